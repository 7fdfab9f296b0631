"""Count words: `twophase run` takes this file, and `twophase demo` kills it to show that nothing gets lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twophase import Pipeline, sinks, sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def transform(words: DataFrame) -> DataFrame:
    """Sum the frequencies of each word of the checkpoint."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

    return words.groupBy("word").agg(F.sum("frequency").cast("long").alias("frequency"))


word_count = Pipeline(
    "word_count",
    reads={"words": sources.Files("landing/words", format="json", schema="word string, frequency bigint")},
    transform="twophase.examples.word_count:transform",
    writes={"lake": sinks.Files("lake/word_count")},
)
