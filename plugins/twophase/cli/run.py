"""The command `run`: run checkpoints without Airflow."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, by_sink, complain, console, listing, print_json
from twophase.core.errors import AttemptFailed, Retryable, in_one_line
from twophase.core.settings import spark_jobs

if TYPE_CHECKING:
    from rich.console import Console

    from twophase.core.checkpoint import Revision
    from twophase.restart import Restart

log = logging.getLogger("twophase")

#: How many lines of a user's traceback are shown.
TAIL = 20

RESULT = (
    ("pipeline", "pipeline"),
    ("checkpoint", "checkpoint_id"),
    ("rev", "revision"),
    ("state", "state"),
    ("seq", "commit_seq"),
    ("rows", "rows"),
    ("bytes", "bytes"),
    ("by sink", "by_sink"),
)

_LOG = re.compile(r"(?:its|the) log is (.+)$")
_KEY = re.compile(r"[a-z][a-z0-9_]*/\d+ r\d+")
_SHIPPED = re.compile(r'"[^"]*/localPyFiles-[^/"]*/([^"]+)"')
_NOT_THE_USERS = re.compile(r'File "[^"]*/(twophase/spark|pyspark|py4j)/')


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(run)


def _pairs(values: list[str]) -> list[str]:
    for value in values:
        if not value.partition("=")[1] or not value.partition("=")[0]:
            msg = f"expected key=value, found {value!r}"
            raise typer.BadParameter(msg)
    return values


def run(  # noqa: PLR0913 - what a person may ask for
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file that declares a pipeline; NAME is its variable or its own name.",
            show_default=False,
        ),
    ],
    *,
    slot: Annotated[
        str | None,
        typer.Option(
            metavar="START/END|KEY",
            help="Which interval, in ISO 8601, or which partition key.",
            show_default=False,
        ),
    ] = None,
    reprocess: Annotated[
        bool, typer.Option("--reprocess", help="A new revision if the slot is committed already.")
    ] = False,
    drain: Annotated[bool, typer.Option("--drain", help="Go on until there is no new input.")] = False,
    restart: Annotated[
        str,
        typer.Option(
            metavar="STRATEGY", help="After a failure: fixed:3,10s, exponential:1s,60s, rate:3/5m,10s or none."
        ),
    ] = "none",
    master: Annotated[
        str | None, typer.Option(help="Where Spark runs, as for spark-submit.", show_default="local[*]")
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            callback=lambda value: _pairs(value or []),
            help="A setting of Spark's; may be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Take one checkpoint through, exactly once; what a crash left is finished first."""
    from twophase.cli.pipeline_files import load
    from twophase.committer import queries
    from twophase.restart import parse
    from twophase.runner import Runner, stager_for

    strategy = parse(restart)
    pipeline = load(target)
    settings = {key: value for key, _, value in (pair.partition("=") for pair in conf or ())}
    done: list[dict[str, Any]] = []
    try:
        with _story(), Runner(pipeline, stager_for(pipeline, master=master, conf=settings)) as runner:
            tries = Tries(strategy)
            while (revision := tries.until_done(lambda: runner.run(slot, reprocess=reprocess))) is not None:
                with runner.record.engine.connect() as connection:
                    done.append(queries.row_of(connection, revision.key))
                if not drain or slot is not None:
                    break
    except AttemptFailed as failed:
        show_traceback(failed)
        raise
    finally:
        if as_json:
            print_json(done)
        elif done:
            listing([{**row, "by_sink": by_sink(row)} for row in done], RESULT)
    if revision is None:
        complain(f"{pipeline.name}: no new input")


class Tries:
    """Runs checkpoints, and again after failures as a strategy says; one for the life of a `twophase run`."""

    def __init__(self, strategy: Restart, clock: Callable[[], float] = time.monotonic) -> None:
        """Count failures from now on."""
        self.strategy = strategy
        self.clock = clock
        self.failures: list[float] = []
        self.committed: float | None = None

    def until_done(self, run: Callable[[], Revision | None]) -> Revision | None:
        """Return what a run returns; raise its failure once the strategy gives up. The range stays the checkpoint's."""
        while True:
            try:
                done = run()
            except (AttemptFailed, Retryable) as failed:
                self.failures.append(self.clock())
                pause = self.strategy.pause(self.failures, self.committed)
                if pause is None:
                    raise
                log.warning("failure %s: %s; starting again in %g s", len(self.failures), in_one_line(failed), pause)
                threading.Event().wait(pause)
            else:
                self.committed = self.clock()
                return done


# --- the story -------------------------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    """Prints what the log says as short lines."""

    def __init__(self, target: Console) -> None:
        super().__init__(logging.INFO)
        self.target = target

    def emit(self, entry: logging.LogRecord) -> None:
        from rich.text import Text

        line = Text(self.format(entry), style="yellow" if entry.levelno >= logging.WARNING else "")
        line.highlight_regex(_KEY, "bold")
        line.highlight_words(["pre-committed"], "cyan")
        line.highlight_words(["committed,", "promoted,"], "green")
        line.highlight_words(["failed"], "red")
        self.target.print(line, soft_wrap=True)


@contextmanager
def _story() -> Iterator[None]:
    """Print progress on stderr, with a clock below it on a terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    target = console(stderr=True)
    before = log.level, log.propagate
    lines = _Lines(target)
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False
    clock = Progress(
        SpinnerColumn(),
        TextColumn("working"),
        TimeElapsedColumn(),
        console=target,
        transient=True,
        disable=not target.is_terminal,
    )
    try:
        with clock:
            clock.add_task("working", total=None)
            yield
    finally:
        log.removeHandler(lines)
        log.level, log.propagate = before


def show_traceback(failed: AttemptFailed) -> None:
    """Print the end of what the user's code raised, from the log that the error names."""
    match = _LOG.search(str(failed))
    path = Path(match[1]) if match else None
    if type(failed) is not AttemptFailed or path is None or not path.is_file():
        return
    for line in tail(path.read_text(encoding="utf-8", errors="replace")):
        complain(_SHIPPED.sub(_own_copy, line), style="dim")


def _own_copy(match: re.Match[str]) -> str:
    """Name the user's own file instead of the copy that Spark made of it, which is gone by now."""
    own = spark_jobs() / match[1]
    return f'"{own}"' if own.is_file() else match[0]


def tail(log: str) -> list[str]:
    """Return the last traceback of a log without Spark's frames and ours, or its last lines when there is none."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return lines[-TAIL:]
    kept = [lines[starts[-1]]]
    users = True
    for line in lines[starts[-1] + 1 :]:
        if line.startswith("  File "):
            users = not _NOT_THE_USERS.search(line)
        elif not line.startswith(" "):
            kept.append(line)
            break
        if users:
            kept.append(line)
    return kept if len(kept) <= TAIL else [kept[0], *kept[1 - TAIL :]]
