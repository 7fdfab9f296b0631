"""The command line: `twophase`.

The modules here import nothing heavy at the top: `twophase --help` and shell completion start at once.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twophase.cli import backfill, care, demo, diff, local, people, reconcile, record, run, status
from twophase.core.errors import TwophaseError

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """Says in one line what went wrong; only what nobody expected keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own context
        """Run the command that was asked for."""
        from twophase.cli.output import Complaints, complain, print_error

        logging.lastResort = Complaints(logging.WARNING)  # the usual one sends whatever is in a text to the terminal
        try:
            return super().invoke(ctx)
        except TwophaseError as caught:
            print_error(caught)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    help="Exactly-once Spark pipelines: run checkpoints, look at the record, finish what a crash left.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer hands over the flag
    if wanted:
        from importlib.metadata import version

        typer.echo(f"twophase {version('twophase')}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


for _module in (run, backfill, record, diff, care, people, reconcile, local, status, demo):
    _module.add_to(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="twophase")
