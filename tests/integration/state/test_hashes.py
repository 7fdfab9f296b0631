"""The hash of a key in Python is the one that Spark computes."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from twophase import State
from twophase.formats.arrow_types import arrow
from twophase.state import hashes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [0, 1, -128, 127],
    "smallint": [0, -1, 32767],
    "int": [0, 1, -1, 2**31 - 1, -(2**31)],
    "bigint": [0, 1, -1, 2**63 - 1, -(2**63)],
    "string": ["", "a", "abcd", "abcdefgh", "x" * 31, "y" * 32, "z" * 100, "ä", "λ🙂", "a\0b"],
    "binary": [b"", b"\0", b"\xff" * 40],
    "date": [date(1970, 1, 1), date(1969, 12, 31), date(2026, 11, 18)],
    "timestamp": [datetime(1969, 12, 31, 23, tzinfo=UTC), datetime(2026, 11, 18, 1, 2, 3, 456789, tzinfo=UTC)],
    "timestamp_ntz": [datetime(1900, 1, 1), datetime(2026, 11, 18, 1, 2, 3, 456789)],  # noqa: DTZ001 - it has none
    "decimal(5,2)": [Decimal("0.00"), Decimal("-1.10"), Decimal("999.99")],
    "decimal(18,0)": [Decimal(10**18 - 1), Decimal(-(10**18) + 1)],
    "decimal(19,4)": [Decimal("0.0000"), Decimal("1.2000"), Decimal("-128.0000"), Decimal("0.0127"), Decimal("0.0128")],
    "decimal(38,10)": [Decimal("1234567890123456789012345678.0123456789"), Decimal("-0.0000000001"), Decimal(-1)],
}


def both(spark: SparkSession, schema: str, rows: list[tuple[Any, ...]]) -> tuple[list[int], list[int]]:
    """Return the hashes of rows of key columns, by Spark and by Python."""
    columns = State([f"k{at}" for at, _ in enumerate(rows[0])], f"{schema}, v int").keys
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    in_spark = [row.h for row in frame.selectExpr(f"{hashes.in_spark(columns)} AS h").collect()]
    arrays = [pa.array([row[at] for row in rows], arrow(kind)) for at, (_, kind) in enumerate(columns)]
    return in_spark, hashes.of(arrays).tolist()


@pytest.mark.parametrize("kind", VALUES)
def test_each_type_of_key_has_the_hash_of_spark(spark: SparkSession, kind: str) -> None:
    rows = [(value,) for value in [*VALUES[kind], None]]
    in_spark, here = both(spark, f"k0 {kind}", rows)

    assert here == in_spark
    assert len(set(here)) == len(rows)


def test_keys_of_several_columns_have_the_hash_of_spark(spark: SparkSession) -> None:
    rows = [("a", None, 1), (None, "a", 1), (None, None, None), ("", "", 0), ("a", "b", -1)]
    in_spark, here = both(spark, "k0 string, k1 string, k2 int", rows)

    assert here == in_spark
    assert len(set(here)) == len(rows), "('a', null) and (null, 'a') must differ"


def test_a_key_is_hashed_by_its_declared_type(spark: SparkSession) -> None:
    """An int frame finds the keys of a bigint state."""
    columns = State(["k"], "k bigint, v int").keys
    found = spark.createDataFrame([(7,), (None,)], "k int").coalesce(1).selectExpr(f"{hashes.in_spark(columns)} AS h")

    assert [row.h for row in found.collect()] == hashes.of([pa.array([7, None], pa.int64())]).tolist()


def test_the_weak_hash_of_tests_is_the_same_in_both(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "WEAK", 15)
    in_spark, here = both(spark, "k0 int", [(number,) for number in range(200)])

    assert here == in_spark
    assert set(here) == set(range(16))


def test_a_slice_is_hashed_as_its_rows_are() -> None:
    """Arrow's buffers of a slice begin earlier than its rows."""
    for kind, values in VALUES.items():
        whole = pa.array([*values, None, *values], arrow(kind))
        assert hashes.of([whole[2:]]).tolist() == hashes.of([whole])[2:].tolist()
    assert np.array_equal(hashes.of([pa.array([], pa.string())]), [])
