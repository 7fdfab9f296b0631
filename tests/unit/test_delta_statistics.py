"""What Delta's log says of a file must not hide a row: bounds hold, and what is in doubt is left out."""

from __future__ import annotations

import io
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from twophase.core.manifest import Column
from twophase.formats import parquet_statistics

JUST_AFTER = datetime(2026, 11, 15, 12, 0, 0, 123_001, tzinfo=UTC)


def described(kind: str, values: list[Any], arrow: pa.DataType, group: int = 2) -> dict[str, Any]:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"c": pa.array(values, arrow)}), buffer, row_group_size=group)
    return parquet_statistics.of(pq.read_metadata(buffer), (Column("c", kind), Column("in_folders", "string")))


def test_bounds_are_over_all_row_groups_and_nulls_are_counted() -> None:
    found = described("bigint", [5, None, -7, 3, None, None], pa.int64())

    assert found == {"minValues": {"c": -7}, "maxValues": {"c": 5}, "nullCount": {"c": 3}}


def test_the_largest_time_is_rounded_up_to_the_logs_milliseconds_and_the_least_down() -> None:
    found = described("timestamp", [JUST_AFTER], pa.timestamp("us", "UTC"))

    assert found["minValues"] == {"c": "2026-11-15T12:00:00.123Z"}
    assert found["maxValues"] == {"c": "2026-11-15T12:00:00.124Z"}


def test_times_without_a_zone_and_dates_are_written_as_they_are() -> None:
    times = described("timestamp_ntz", [JUST_AFTER.replace(tzinfo=None, microsecond=0)], pa.timestamp("us"))
    dates = described("date", [date(2026, 11, 15), date(1, 1, 1)], pa.date32())

    assert times["maxValues"] == {"c": "2026-11-15T12:00:00.000"}
    assert dates["minValues"] == {"c": "0001-01-01"}


def test_what_readers_understand_differently_has_no_bounds() -> None:
    doubtful: tuple[tuple[str, list[Any], pa.DataType], ...] = (
        ("double", [1.0, float("nan")], pa.float64()),
        ("binary", [b"a"], pa.binary()),
        ("boolean", [True], pa.bool_()),
        ("string", ["a", "b" * 33], pa.string()),
        ("bigint", [None, None], pa.int64()),
    )
    for kind, values, arrow in doubtful:
        found = described(kind, values, arrow)

        assert (found["minValues"], found["maxValues"]) == ({}, {}), kind
        assert found["nullCount"] == {"c": values.count(None)}


def test_nested_columns_and_those_of_folders_are_left_out() -> None:
    found = described("struct<x:int>", [{"x": 1}], pa.struct([("x", pa.int32())]))

    assert found == {"minValues": {}, "maxValues": {}, "nullCount": {}}
