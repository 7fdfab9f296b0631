"""Count the words that land as JSON; also `twophase run dags/word_count.py`, without Airflow."""

from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

word_count = Pipeline(
    "word_count",
    reads={"words": sources.Files("landing/words", format="json", schema="word string, frequency bigint")},
    transform="word_count:transform",
    writes={"lake": sinks.Files("lake/word_count")},
)

dag = TwophaseDag(word_count, schedule="*/5 * * * *", tags=["example"])
