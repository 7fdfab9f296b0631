"""Rows with every value that some sink may get wrong: the same ones wherever they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 10_000
#: Each is in hundreds of rows.
TEXTS = (
    None, "", " ", "NULL", r"\N", '"', '""', "'", "''", "\\", '\\"', r"a\"b", "\n", "\r\n", "\t", "{a,b}", "a,b;c|d",
    "ä ß ñ", "日本語", "שלום", "e\u0301", "😀👩‍👩‍👧", "\u0001", "\u2028", "$1 %s {} ?", "'); --", "-- ;", "\x7f",
)  # fmt: skip
#: A megabyte each: each is in one row.
LONG = ("x" * 1_000_000, 'é"\\\n' * 200_000)
_COLUMNS = """
    id, word, concat('k', id, word) AS other,
    IF(id % 2 = 0, 2147483647, -2147483648) AS whole,
    IF(id % 2 = 0, 9223372036854775807L, -9223372036854775807L) AS large,
    CASE id % 3 WHEN 0 THEN float('NaN') WHEN 1 THEN float(1.17549435E-38D) ELSE float(id) / float(3) END AS single,
    CASE id % 5 WHEN 0 THEN double('-Infinity') WHEN 1 THEN 4.9E-324D WHEN 2 THEN 1.7976931348623157E308D
        WHEN 3 THEN double('NaN') ELSE id / 3D END AS ratio,
    cast(id AS decimal(20,6)) / 7 - 700 AS amount,
    IF(id % 3 = 0, NULL, id % 3 = 1) AS flag,
    CASE id % 4 WHEN 0 THEN DATE'0001-01-01' WHEN 1 THEN DATE'9999-12-31' WHEN 2 THEN DATE'1582-10-04'
        ELSE date_add(DATE'2026-01-01', cast(id % 400 AS int)) END AS day,
    CASE id % 4 WHEN 0 THEN TIMESTAMP'1582-10-04 00:00:00.000001Z' WHEN 1 THEN TIMESTAMP'1969-12-31 23:59:59.999999Z'
        ELSE timestamp_micros(1792890000000000 + id * 450000001) END AS at,
    IF(id % 2 = 0, timestamp_ntz'2026-03-29 02:30:00.123456', timestamp_ntz'1900-01-01 00:00:00') AS local,
    CASE id % 3 WHEN 0 THEN unhex('00FF5C22') WHEN 1 THEN cast('' AS binary) END AS raw
"""


def hard_rows(spark: SparkSession, rows: int = ROWS, *more: str) -> DataFrame:
    """Return rows with hard values of every plain type, numbered by `id`; `more` are further columns of theirs."""
    from pyspark.sql import functions

    texts = [*enumerate(TEXTS), *((-number, text) for number, text in enumerate(LONG, 1))]
    words = functions.broadcast(spark.createDataFrame(texts, "text int, word string"))
    numbers = spark.range(0, rows, 1, 4).selectExpr(
        "id", f"cast(IF(id < {len(LONG)}, -1 - id, id % {len(TEXTS)}) AS int) AS text"
    )
    numbers.join(words, "text").createOrReplaceTempView("hard_words")
    return spark.sql(f"SELECT {', '.join((_COLUMNS, *more))} FROM hard_words")


def plain(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return rows by their number, so that equal ones compare equal: NaN by its name, times in UTC, bytes as bytes."""
    return {row["id"]: {name: _plain(value) for name, value in row.items()} for row in rows}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return bytes(value) if isinstance(value, bytearray | memoryview) else value
