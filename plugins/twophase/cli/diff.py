"""The command `diff`: compare a staged or new revision with the committed one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, print_json, say

if TYPE_CHECKING:
    from twophase.revision_diff import Diff


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(diff)


def diff(  # noqa: PLR0913 - what a person may ask for
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", show_default=False)],
    checkpoint_id: Annotated[int, typer.Argument(metavar="ID", min=1, help="The checkpoint's id.", show_default=False)],
    *,
    key: Annotated[
        str | None, typer.Option(metavar="A,B", help="Columns that make a row; then changes count.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=100, help="Show so many rows of each kind.")] = 0,
    sink: Annotated[list[str] | None, typer.Option(help="Only this write; may be repeated.")] = None,
    revision: Annotated[
        int | None, typer.Option(min=0, help="This revision, not the newest.", show_default=False)
    ] = None,
    against: Annotated[
        int | None, typer.Option(min=0, help="Against this one, not the live one.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a staged or new revision with the live one: rows added, removed, changed by key, and columns."""
    from twophase.cli.record_access import opened
    from twophase.revision_diff import diff as compare
    from twophase.wiring import load

    columns = [column.strip() for column in (key or "").split(",") if column.strip()]
    with opened() as record:
        found = list(
            compare(
                record,
                load(record, pipeline),
                checkpoint_id,
                revision=revision,
                against=against,
                sinks=sink or (),
                key=columns,
                samples=samples,
            )
        )
    if as_json:
        print_json([_object(one) for one in found])
        return
    for one in found:
        _show(one)


def _object(one: Diff) -> dict[str, Any]:
    return {
        "sink": one.sink,
        "checkpoint_id": one.new.checkpoint_id,
        "revision": one.new.revision,
        "against": one.old.revision if one.old else None,
        **one.comparison.summary(),
    }


def _show(one: Diff) -> None:
    from rich.text import Text

    against = f"r{one.old.revision}" if one.old else "nothing: there is no older revision"
    say(Text.assemble((f"{one.sink}", "bold"), f": {one.new} against {against}"))
    if one.comparison.same:
        say("  the same rows and columns")
    for line in one.comparison.lines():
        say(f"  {line}")
    colours = {"added": "green", "removed": "red", "changed": "yellow"}
    for kind, rows in one.comparison.samples.items():
        for row in rows:
            say(Text.assemble(f"  {kind:<8}", (json.dumps(row, ensure_ascii=False, default=str), colours[kind])))
