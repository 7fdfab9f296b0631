"""What is asked of a Kafka cluster: topics, their settings, offsets, groups. The Kafka source and sink ask through it.

Each question is one request for all topics or partitions. What cannot be asked is a typed error within seconds: the
client itself would try again for minutes, and tell the reason to a callback only, so a wrong password looks like
silence.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.core.secret_texts import without_secrets
from twophase.storage.kafka import client_settings

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

log = logging.getLogger("twophase")

T = TypeVar("T")
K = TypeVar("K")

#: How long one question may take, and how long to go on while no broker can be reached: one may be restarting.
PATIENCE = 20.0
UNREACHED = 5.0
#: Within this time every broker knows a topic that was just created.
_NEW = 2.0
_POLL = 0.02
#: Kafka's names of errors that pass: a leader or a coordinator moves.
_PASSING = re.compile(r"LEADER|COORDINATOR|_NOENT|REPLICA_NOT_AVAILABLE|KAFKA_STORAGE_ERROR")
#: Kafka's names of errors by which a person has to act: in general, and about who asks.
_REFUSALS = re.compile(r"AUTHENTICATION|AUTHORIZATION|_SSL$|SASL|POLICY_VIOLATION|^INVALID_")
_LOGIN = re.compile(r"AUTHENTICATION|_SSL$|SASL")
#: Kafka's largest number means: no limit.
_NO_LIMIT = 2**63 - 1


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


class Topic(NamedTuple):
    """One topic: its id, which no other topic ever has, and its partitions."""

    name: str
    id: str
    partitions: tuple[int, ...]
    #: What this account may do with it, by Kafka's names; None: the broker does not say.
    rights: frozenset[str] | None = None


class TopicSettings(NamedTuple):
    """What a topic does with its records; the defaults are those of a broker."""

    cleanup_policy: str = "delete"
    max_message_bytes: str = "1048588"
    message_timestamp_type: str = "CreateTime"
    message_timestamp_after_max_ms: str = "3600000"
    message_timestamp_before_max_ms: str = str(_NO_LIMIT)

    @property
    def compacted(self) -> bool:
        """Return True if only the last record of each key stays."""
        return "compact" in self.cleanup_policy

    @property
    def expires(self) -> bool:
        """Return True if old records are deleted."""
        return "delete" in self.cleanup_policy

    @property
    def largest(self) -> int:
        """Return how many bytes a batch of records may have."""
        return int(self.max_message_bytes)

    @property
    def times(self) -> tuple[int | None, int | None]:
        """Return how many milliseconds a record's time may lie before and after the broker's; None: any."""
        if self.message_timestamp_type != "CreateTime":
            return None, None
        before, after = int(self.message_timestamp_before_max_ms), int(self.message_timestamp_after_max_ms)
        return (None if before == _NO_LIMIT else before), (None if after == _NO_LIMIT else after)


class KafkaCluster:
    """The cluster that a connection leads to; one client, made at the first question."""

    def __init__(self, conn_id: str, who: str) -> None:
        """Name the connection, and who asks, for messages."""
        self.conn_id = conn_id
        self.who = who
        #: What clients complained about since the last answer.
        self._told: list[KafkaError] = []
        self._admin: AdminClient | None = None
        #: Clients that were replaced; one that goes while its own thread still answers takes the process with it.
        self._retired: list[AdminClient] = []

    def settings(self, **more: object) -> dict[str, Any]:
        """Return the settings of a client, which reports its errors here; they may hold secrets."""
        named = {name.replace("_", "."): value for name, value in more.items()}
        return {**client_settings(self.conn_id), "error_cb": self._told.append, "logger": log, **named}

    @property
    def admin(self) -> AdminClient:
        """Return the client; it must outlive what it was asked."""
        if self._admin is None:
            try:
                from confluent_kafka.admin import AdminClient
            except ImportError as error:
                msg = f"{self.who}: the package confluent-kafka is not installed; pip install 'twophase[kafka]'"
                raise ConfigError(msg) from error
            self._admin = AdminClient(self.settings())
        return self._admin

    # --- topics ------------------------------------------------------------------------------------------------------

    def named(self, pattern: str) -> list[str]:
        """Return the names of the topics that a regular expression matches as a whole; Kafka's own are left out."""
        listed = self._answers(lambda: {0: _in_a_thread(self.admin.list_topics, timeout=PATIENCE)})[0].topics
        wanted = re.compile(pattern)
        return sorted(name for name in listed if wanted.fullmatch(name) and not name.startswith("__"))

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the topics of these names; those that do not exist are left out."""
        from confluent_kafka import KafkaError, TopicCollection

        if not (wanted := list(dict.fromkeys(names))):
            return {}
        found = self._answers(
            lambda: self.admin.describe_topics(TopicCollection(wanted), include_authorized_operations=True),
            but=(KafkaError.UNKNOWN_TOPIC_OR_PART,),
        )
        return {
            name: Topic(name, str(one.topic_id), tuple(sorted(part.id for part in one.partitions)), _rights(one))
            for name, one in found.items()
        }

    def topic(self, name: str) -> Topic | None:
        """Return one topic; None: there is none of this name."""
        return self.topics([name]).get(name)

    def topic_settings(self, name: str) -> TopicSettings:
        """Return what a topic does with its records; nobody knows whether it is compacted if we may not see it."""
        from confluent_kafka import KafkaError
        from confluent_kafka.admin import ConfigResource

        hidden = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        found = self._answers(lambda: self.admin.describe_configs([resource]), but=hidden)
        if not found:
            return TopicSettings(cleanup_policy="")
        told = {field: found[resource].get(field.replace("_", ".")) for field in TopicSettings._fields}
        return TopicSettings(**{field: str(entry.value) for field, entry in told.items() if entry is not None})

    def create(self, name: str, partitions: int, **config: str) -> None:
        """Create a topic with the broker's own replication, unless it is there."""
        from confluent_kafka import KafkaError
        from confluent_kafka.admin import NewTopic

        settings = {field.replace("_", "."): value for field, value in config.items()}
        wanted = NewTopic(name, partitions, -1, config=settings)
        self._answers(lambda: self.admin.create_topics([wanted]), but=(KafkaError.TOPIC_ALREADY_EXISTS,))

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

    def starts(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return where partitions start: records before were deleted."""
        from confluent_kafka.admin import OffsetSpec

        places = [Place(topic, number) for number in partitions]
        found = self._answers(lambda: self._offsets(places, OffsetSpec.earliest()))
        return {place.partition: answer.offset for place, answer in found.items()}

    def ends(self, topic: str, partitions: Iterable[int], *, committed: bool) -> dict[int, int]:
        """Return where partitions end: the last stable offset, or with everything that is not decided yet."""
        from confluent_kafka.admin import OffsetSpec

        places = [Place(topic, number) for number in partitions]
        found = self._answers(lambda: self._offsets(places, OffsetSpec.latest(), committed=committed))
        return {place.partition: answer.offset for place, answer in found.items()}

    def since(self, places: Iterable[Place], milliseconds: int) -> dict[Place, int | None]:
        """Return the first offset with this timestamp or a later one; None: there is none yet."""
        from confluent_kafka.admin import OffsetSpec

        wanted = list(places)
        found = self._answers(lambda: self._offsets(wanted, OffsetSpec.for_timestamp(milliseconds)))
        return {place: None if answer.offset < 0 else answer.offset for place, answer in found.items()}

    def _offsets(
        self, places: Collection[Place], spec: OffsetSpec, *, committed: bool = True
    ) -> dict[Place, Future[Any]]:
        from confluent_kafka import IsolationLevel, TopicPartition

        if not places:
            return {}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = {TopicPartition(*place): spec for place in places}
        told = self.admin.list_offsets(asked, isolation_level=level)
        return {Place(one.topic, one.partition): future for one, future in told.items()}

    # --- groups ------------------------------------------------------------------------------------------------------

    def group_offsets(self, group: str, places: Iterable[Place]) -> dict[Place, int]:
        """Return the offsets that a consumer group has committed; partitions without one are left out."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(*place) for place in places])
        found = self._answers(lambda: self.admin.list_consumer_group_offsets([wanted]))
        return self._fine(found[group].topic_partitions)

    def commit_group(self, group: str, offsets: Mapping[Place, int]) -> None:
        """Write the offsets to read next to a consumer group that has no members."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        told = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        wanted = ConsumerGroupTopicPartitions(group, told)
        found = self._answers(lambda: self.admin.alter_consumer_group_offsets([wanted]))
        self._fine(found[group].topic_partitions)

    def _fine(self, found: Iterable[TopicPartition]) -> dict[Place, int]:
        """Return the partitions that have an offset; raise the error that the broker gave for one of them."""
        answered = list(found)
        for one in answered:
            if one.error is not None:
                raise self.failed(one.error)
        return {Place(one.topic, one.partition): one.offset for one in answered if one.offset >= 0}

    # --- asking ------------------------------------------------------------------------------------------------------

    def _answers(self, ask: Callable[[], Mapping[K, Future[Any]]], but: Collection[int] = ()) -> dict[K, Any]:
        """Return the answers to a question; ask again, by a new client, while leaders move; leave out errors `but`.

        It ends as soon as it is clear that no answer will come.
        """
        from confluent_kafka import KafkaException

        began = time.monotonic()
        while True:
            asked = ask()
            self._wait(asked.values())
            errors = {key: one.exception() for key, one in asked.items()}
            wrong = [(key, error) for key, error in errors.items() if error is not None and _code(error) not in but]
            if not wrong:
                self.answered()
                return {key: one.result() for key, one in asked.items() if errors[key] is None}
            what, error = wrong[0]
            if not isinstance(error, KafkaException):
                raise error
            if time.monotonic() > began + _passes(error.args[0]):
                raise self.failed(error.args[0], _named(what)) from error
            if self._admin is not None:
                self._retired.append(self._admin)
                self._admin = None
            time.sleep(_POLL)

    def _wait(self, asked: Iterable[Future[Any]]) -> None:
        pending = set(asked)
        for _ in self.patience() if pending else ():
            pending = wait(pending, _POLL).not_done
            self.admin.poll(0)
            if not pending:
                return

    def answered(self) -> None:
        """Forget complaints: the cluster answers."""
        self._told.clear()

    def patience(self) -> Iterator[None]:
        """Go on until somebody has to act, no broker was reached for a while, or patience ends; then raise."""
        from confluent_kafka import KafkaError

        began = time.monotonic()
        while True:
            yield
            spent = time.monotonic() - began
            for told in self._told:
                if _is_refusal(told):
                    raise self.failed(told)
                if told.code() == KafkaError._ALL_BROKERS_DOWN and spent > UNREACHED:  # noqa: SLF001 - its name
                    raise self.failed(self._told[0])
            if spent > PATIENCE:
                why = f"no answer within {PATIENCE:.0f} s"
                raise self.unavailable(why)

    def unavailable(self, why: object) -> SinkUnavailable:
        """Return the error that says why the cluster could not be asked: what the client said last, or `why`."""
        said = _line(self._told[-1].str() if self._told else str(why))
        return SinkUnavailable(f"{self.who}: connection {self.conn_id}: {said}; check the broker, then run again")

    def failed(self, error: KafkaError, what: str = "") -> ConfigError | SinkUnavailable:
        """Return the error to raise: what a person has to correct, or what may pass."""
        where = f"{self.who}: connection {self.conn_id}: {what}{_line(error.str())}"
        if not _is_refusal(error):
            return SinkUnavailable(f"{where}; check the broker and bootstrap.servers, then run again")
        if "AUTHORIZATION" in error.name():
            return ConfigError(f"{where}; give this account the right to it")
        login = _LOGIN.search(error.name()) or "tls alert" in error.str()
        return ConfigError(where + ("; correct login, password and certificates in the connection" if login else ""))


def _in_a_thread(call: Callable[..., T], **arguments: Any) -> Future[T]:  # noqa: ANN401 - the call's own
    """Make a call that blocks; meanwhile the errors of the client are heard."""
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(partial(call, **arguments))
    pool.shutdown(wait=False)
    return asked


def _rights(described: Any) -> frozenset[str] | None:  # noqa: ANN401 - a TopicDescription
    allowed = described.authorized_operations
    return None if allowed is None else frozenset(one.name for one in allowed)


def _code(error: BaseException) -> int | None:
    return getattr(error.args[0], "code", lambda: None)() if error.args else None


def _passes(error: KafkaError) -> float:
    """Return for how many seconds an error may go on before it counts; 0: it will not pass."""
    if error.name() == "UNKNOWN_TOPIC_OR_PART":
        return _NEW
    return PATIENCE if _PASSING.search(error.name()) else 0


def _named(what: object) -> str:
    return f"{what}: " if isinstance(what, str | Place) else ""


def _line(text: str) -> str:
    return " ".join(without_secrets(text).split())


def _is_refusal(error: KafkaError) -> bool:
    """Return True if a person has to act; a broker that wants a certificate only ends the connection with an alert."""
    return bool(_REFUSALS.search(error.name())) or "tls alert" in error.str()
