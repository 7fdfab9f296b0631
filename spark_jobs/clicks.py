"""The transform of dags/clicks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(clicks: DataFrame) -> DataFrame:
    """Add the day that a click belongs to."""
    return clicks.withColumn("day", F.date_format("at", "yyyy-MM-dd"))
