"""The commands that show the record: `pipelines`, `checkpoints`, `show`; and `failpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.manual_decisions import behind, standing
from twophase.cli.output import Json, by_sink, cell, complain, listing, print_json, say, size, state, table
from twophase.core.next_step import advise
from twophase.core.states import State

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord

#: (heading, column) of a listing of checkpoints, in the order people look for them.
CHECKPOINTS = (
    ("checkpoint", "checkpoint_id"),
    ("rev", "revision"),
    ("state", "state"),
    ("kind", "kind"),
    ("slot", "slot"),
    ("seq", "commit_seq"),
    ("rows", "rows"),
    ("bytes", "bytes"),
    ("by sink", "by_sink"),
    ("created", "created_at"),
    ("committed", "committed_at"),
    ("dag", "dag_id"),
    ("run", "run_id"),
    ("error", "error"),
    ("parked", "parked_reason"),
)
#: Likewise of pipelines.
PIPELINES = (
    ("pipeline", "pipeline"),
    ("last checkpoint", "last_checkpoint"),
    ("seq", "last_commit_seq"),
    ("committed", "last_committed_at"),
    ("rows", "last_rows"),
    ("by sink", "by_sink"),
    ("newest", "newest_checkpoint"),
    ("state", "newest_state"),
    ("pending", "pending"),
    ("parked", "parked"),
    ("failures", "failures"),
    ("failed slots", "failed_slots"),
    ("missing slots", "missing_slots"),
    ("last failure", "last_failure"),
    ("waiting", "waiting"),
    ("lacking", "lacking"),
)
_SELDOM = frozenset({"parked", "failures", "failed_slots", "missing_slots"})
#: How many input files `show` names before it only counts them.
FILES = 10


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (pipelines, checkpoints, show, failpoints):
        app.command(rich_help_panel="Look")(command)


def pipelines(*, as_json: Json = False) -> None:
    """List the pipelines: last commit, newest checkpoint, and what is pending, failed or waited for."""
    from twophase.cli.record_access import connected
    from twophase.committer import queries

    with connected() as connection:
        found = queries.pipelines(connection)
    if as_json:
        print_json(found)
    elif not found:
        complain("no pipelines in the record yet; `twophase run FILE` enters one")
    else:
        listing([{**_without_zeros(row), "by_sink": by_sink(row)} for row in found], PIPELINES)
        for row in found:
            behind(row)


def _without_zeros(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the listing with empty cells for zeros in rare columns, so that other numbers stand out."""
    shown = {name: None if name in _SELDOM and value == 0 else value for name, value in row.items()}
    return {**shown, "lacking": "; ".join(row["lacking"]) or None}


