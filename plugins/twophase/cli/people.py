"""What a person decides: `restage`, `release`. Each says why, and the record keeps it."""

from __future__ import annotations

from typing import Annotated

import typer

from twophase.cli.output import say

Name = Annotated[str, typer.Argument(metavar="PIPELINE", show_default=False)]
Id = Annotated[int, typer.Argument(metavar="ID", help="The checkpoint's number.", show_default=False)]
Reason = Annotated[str, typer.Option(help="Why; it is kept in the events.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (restage, release):
        app.command(rich_help_panel="Decide")(command)


def restage(pipeline: Name, checkpoint_id: Id, *, reason: Reason, master: str | None = None) -> None:
    """Stage again what a decided checkpoint has lost, and promote it: the way out for a parked one."""
    from twophase.cli.opening import opened
    from twophase.maintenance import load
    from twophase.running import Runner, stager_for

    with opened() as record:
        declared = load(record, pipeline)
        runner = Runner(declared, stager_for(declared, master=master), record=record)
        done = runner.restage(checkpoint_id, reason)
    say(f"{done.key}: {done.state.lower()}, rows {done.rows}")


def release(pipeline: Name, checkpoint_id: Id, *, reason: Reason) -> None:
    """Free the input of an aborted checkpoint, so that what changed in it is read by a later one."""
    from twophase.cli.opening import opened
    from twophase.maintenance import load
    from twophase.running import coordinator

    with opened() as record:
        coordinator(record, load(record, pipeline)).release(checkpoint_id, reason)
    say(f"{pipeline}/{checkpoint_id}: released, its input belongs to no checkpoint")
