"""What Spark writes is what DuckDB reads: the same rows in every format, with partitions that have strange values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twophase.audits import not_null, unique
from twophase.comparison import compare
from twophase.row_queries.duckdb_rows import DuckDBRows
from twophase.sinks.files.sink import CSV
from twophase.storage import disk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ROWS = """
    SELECT * FROM VALUES
      (1, 'a, "b" \\\\ c\\n d', TINYINT(1), DOUBLE('NaN'), DECIMAL(12.345678901234567890), true,
       DATE'2026-11-15', TIMESTAMP'2026-11-15 10:00:00.123', TIMESTAMP_NTZ'2026-11-15 10:00:00.123', X'00FF41'),
      (2, '', TINYINT(-128), DOUBLE('-Infinity'), DECIMAL(-0.5), false,
       DATE'0001-01-01', TIMESTAMP'1900-01-01 00:00:00', TIMESTAMP_NTZ'1900-01-01 00:00:00', X''),
      (3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
      (4, 'end\\\\', TINYINT(0), DOUBLE(0.1), DECIMAL(0), true,
       DATE'2026-11-15', TIMESTAMP'2026-11-15 00:00:00', TIMESTAMP_NTZ'2026-11-15 00:00:00', X'5C')
    AS t(id, word, small, real, exact, flag, day, seen, wall, raw)
"""
NESTED = [
    "id",
    "array(id, NULL) AS list",
    "named_struct('x', id, 'y', word) AS part",
    "map('k', id) AS map",
    "array(named_struct('m', map(id, word))) AS deep",
]
#: Values that a folder's name cannot have as they are.
STRANGE = ["plain", "a/b=c%d", "C:\\x", " space ", "é😀", "q\"'[*]?", "new\nline", "NULL", "a+b", None]


def stage(frame: DataFrame, folder: Path, format: str, partition_by: list[str]) -> DuckDBRows:  # noqa: A002 - Spark's word
    """Let Spark write a frame as the files sink does; return it as DuckDB reads it."""
    options = CSV if format == "csv" else {}
    frame.write.format(format).options(**options).partitionBy(*partition_by).save(f"file://{folder}")
    schema = [[field.name, field.dataType.simpleString()] for field in frame.schema.fields]
    files = [f"{folder}/{path}" for path, _ in disk.walk(folder)]
    return DuckDBRows(files, schema, format=format, partition_by=partition_by)


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Return rows of every type that all formats have."""
    return spark.sql(ROWS)


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_every_type_is_read_as_spark_wrote_it(frame: DataFrame, tmp_path: Path, format: str) -> None:  # noqa: A002 - Spark's word
    with stage(frame.coalesce(1), tmp_path / "rows", format, []) as relation:
        rows = relation.sample("SELECT * FROM staged ORDER BY id", size=10_000)
        types = relation.types()

    assert types == {
        "id": "INTEGER",
        "word": "VARCHAR",
        "small": "TINYINT",
        "real": "DOUBLE",
        "exact": "DECIMAL(10,0)",
        "flag": "BOOLEAN",
        "day": "DATE",
        "seen": "TIMESTAMP WITH TIME ZONE",
        "wall": "TIMESTAMP",
        "raw": "BLOB",
    }
    raw = "5b30302046462034315d" if format == "csv" else "00ff41"  # what Spark's own reader of CSV gets
    assert rows[0] == {
        "id": 1,
        "word": 'a, "b" \\ c\n d',
        "small": 1,
        "real": "nan",
        "exact": "12",
        "flag": True,
        "day": "2026-11-15",
        "seen": "2026-11-15 10:00:00.123+00",
        "wall": "2026-11-15 10:00:00.123",
        "raw": raw,
    }
    assert [row["word"] for row in rows] == ['a, "b" \\ c\n d', "", None, "end\\"]
    assert set(rows[2].values()) == {3, None}
    assert rows[1]["day"] == "0001-01-01"
    assert rows[1]["seen"] == "1900-01-01 00:00:00+00"


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_nested_values_are_read_as_spark_wrote_them(frame: DataFrame, tmp_path: Path, format: str) -> None:  # noqa: A002 - Spark's word
    with stage(frame.selectExpr(*NESTED), tmp_path / "rows", format, []) as relation:
        rows = relation.sample("SELECT * FROM staged WHERE id > 1 ORDER BY id")
        types = relation.types()

    assert types["deep"] == "STRUCT(m MAP(INTEGER, VARCHAR))[]"
    assert rows[0] == {
        "id": 2,
        "list": "[2, NULL]",
        "part": "{'x': 2, 'y': ''}",
        "map": "{k=2}",
        "deep": "[{'m': {2=''}}]",
    }


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_partition_values_come_back_as_they_were(spark: SparkSession, tmp_path: Path, format: str) -> None:  # noqa: A002 - Spark's word
    rows = [(number, shop) for number, shop in enumerate(STRANGE)]
    columns = [
        "*",
        "DATE'2026-11-15' AS dt",
        "IF(id = 0, TIMESTAMP'2026-11-15 10:00:00.5', NULL) AS seen",
        "id < 3 AS ok",
    ]
    frame = spark.createDataFrame(rows, "id int, shop string").selectExpr(*columns)

    with stage(frame, tmp_path / "shop=none" / "rows", format, ["Shop", "dt", "seen", "ok"]) as relation:
        found = [relation.sample(f"FROM staged WHERE id = {number}")[0] for number, _ in rows]
        verdicts = [audit.check(relation, None) for audit in (unique("shop"), not_null("dt"))]  # type: ignore[arg-type]

    assert found == [
        {
            "id": number,
            "shop": shop,
            "dt": "2026-11-15",
            "seen": "2026-11-15 10:00:00.5+00" if number == 0 else None,
            "ok": number < 3,
        }
        for number, shop in rows
    ]
    assert all(verdict.passed for verdict in verdicts)


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_a_frame_without_rows_is_no_rows(frame: DataFrame, tmp_path: Path, format: str) -> None:  # noqa: A002 - Spark's word
    with stage(frame.where("false"), tmp_path / "rows", format, []) as relation:
        assert relation.rows("SELECT * FROM staged") == []


def test_the_same_rows_in_two_formats_are_the_same(frame: DataFrame, tmp_path: Path) -> None:
    rows = frame.drop("raw")  # in CSV it is not what it was, for Spark either

    sides = {form: stage(rows, tmp_path / form, form, ["flag"]) for form in ("parquet", "json", "csv")}

    for form in ("json", "csv"):
        assert compare(sides["parquet"], sides[form], samples=5).samples == {}
        assert compare(sides["parquet"], sides[form], key=["id"]).same
