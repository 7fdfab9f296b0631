"""Count the words of a Kafka topic into a topic, a PostgreSQL table and files; `twophase demo --kafka` kills it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twophase import Pipeline, sinks, sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(lines: DataFrame) -> DataFrame:
    """Count the words of the lines in this checkpoint; a reader sums over checkpoints."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

    words = lines.select(F.explode(F.split(F.trim("value"), r"\s+")).alias("word")).where("word <> ''")
    return words.groupBy("word").agg(F.count("*").alias("frequency"))


kafka_word_count = Pipeline(
    "kafka_word_count",
    reads={"lines": sources.Kafka("lines", start="earliest", group="kafka_word_count", max_records=100_000)},
    transform="twophase.examples.kafka_word_count:transform",
    writes={
        "topic": sinks.Kafka("word-counts", key="word"),
        "dwh": sinks.Postgres("word_counts", conn_id="postgres_default", create=True),
        "lake": sinks.Files("lake/kafka_word_count"),
    },
)
