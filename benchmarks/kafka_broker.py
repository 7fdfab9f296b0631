"""A Kafka broker for a measure, its topics, and the CPU that it takes beside this process and Spark's Java."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count

import psutil

from benchmarks.harness import number, step, timed
from benchmarks.place import Place
from twophase import sinks
from twophase.local.kafka import Broker
from twophase.storage.kafka_cluster import KafkaCluster

CONN_ID = "kafka"
#: Java as it comes, unlike the broker of tests, which is made to start quickly.
_JAVA = ("-Xmx1g",)


class KafkaPlace:
    """A running broker, and topics on it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.cluster = KafkaCluster(CONN_ID, "benchmarks")
        self._names = (f"topic-{turn}" for turn in count())

    def make_topic(self, partitions: int) -> str:
        """Create a topic; return its name once its partitions can be asked."""
        from confluent_kafka.admin import NewTopic

        name = next(self._names)
        self.cluster.admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
        self.cluster.ends(name, range(partitions), committed=True)
        return name

    def delete_topic(self, name: str) -> None:
        """Delete a topic: a full size would fill the disk otherwise."""
        self.cluster.admin.delete_topics([name])[name].result(30)

    def ends(self, topic: str, partitions: int) -> dict[int, int]:
        """Return where each partition ends for readers of committed records."""
        return self.cluster.ends(topic, range(partitions), committed=True)

    def cpu(self) -> dict[str, float]:
        """Return the seconds of CPU that each side has taken so far: the broker, Java behind Spark, this process."""
        me = psutil.Process()
        broker = self.broker.process
        java = [one for one in me.children(recursive=True) if broker is None or one.pid != broker.pid]
        return {
            "CPU, Python": _used(me),
            "CPU, Spark": sum(map(_used, java)),
            "CPU, broker": 0.0 if broker is None else _used(psutil.Process(broker.pid)),
        }

    def taken(self, action: Callable[[], object]) -> Mapping[str, float]:
        """Return how long something takes, and how much CPU."""
        before = self.cpu()
        whole = timed(action)
        cpu = {part: max(seconds - before[part], 0.0) for part, seconds in self.cpu().items()}
        return {"whole": whole, "CPU": sum(cpu.values()), **cpu}


def _used(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.NoSuchProcess:
        return 0.0


@contextmanager
def serving(place: Place) -> Iterator[KafkaPlace]:
    """Start a broker below the home of a measure, and let the connection `kafka` lead to it."""
    variable = f"AIRFLOW_CONN_{CONN_ID.upper()}"
    broker = Broker(place.home / "kafka", java_options=_JAVA)
    with step("starting a Kafka broker"):
        broker.start()
    before = os.environ.get(variable)
    os.environ[variable] = f'{{"conn_type": "kafka", "extra": {{"bootstrap.servers": "{broker.address()}"}}}}'
    try:
        yield KafkaPlace(broker)
    finally:
        broker.stop()
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def rows_sent(place: KafkaPlace, topic: str, partitions: int, rows: int, control: int) -> None:
    """Raise unless a topic holds so many records; `control`: how many offsets a transaction's end may take."""
    found = sum(place.ends(topic, partitions).values())
    if not rows <= found <= rows + control:
        msg = f"topic {topic}: expected {number(rows)} records, found offsets up to {number(found)}"
        raise RuntimeError(msg)


def declared(topic: str, delivery: str = "exactly_once") -> sinks.Kafka:
    """Declare a sink with a key and a value of its own columns."""
    return sinks.Kafka(topic, conn_id=CONN_ID, key="key", value="value", delivery=delivery)
