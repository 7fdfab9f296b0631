"""The transform of dags/visits.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(clicks: DataFrame) -> DataFrame:
    """Count the clicks of each page and day in this checkpoint; a reader sums over checkpoints."""
    return clicks.groupBy("page", "day").agg(F.count("*").alias("clicks"))
