"""A real Kafka broker for the tests, and what a stranger sees of its topics."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.faults.processes import polls
from twophase.local.kafka import Broker

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.admin import AdminClient

CONN_ID = "kafka"
#: Short, so that a test that waits for the broker to end a dead transaction does not wait long.
SETTINGS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}


@contextmanager
def serving(**options: Any) -> Iterator[Broker]:
    """Start a broker; remove it and its folder at the end."""
    home = Path(tempfile.mkdtemp(prefix="twophase-kafka-"))
    settings = {**SETTINGS, **options.pop("settings", {})}
    try:
        with Broker(home, settings=settings, **options) as broker:
            yield broker
    finally:
        shutil.rmtree(home, ignore_errors=True)


def restore(broker: Broker) -> None:
    """Let a broker work again, whatever was done to it."""
    if broker.process is not None and broker.process.poll() is None:
        broker.process.send_signal(signal.SIGCONT)
    else:
        broker.start()


def connection(address: str, **extra: str) -> str:
    """Return the Airflow connection, as an environment variable has it."""
    return json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": address, **extra}})


def environment(broker: Broker) -> Mapping[str, str]:
    """Return what a user sets."""
    return {f"AIRFLOW_CONN_{CONN_ID.upper()}": connection(broker.address())}


def client(broker: Broker, **settings: Any) -> dict[str, Any]:
    """Return the settings of a client of librdkafka that says nothing on stderr."""
    return {"bootstrap.servers": broker.address(), "log_level": 0, **settings}


def admin(broker: Broker) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient(client(broker))


def make_topic(broker: Broker, partitions: int = 1, name: str | None = None, **config: str) -> str:
    """Create a topic, of the test's own unless it is named; return its name."""
    from confluent_kafka.admin import NewTopic

    name = name or f"t-{uuid.uuid4().hex[:8]}"
    config = {key.replace("_", "."): value for key, value in config.items()}
    asked = admin(broker)
    asked.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(30)
    for _ in polls(30):
        found = asked.list_topics(name, timeout=30).topics[name]
        if len(found.partitions) == partitions and all(one.leader >= 0 for one in found.partitions.values()):
            return name
    msg = f"topic {name} has no leaders"
    raise AssertionError(msg)


def ends(broker: Broker, topic: str, *, committed: bool = True) -> dict[int, int]:
    """Return where each partition ends: for readers of committed records, or for all."""
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import OffsetSpec

    asked = admin(broker)
    partitions = asked.list_topics(topic, timeout=30).topics[topic].partitions
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    wanted = {TopicPartition(topic, number): OffsetSpec.latest() for number in partitions}
    found = asked.list_offsets(wanted, isolation_level=level)
    return {place.partition: future.result(30).offset for place, future in found.items()}


def read(broker: Broker, topic: str, *, committed: bool = True) -> list[Message]:
    """Return every record of a topic up to its end, partition by partition."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    level = "read_committed" if committed else "read_uncommitted"
    settings = {"group.id": uuid.uuid4().hex, "isolation.level": level, "enable.auto.commit": "false"}
    consumer = Consumer(client(broker, **settings, **{"enable.partition.eof": "true", "fetch.wait.max.ms": "10"}))
    wanted = ends(broker, topic, committed=committed)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in wanted])
    found: list[Message] = []
    try:
        for _ in polls(60):
            found += [message for message in consumer.consume(100_000, 0.2) if message.error() is None]
            places = consumer.position([TopicPartition(topic, number) for number in wanted])
            if all(max(place.offset, 0) >= wanted[place.partition] for place in places):
                return sorted(found, key=lambda message: (message.partition(), message.offset()))
    finally:
        consumer.close()
    msg = f"topic {topic}: not read to its end {wanted}"
    raise AssertionError(msg)


def values(broker: Broker, topic: str) -> list[str]:
    """Return what a reader of committed records sees, sorted."""
    return sorted((message.value() or b"").decode() for message in read(broker, topic))


def produce(broker: Broker, topic: str, records: list[str], **settings: Any) -> None:
    """Send some records as a stranger does, without a transaction."""
    from confluent_kafka import Producer

    producer = Producer(client(broker, **settings))
    for number, record in enumerate(records):
        producer.produce(topic, record, key=str(number))
    assert producer.flush(60) == 0
