"""Does the topic hold what a committed checkpoint sent? `twophase verify` asks; reads the records, changes nothing.

The marker names the offsets between which the rows are. Others may have sent to the same partitions meanwhile, so the
records there are counted exactly only if they bear their lineage; otherwise there must be at least as many.
"""

from __future__ import annotations

from collections.abc import Iterator

from twophase.core.checkpoint import Key, Output
from twophase.sinks.kafka.markers import Markers, Note, SentMarker
from twophase.storage.kafka_cluster import KafkaCluster, Topic
from twophase.storage.kafka_reader import KafkaReader


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
    topic = cluster.topic(marker.topic)
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
    cut_off = any(starts[number] > start for number, (start, _) in places.items())
    if cut_off or cluster.topic_settings(topic.name).compacted:
        return
    mine, every = _count(cluster, topic.name, places, key)
    found = mine or every
    if found < expected or (mine and mine != expected):
        yield f"kafka topic {topic.name}: expected {expected} records of {key}, found {found}"


def _count(cluster: KafkaCluster, topic: str, places: dict[int, tuple[int, int]], key: Key) -> tuple[int, int]:
    """Return how many committed records between the offsets bear this revision, and how many there are."""
    wanted = [(f"twophase.{name}", str(value).encode()) for name, value in _lineage(key).items()]
    mine = every = 0
    with KafkaReader(cluster) as reader:
        for message in reader.between(topic, places):
            every += 1
            mine += all(one in (message.headers() or ()) for one in wanted)
    return mine, every


def _lineage(key: Key) -> dict[str, object]:
    return {"pipeline": key.pipeline, "checkpoint": key.checkpoint_id, "revision": key.revision}
