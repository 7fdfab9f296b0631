"""Reads records of a Kafka cluster by their offsets, without a consumer group; the Kafka source and sink call this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self

from twophase.storage.kafka_cluster import At, KafkaCluster, Place

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

_POLL = 0.1
_BATCH = 10_000
#: A consumer that commits nothing, and does not jump when an offset is gone.
_BY_OFFSET = {
    "group_id": "twophase",
    "enable_auto_commit": False,
    "enable_auto_offset_store": False,
    "enable_partition_eof": True,
    "auto_offset_reset": "error",
    "fetch_wait_max_ms": 10,
}
#: It only looks whether an offset still means the same record.
_ONE_LOOK = {"isolation_level": "read_uncommitted", "max_partition_fetch_bytes": 1024, "queued_min_messages": 1}


class KafkaReader:
    """Reads committed records between offsets that are decided; one consumer, made at the first read."""

    def __init__(self, cluster: KafkaCluster) -> None:
        """Name the cluster."""
        self._cluster = cluster
        self._consumer: Consumer | None = None

    def __enter__(self) -> Self:
        """Open nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the consumer."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def between(self, topic: str, ranges: Mapping[int, tuple[int, int]]) -> Iterator[Message]:
        """Yield the committed records of partitions from a first offset up to, and without, an end."""
        from confluent_kafka import Consumer, TopicPartition

        if self._consumer is None:
            self._consumer = Consumer(self._cluster.settings(**_BY_OFFSET, isolation_level="read_committed"))
        left = {number for number, (start, end) in ranges.items() if start < end}
        self._consumer.assign([TopicPartition(topic, number, ranges[number][0]) for number in left])
        patience = self._cluster.patience()
        while left:
            next(patience)
            for message in self._some(self._consumer):
                patience = self._cluster.patience()
                number, end = message.partition(), ranges[message.partition()][1]
                if message.error() is None and message.offset() < end:
                    yield message
                if message.error() is not None or message.offset() >= end - 1:
                    left.discard(number)

    def _some(self, consumer: Consumer) -> list[Message]:
        """Return what there is: records, and that a partition was read to its end."""
        first = consumer.poll(_POLL)
        if first is None:
            return []
        found = [one for one in (first, *consumer.consume(_BATCH, 0)) if not _is_about_group(one)]
        for one in found:
            error = one.error()
            if error is not None and error.name() != "_PARTITION_EOF":
                raise self._cluster.failed(error, f"{one.topic()}/{one.partition()}: ")
        if found:
            self._cluster.answered()
        return found


def truncated(cluster: KafkaCluster, positions: Mapping[Place, At]) -> set[Place]:
    """Return the partitions whose log lost records before these offsets, though it may have grown again since.

    The broker says for each epoch where it ended; with the epoch of an offset it can tell.
    """
    from confluent_kafka import Consumer, TopicPartition

    asked = [TopicPartition(*place, at.offset, leader_epoch=at.epoch) for place, at in positions.items()]
    consumer = Consumer(cluster.settings(**_BY_OFFSET, **_ONE_LOOK))
    waiting, lost = set(positions), set()
    try:
        consumer.assign(asked)
        for _ in cluster.patience():
            message = consumer.poll(_POLL)
            if message is None or _is_about_group(message):
                continue
            place, error = Place(str(message.topic()), int(message.partition() or 0)), message.error()
            if error is not None and error.name() in {"_AUTO_OFFSET_RESET", "_LOG_TRUNCATION"}:
                lost.add(place)
            elif error is not None and error.name() != "_PARTITION_EOF":
                raise cluster.failed(error, f"{place}: ")
            waiting.discard(place)
            if not waiting:
                break
    finally:
        consumer.close()
    return lost


def _is_about_group(message: Message) -> bool:
    """Return True if a right on the consumer group is missing: the client asks for it, though no group is used."""
    error = message.error()
    return error is not None and error.name() == "GROUP_AUTHORIZATION_FAILED"
