"""The commands for upkeep: `recover`, `sweep`, `verify`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.manual_decisions import parked
from twophase.cli.output import Json, complain, print_json, progress, say, state, table
from twophase.core.errors import SinkUnavailable, StoreUnavailable, TwophaseError

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator
    from twophase.core.recovery import Decision
    from twophase.verification import Difference

Some = Annotated[str | None, typer.Argument(help="Only this pipeline; default: all of them.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (recover, sweep, verify):
        app.command(rich_help_panel="Take care")(command)


def _each(record: PostgresRecord, pipeline: str | None, work: Callable[[str], None]) -> list[Exception]:
    """Work on one pipeline or on all, also after a failure in another; print and return the failures."""
    from twophase.committer import queries

    if pipeline is None:
        with record.engine.connect() as connection:
            names = queries.names(connection)
    else:
        names = [pipeline]
    problems: list[Exception] = []
    for name in names:
        try:
            work(name)
        except StoreUnavailable:
            raise
        except (OSError, TwophaseError) as problem:
            if name == pipeline and isinstance(problem, TwophaseError) and not isinstance(problem, SinkUnavailable):
                raise
            problems.append(problem)
            complain(f"{name}: left as it is: {' '.join(str(problem).split())}", style="yellow")
    return problems


# --- recover ---------------------------------------------------------------------------------------------------------


def recover(
    pipeline: Some = None,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for those who work on something.")] = False,
    as_json: Json = False,
) -> None:
    """Finish what a crash left, from the record alone. Exits 1 when something is parked or could not be cleaned up."""
    from twophase.cli.record_access import opened
    from twophase.wiring import coordinator_of, load

    told: list[dict[str, Any]] = []
    unsettled: list[str] = []
    with opened() as record:

        def work(name: str) -> None:
            coordinator = coordinator_of(record, load(record, name))
            told.extend(_recover(coordinator, wait=wait, quiet=as_json))
            unsettled.extend(coordinator.settle())

        problems = _each(record, pipeline, work)
    if as_json:
        print_json(told)
    elif not told and not problems:
        say("nothing to recover")
    for problem in unsettled:
        complain(problem, style="yellow")
    # A sink that cannot promote now is no failure of recovery: the next run tries again.
    if problems or unsettled or any(one["parked_reason"] or one["failed"] for one in told):
        raise typer.Exit(1)


def _recover(coordinator: Coordinator, *, wait: bool, quiet: bool) -> list[dict[str, Any]]:
    """Recover one pipeline; say what was decided as it goes."""
    from twophase.runner import GRACE

    told: dict[tuple[int, int], dict[str, Any]] = {}
    while True:
        decisions = coordinator.recover()
        busy = [revision for revision, _ in decisions if revision.leased]
        for revision, decision in decisions:
            if wait and revision.leased:
                complain(f"{revision.key}: {_why(revision, decision)}; waiting for it", style="dim")
                continue
            one = told_of(coordinator, revision, decision)
            told[revision.checkpoint_id, revision.revision] = one
            if not quiet:
                _say(revision, one)
        if not (wait and busy):
            return list(told.values())
        threading.Event().wait(max(revision.lease_left or 0 for revision in busy) + GRACE)


def told_of(coordinator: Coordinator, revision: Revision, decision: Decision) -> dict[str, Any]:
    """Say what recovery did with a revision, why, and how it ended."""
    from twophase.core.recovery import Leave

    now = coordinator.transact(lambda tx: tx.revision(revision.key))
    return {
        "pipeline": revision.key.pipeline,
        "checkpoint_id": revision.checkpoint_id,
        "revision": revision.revision,
        "state": now.state,
        "decision": _WORDS[type(decision).__name__],
        "why": _why(revision, decision),
        "parked_reason": now.parked_reason,
        "hindrances": now.hindrances,
        "failed": isinstance(decision, Leave) and decision.failed,
    }


_WORDS = {"RollForward": "promoted", "RollBack": "aborted", "Leave": "left", "Park": "parked"}


def _why(revision: Revision, decision: Decision) -> str:
    from twophase.core.recovery import Leave, Park, RollForward
    from twophase.core.states import State

    if isinstance(decision, Leave | Park):
        return decision.reason
    if isinstance(decision, RollForward):
        return "the commit point was passed"
    if revision.state is State.ABORTING:
        return "the abort was decided"
    return decision.why.replace("its run", f"its run {revision.run}", 1)


def _say(revision: Revision, one: dict[str, Any]) -> None:
    from rich.text import Text

    colours = {"promoted": "green", "aborted": "magenta", "left": "yellow", "parked": "bold red"}
    say(
        Text.assemble(
            (str(revision.key), "bold"),
            ": ",
            (one["decision"], colours[one["decision"]]),
            ", ",
            one["why"],
            " (now ",
            state(one["state"], one["parked_reason"]),
            ")",
        )
    )
    parked(one)


# --- sweep -----------------------------------------------------------------------------------------------------------


def sweep(
    pipeline: Some = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list it.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Look also where an earlier sweep has looked: the cost goes with the history.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove what the record says is dead: staged output of aborted attempts, and what retention is over for."""
    from twophase.cli.record_access import opened
    from twophase.sweep import sweep as sweep_pipeline
    from twophase.wiring import load

    swept: list[dict[str, str]] = []
    with opened() as record:

        def work(name: str) -> None:
            declared = load(record, name)
            for one in sweep_pipeline(record, declared, dry_run=dry_run, everything=everything):
                swept.append(one._asdict())
                if not as_json:
                    say(f"{'would remove' if dry_run else 'removed'} {one.path}: {one.why}")

        problems = _each(record, pipeline, work)
    if as_json:
        print_json(swept)
    elif not swept and not problems:
        say("nothing to sweep")
    if problems:
        raise typer.Exit(1)


