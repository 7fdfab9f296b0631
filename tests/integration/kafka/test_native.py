"""Columns that are sent by librdkafka's call for batches arrive as records that the client sends one by one."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.faults.processes import polls
from support.servers.kafka import ends, make_topic, read
from support.sinks.kafka_topic import kafka_sink, rows_of, seen, staged
from twophase.core.ports import Outcome
from twophase.local.kafka import Broker
from twophase.sinks.kafka import native, promotion
from twophase.sinks.kafka.records import RecordColumns
from twophase.sinks.kafka.transaction import NotSent, Producing
from twophase.storage.kafka_cluster import KafkaCluster

pytestmark = pytest.mark.timeout(300)

ALL = RecordColumns(key="k", value="v")


def producer(name: str, *, one_by_one: bool = False) -> Producing:
    return Producing(KafkaCluster("kafka", "a test"), name, 60.0, one_by_one=one_by_one)


def sent(broker: Broker, batch: pa.RecordBatch, columns: RecordColumns, *, one_by_one: bool = False) -> list[Any]:
    """Send a batch to a topic of its own in one transaction; return what a reader sees, by partition and offset."""
    topic = make_topic(broker, 3)
    sender = producer(topic, one_by_one=one_by_one)
    sender.begin(3)
    sender.send(topic, batch, columns, [])
    sender.flush()
    sender.commit(30.0)
    sender.close()
    assert any(ends(broker, topic) == ends(broker, topic, committed=False) for _ in polls(30))  # readers see it later
    return [(one.partition(), one.key(), one.value()) for one in read(broker, topic)]


def records(*, binary: bool) -> pa.RecordBatch:
    """Return records with nulls and empty values, in the middle of a longer batch."""
    draw = random.Random(7)
    kind = pa.binary() if binary else pa.string()

    def texts() -> list[Any]:
        made = [draw.choice([None, "", "ä" * draw.randrange(40), str(draw.random())]) for _ in range(500)]
        return [one.encode() if binary and one is not None else one for one in made]

    columns = {"k": pa.array(texts(), kind), "v": pa.array(texts(), kind)}
    return pa.RecordBatch.from_pydict(columns).slice(13, 400)


@pytest.mark.parametrize("binary", [True, False])
def test_columns_arrive_as_the_records_that_the_client_sends(binary: bool, folder: Path, kafka: Broker) -> None:
    """Nulls stay nulls, empty stays empty, keys go where they go, in the order of the rows; null keys go anywhere."""
    batch = records(binary=binary)
    found, expected = sent(kafka, batch, ALL), sent(kafka, batch, ALL, one_by_one=True)

    assert [one for one in found if one[1] is not None] == [one for one in expected if one[1] is not None]
    assert Counter(one[1:] for one in found) == Counter(one[1:] for one in expected)
    assert {None, b""} < {key for _, key, _ in found}
    assert {None, b""} < {value for _, _, value in found}


@pytest.mark.parametrize("column", [["", ""], [None, None], ["", None]])
def test_a_column_without_a_byte_arrives(column: list[str | None], folder: Path, kafka: Broker) -> None:
    batch = pa.RecordBatch.from_pydict({"v": pa.array(column, pa.string())})

    found = [value for _, _, value in sent(kafka, batch, RecordColumns(value="v"))]

    assert sorted(found, key=str) == sorted((None if one is None else b"" for one in column), key=str)


@pytest.mark.parametrize("limit", ["EACH", "MOST", "queue"])
def test_a_full_client_is_waited_for_and_the_order_stays(
    limit: str, folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are ours, or that of librdkafka's own queue, which takes the first of a batch and no others."""
    if limit == "queue":
        settings = KafkaCluster.settings
        monkeypatch.setattr(
            KafkaCluster, "settings", lambda *at, **more: settings(*at, **more, queue_buffering_max_messages=5)
        )
    else:
        monkeypatch.setattr(native, limit, 2)
    values = [f"{number:03d}" for number in range(300)]
    batch = pa.RecordBatch.from_pydict({"k": ["a"] * 300, "v": values})

    found = sent(kafka, batch, ALL)

    assert [value.decode() for _, _, value in found] == values


def test_a_transaction_that_is_fenced_or_not_begun_takes_no_columns(folder: Path, kafka: Broker) -> None:
    topic, batch = make_topic(kafka, 1), pa.RecordBatch.from_pydict({"k": ["a", "b"], "v": ["a", "b"]})
    first = producer(topic)
    with pytest.raises(NotSent, match="Erroneous state"):
        first.send(topic, batch, ALL, [])
    first.begin()
    producer(topic).close()
    first.send(topic, batch, ALL, [])

    with pytest.raises(NotSent, match=r"connection kafka\): "):
        first.flush()
    first.abort()
    first.close()
    assert read(kafka, topic, committed=False) == []


def test_a_handle_ends_when_it_is_closed(folder: Path, kafka: Broker) -> None:
    """Nothing but its user holds it: a handle that lived on could send without being fenced."""
    sender = producer(make_topic(kafka, 1))
    gc.disable()
    try:
        handle = weakref.ref(sender._producer)
        sender.close()
        assert handle() is None
    finally:
        gc.enable()


def test_a_setting_that_the_library_refuses_is_named(folder: Path, kafka: Broker, monkeypatch: Any) -> None:
    from confluent_kafka import KafkaException

    settings = {"no.such.setting": "1", "on_delivery": print, "error_cb": print}

    with pytest.raises(KafkaException, match=r"no\.such\.setting"):
        native.NativeProducer(settings)


def test_a_promotion_is_the_same_without_the_library(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.takes(RecordColumns(key="k"), [])
    assert not any(native.takes(RecordColumns(**{name: "x"}), []) for name in ("headers", "timestamp", "partition"))
    assert not native.takes(RecordColumns(), [("twophase.pipeline", b"orders")])
    monkeypatch.setattr(native, "library", lambda: None)
    assert not native.takes(RecordColumns(), [])
    monkeypatch.setattr(promotion, "takes", native.takes)
    sink = kafka_sink(kafka)

    assert sink.promote(staged(sink, 1)).outcome is Outcome.PROMOTED
    assert seen(kafka, sink.topic) == rows_of(1)


def test_a_library_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_MAJOR", 3)
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()


def test_a_library_without_the_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_FUNCTIONS_OF_C", {**native._FUNCTIONS_OF_C, "rd_kafka_no_such": (None,)})
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
