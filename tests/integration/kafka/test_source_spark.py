"""Kafka to files and PostgreSQL on a real Spark and a real broker: each committed record once, bad ones set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from support.servers import kafka as server
from twophase import Pipeline, sinks, sources
from twophase.core.errors import BadRecord
from twophase.local.kafka import Broker
from twophase.runner import run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

TYPO = '{"word": "x", "frequency": "many"}'


def union(words: DataFrame, lines: DataFrame, quiet: DataFrame) -> DataFrame:
    assert quiet.count() == 0
    assert words.columns == ["key", "value", "headers", "topic", "partition", "offset", "timestamp"]
    found = words.select("value.word", "value.frequency").union(lines.selectExpr("value", "1L"))
    return found.toDF("word", "frequency")


def copy(words: DataFrame) -> DataFrame:
    return words.selectExpr("value.word", "value.frequency")


def words(topic: str, **arguments: Any) -> sources.Kafka:
    schema = "word string, frequency long"
    return sources.Kafka(topic, conn_id=server.CONN_ID, format="json", schema=schema, start="earliest", **arguments)


def rows(table: str, home: Path) -> list[tuple[Any, ...]]:
    found = duckdb.sql(f"SELECT * EXCLUDE checkpoint FROM '{home}/data/{table}/*/*.parquet' ORDER BY ALL")
    return found.fetchall() if found else []


def transact(broker: Broker, topic: str, records: list[str], *, commit: bool) -> None:
    """Send records in a transaction, and end it."""
    from confluent_kafka import Producer

    producer = Producer(server.client(broker, **{"transactional.id": f"tx-{topic}-{commit}"}))
    producer.init_transactions(30)
    producer.begin_transaction()
    for record in records:
        producer.produce(topic, record)
    producer.flush(30)
    producer.commit_transaction(30) if commit else producer.abort_transaction(30)


def test_committed_records_reach_every_sink_once_and_bad_ones_the_quarantine(
    kafka: Broker, home: Path, target: Any, spark: SparkSession
) -> None:
    """Aborted records are never read; a range of nothing but aborted records and markers is empty."""
    topic, lines, quiet = (server.make_topic(kafka, number) for number in (2, 1, 1))
    good = [json.dumps({"word": f"w{number}", "frequency": number}) for number in range(6)]
    server.produce(kafka, topic, [*good, "no json", TYPO, "[]"])
    transact(kafka, lines, ["seen"], commit=True)
    transact(kafka, lines, ["never"], commit=False)
    transact(kafka, quiet, ["never either"], commit=False)
    text: dict[str, Any] = {"conn_id": server.CONN_ID, "start": "earliest"}
    pipeline = Pipeline(
        "kafka_words",
        reads={
            "words": words(topic, on_bad_record="quarantine", quarantine_path="lake/bad"),
            "lines": sources.Kafka(lines, **text),
            "quiet": sources.Kafka(quiet, **text),
        },
        transform=union,
        writes={"lake": sinks.Files("lake/words"), "dwh": sinks.Postgres("words", conn_id="dwh", create=True)},
    )
    done = run(pipeline, spark)
    server.produce(kafka, topic, [json.dumps({"word": "later", "frequency": 9})])
    again = run(pipeline, spark)

    assert done is not None
    assert again is not None
    assert run(pipeline, spark) is None
    expected = sorted([*((f"w{number}", number) for number in range(6)), ("seen", 1), ("later", 9)])
    assert rows("lake/words", home) == expected
    bad = sorted((row[1], row[0]) for row in rows("lake/bad", home))
    assert bad == [(raw, "its value is no JSON of the declared schema") for raw in sorted(("no json", "[]", TYPO))]
    target.execute("SELECT word, frequency FROM words ORDER BY 1, 2")
    assert target.fetchall() == expected


def test_a_bad_record_fails_the_attempt_and_is_named(kafka: Broker, home: Path, spark: SparkSession) -> None:
    topic = server.make_topic(kafka)
    server.produce(kafka, topic, [json.dumps({"word": "a", "frequency": 1}), "no json"])
    writes = {"lake": sinks.Files("lake/strict")}
    pipeline = Pipeline("kafka_strict", reads={"words": words(topic)}, transform=copy, writes=writes)

    with pytest.raises(BadRecord, match=f"{topic}/0, offset 1: its value is no JSON of the declared schema"):
        run(pipeline, spark)
