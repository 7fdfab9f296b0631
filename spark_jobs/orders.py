"""The transform of dags/orders.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(orders: DataFrame) -> DataFrame:
    """Keep one row per order: the largest amount, as corrections only ever add to it."""
    return orders.groupBy("order_id", "customer").agg(F.max("amount").alias("amount"))
