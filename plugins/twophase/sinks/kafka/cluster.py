"""What a Kafka cluster says of its topics: ids, settings, rights and offsets. The Kafka sink asks through it.

Nothing here waits for ever: a cluster that does not answer is `SinkUnavailable` within seconds, with the client's own
reason, because a wrong password looks like silence otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.storage.kafka import client_settings

log = logging.getLogger("twophase")

T = TypeVar("T")

#: Seconds in which a cluster that works has answered.
ANSWER = 15.0
#: Seconds after which a cluster that no broker of can be reached counts as down.
DOWN = 3.0
_POLL = 0.05
#: Kafka's largest number means: no limit.
_NO_LIMIT = 2**63 - 1
#: Defaults of a broker, for settings that it does not have.
_DEFAULTS = {
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": str(_NO_LIMIT),
}
#: What is assumed of a topic whose settings this account may not see; nobody knows whether it is compacted.
_UNSEEN = {**_DEFAULTS, "cleanup.policy": ""}


class Topic(NamedTuple):
    """A topic as the broker describes it."""

    name: str
    id: str
    partitions: int
    #: What this account may do with it, by Kafka's names; None: the broker does not say.
    rights: frozenset[str] | None
    settings: Mapping[str, str]

    @property
    def compacted(self) -> bool:
        """Return True if only the last record of each key stays."""
        return "compact" in self.settings["cleanup.policy"]

    @property
    def expires(self) -> bool:
        """Return True if old records are deleted."""
        return "delete" in self.settings["cleanup.policy"]

    @property
    def largest(self) -> int:
        """Return how many bytes a batch of records may have."""
        return int(self.settings["max.message.bytes"])

    @property
    def times(self) -> tuple[int | None, int | None]:
        """Return how many milliseconds a record's time may lie before and after the broker's; None: any."""
        if self.settings["message.timestamp.type"] != "CreateTime":
            return None, None
        before, after = (int(self.settings[f"message.timestamp.{side}.max.ms"]) for side in ("before", "after"))
        return (None if before == _NO_LIMIT else before), (None if after == _NO_LIMIT else after)


@dataclass
class KafkaCluster:
    """One cluster, by its connection; its client lives as long as this object."""

    conn_id: str
    #: The last thing that the client complained about, and since when no broker answers.
    complaint: str | None = field(init=False, default=None)
    _refused: bool = field(init=False, default=False)
    _down: float | None = field(init=False, default=None)
    _admin: Any = field(init=False, default=None, repr=False)

    def settings(self, **more: object) -> dict[str, Any]:
        """Return the settings of a client, which reports its errors here; they may hold secrets."""
        named = {name.replace("_", "."): value for name, value in more.items()}
        return {**client_settings(self.conn_id), "error_cb": self._note, "logger": log, **named}

    def _note(self, error: Any) -> None:  # noqa: ANN401 - a KafkaError
        from confluent_kafka import KafkaError

        if not self._refused:  # that no broker is left follows from it
            self.complaint = error.str()
        if error.code() in {KafkaError._AUTHENTICATION, KafkaError._SSL}:  # noqa: SLF001 - the client's own names
            self._refused = True
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._down is None:  # noqa: SLF001 - likewise
            self._down = time.monotonic()

    @property
    def admin(self) -> Any:  # noqa: ANN401 - an AdminClient
        """Return the client; it must outlive what it was asked."""
        if self._admin is None:
            try:
                from confluent_kafka.admin import AdminClient
            except ImportError as error:
                msg = "kafka: the package confluent-kafka is not installed; pip install 'twophase[kafka]'"
                raise ConfigError(msg) from error
            self._admin = AdminClient(self.settings())
        return self._admin

    def unavailable(self, why: object) -> SinkUnavailable:
        """Return the error that says why the cluster could not be asked."""
        said = self.complaint or why
        return SinkUnavailable(f"kafka (connection {self.conn_id}): {' '.join(str(said).split())}")

    def silent(self) -> str | None:
        """Say why there will be no answer; None: there may be one."""
        if self._refused or (self._down is not None and time.monotonic() - self._down > DOWN):
            return self.complaint
        return None

    def ask(self, question: Callable[[Any], Mapping[Any, Future[T]]]) -> dict[Any, T | Exception]:
        """Ask the cluster, and wait for all answers; a KafkaException is an answer, too."""
        from confluent_kafka import KafkaException

        found: dict[Any, T | Exception] = {}
        deadline = time.monotonic() + ANSWER
        for what, future in question(self.admin).items():
            while what not in found:
                try:
                    found[what] = future.result(_POLL)
                except KafkaException as error:
                    found[what] = error
                except NoAnswer:
                    self.admin.poll(0)  # lets the client say what is wrong
                    if self.silent() or time.monotonic() > deadline:
                        why = f"no answer within {ANSWER:.0f} s"
                        raise self.unavailable(why) from None
        return found

    def topics(self, names: Iterable[str]) -> dict[str, Topic | None]:
        """Describe topics; None: there is no such topic, or this account may not see it."""
        from confluent_kafka import TopicCollection
        from confluent_kafka.admin import ConfigResource

        wanted = list(dict.fromkeys(names))
        described = self.ask(
            lambda admin: admin.describe_topics(TopicCollection(wanted), include_authorized_operations=True)
        )
        there = {name: self._there(answer) for name, answer in described.items()}
        resources = {ConfigResource(ConfigResource.Type.TOPIC, name): name for name, one in there.items() if one}
        configs = self.ask(lambda admin: admin.describe_configs(list(resources))) if resources else {}
        settings = {resources[resource]: self._told(answer) for resource, answer in configs.items()}
        return {
            name: None
            if one is None
            else Topic(name, str(one.topic_id), len(one.partitions), _rights(one), settings[name])
            for name, one in there.items()
        }

    def _there(self, answer: Any) -> Any:  # noqa: ANN401 - a TopicDescription, or an error
        from confluent_kafka import KafkaError

        if not isinstance(answer, Exception):
            return answer
        error = answer.args[0]
        if error.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}:
            return None
        raise self.unavailable(error.str()) from answer

    def _told(self, answer: Any) -> Mapping[str, str]:  # noqa: ANN401 - settings, or an error
        from confluent_kafka import KafkaError

        if not isinstance(answer, Exception):
            return {name: str(answer[name].value) if name in answer else value for name, value in _DEFAULTS.items()}
        error = answer.args[0]
        if error.code() in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            return _UNSEEN
        raise self.unavailable(error.str()) from answer

    def ends(self, topic: str, partitions: Iterable[int], *, committed: bool) -> dict[int, int]:
        """Return where partitions end: the last stable offset, or with everything that is not decided yet."""
        from confluent_kafka.admin import OffsetSpec

        return self._offsets(topic, partitions, OffsetSpec.latest(), committed=committed)

    def starts(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return where partitions start: records before were deleted."""
        from confluent_kafka.admin import OffsetSpec

        return self._offsets(topic, partitions, OffsetSpec.earliest(), committed=False)

    def _offsets(self, topic: str, partitions: Iterable[int], spec: object, *, committed: bool) -> dict[int, int]:
        """Ask for offsets; a leader that has just changed is asked again, by a new client that knows the new one."""
        from confluent_kafka import IsolationLevel, TopicPartition

        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        wanted = {TopicPartition(topic, partition): spec for partition in partitions}
        deadline = time.monotonic() + ANSWER
        while True:
            answers = self.ask(lambda admin: admin.list_offsets(wanted, isolation_level=level))
            wrong = [answer for answer in answers.values() if isinstance(answer, Exception)]
            if not wrong:
                return {place.partition: answer.offset for place, answer in answers.items()}  # type: ignore[union-attr]
            if time.monotonic() > deadline or not _passes(wrong[0]):
                raise self.unavailable(wrong[0].args[0].str()) from wrong[0]
            self._admin = None
            time.sleep(_POLL)


def _passes(answer: Exception) -> bool:
    """Return True if an error is one that passes while a partition gets its leader."""
    from confluent_kafka import KafkaError

    passing = {
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._NOENT,  # noqa: SLF001 - the client's own name
    }
    return answer.args[0].code() in passing


def _rights(described: Any) -> frozenset[str] | None:  # noqa: ANN401 - a TopicDescription
    allowed = described.authorized_operations
    return None if allowed is None else frozenset(one.name for one in allowed)
