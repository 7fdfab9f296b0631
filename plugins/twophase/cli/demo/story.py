"""What the demos share: the input, what the record and a reader say of it, and the proof."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.cli.demo import proof
from twophase.cli.output import busy, by_sink, listing, state
from twophase.core.errors import ConfigError, StoreUnavailable, TwophaseError
from twophase.core.settings import data_path

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
#: The command line as a process of its own.
TWOPHASE = (sys.executable, "-m", "twophase.cli")
#: Longer than any part takes, so that the demo ends whatever happens.
PATIENCE = 240.0


class DemoFailed(TwophaseError):
    """The demo could not show what it promises."""


class Story(ABC):
    """Lands input, has it run, kills, looks, and compares."""

    pipeline = PIPELINE

    def __init__(self, say: Console) -> None:
        """Tell it to a console."""
        from twophase.examples import word_count

        self.say = say
        self.table = Path(word_count.word_count.writes["lake"].location())
        self._random = random.Random(17)  # noqa: S311 - made-up words
        #: The input files of each checkpoint, as they were landed.
        self.inputs: dict[int, list[Path]] = {}

    @abstractmethod
    def play(self) -> bool:
        """Play it; say whether the proof holds."""

    def head(self, text: str, rest: str = "") -> None:
        """Begin a part."""
        self.say.print(f"\n[bold]{text}[/]{rest}", soft_wrap=True)

    def tell(self, text: str, style: str = "") -> None:
        """Tell one line of a part."""
        self.say.print(f"   {text}", style=style, markup=False, soft_wrap=True)

    def land(self) -> int:
        """Put new files into the landing folder, each under its name once it is whole; return whose input they are."""
        number = len(self.inputs) + 1
        folder = data_path("landing/words")
        folder.mkdir(parents=True, exist_ok=True)
        count = 0
        landed = []
        for part in range(3):
            rows = [{"word": self._random.choice(WORDS), "frequency": self._random.randint(1, 9)} for _ in range(200)]
            new = folder / f"_{number}-{part}.json"
            new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            landed.append(new.rename(folder / f"{number}-{part}.json"))
            count += len(rows)
        self.inputs[number] = landed
        self.tell(f"new input: {len(landed)} files, {count} records", "dim")
        return number

    # --- looking -----------------------------------------------------------------------------------------------------

    def look(self, checkpoint_id: int | None = None) -> None:
        """Say in one line what the record says of a checkpoint (the last one), and what a reader sees."""
        from rich.text import Text

        line = Text("   record: ").append(self._recorded(checkpoint_id)).append("   reader: ").append(self._seen())
        self.say.print(line, soft_wrap=True)

    def _recorded(self, checkpoint_id: int | None) -> Text:
        from rich.text import Text

        try:
            found = self.record()
        except (ConfigError, StoreUnavailable):  # no server, or one that dies while it is asked
            return Text("cannot be read", style="red")
        row = next(row for row in found if checkpoint_id in (None, row["checkpoint_id"]))
        revision = f", revision {row['revision']}," if row["revision"] > 1 else ""
        line = Text(f"checkpoint {row['checkpoint_id']}{revision} is ").append(state(row["state"]))
        return line.append(f" by attempt {row['epoch']}" if row["epoch"] > 1 else "")

    def _seen(self) -> Text:
        from rich.text import Text

        rows = proof.read(self.table)
        checkpoints = sorted({row.checkpoint_id for row in rows})
        if not rows:
            return Text("an empty table", style="bold")
        which = f"checkpoint{'s' * (len(checkpoints) > 1)} {', '.join(map(str, checkpoints))}"
        doubled = len(rows) - len(set(rows))
        return Text(f"{len(rows)} rows, {which}", style="bold").append(f", {doubled} doubled" if doubled else "")

    def record(self) -> list[dict[str, Any]]:
        """Return the record's revisions, newest checkpoint first."""
        from twophase.cli.record_access import connected
        from twophase.committer import queries

        with connected() as connection:
            return queries.checkpoints(connection, self.pipeline)

    # --- the proof ---------------------------------------------------------------------------------------------------

    def prove(self, *further: proof.Finding) -> bool:
        """Print the commit table and the proof; say whether everything holds."""
        record = self.commit_table()
        self.head("The proof", ": the input, counted in plain Python, against the table, read with pyarrow")
        made, seen = proof.expected(self.inputs), proof.read(self.table)
        self._totals(made, seen)
        committed = [row["checkpoint_id"] for row in record if row["state"] == "COMMITTED"]
        return self.conclude([*proof.prove(made, seen, committed), *further, self.verified()])

    def commit_table(self) -> list[dict[str, Any]]:
        """Print the commit table; return its rows."""
        from twophase.cli.record_views import CHECKPOINTS

        self.head("The commit table")
        record = self.record()
        hidden = {"run_id"} | ({"kind"} if all(row["kind"] == "regular" for row in record) else set())
        rows = [{**row, "by_sink": by_sink(row)} for row in record]
        listing(rows, [column for column in CHECKPOINTS if column[1] not in hidden])
        return record

    def conclude(self, checks: list[proof.Finding]) -> bool:
        """Print each claim of the proof; say whether everything holds."""
        from rich.text import Text

        for check in checks:
            mark = ("✓", "green") if check.holds else ("✗", "bold red")
            self.say.print(Text.assemble("   ", mark, f" {check.claim} ", (f"({check.found})", "dim")), soft_wrap=True)
        holds = all(check.holds for check in checks)
        verdict = "[bold green]exactly once: the proof holds[/]" if holds else "[bold red]the proof does not hold[/]"
        self.say.print(f"   {verdict}\n")
        return holds

    def verified(self) -> proof.Finding:
        """Return what `twophase verify` finds."""
        with busy(self.say, "verifying"):
            done = subprocess.run([*TWOPHASE, "verify", self.pipeline], capture_output=True, text=True, check=False)
        found = " ".join((done.stdout + done.stderr).split())
        return proof.Finding("`twophase verify` finds every byte as recorded", done.returncode == 0, found)

    def _totals(self, made: list[proof.Counted], seen: list[proof.Counted]) -> None:
        wanted, found = proof.totals(made), proof.totals(seen)
        for row in (("word", list(WORDS)), ("input", [wanted[w] for w in WORDS]), ("table", [found[w] for w in WORDS])):
            self.say.print(f"   {row[0]:<6}" + "".join(f"{value:>8}" for value in row[1]), style="dim")
