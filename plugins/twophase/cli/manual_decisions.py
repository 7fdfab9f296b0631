"""The commands by which a person decides: `pending`, `commit`, `abort`, `restage`, `release`, `hand-over`.

The record keeps the reason of each decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, complain, listing, print_json, say
from twophase.core import hindrances
from twophase.core.checkpoint import Key, Run
from twophase.core.next_step import Advice, Standing, advise
from twophase.core.states import UNDECIDED, State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Transaction

Name = Annotated[str, typer.Argument(metavar="PIPELINE", show_default=False)]
Some = Annotated[str | None, typer.Argument(metavar="PIPELINE", help="Only this pipeline.", show_default=False)]
Id = Annotated[int, typer.Argument(metavar="ID", min=1, help="The checkpoint's number.", show_default=False)]
_SINK = "A sink to stage again though its staged output is there, because its target refuses the rows; repeatable."
Reason = Annotated[str, typer.Option(help="Why; it is kept in the events.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (pending, commit, abort, restage, release, hand_over):
        app.command(rich_help_panel="Decide")(command)


def pending(pipeline: Some = None, *, as_json: Json = False) -> None:
    """List what has not ended, parked revisions first, each with what to do about it; then what could not begin."""
    from twophase.cli.record_access import connected
    from twophase.committer import queries

    with connected() as connection:
        found = queries.pending(connection, pipeline)
        unbegun = queries.unbegun(connection, pipeline)
    told = [advise(standing(row)) or Advice("") for row in found]
    rows = [{**row, "advice": one.words, "command": one.command} for row, one in zip(found, told, strict=True)]
    if as_json:
        print_json(rows)
    elif not rows:
        if not unbegun:
            say("nothing is pending")
    else:
        columns = (
            "pipeline",
            "checkpoint_id",
            "revision",
            "state",
            "slot",
            "age",
            "run_id",
            "parked_reason",
            "error",
            "advice",
            "command",
        )
        names = {"checkpoint_id": "checkpoint", "revision": "rev", "run_id": "run", "parked_reason": "parked"}
        listing(rows, [(names.get(column, column), column) for column in columns])
    if not as_json:
        _tell_unbegun(unbegun)


def _tell_unbegun(rows: list[dict[str, Any]]) -> None:
    """Print the slots that a run could not begin."""
    for row in rows:
        slot = f" slot {row['slot']}" if row["slot"] else ""
        say(f"{row['pipeline']}{slot}: not begun, {row['why']}")


def standing(row: Mapping[str, Any], *, run_ended: bool | None = None, stale: bool = False) -> Standing:
    """Return how a revision stands, from a row of `pending` or of a listing; a script's run ends with its lease."""
    return Standing(
        Key(row["pipeline"], row["checkpoint_id"], row["revision"]),
        State(row["state"]),
        Run(row["dag_id"], row["run_id"]) if row["run_id"] else None,
        leased=bool(row.get("leased")),
        run_ended=True if row["dag_id"] is None else run_ended,
        awaits=tuple((row.get("no_vote") or "").split(", ")) if row.get("no_vote") else (),
        parked=bool(row["parked_reason"]),
        hindrances=row["hindrances"] or {},
        failed=bool(row.get("failed")),
        stale=stale,
    )


def commit(pipeline: Name, checkpoint_id: Id, *, reason: Reason) -> None:
    """Commit a pre-committed revision whose run is gone, or promote a decided one."""
    from twophase.core.errors import ConfigError

    with _opened(pipeline) as coordinator:
        found = _standing(coordinator, checkpoint_id)
        which = f"checkpoint {found.key}"
        if found.state in {State.COMMITTED, State.SUPERSEDED}:
            say(f"{found.key}: it is {found.state.lower()} already")
            return
        if found.state is State.PRECOMMITTED:
            _free(found)
            for participant in coordinator.transact(lambda tx: tx.participants(found.key)):
                if participant.stages:
                    coordinator.sinks[participant.name].check(participant.output(found))
            done = coordinator.commit(found, f"the commit point, by a person: {reason}")
        elif found.state is State.COMMITTING:
            coordinator.transact(lambda tx: tx.note(found.key, "commit asked for", reason))
            done = coordinator.finish(found.key)
        else:
            votes = coordinator.transact(lambda tx: tx.participants(found.key))
            missing = ", ".join(p.name for p in votes if not p.vote) or "everybody: no attempt was opened"
            state = found.state.lower()
            msg = f"{which}: expected precommitted, found {state}; no yes from {missing}; {_remedy(coordinator, found)}"
            raise ConfigError(msg)
    say(f"{done.key}: {done.state.lower()}, rows {done.rows}")


def abort(pipeline: Name, checkpoint_id: Id, *, reason: Reason) -> None:
    """End a revision before its commit point; the checkpoint keeps its input, and the next run takes it again."""
    from twophase.core.errors import ConfigError

    with _opened(pipeline) as coordinator:
        found = _standing(coordinator, checkpoint_id)
        if found.state is State.ABORTED:
            say(f"{found.key}: it is aborted already")
            return
        if found.state not in UNDECIDED | {State.ABORTING}:
            remedy = f"to replace it, `twophase backfill {pipeline} --checkpoints {checkpoint_id}`"
            if found.state is State.COMMITTING:
                remedy = _remedy(coordinator, found)
            msg = f"checkpoint {found.key}: it is {found.state.lower()}, and a decision is final; {remedy}"
            raise ConfigError(msg)
        _free(found)
        if found.state is State.ABORTING:
            done = coordinator.finish_abort(found)
        else:
            done = coordinator.abort(found, f"by a person: {reason}", unleased=True)
    say(f"{done.key}: {done.state.lower()}")