# --- verify ----------------------------------------------------------------------------------------------------------


def verify(
    pipeline: Annotated[str, typer.Argument(help="The pipeline's name.", show_default=False)], *, as_json: Json = False
) -> None:
    """Compare every committed checkpoint with what each sink holds, byte by byte. Exits 1 when they differ."""
    from twophase.cli.record_access import opened
    from twophase.committer import writes
    from twophase.verification import Verified
    from twophase.verification import verify as verify_pipeline
    from twophase.wiring import load

    differences: list[Difference] = []
    checked: Counter[str] = Counter()
    with opened() as record:
        declared = load(record, pipeline)
        with progress() as bar:
            task = bar.add_task(f"verifying {pipeline}", total=_committed(record, pipeline) * len(declared.sinks))
            for found in verify_pipeline(record, declared):
                if isinstance(found, Verified):
                    checked[found.sink] += 1
                    bar.advance(task)
                else:
                    differences.append(found)
        with record.engine.connect() as connection:
            apart = [*writes.holes(connection, [pipeline]), *writes.dropped(connection, pipeline)]
    if as_json:
        print_json([one._asdict() for one in differences])
    elif differences:
        _differences(differences)
    for one in apart:
        complain(f"{pipeline}: {one}", style="yellow")
    if differences:
        raise typer.Exit(1)
    if not as_json:
        say(_verdict(pipeline, checked))


def _committed(record: PostgresRecord, pipeline: str) -> int:
    from twophase.committer import revisions

    return revisions.committed(record.engine, pipeline)


def _differences(differences: list[Difference]) -> None:
    from rich.text import Text

    table(
        ["pipeline", "checkpoint", "sink", "difference"],
        (
            [d.pipeline, "" if d.checkpoint_id is None else str(d.checkpoint_id), d.sink, Text(d.difference)]
            for d in differences
        ),
        right=["checkpoint"],
    )


def _verdict(pipeline: str, checked: Counter[str]) -> str:
    if not checked:
        return f"{pipeline}: nothing is committed, and nothing is there"
    by_count: dict[int, list[str]] = {}
    for sink, count in checked.items():
        by_count.setdefault(count, []).append(sink)
    verified = [
        f"{count} checkpoint{'' if count == 1 else 's'} verified in {', '.join(sinks)}"
        for count, sinks in by_count.items()
    ]
    return f"{pipeline}: {', '.join(verified)}: all as recorded"
