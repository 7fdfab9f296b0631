"""The command `state`: what a pipeline keeps between its checkpoints, now and as of earlier ones."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, listing, print_json, say
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twophase.committer.record import PostgresRecord

Name = Annotated[str, typer.Argument(metavar="PIPELINE", show_default=False)]
Which = Annotated[str | None, typer.Option("--name", metavar="NAME", help="One of several states.", show_default=False)]
AsOf = Annotated[int | None, typer.Option(metavar="N", help="As of this checkpoint.", show_default="the last one")]
_KEY = "The row of a key: COLUMN=VALUE, once for each key column."
Key = Annotated[list[str] | None, typer.Option(metavar="COLUMN=VALUE", help=_KEY, show_default=False)]
History = Annotated[bool, typer.Option("--history", help="Each change of the key that is still kept.")]
Diff = Annotated[str | None, typer.Option(metavar="J..K", help="What changed after checkpoint J, up to K.")]
Limit = Annotated[int, typer.Option(min=1, max=1_000_000, help="So many rows at most.")]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(state)


def state(  # noqa: PLR0913 - what a person may ask for
    pipeline: Name,
    *,
    name: Which = None,
    as_of: AsOf = None,
    key: Key = None,
    history: History = False,
    diff: Diff = None,
    rows: Annotated[bool, typer.Option("--rows", help="The rows themselves, not how many there are.")] = False,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """Show a pipeline's state: keys, runs and bytes; a key, its history, or what changed between two checkpoints."""
    from twophase.cli.record_access import opened

    if history and not key:
        msg = "--history: expected the key with it: --key COLUMN=VALUE"
        raise typer.BadParameter(msg)
    with opened() as record:
        if diff is not None:
            found = _changes(record, pipeline, diff, name, limit)
        elif history:
            found = _history(record, pipeline, _key(key), name)
        elif key:
            found = _rows(record, pipeline, as_of, name, _key(key))
        elif rows:
            found = list(islice(_all(record, pipeline, as_of, name), limit))
        else:
            found = [_summary(record, pipeline, as_of, one) for one in _names(record, pipeline, name)]
    if as_json:
        print_json(found)
    elif found:
        listing(found, [(column, column) for column in found[0]])
    else:
        say("nothing")


def _key(told: list[str] | None) -> dict[str, Any]:
    found = {}
    for one in told or ():
        column, equals, value = one.partition("=")
        if not equals:
            msg = f"--key {one!r}: expected COLUMN=VALUE"
            raise ConfigError(msg)
        found[column] = None if value == "null" else value
    return found


def _names(record: PostgresRecord, pipeline: str, name: str | None) -> list[str | None]:
    from twophase.wiring import load

    states = load(record, pipeline).states
    if name is not None or not states or "state" in states:
        return [name]
    return [one.removeprefix("state.") for one in states]


def _summary(record: PostgresRecord, pipeline: str, as_of: int | None, name: str | None) -> dict[str, Any]:
    from twophase.state_reads import state_at

    found = state_at(record, pipeline, as_of, name)
    runs = found.manifest.runs
    return {
        "pipeline": pipeline,
        "state": found.name,
        "checkpoint_id": found.checkpoint_id,
        "revision": found.revision,
        "keys": found.manifest.keys,
        "changed": found.manifest.changed,
        "deleted": found.manifest.deleted,
        "runs": len(runs),
        "rows": sum(run.rows for run in runs),
        "bytes": sum(run.bytes for run in runs),
        "last_merge": max((run.checkpoint_id for run in runs if run.level), default=None),
    }


def _rows(
    record: PostgresRecord, pipeline: str, as_of: int | None, name: str | None, key: dict[str, Any]
) -> list[dict[str, Any]]:
    from twophase import state_reads

    found: list[dict[str, Any]] = state_reads.found(
        state_reads.state_at(record, pipeline, as_of, name), [key]
    ).to_pylist()
    return found


def _all(record: PostgresRecord, pipeline: str, as_of: int | None, name: str | None) -> Iterator[dict[str, Any]]:
    from twophase.state.reader import StateReader
    from twophase.state_reads import state_at

    found = state_at(record, pipeline, as_of, name)
    for batch in StateReader(found.home, found.manifest).scan():
        yield from batch.to_pylist()


def _history(record: PostgresRecord, pipeline: str, key: dict[str, Any], name: str | None) -> list[dict[str, Any]]:
    from twophase import state_reads

    told = state_reads.history(record, pipeline, key, name)
    return [
        {"checkpoint_id": number, "change": "deleted" if row is None else "set", **(row or key)} for number, row in told
    ]


def _changes(record: PostgresRecord, pipeline: str, diff: str, name: str | None, limit: int) -> list[dict[str, Any]]:
    from twophase import state_reads

    first, dots, last = diff.partition("..")
    if not dots or not first.isdigit() or not last.isdigit():
        msg = f"--diff {diff!r}: expected two checkpoints such as 17..20; 0 stands for the empty state"
        raise ConfigError(msg)
    found: list[dict[str, Any]] = (
        state_reads.changed(record, pipeline, int(first), int(last), name).slice(0, limit).to_pylist()
    )
    return found
