"""Count words: the transform of the demo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(words: DataFrame) -> DataFrame:
    """Sum the frequencies of each word; the word `ERROR` fails the attempt, as in Flink's word count with failover."""
    if not words.filter(F.col("word") == "ERROR").isEmpty():
        msg = "the input holds the word 'ERROR'"
        raise ValueError(msg)
    return words.groupBy("word").agg(F.sum("frequency").cast("long").alias("frequency"))