def checkpoints(
    pipeline: Annotated[str, typer.Argument(help="The pipeline's name.", show_default=False)],
    *,
    wanted: Annotated[
        State | None,
        typer.Option("--state", case_sensitive=False, help="Only revisions in this state.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    before: Annotated[
        int | None, typer.Option(min=1, help="Only checkpoints below this id.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List a pipeline's checkpoints, newest first, every revision a line."""
    from twophase.cli.record_access import connected
    from twophase.committer import queries

    with connected() as connection:
        found = queries.checkpoints(connection, pipeline, state=wanted, before=before, limit=limit)
    if as_json:
        print_json(found)
        return
    if not found:
        complain(f"pipeline {pipeline!r}: no such checkpoint")
        return
    hidden = {"kind"} if all(row["kind"] == "regular" for row in found) else set()
    rows = [{**row, "by_sink": by_sink(row)} for row in found]
    listing(rows, [column for column in CHECKPOINTS if column[1] not in hidden])
    if len(found) == limit:
        last = found[-1]
        # The page may have ended between two revisions of one checkpoint: then the next page shows it again.
        after = last["checkpoint_id"] + (last["revision"] > 1)
        complain(f"older ones: --before {after}", style="dim")


def show(
    pipeline: Annotated[str, typer.Argument(help="The pipeline's name.", show_default=False)],
    checkpoint_id: Annotated[int, typer.Argument(metavar="ID", min=1, help="The checkpoint's id.", show_default=False)],
    *,
    revision: Annotated[
        int | None, typer.Option(min=0, help="This revision, not the newest.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one checkpoint whole: its state, input, participants and every event."""
    from twophase.cli.record_access import opened
    from twophase.committer import queries

    with opened() as record:
        with record.engine.connect() as connection:
            found = queries.show(connection, pipeline, checkpoint_id, revision)
            pending = queries.pending(connection, pipeline, checkpoint_id)
            stale = queries.stale(connection, pipeline, checkpoint_id)
        waiting = _waiting(record, found)
    for participant in found["participants"]:
        participant["pending"] = waiting.get(participant["name"])
    of_mine = [row for row in pending if row["revision"] == found["revision"]]
    is_stale = any(row["revision"] == found["revision"] for row in stale)
    advice = advise(standing({**found, **(of_mine[0] if of_mine else {})}, stale=is_stale))
    found |= {"advice": advice.words if advice else None, "command": advice.command if advice else None}
    if as_json:
        print_json(found)
        return
    _show_revision(found)
    if advice:
        complain(f"what to do: {advice}")
    behind(found)
    _show_inputs(found["inputs"])
    _show_participants(found)
    for name in found["lacking"]:
        which = f"{pipeline} --checkpoints {checkpoint_id}"
        complain(f"write {name} has nothing of it, it was added or moved later; `twophase backfill {which}` fills it")
    _show_events(found["events"])


def _waiting(record: PostgresRecord, found: Mapping[str, Any]) -> dict[str, str]:
    """Ask the sinks that a decided revision is not promoted to yet why that is; nothing is changed."""
    from twophase.core.checkpoint import Key
    from twophase.core.errors import TwophaseError
    from twophase.wiring import coordinator_of, load

    if found["state"] != State.COMMITTING:
        return {}
    key = Key(found["pipeline"], found["checkpoint_id"], found["revision"])
    late = {p["name"] for p in found["participants"] if p["kind"] == "sink" and p["promoted_at"] is None}
    try:
        asking = coordinator_of(record, load(record, key.pipeline))
    except TwophaseError as error:
        return dict.fromkeys(late, str(error))
    with record.transaction() as tx:
        revision, participants = tx.revision(key), [p for p in tx.participants(key) if p.name in late]
    reasons: dict[str, str] = {}
    for participant in participants:
        try:
            reasons[participant.name] = asking.find(revision, participant).reason or "its marker is there"
        except (OSError, TwophaseError) as error:
            reasons[participant.name] = str(error)
    return reasons


def _show_revision(found: Mapping[str, Any]) -> None:
    from rich.text import Text

    key = f"{found['pipeline']}/{found['checkpoint_id']} r{found['revision']}"
    say(Text.assemble((key, "bold"), "  ", state(found["state"], found["parked_reason"])))
    names = [name for _, name in CHECKPOINTS if name not in {"checkpoint_id", "revision", "state", "by_sink"}]
    facts = {"epoch": found["epoch"], **{name: found[name] for name in names if found[name] is not None}}
    width = max(map(len, facts))
    for name, value in facts.items():
        say(Text.assemble((f"  {name:<{width}}  ", "dim"), cell(name, value)))


def _show_inputs(inputs: Mapping[str, Any]) -> None:
    from rich.text import Text

    for source, fixed in inputs.items():
        if "unversioned" in fixed:
            where = fixed["unversioned"]
            say(Text.assemble("\n", ("input ", "bold"), f"{source}: {where}", ("  as each attempt found it", "dim")))
            continue
        if "ranges" in fixed:
            ranges = ", ".join(f"{part} [{start}, {end})" for part, (start, end) in fixed["ranges"].items())
            say(Text.assemble("\n", ("input ", "bold"), f"{source}: {ranges}"))
            for read in fixed.get("read", ())[:FILES]:
                say(f"  {read['pipeline']}/{read['checkpoint_id']} r{read['revision']}")
            if fixed.get("revisions", 0) > FILES:
                say(Text(f"  … and {fixed['revisions'] - FILES} more; --json lists them", style="dim"))
            continue
        count, paths = fixed["files"], fixed["paths"]
        of = f"{count} file{'' if count == 1 else 's'}, {size(fixed['bytes'])}"
        say(Text.assemble("\n", ("input ", "bold"), f"{source}: {of}"))
        for file in paths[:FILES]:
            gone = "  (archived or deleted since)" if file["gone_at"] else ""
            say(Text.assemble(f"  {file['path']}  ", (size(file["size"]) + gone, "dim")))
        if count > FILES:
            say(Text(f"  … and {count - FILES} more; --json lists them", style="dim"))


def _show_participants(found: Mapping[str, Any]) -> None:
    participants = found["participants"]
    if not participants:
        return
    say("")
    rows = [
        {
            **p,
            "kind": "quarantine" if p["name"] in (found["quarantine"] or {}) else p["kind"],
            **{name: p["manifest"].get(name) for name in ("rows", "bytes", "files")},
            "promoted": f"pending: {' '.join(p['pending'].split())}" if p["pending"] else p["promoted_at"],
        }
        for p in participants
    ]
    columns = ("name", "kind", "attempt", "vote", "rows", "files", "bytes", "promoted", "reason")
    listing(rows, [(name, name) for name in columns], title="participants")


def _show_events(events: list[dict[str, Any]]) -> None:
    from rich.text import Text

    def what(event: Mapping[str, Any]) -> Text:
        if not event["to_state"]:
            return Text(event["action"])
        return state(event["to_state"])

    say("")
    table(
        ["at", "rev", "epoch", "what", "why", "who"],
        (
            [
                cell("at", event["at"]),
                f"r{event['revision']}",
                str(event["epoch"]),
                what(event),
                Text(event["why"] or ""),
                Text(event["who"] or "", style="dim"),
            ]
            for event in events
        ),
        right=["epoch"],
        title="events",
    )


def failpoints(*, as_json: Json = False) -> None:
    """List the places where a test may kill, stop or fail a process: TWOPHASE_FAILPOINTS="name=kill"."""
    from twophase.core.failpoints import FAILPOINTS

    if as_json:
        print_json([{"name": name, "description": what} for name, what in FAILPOINTS.items()])
    else:
        table(["failpoint", "what has happened"], FAILPOINTS.items())
