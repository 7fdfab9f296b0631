"""Ask a Kafka cluster about topics, offsets and groups; `sources.Kafka` calls this at begin and before votes.

Each question is one request for all topics or partitions. What cannot be asked is a typed error within seconds: the
client itself would try again for minutes, and tell the reason to a callback only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.core.secret_texts import without_secrets
from twophase.storage.kafka import client_settings

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

T = TypeVar("T")
K = TypeVar("K")

#: How long one question may take, and how long to go on while no broker can be reached: one may be restarting.
PATIENCE = 20.0
UNREACHED = 5.0
_POLL = 0.02
#: Kafka's names of errors that pass: a leader or a coordinator moves, a topic has just been created.
_PASSING = re.compile(r"LEADER|COORDINATOR|_NOENT|REPLICA_NOT_AVAILABLE|UNKNOWN_TOPIC_OR_PART|KAFKA_STORAGE_ERROR")
#: Kafka's names of errors by which a person has to act.
_REFUSALS = re.compile(r"AUTHENTICATION|AUTHORIZATION|_SSL$|SASL")


class ReadTopic(NamedTuple):
    """One topic: its id, which no other topic ever has, and its partitions."""

    id: str
    partitions: tuple[int, ...]


class Place(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        """Read as the record has it: `orders/0`."""
        return f"{self.topic}/{self.partition}"

    @classmethod
    def parse(cls, name: str) -> Place:
        """Read `orders/0`."""
        topic, _, partition = name.rpartition("/")
        return cls(topic, int(partition))


class At(NamedTuple):
    """An offset of a partition, and the leader epoch there; None: the log knows of none."""

    offset: int
    epoch: int | None


class KafkaOffsets:
    """The cluster that a connection leads to; one client, made at the first question."""

    def __init__(self, conn_id: str, who: str) -> None:
        """Name the connection, and who asks, for messages."""
        self.conn_id = conn_id
        self.who = who
        self._told: list[KafkaError] = []
        #: Clients that were replaced; one that goes while its own thread still answers takes the process with it.
        self._retired: list[AdminClient] = []

    @cached_property
    def _admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        return AdminClient({**client_settings(self.conn_id), "error_cb": self._told.append})

    # --- topics ------------------------------------------------------------------------------------------------------

    def named(self, pattern: str) -> list[str]:
        """Return the names of the topics that a regular expression matches as a whole; Kafka's own are left out."""
        listed = self._answers(lambda: {0: self._in_a_thread(self._admin.list_topics, timeout=PATIENCE)})[0].topics
        wanted = re.compile(pattern)
        return sorted(name for name in listed if wanted.fullmatch(name) and not name.startswith("__"))

    @staticmethod
    def _in_a_thread(call: Callable[..., T], **arguments: Any) -> Future[T]:  # noqa: ANN401 - the call's own
        """Make a call that blocks; meanwhile the errors of the client are heard."""
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(call, **arguments)
        pool.shutdown(wait=False)
        return asked

    def topics(self, names: Iterable[str]) -> dict[str, ReadTopic]:
        """Return the topics of these names; those that do not exist are left out."""
        from confluent_kafka import KafkaError, TopicCollection

        wanted = list(names)
        unknown = (KafkaError.UNKNOWN_TOPIC_OR_PART,)
        ask = partial(self._describe, wanted and TopicCollection(wanted))
        found = self._answers(ask, but=unknown)
        return {
            name: ReadTopic(str(topic.topic_id), tuple(sorted(one.id for one in topic.partitions)))
            for name, topic in found.items()
        }

    def _describe(self, wanted: Any) -> dict[str, Future[Any]]:  # noqa: ANN401 - a TopicCollection
        return self._admin.describe_topics(wanted) if wanted else {}

    # --- offsets -----------------------------------------------------------------------------------------------------

    def bounds(self, places: Iterable[Place]) -> dict[Place, tuple[At, At]]:
        """Return where each log begins, and where it ends for those who read committed records only."""
        from confluent_kafka.admin import OffsetSpec

        wanted = list(places)

        def ask() -> dict[tuple[Place, int], Future[Any]]:  # both requests are under way at once
            specs = enumerate((OffsetSpec.earliest(), OffsetSpec.latest()))
            return {(at, n): one for n, spec in specs for at, one in self._offsets(wanted, spec).items()}

        found = self._answers(ask)
        ends = {key: At(answer.offset, answer.leader_epoch) for key, answer in found.items()}
        return {place: (ends[place, 0], ends[place, 1]) for place in wanted}

    def since(self, places: Iterable[Place], milliseconds: int) -> dict[Place, int | None]:
        """Return the first offset with this timestamp or a later one; None: there is none yet."""
        from confluent_kafka.admin import OffsetSpec

        wanted = list(places)
        found = self._answers(lambda: self._offsets(wanted, OffsetSpec.for_timestamp(milliseconds)))
        return {place: None if answer.offset < 0 else answer.offset for place, answer in found.items()}

    def _offsets(self, places: Sequence[Place], spec: OffsetSpec) -> dict[Place, Future[Any]]:
        from confluent_kafka import IsolationLevel, TopicPartition

        if not places:
            return {}
        asked = {TopicPartition(*place): spec for place in places}
        told = self._admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        return {Place(one.topic, one.partition): future for one, future in told.items()}

    def truncated(self, positions: Mapping[Place, At]) -> set[Place]:
        """Return the partitions whose log lost records before these offsets, though it may have grown again since.

        The broker says for each epoch where it ended; with the epoch of an offset it can tell.
        """
        from confluent_kafka import Consumer, KafkaError, TopicPartition

        gone = {KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION}  # noqa: SLF001 - the client's own names
        asked = [TopicPartition(*place, at.offset, leader_epoch=at.epoch) for place, at in positions.items()]
        consumer = Consumer({**client_settings(self.conn_id), **_ONE_LOOK, "error_cb": self._told.append})
        waiting, lost = set(positions), set()
        try:
            consumer.assign(asked)
            for _ in self._polls():
                message = consumer.poll(_POLL)
                if message is None or _of_group(message.error()):
                    continue
                place, error = Place(message.topic(), message.partition()), message.error()
                if error is not None and error.code() in gone:
                    lost.add(place)
                elif error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - likewise
                    raise self._failed(error)
                waiting.discard(place)
                if not waiting:
                    break
        finally:
            consumer.close()
        return lost

    # --- groups ------------------------------------------------------------------------------------------------------

    def group_offsets(self, group: str, places: Iterable[Place]) -> dict[Place, int]:
        """Return the offsets that a consumer group has committed; partitions without one are left out."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(*place) for place in places])
        found = self._answers(lambda: self._admin.list_consumer_group_offsets([wanted]))
        return self._fine(found[group].topic_partitions)

    def commit_group(self, group: str, offsets: Mapping[Place, int]) -> None:
        """Write the offsets to read next to a consumer group that has no members."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        told = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        wanted = ConsumerGroupTopicPartitions(group, told)
        found = self._answers(lambda: self._admin.alter_consumer_group_offsets([wanted]))
        self._fine(found[group].topic_partitions)

    def _fine(self, found: Iterable[TopicPartition]) -> dict[Place, int]:
        """Return the partitions that have an offset; raise the error that the broker gave for one of them."""
        answered = list(found)
        for one in answered:
            if one.error is not None:
                raise self._failed(one.error)
        return {Place(one.topic, one.partition): one.offset for one in answered if one.offset >= 0}

    # --- asking ------------------------------------------------------------------------------------------------------

    def _answers(self, ask: Callable[[], Mapping[K, Future[Any]]], but: Collection[int] = ()) -> dict[K, Any]:
        """Return the answers to a question; ask again, by a new client, while leaders move; leave out errors `but`.

        It ends as soon as it is clear that no answer will come.
        """
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + PATIENCE
        while True:
            asked = ask()
            self._wait(asked.values())
            errors = {key: one.exception() for key, one in asked.items()}
            failed = next((error for error in errors.values() if error is not None and _code(error) not in but), None)
            if failed is None:
                return {key: one.result() for key, one in asked.items() if errors[key] is None}
            if not isinstance(failed, KafkaException):
                raise failed
            if not _PASSING.search(failed.args[0].name()) or time.monotonic() > deadline:
                raise self._failed(failed.args[0]) from failed
            self._retired.append(self.__dict__.pop("_admin"))
            time.sleep(_POLL)

    def _wait(self, asked: Iterable[Future[Any]]) -> None:
        pending = set(asked)
        for _ in self._polls() if pending else ():
            pending = wait(pending, _POLL).not_done
            self._admin.poll(0)
            if not pending:
                return

    def _polls(self) -> Iterable[None]:
        """Go on until somebody has to act, no broker was reached for a while, or patience ends; then raise."""
        from confluent_kafka import KafkaError

        began = time.monotonic()
        while True:
            yield
            spent = time.monotonic() - began
            for told in self._told:
                if _is_refusal(told):
                    raise self._failed(told)
                if told.code() == KafkaError._ALL_BROKERS_DOWN and spent > UNREACHED:  # noqa: SLF001 - its name
                    raise self._failed(self._told[0])
            if spent > PATIENCE:
                why = self._told[-1].str() if self._told else f"no answer within {PATIENCE:.0f} s"
                msg = f"{self.who}: connection {self.conn_id}: {_line(why)}; check the broker, then run again"
                raise SinkUnavailable(msg)

    def _failed(self, error: KafkaError) -> ConfigError | SinkUnavailable:
        """Return the error to raise: what a person has to correct, or what may pass."""
        where = f"{self.who}: connection {self.conn_id}: {_line(error.str())}"
        if not _is_refusal(error):
            return SinkUnavailable(f"{where}; check the broker and bootstrap.servers, then run again")
        if "AUTHORIZATION" in error.name():
            return ConfigError(f"{where}; give this account the right to it")
        return ConfigError(f"{where}; correct login, password and certificates in the connection")


def _code(error: BaseException) -> int | None:
    return getattr(error.args[0], "code", lambda: None)() if error.args else None


def _line(text: str) -> str:
    return " ".join(without_secrets(text).split())


#: A consumer that belongs to no group, and only looks whether an offset still means the same record.
_ONE_LOOK = {
    "group.id": "twophase",
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "auto.offset.reset": "error",
    "enable.partition.eof": "true",
    "fetch.wait.max.ms": "10",
    "max.partition.fetch.bytes": "1024",
    "isolation.level": "read_uncommitted",
    "queued.min.messages": "1",
}


def _is_refusal(error: KafkaError) -> bool:
    """Return True if a person has to act; a broker that wants a certificate only ends the connection with an alert."""
    return bool(_REFUSALS.search(error.name())) or "tls alert" in error.str()


def _of_group(error: KafkaError | None) -> bool:
    """Return True if a right on the consumer group is missing: the client asks for it, though no group is used."""
    return error is not None and error.name() == "GROUP_AUTHORIZATION_FAILED"
