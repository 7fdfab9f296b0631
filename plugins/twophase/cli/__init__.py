"""The command line `twophase`: each module here adds its commands.

The modules import nothing heavy at the top, so that `twophase --help` and shell completion start at once.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twophase.cli import (
    backfill,
    demo,
    diff,
    explain,
    local,
    maintenance,
    manual_decisions,
    positions,
    reconcile,
    record_views,
    run,
    state,
    status,
)
from twophase.core.errors import ConfigError, TwophaseError

__all__ = ["app", "main"]


#: The highest numbers that the record's columns can hold: of a checkpoint, and of a revision.
LARGEST = 2**63 - 1
LARGEST_REVISION = 2**31 - 1
#: The longest text that is accepted: that of a path.
LONGEST = 4096


def _plain(ctx: Any, parameter: Any, value: Any) -> Any:  # noqa: ANN401 - typer's own
    """Refuse a number that the record cannot hold, and a text that cannot be a name, a path or a reason."""
    largest = LARGEST_REVISION if parameter.name in {"revision", "against"} else LARGEST
    for one in value if isinstance(value, list | tuple) else [value]:
        problem = None
        if isinstance(one, int) and one > largest:
            problem = f"expected at most {largest}, found {one}"
        elif isinstance(one, str) and len(one) > LONGEST:
            problem = f"expected at most {LONGEST} characters, found {len(one)}"
        elif isinstance(one, str) and ("\0" in one or any("\ud800" <= character <= "\udfff" for character in one)):
            problem = "expected text in UTF-8, without NUL"
        if problem:
            raise typer.BadParameter(problem, ctx, parameter)
    return value


class Commands(TyperGroup):
    """Prints an error as one line; only an unexpected one keeps its traceback."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - typer's own
        """Return a command, with `_plain` as a check on its numbers and texts."""
        found = super().get_command(ctx, cmd_name)
        for parameter in found.params if found is not None else ():
            if parameter.callback is None:
                parameter.callback = _plain
        return found

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own context
        """Run the command that was asked for."""
        from twophase.cli.output import Complaints, complain, print_error

        logging.lastResort = Complaints(logging.WARNING)  # the usual one sends whatever is in a text to the terminal
        try:
            return super().invoke(ctx)
        except TwophaseError as caught:
            print_error(caught)
            raise typer.Exit(1) from None
        except BrokenPipeError:
            raise  # whoever read has gone; click ends quietly
        except OSError as caught:  # what the machine refuses: a folder that is a file, a missing right
            print_error(ConfigError(f"{caught.filename or 'the system'}: {caught.strerror or caught}"))
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


#: In the order of `twophase --help`.
_DECIDING = (manual_decisions, positions, reconcile)
_COMMANDS = (run, explain, backfill, record_views, state, diff, maintenance, *_DECIDING, local, status, demo)
for _module in _COMMANDS:
    _module.add_to(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="twophase")