def restage(
    pipeline: Name,
    checkpoint_id: Id,
    *,
    reason: Reason,
    sink: Annotated[list[str] | None, typer.Option(help=_SINK, show_default=False)] = None,
    master: str | None = None,
) -> None:
    """Stage again what a decided checkpoint cannot promote, by today's transform, and promote it."""
    from twophase.cli.record_access import opened
    from twophase.runner import Runner, stager_for
    from twophase.wiring import load

    with opened() as record:
        declared = load(record, pipeline)
        runner = Runner(declared, stager_for(declared, master=master), record=record, restages=True)
        found = _standing(runner.coordinator, checkpoint_id)
        if found.state in {State.COMMITTED, State.SUPERSEDED}:
            say(f"{found.key}: it is {found.state.lower()} already")
            return
        _free_of_restages(runner.coordinator, found)
        done = runner.restage(checkpoint_id, reason, sink or ())
    say(f"{done.key}: {done.state.lower()}, rows {done.rows}")


def release(pipeline: Name, checkpoint_id: Id, *, reason: Reason) -> None:
    """Free the input of an aborted checkpoint, so that what changed in it is read by a later one."""
    with _opened(pipeline) as coordinator:
        coordinator.release(checkpoint_id, reason)
    say(f"{pipeline}/{checkpoint_id}: released, its input belongs to no checkpoint")


def hand_over(
    pipeline: Name,
    write: Annotated[str, typer.Argument(metavar="WRITE", help="Its write to the table.", show_default=False)],
    *,
    to: Annotated[str, typer.Option(metavar="PIPELINE", help="Whose it is from now on.", show_default=False)],
    reason: Reason,
) -> None:
    """Give the table of a write to another pipeline; rows that are in it stay as they are."""
    from twophase import ownership
    from twophase.cli.record_access import opened
    from twophase.wiring import load

    with opened() as record:
        ownership.hand_over(record, load(record, pipeline), write, to, reason)
    say(f"{pipeline}: the table of {write} belongs to {to}; declare it there, and drop the write here")


def _opened(pipeline: str) -> Any:  # noqa: ANN401 - a context manager around a coordinator
    from contextlib import contextmanager

    from twophase.cli.record_access import opened
    from twophase.core.record_behind import check_known
    from twophase.wiring import coordinator_of, load

    @contextmanager
    def one() -> Any:  # noqa: ANN401 - see above
        with opened() as record:
            found = coordinator_of(record, load(record, pipeline))
            check_known(found)
            yield found

    return one()


def _standing(coordinator: Coordinator, checkpoint_id: int) -> Revision:
    """Return the revision of a checkpoint that a person means: the live one, else the newest."""

    def look(tx: Transaction) -> Revision:
        live = tx.live_revision(coordinator.pipeline, checkpoint_id)
        return live or tx.newest_of(coordinator.pipeline, checkpoint_id)

    return coordinator.transact(look)


def _remedy(coordinator: Coordinator, found: Revision) -> str:
    """Return the advice about a revision, for the end of an error."""
    votes = coordinator.transact(lambda tx: tx.participants(found.key))
    stands = Standing(
        found.key,
        found.state,
        found.run,
        leased=found.leased,
        run_ended=bool(coordinator.run_ended(found.run)) or None,
        awaits=tuple(p.name for p in votes if p.vote is None),
        parked=found.parked_reason is not None,
        hindrances=found.hindrances,
    )
    said = str(advise(stands) or "")
    return said[:1].lower() + said[1:]


def _free(found: Revision) -> None:
    """Refuse a decision about a revision that a run works on."""
    from twophase.core.errors import Busy

    if found.leased:
        msg = (
            f"checkpoint {found.key}: run {found.run} works on it, {found.lease_left:.0f} s of lease left;"
            " stop that run, or wait"
        )
        raise Busy(msg, lease_left=found.lease_left)


def _free_of_restages(coordinator: Coordinator, found: Revision) -> None:
    """Refuse to restage what a run promotes, or what is being staged again: a second attempt would fence the first.

    Once it is parked the lease of the run that parked it means nothing: that run has ended its work.
    """
    from twophase.core.errors import Busy

    votes = coordinator.transact(lambda tx: tx.participants(found.key))
    if not any(p.attempt == found.epoch and p.vote is None for p in votes):
        if found.parked_reason is None:
            _free(found)
    elif found.leased:
        msg = (
            f"checkpoint {found.key}: it is being staged again, {found.lease_left:.0f} s of lease left; `twophase show"
            f" {found.key.pipeline} {found.key.checkpoint_id}` says by whom; stop that, or wait"
        )
        raise Busy(msg, lease_left=found.lease_left)


def parked(found: Mapping[str, Any]) -> None:
    """Return what a person can do about a parked revision."""
    if found["parked_reason"]:
        ways = hindrances.ways_out(found["pipeline"], found["checkpoint_id"], found["hindrances"] or {})
        complain(f"it needs a person: {ways}")


def behind(found: Mapping[str, Any]) -> None:
    """Say that a pipeline's record is older than its sinks, and what a person can do."""
    if found["behind"]:
        name = found["pipeline"]
        complain(f"{name}: its record is older than its sinks, and no run begins: {found['behind']}")
        complain(f"it needs a person: twophase reconcile {name}")
