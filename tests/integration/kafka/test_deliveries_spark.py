"""One checkpoint through Spark into topics of every delivery, beside a table of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.pipelines.factories import land_words, words_pipeline
from support.servers.kafka import CONN_ID, make_topic, read
from twophase import sinks
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError
from twophase.core.states import State
from twophase.local.kafka import Broker
from twophase.runner import Runner, stager_for
from twophase.verification import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_each_delivery_brings_the_rows_of_each_checkpoint(
    home: Path, kafka: Broker, record: PostgresRecord, spark: SparkSession
) -> None:
    """The two that are not exactly once are sent by Spark while it stages; without a crash they differ in nothing.

    The second checkpoint has the columns of the first, though the sink stages one more than the transform returns.
    """
    deliveries = ("exactly_once", "at_least_once", "none")
    topics = {delivery: make_topic(kafka, 2) for delivery in deliveries}
    writes: dict[str, sinks.Sink] = {
        delivery: sinks.Kafka(
            topic,
            conn_id=CONN_ID,
            key="word",
            value=["word", "frequency"],
            delivery=delivery,
            markers=f"markers-{topic}",
        )
        for delivery, topic in topics.items()
    }
    writes |= {"lake": sinks.Files("lake/words")}
    schema = "word string, frequency bigint"
    pipeline = words_pipeline(transform=lambda words: words, writes=writes, schema=schema, max_files=1)
    rows = [(row["word"], row["frequency"], row["word"]) for row in land_words(files=2)]

    with Runner(pipeline, stager_for(pipeline, spark), record=record) as runner:
        found = [runner.run(), runner.run()]

    assert [one and (one.state, one.rows) for one in found] == [(State.COMMITTED, len(rows) // 2)] * 2
    expected = sorted(rows)
    for delivery, topic in topics.items():
        records = [(json.loads(message.value()), message.key().decode()) for message in read(kafka, topic)]
        assert sorted((value["word"], value["frequency"], key) for value, key in records) == expected, delivery
    assert not any(verify(record, pipeline))
    with record.engine.connect() as connection:
        (manifests,) = zip(*connection.exec_driver_sql("SELECT manifest FROM twophase.participant"), strict=True)
    assert {manifest["rows"] for manifest in manifests} == {len(rows) // 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"delivery": "twice"}, "delivery: expected exactly_once, at_least_once, none, found 'twice'"),
        ({"delivery": "none", "timestamp": "t"}, "timestamp: Spark's Kafka writer sends none"),
        ({"delivery": "at_least_once", "lineage": True}, "lineage: only what is sent exactly once has it"),
    ],
)
def test_what_a_delivery_cannot_do_is_refused_when_it_is_declared(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sinks.Kafka("words", **arguments)  # type: ignore[arg-type]


def test_a_delivery_is_declared_as_one_kind_of_sink(tmp_path: Path) -> None:
    declared = sinks.Kafka("words", delivery="none", path=str(tmp_path)).declaration()

    assert (declared["class"], declared["delivery"]) == ("twophase.sinks:Kafka", "none")
    assert type(sinks.Sink.load(declared)).__name__ == "DirectKafka"
