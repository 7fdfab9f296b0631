"""Does the topic hold what a committed checkpoint sent? `twophase verify` asks; reads the records, changes nothing.

The marker names the offsets between which the rows are. Others may have sent to the same partitions meanwhile, so the
records there are counted exactly only if they bear their lineage; otherwise there must be at least as many.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from twophase.core.checkpoint import Key, Output
from twophase.core.errors import SinkUnavailable
from twophase.sinks.kafka.cluster import ANSWER, KafkaCluster, Topic
from twophase.sinks.kafka.markers import Markers, Note, SentMarker

_POLL = 0.1


def differences(cluster: KafkaCluster, output: Output, marker: SentMarker | None) -> Iterator[str]:
    """Yield in words what differs between a committed output and the topic, of which the marker is known or not."""
    handle = output.handle
    if marker is None or marker.manifest["digest"] != output.manifest["digest"]:
        note = handle.get("note")
        with Markers(cluster, output.key.pipeline, handle["write"], handle["markers"]) as markers:
            marker, *why = markers.look(output, Note(*note) if note else None)
        if marker is None:
            said = next(filter(None, why), None)
            yield said or f"kafka topic {handle['markers']}: there is no marker of {output.key}"
            return
    topic = cluster.topics([marker.topic])[marker.topic]
    if topic is None or topic.id != marker.topic_id:
        yield f"kafka topic {marker.topic} was deleted" + (" and created again" if topic else "")
        return
    yield from _compare(cluster, topic, marker, output.key)


def _compare(cluster: KafkaCluster, topic: Topic, marker: SentMarker, key: Key) -> Iterator[str]:
    """Count the records of a marker; where the topic has removed some by its own rules, nothing can be counted."""
    places = {int(number): (start, end) for number, (start, end) in marker.places.items()}
    expected = marker.manifest["rows"]
    if not places:
        if expected:
            yield f"kafka topic {topic.name}: its marker names no offsets, expected {expected} records"
        return
    starts = cluster.starts(topic.name, places)
    if topic.compacted or any(starts[number] > start for number, (start, _) in places.items()):
        return
    mine, every = _count(cluster, topic.name, places, key)
    found = mine or every
    if found < expected or (mine and mine != expected):
        yield f"kafka topic {topic.name}: expected {expected} records of {key}, found {found}"


def _count(cluster: KafkaCluster, topic: str, places: dict[int, tuple[int, int]], key: Key) -> tuple[int, int]:
    """Return how many committed records between the offsets bear this revision, and how many there are."""
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    consumer: Any = Consumer(
        cluster.settings(
            group_id="twophase-verify",
            isolation_level="read_committed",
            enable_auto_commit=False,
            enable_partition_eof=True,
            auto_offset_reset="error",
        )
    )
    wanted = [(f"twophase.{name}", str(value).encode()) for name, value in _lineage(key).items()]
    left, mine, every = set(places), 0, 0
    try:
        consumer.assign([TopicPartition(topic, number, start) for number, (start, _) in places.items()])
        deadline = time.monotonic() + ANSWER
        while left:
            for message in consumer.consume(10_000, _POLL):
                deadline = time.monotonic() + ANSWER
                error, number = message.error(), message.partition()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the client's own name
                    raise cluster.unavailable(error.str())
                if error is not None or message.offset() >= places[number][1] - 1:
                    left.discard(number)
                if error is None and message.offset() < places[number][1]:
                    every += 1
                    mine += all(one in (message.headers() or ()) for one in wanted)
            if time.monotonic() > deadline:
                msg = f"kafka topic {topic}: nothing was read within {ANSWER:.0f} s"
                raise SinkUnavailable(msg)
    finally:
        consumer.close()
    return mine, every


def _lineage(key: Key) -> dict[str, object]:
    return {"pipeline": key.pipeline, "checkpoint": key.checkpoint_id, "revision": key.revision}
