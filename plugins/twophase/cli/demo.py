"""`twophase demo`: a pipeline is killed at the three worst moments, and a reader never sees it."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from twophase.cli import proof
from twophase.cli.output import console, listing, state
from twophase.core.errors import TwophaseError
from twophase.core.settings import data_path, home

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIPELINE = "word_count"
WORDS = ("apple", "cherry", "fig", "grape", "lemon", "mango", "plum", "quince")
#: Spark for a few kilobytes: start quickly, compile little.
CONF = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
#: Settings of the caller's that must not reach into the demo.
NOT_OURS = (
    "TWOPHASE_DSN",
    "TWOPHASE_FAILPOINTS",
    "AIRFLOW_CONN_TWOPHASE_COMMITTER",
    "AIRFLOW_CTX_DAG_ID",
    "_AIRFLOW_PROCESS_CONTEXT",
)
#: The command line as a process of its own.
TWOPHASE = (sys.executable, "-m", "twophase.cli")
#: Longer than any child takes, so that the demo ends whatever happens.
PATIENCE = 240.0


class Kill(NamedTuple):
    """Where a run is killed, and what that means."""

    failpoint: str
    when: str
    then: str


KILLS = (
    Kill("vote.before", "before the vote", "Spark has staged everything, nobody has voted for it."),
    Kill("commit.after", "right after the commit point", "It is decided, and nothing is promoted."),
    Kill("promote.visible", "in the middle of promotion", "The data is visible, and the record does not know it."),
)


class DemoFailed(TwophaseError):
    """The demo could not show what it promises."""


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Run")(demo)


def demo() -> None:
    """Show a pipeline survive being killed at three moments, with real Spark and PostgreSQL; under three minutes."""
    started = time.monotonic()
    with _own_home() as folder, _own_server(folder):
        holds = Demo(console(), folder).play()
    say = console()
    say.print(
        f"{time.monotonic() - started:.0f} s in all. Everything is still in {folder}:", style="dim", soft_wrap=True
    )
    say.print(f"  export TWOPHASE_HOME={shlex.quote(str(folder))}", style="dim", soft_wrap=True)
    say.print(f"  twophase up --no-airflow && twophase show {PIPELINE} 1; twophase down", style="dim", soft_wrap=True)
    if not holds:
        raise typer.Exit(1)


# --- a place of its own ----------------------------------------------------------------------------------------------


@contextmanager
def _own_home() -> Iterator[Path]:
    """Work in `<TWOPHASE_HOME>/demo`, with no setting of the caller's but that."""
    before = dict(os.environ)
    folder = home() / "demo"
    for name in NOT_OURS:
        os.environ.pop(name, None)
    os.environ["TWOPHASE_HOME"] = str(folder)
    os.environ["TWOPHASE_SPARK_JOBS"] = str(folder / "spark_jobs")
    os.environ["TWOPHASE_LEASE"] = "3"
    try:
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _own_server(folder: Path) -> Iterator[None]:
    """Start from nothing, and leave no process behind: not after Ctrl-C, not after a polite kill."""
    from twophase.local import postgres

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end) if threading.current_thread() is threading.main_thread() else None
    try:
        postgres.stop()  # of a demo that was killed
        if folder.exists():
            shutil.rmtree(folder)
        yield
    finally:
        postgres.stop()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# --- the play --------------------------------------------------------------------------------------------------------


