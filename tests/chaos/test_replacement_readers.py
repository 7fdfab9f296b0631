"""Readers that know nothing of the protocol, while checkpoints are replaced: each sees the old or the new one, whole.

Each checkpoint is eight files, and each row says which revision it is from. A reader lists the table's folder and reads
what it found; when it was replaced meanwhile the reader fails, loudly, because no file of one revision has the name of
another's. That it fails is allowed now and then; that it sees a mixture, or a part, is not.

Some readers leave out a file that they cannot find any more while they still list. Such a one, held up between a
folder's names and its files in the very moment of the exchange, misses the checkpoint whole: allowed to them, and rare.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import polars as pl
import pytest

import twophase
from support.crashes import replacements
from support.faults.processes import context, start, stopped_at_end
from twophase.core.settings import data_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.chaos

log = logging.getLogger("twophase.tests")

#: How a reader says that a file which it had listed is not there any more; that there is nothing at all is not allowed.
VANISHED = re.compile(
    r"No such file or directory|os error 2|FILE_NOT_EXIST|FileNotFoundException|NoSuchFileException"
    r'|No files found that match the pattern "[^"*]*/part-r'
)

#: How a reader says that it found no file at all.
NOTHING = re.compile(r"No files found that match the pattern|UNABLE_TO_INFER_SCHEMA")
#: Who leaves out what vanishes while it lists, and how often that may make a checkpoint vanish.
LEAVES_OUT = frozenset({"duckdb", "duckdb-folder", "pandas", "spark"})
RARELY = 0.05

Reader = Callable[[Path], Iterable[Sequence[Any]]]


def by_duckdb(place: str | list[str]) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        return connection.execute("SELECT id, word FROM read_parquet(?)", [place]).fetchall()


def by_pandas(table: Path) -> list[tuple[Any, ...]]:
    found = pd.read_parquet(table, engine="pyarrow")
    return [] if found.empty else list(zip(found["id"], found["word"], strict=True))


def by_spark(spark: SparkSession) -> Reader:
    return lambda table: spark.read.parquet(str(table)).select("id", "word").collect()


READERS: Mapping[str, Reader] = {
    "duckdb": lambda table: by_duckdb(f"{table}/**/*.parquet"),
    "duckdb-folder": lambda table: by_duckdb(str(table)),
    "polars": lambda table: pl.read_parquet(table).select("id", "word").rows(),
    "polars-lazy": lambda table: pl.scan_parquet(table).select("id", "word").collect().rows(),
    "polars-pattern": lambda table: pl.read_parquet(f"{table}/**/*.parquet").select("id", "word").rows(),
    "pandas": by_pandas,
    "committed": lambda _: by_duckdb(twophase.committed_files("words", "lake")),
}


class Watch:
    """What one reader saw so far."""

    def __init__(self, name: str, reader: Reader, checkpoints: int, *, gap: bool) -> None:
        self.name, self.reader, self.gap = name, reader, gap
        self.may_miss = gap or name in LEAVES_OUT
        self.last = dict.fromkeys(range(1, checkpoints + 1), 1)
        self.reads = self.failed = self.missed = self.different = 0

    def look(self) -> None:
        """Read the table once: one revision of each checkpoint, whole, and no older one than before."""
        self.reads += 1
        try:
            seen = Counter((row[0], row[1]) for row in self.reader(data_path("lake/words")))
        except Exception as error:
            told = f"{error!r} {error}"
            if VANISHED.search(told):
                self.failed += 1
                return
            if not (self.may_miss and NOTHING.search(told)):
                raise
            seen = Counter()
        before = dict(self.last)
        for checkpoint_id in self.last:
            mine = {row: count for row, count in seen.items() if row[0] // 100 == checkpoint_id}
            if self.may_miss and not mine:
                self.missed += 1
                continue
            words = {word for _, word in mine}
            assert len(words) == 1, f"{self.name} saw {words or 'nothing'} of checkpoint {checkpoint_id}"
            (word,) = words
            whole = dict.fromkeys(((number, word) for number in replacements.ids(checkpoint_id)), 1)
            assert mine == whole, f"{self.name} saw of checkpoint {checkpoint_id}: {mine}"
            revision = int(word.removeprefix("r"))
            assert revision >= self.last[checkpoint_id], f"{self.name} saw {word} after r{self.last[checkpoint_id]}"
            self.last[checkpoint_id] = revision
        self.different += before != self.last

    def __str__(self) -> str:
        """Say what it came to."""
        return f"{self.name}: {self.reads} reads, {self.different} states, {self.failed} failed, {self.missed} missed"


def watch(
    readers: Mapping[str, Reader],
    times: int,
    home: Path,
    *,
    checkpoints: int = 2,
    gap: bool = False,
    at_least: int = 3,
    paced: bool = False,
) -> None:
    """Let readers read in turn while a process replaces checkpoints in turn.

    One that takes longer to read than to replace would hardly ever succeed: for such ones it is paced, and replaces
    once for every two reads.
    """
    for number in range(1, checkpoints + 1):
        replacements.land("words", number)
        replacements.run("words")
    watches = [Watch(name, reader, checkpoints, gap=gap) for name, reader in readers.items()]
    pace = context.Semaphore(0) if paced else None
    work: tuple[Any, ...] = (replacements.replace_in_turn, tuple(range(1, checkpoints + 1)), times, pace)
    writer = start(*((replacements.without_exchange, *work) if gap else work), log=home / "writer.log")
    with stopped_at_end(writer):
        while writer.process.exitcode is None:
            for each in watches:
                if pace is not None and each.reads % 2:
                    pace.release()
                each.look()
        assert writer.wait() == 0, writer.said

    for each in watches:
        each.look()
        log.info("%s", each)
        assert each.last == dict.fromkeys(each.last, 1 + times // checkpoints)
        assert each.different >= at_least, f"{each.name} saw only {each.different} states of the table"
        assert gap or each.missed <= RARELY * each.reads, f"{each} is not rare"
        share = each.failed / each.reads
        assert share < (0.75 if paced else 0.5), f"{each.name}: {each.failed} of {each.reads} reads failed"


def test_readers_see_the_old_or_the_new_revision_whole(home: Path) -> None:
    watch(READERS, 30, home)


def test_readers_see_a_whole_revision_or_none_where_folders_cannot_change_places(home: Path) -> None:
    watch(READERS, 20, home, gap=True)


@pytest.mark.spark
def test_spark_sees_the_old_or_the_new_revision_whole(home: Path, spark: SparkSession) -> None:
    watch({"spark": by_spark(spark)}, 30, home, paced=True)


def test_what_was_replaced_is_read_as_of_its_time_while_others_come(home: Path) -> None:
    for number in (1, 2):
        replacements.land("words", number)
        replacements.run("words")
    first = Counter((number, "r1") for checkpoint_id in (1, 2) for number in replacements.ids(checkpoint_id))
    writer = start(replacements.replace_in_turn, (1, 2), 20, log=home / "writer.log")
    reads = failed = 0
    with stopped_at_end(writer):
        while writer.process.exitcode is None:
            reads += 1
            try:
                seen = by_duckdb(twophase.committed_files("words", "lake", as_of=2))
            except duckdb.IOException as error:
                if not VANISHED.search(str(error)):
                    raise
                failed += 1
            else:
                assert Counter(seen) == first
        assert writer.wait() == 0, writer.said

    assert reads > failed
    assert failed <= 4, "each of two folders was moved twice, then it lies where it stays"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checkpoints", [1, 2])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_sees_the_old_or_the_new_revision_whole_while_hundreds_come(
    reader: str, checkpoints: int, home: Path
) -> None:
    watch({reader: READERS[reader]}, 200, home, checkpoints=checkpoints, at_least=20)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_spark_sees_the_old_or_the_new_revision_whole_while_hundreds_come(
    checkpoints: int, home: Path, spark: SparkSession
) -> None:
    watch({"spark": by_spark(spark)}, 200, home, checkpoints=checkpoints, at_least=20, paced=True)
