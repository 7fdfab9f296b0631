"""The transform of dags/kafka_word_count.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(lines: DataFrame) -> DataFrame:
    """Count the words of the lines in this checkpoint; a reader sums over checkpoints."""
    words = lines.select(F.explode(F.split(F.trim("value"), r"\s+")).alias("word")).where("word <> ''")
    return words.groupBy("word").agg(F.count("*").alias("frequency"))
