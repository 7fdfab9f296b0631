"""How executors read Parquet where Spark has no way to the files: a schema's columns, and no more than is asked."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import LocalFileSystem

from twophase.storage.arrow_files import ArrowReader
from twophase.storage.base import Within

DAY = datetime(2026, 11, 15, tzinfo=UTC)
TYPES = {
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "date": pa.date32(),
    "nanoseconds": pa.timestamp("ns", "UTC"),
}


def read(path: Path, schema: pa.Schema, within: Within | None = None, **given: str | None) -> pa.Table:
    row = {"path": str(path), "given": list(given.values())}
    names = pa.schema([("path", pa.string()), ("given", pa.list_(pa.string()))])
    reader = ArrowReader(LocalFileSystem, schema, tuple(given), within)
    return pa.Table.from_batches(reader(iter([pa.RecordBatch.from_pylist([row], names)])), schema)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("days", "expected"),
    [((15, 16), [15]), ((15, 17), [15, 16]), ((14, 15), [14]), ((17, 18), []), ((1, 30), [14, 15, 16])],
)
def test_only_groups_of_rows_that_may_be_within_are_read(
    kind: str, days: tuple[int, int], expected: list[int], tmp_path: Path
) -> None:
    times: list[Any] = [DAY + timedelta(days=number) for number in (-1, 0, 1)]
    plain = [one.date() if kind == "date" else one.replace(tzinfo=None) if kind[-3:] == "ntz" else one for one in times]
    table = pa.table({"ts": pa.array(plain, TYPES[kind]), "id": pa.array([14, 15, 16], pa.int64())})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1)
    within = Within("ts", *(datetime(2026, 11, day, tzinfo=UTC) for day in days))

    found = read(tmp_path / "rows.parquet", pa.schema([("ts", pa.timestamp("us", "UTC")), ("id", pa.int64())]), within)

    assert found["id"].to_pylist() == expected


@pytest.mark.parametrize("options", [{"write_statistics": False}, {"use_deprecated_int96_timestamps": True}], ids=str)
def test_groups_of_which_nothing_is_said_are_read(options: dict[str, Any], tmp_path: Path) -> None:
    table = pa.table({"ts": pa.array([DAY], pa.timestamp("us", "UTC"))})
    pq.write_table(table, tmp_path / "rows.parquet", **options)
    later = Within("ts", DAY + timedelta(days=1), DAY + timedelta(days=2))

    found = read(tmp_path / "rows.parquet", table.schema, later)

    assert found["ts"].to_pylist() == [DAY]


def test_columns_are_those_of_the_schema_whatever_the_file_has(tmp_path: Path) -> None:
    table = pa.table({"ID": pa.array([1, 2], pa.int32()), "other": ["x", "y"], "dt": ["wrong", "wrong"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    schema = pa.schema([("dt", pa.date32()), ("id", pa.int64()), ("new", pa.string()), ("n", pa.int32())])

    found = read(tmp_path / "rows.parquet", schema, dt="2026-11-15", n=None)

    assert found.to_pylist() == [{"dt": date(2026, 11, 15), "id": number, "new": None, "n": None} for number in (1, 2)]


def test_rows_are_counted_where_a_file_has_none_of_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"other": ["x", "y"]}), tmp_path / "rows.parquet")

    found = read(tmp_path / "rows.parquet", pa.schema([("new", pa.string()), ("k", pa.string())]), k="a")

    assert found.to_pylist() == [{"new": None, "k": "a"}] * 2
