"""The command `positions`: how far each source has been read, and moving that."""

from __future__ import annotations

from typing import Annotated

import typer

from twophase.cli.output import Json, complain, listing, print_json, say

Name = Annotated[str, typer.Argument(metavar="PIPELINE", show_default=False)]
_SET = "Read on from elsewhere: READ/TOPIC or READ/TOPIC/PARTITION, and an offset, earliest or latest; repeatable."
Set = Annotated[list[str] | None, typer.Option("--set", metavar="PLACE=OFFSET", help=_SET, show_default=False)]
_FORGET = "Forget a topic or partition that is gone: READ/TOPIC or READ/TOPIC/PARTITION; repeatable."
Forget = Annotated[list[str] | None, typer.Option(metavar="PLACE", help=_FORGET, show_default=False)]
Reason = Annotated[str | None, typer.Option(help="Why; it is kept in the events.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Decide")(positions)


def positions(
    pipeline: Name, *, set_: Set = None, forget: Forget = None, reason: Reason = None, as_json: Json = False
) -> None:
    """Show how far each partition has been read, its end and what waits; or move that, while nothing is undecided."""
    from twophase import positions as held
    from twophase.cli.record_access import opened
    from twophase.core.errors import ConfigError
    from twophase.core.record_behind import check_known
    from twophase.wiring import coordinator_of, load

    wanted = {}
    for told in set_ or ():
        place, equals, offset = told.rpartition("=")
        if not equals:
            msg = f"--set {told!r}: expected READ/TOPIC/PARTITION=OFFSET"
            raise ConfigError(msg)
        wanted[place] = offset
    if (wanted or forget) and not reason:
        msg = "--reason: expected one with --set and --forget; it is kept in the events"
        raise ConfigError(msg)
    with opened() as record:
        declared = load(record, pipeline)
        found = coordinator_of(record, declared)
        if reason and (wanted or forget):
            check_known(found)
            for source, parts in held.move(found, declared, wanted, forget or (), reason).items():
                for name, at in sorted(parts.items()):
                    complain(f"{source}/{name}: {f'moved to {at.offset}' if at else 'forgotten'}")
        rows, problems = held.listed(found, declared)
    if as_json:
        print_json(rows)
    elif rows:
        listing(rows, [(name, name) for name in ("source", "partition", "offset", "end", "lag")])
    else:
        say(f"{pipeline}: no source of it has positions yet")
    for problem in problems:
        complain(problem)