class Demo:
    """Lands input, runs, kills, runs again, and compares."""

    def __init__(self, say: Console, folder: Path) -> None:
        """Tell it to a console."""
        from twophase.examples import word_count

        self.say = say
        self.folder = folder
        self.file = Path(word_count.__file__)
        self.table = Path(word_count.word_count.writes["lake"].location())
        self.random = random.Random(17)  # noqa: S311 - made-up words
        #: The input files of each checkpoint, as they were landed.
        self.inputs: dict[int, list[Path]] = {}

    def play(self) -> bool:
        """Play it; say whether the proof holds."""
        from twophase.cli.opening import opened

        self.say.print("[bold]Twophase demo[/]: word count, from JSON files to a Parquet table, killed three times")
        with self._busy("starting PostgreSQL"), opened(may_start=True):
            pass
        for number, kill in enumerate(KILLS, start=1):
            self.say.print()
            self.say.print(f"[bold]{number}. Killed {kill.when}[/]")
            self._land(number)
            self._run(kill)
            self.say.print(f"   {kill.then}")
            self._look()
            self._run()
            self._look()
        return self._prove()

    def _land(self, number: int) -> None:
        """Put new files into the landing folder, each under its name only when it is whole."""
        folder = data_path("landing/words")
        folder.mkdir(parents=True, exist_ok=True)
        count = 0
        self.inputs[number] = []
        for part in range(3):
            rows = [{"word": self.random.choice(WORDS), "frequency": self.random.randint(1, 9)} for _ in range(200)]
            new = folder / f"_{number}-{part}.json"
            new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            self.inputs[number].append(new.rename(folder / f"{number}-{part}.json"))
            count += len(rows)
        self.say.print(f"   new input: {len(self.inputs[number])} files, {count} records", style="dim")

    def _run(self, kill: Kill | None = None) -> None:
        """Run the pipeline in a process of its own; it must be killed just where it should, or end well."""
        environment = {"TWOPHASE_FAILPOINTS": f"{kill.failpoint}=kill"} if kill else {}
        shown = "".join(f"{name}={value} " for name, value in environment.items())
        arguments = ["run", str(self.file), *(part for item in CONF.items() for part in ("--conf", "=".join(item)))]
        self.say.print(f"   [bold]$[/] {shown}twophase run {self.file.name}", soft_wrap=True)
        code, told = self._child(arguments, environment)
        if code != (-signal.SIGKILL if kill else 0):
            msg = f"the run ended with {code}, expected {'to be killed' if kill else '0'}: {' / '.join(told[-3:])}"
            raise DemoFailed(msg)

    def _child(self, arguments: list[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
        """Run `twophase` and pass on what it tells; return its exit code and its last words."""
        told: list[str] = []
        with (
            self._busy("working"),
            subprocess.Popen(
                [*TWOPHASE, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ) as child,
        ):
            watchdog = threading.Timer(PATIENCE, child.kill)
            watchdog.start()
            try:
                for line in child.stderr or ():
                    told.append(line.rstrip())
                    self.say.print(
                        f"     {told[-1]}", style="red" if "failpoint" in line else "dim", markup=False, soft_wrap=True
                    )
                return child.wait(), told
            finally:
                watchdog.cancel()
                child.kill()

    def _look(self) -> None:
        """Say in one line what the record says, and what a reader sees."""
        from rich.text import Text

        newest = self._record()[0]
        line = Text("   record: ").append(f"checkpoint {newest['checkpoint_id']} is ").append(state(newest["state"]))
        self.say.print(line.append("   reader: ").append(self._seen()), soft_wrap=True)

    def _seen(self) -> Text:
        from rich.text import Text

        rows = proof.read(self.table)
        checkpoints = sorted({row.checkpoint_id for row in rows})
        if not rows:
            return Text("an empty table", style="bold")
        which = f"checkpoint{'s' * (len(checkpoints) > 1)} {', '.join(map(str, checkpoints))}"
        doubled = len(rows) - len(set(rows))
        return Text(f"{len(rows)} rows, {which}", style="bold").append(f", {doubled} doubled" if doubled else "")

    def _record(self) -> list[dict[str, Any]]:
        from twophase.cli.opening import connected
        from twophase.committer import queries

        with connected() as connection:
            return queries.checkpoints(connection, PIPELINE)

    # --- the proof ---------------------------------------------------------------------------------------------------

    def _prove(self) -> bool:
        from rich.text import Text

        from twophase.cli.record import CHECKPOINTS

        self.say.print()
        self.say.print("[bold]The commit table[/]")
        record = self._record()
        columns = [column for column in CHECKPOINTS if column[1] not in {"kind", "run_id"}]
        listing(record, columns)
        self.say.print()
        self.say.print("[bold]The proof[/]: the input, counted in plain Python, against the table, read with pyarrow")
        made, seen = proof.expected(self.inputs), proof.read(self.table)
        self._totals(made, seen)
        committed = [row["checkpoint_id"] for row in record if row["state"] == "COMMITTED"]
        checks = proof.prove(made, seen, committed)
        checks.append(self._verify())
        for check in checks:
            mark = ("✓", "green") if check.holds else ("✗", "bold red")
            self.say.print(Text.assemble("   ", mark, f" {check.claim} ", (f"({check.found})", "dim")))
        holds = all(check.holds for check in checks)
        verdict = "[bold green]exactly once: the proof holds[/]" if holds else "[bold red]the proof does not hold[/]"
        self.say.print(f"   {verdict}\n")
        return holds

    def _verify(self) -> proof.Check:
        with self._busy("verifying"):
            done = subprocess.run([*TWOPHASE, "verify", PIPELINE], capture_output=True, text=True, check=False)
        found = " ".join((done.stdout + done.stderr).split())
        return proof.Check("`twophase verify` finds every byte as recorded", done.returncode == 0, found)

    def _totals(self, made: list[proof.Counted], seen: list[proof.Counted]) -> None:
        wanted, found = proof.totals(made), proof.totals(seen)
        for row in (("word", list(WORDS)), ("input", [wanted[w] for w in WORDS]), ("table", [found[w] for w in WORDS])):
            self.say.print(f"   {row[0]:<6}" + "".join(f"{value:>8}" for value in row[1]), style="dim")

    @contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        """Turn a wheel while something takes its time, on a terminal."""
        if not self.say.is_terminal:
            yield
            return
        with self.say.status(f"[dim]{what} …[/]"):
            yield
