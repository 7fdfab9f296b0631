"""Count the words that land as JSON; run it with `twophase run dags/word_count.py`."""

from twophase import Pipeline, sinks, sources

word_count = Pipeline(
    "word_count",
    reads={"words": sources.Files("landing/words", format="json", schema="word string, frequency bigint")},
    transform="word_count:transform",
    writes={"lake": sinks.Files("lake/word_count")},
)
