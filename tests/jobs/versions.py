"""Transforms that say which Spark ran them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def transform(words: DataFrame, spark: SparkSession) -> DataFrame:
    """Add the versions of Spark and Java to each row."""
    java = spark.sparkContext._jvm.System.getProperty("java.specification.version")  # type: ignore[union-attr]
    return words.withColumn("spark", F.lit(spark.version)).withColumn("java", F.lit(java))


def with_function(words: DataFrame) -> DataFrame:
    """Run a Python function of this module in the executors."""
    return words.withColumn("shout", F.udf(shout, "string", useArrow=False)(F.col("word")))


def shout(word: str) -> str:
    """Say it louder."""
    return word.upper()


def counted(words: DataFrame) -> DataFrame:
    """Count each word: a shuffle."""
    return words.groupBy("word").count()


def broken(words: DataFrame) -> DataFrame:
    """Fail, as a user's mistake would."""
    return words.select("no_such_column")
