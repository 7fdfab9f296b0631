"""Readers that know nothing of the protocol, while checkpoints appear: each sees all of a checkpoint or nothing.

Each checkpoint is three files. A reader lists the table's folder and reads what it found, at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pandas as pd
import polars as pl
import pytest

from support.crashes import scenarios
from support.faults.processes import call, start, stopped_at_end
from support.pipelines.factories import land_words
from twophase.core.settings import data_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.chaos

#: Rows of a checkpoint: two input files of ten.
WHOLE = 20

Reader = Callable[[Path], Iterable[int]]


def by_duckdb(place: str) -> list[int]:
    with duckdb.connect() as connection:
        return [row[0] for row in connection.execute("SELECT id FROM read_parquet(?)", [place]).fetchall()]


READERS: Mapping[str, Reader] = {
    "duckdb": lambda table: by_duckdb(f"{table}/**/*.parquet"),
    "duckdb-folder": lambda table: by_duckdb(str(table)),
    "polars": lambda table: pl.read_parquet(table)["id"].to_list(),
    "polars-lazy": lambda table: pl.scan_parquet(table).select("id").collect()["id"].to_list(),
    "polars-pattern": lambda table: pl.read_parquet(f"{table}/**/*.parquet")["id"].to_list(),
    "pandas": lambda table: pd.read_parquet(table, engine="pyarrow")["id"].tolist(),
}


class Watch:
    """What one reader saw so far."""

    def __init__(self, name: str, reader: Reader) -> None:
        self.name, self.reader = name, reader
        self.last: frozenset[int] = frozenset()
        self.different = 0

    def look(self) -> frozenset[int]:
        """Read the table once: whole checkpoints, and none fewer than before."""
        seen = Counter(number // WHOLE for number in self.reader(data_path(scenarios.TABLES[0])))
        parts = {checkpoint: rows for checkpoint, rows in seen.items() if rows != WHOLE}
        assert not parts, f"{self.name} saw parts of checkpoints: {parts}"
        now = frozenset(seen)
        assert now >= self.last, f"{self.name} no longer saw {self.last - now}"
        self.different += now != self.last
        self.last = now
        return now


def watch(readers: Mapping[str, Reader], checkpoints: int, home: Path, *, at_least: int) -> None:
    """Let readers read in turn while a process takes checkpoints through."""
    land_words(files=2 * checkpoints)
    assert call(scenarios.in_threes, 1, log=home / "first.log").wait() == 0
    watches = [Watch(name, reader) for name, reader in readers.items()]
    writer = start(scenarios.in_threes, checkpoints - 1, log=home / "writer.log")
    with stopped_at_end(writer):
        while writer.process.exitcode is None:
            for each in watches:
                each.look()
        assert writer.wait() == 0, writer.said

    for each in watches:
        assert each.look() == frozenset(range(checkpoints))
        assert each.different >= at_least, f"{each.name} saw only {each.different} states of the table"


def test_readers_see_whole_checkpoints_while_they_appear(home: Path) -> None:
    watch(READERS, 30, home, at_least=3)


@pytest.mark.spark
def test_spark_sees_whole_checkpoints_while_they_appear(home: Path, spark: SparkSession) -> None:
    watch({"spark": by_spark(spark)}, 30, home, at_least=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_sees_whole_checkpoints_while_hundreds_appear(reader: str, home: Path) -> None:
    watch({reader: READERS[reader]}, 200, home, at_least=20)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_spark_sees_whole_checkpoints_while_hundreds_appear(home: Path, spark: SparkSession) -> None:
    watch({"spark": by_spark(spark)}, 200, home, at_least=10)


def by_spark(spark: SparkSession) -> Reader:
    return lambda table: [row.id for row in spark.read.parquet(str(table)).select("id").collect()]
