"""Count the words of a Kafka topic; each checkpoint's counts reach a topic, a PostgreSQL table and files, once each."""

from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

kafka_word_count = Pipeline(
    "kafka_word_count",
    reads={"lines": sources.Kafka("lines", group="kafka_word_count", max_records=1_000_000)},
    transform="kafka_word_count:transform",
    writes={
        "topic": sinks.Kafka("word-counts", key="word"),
        "dwh": sinks.Postgres("word_counts", conn_id="postgres_default", create=True),
        "lake": sinks.Files("lake/kafka_word_count"),
    },
)

dag = TwophaseDag(kafka_word_count, schedule="*/5 * * * *", tags=["example"])
