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


def client(broker: Broker | str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a client of librdkafka that says nothing on stderr; an address will do for a broker."""
    address = broker if isinstance(broker, str) else broker.address()
    return {"bootstrap.servers": address, "log_level": 0, **settings}


def admin(broker: Broker | str) -> AdminClient:
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


def delete_topic(broker: Broker, topic: str) -> None:
    """Delete a topic, and wait until nobody sees it any more."""
    asked = admin(broker)
    asked.delete_topics([topic])[topic].result(30)
    assert any(topic not in admin(broker).list_topics(timeout=30).topics for _ in polls(30))


def delete_records(broker: Broker, topic: str, partition: int, before: int) -> None:
    """Delete the records of a partition before an offset, as retention does."""
    from confluent_kafka import TopicPartition

    asked, some = admin(broker), TopicPartition(topic, partition, before)
    asked.delete_records([some])[some].result(30)


def set_policy(broker: Broker, topic: str, policy: str) -> None:
    """Let a topic be compacted, or let its records be deleted."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

    entry = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    asked, resource = admin(broker), ConfigResource("topic", topic, incremental_configs=[entry])
    asked.incremental_alter_configs([resource])[resource].result(30)


def ends(broker: Broker | str, topic: str, *, committed: bool = True) -> dict[int, int]:
    """Return where each partition ends: for readers of committed records, or for all."""
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import OffsetSpec

    asked = admin(broker)
    partitions = asked.list_topics(topic, timeout=30).topics[topic].partitions
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    wanted = {TopicPartition(topic, number): OffsetSpec.latest() for number in partitions}
    found = asked.list_offsets(wanted, isolation_level=level)
    return {place.partition: future.result(30).offset for place, future in found.items()}


def read(broker: Broker | str, topic: str, *, committed: bool = True) -> list[Message]:
    """Return every record of a topic up to its end, partition by partition."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    level = "read_committed" if committed else "read_uncommitted"
    settings = {"group.id": uuid.uuid4().hex, "isolation.level": level, "enable.auto.commit": "false"}
    consumer = Consumer(client(broker, **settings, **{"enable.partition.eof": "true", "fetch.wait.max.ms": "10"}))
    wanted = ends(broker, topic, committed=committed)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in wanted])
    found: list[Message] = []
    left = {number for number, end in wanted.items() if end}
    try:
        for _ in polls(60):
            for message in consumer.consume(10_000, 0.1) if left else ():
                if message.error() is None:
                    found.append(message)
                elif message.error().code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
            if not left:
                return sorted(found, key=lambda message: (message.partition(), message.offset()))
    finally:
        consumer.close()
    msg = f"topic {topic}: not read to its end {wanted}"
    raise AssertionError(msg)


def values(broker: Broker, topic: str) -> list[str]:
    """Return what a reader of committed records sees, sorted."""
    return sorted((message.value() or b"").decode() for message in read(broker, topic))


def produce(broker: Broker | str, topic: str, records: list[str], **settings: Any) -> None:
    """Send some records as a stranger does, without a transaction."""
    from confluent_kafka import Producer

    producer = Producer(client(broker, **settings))
    for number, record in enumerate(records):
        producer.produce(topic, record, key=str(number))
    assert producer.flush(60) == 0
