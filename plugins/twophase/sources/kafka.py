"""`Kafka`, the source that reads topics by ranges of offsets; a record belongs to exactly one checkpoint.

The positions are in the record, never in the consumer group: that is told after the commit, for those who watch its
lag. A mark goes with each position: the topic's id and the leader epoch. So a topic that was created again, or a log
that lost records and grew again, is noticed, though its offsets look right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Input, Json, Known, Position
from twophase.core.errors import ConfigError, InputChanged, InputMissing
from twophase.sources import kafka_records
from twophase.sources.base import Sifted, Source
from twophase.sources.kafka_starts import Start, shared
from twophase.sources.quarantine import Quarantine
from twophase.storage import kafka
from twophase.storage.kafka_cluster import At, KafkaCluster, Place, Topic
from twophase.storage.kafka_reader import truncated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from twophase.core.ports import Progress
    from twophase.sinks.files.sink import Files as FilesSink

FORMATS = ("text", "json", "binary")
_MOVE = "`twophase positions PIPELINE --set READ/{}=earliest --reason …` goes on at its first record"
_FREE = "abort the checkpoint, `twophase release` it, then "


@dataclass(frozen=True)
class Seen:
    """What `discover` saw: the bounds of each partition, and where those begin that were never seen before."""

    topics: Mapping[str, Topic]
    bounds: Mapping[Place, tuple[At, At]]
    starts: Mapping[Place, int]
    #: Positions whose mark was looked at again and still holds, though the leader changed.
    renewed: frozenset[Place] = frozenset()
    marks: Mapping[Place, Json] = field(default_factory=dict)


class Kafka(Source):
    """The records of some topics, in ranges of offsets."""

    identity = ()
    fixed_while_pending = ("topics", "pattern", "conn_id")

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        topics: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        conn_id: str = "kafka_default",
        group: str | None = None,
        start: str | datetime | Mapping[str, int] = "group",
        format: str = "text",  # noqa: A002 - the word that Spark's readers use
        schema: str | None = None,
        max_records: int | None = None,
        on_bad_record: str = "fail",
        bad_record_limit: float | None = None,
        quarantine_path: str | Path | None = None,
    ) -> None:
        """Name topics, or a regular expression of their whole names; later topics and partitions begin at their start.

        `start` says where a pipeline begins that has read nothing yet: "earliest", "latest", "group" (the offsets of
        the consumer group; where it has none, `auto.offset.reset` of the connection, else earliest), a time, or offsets
        such as {"orders/0": 17}. The group is `group.id` of the connection unless `group` names another; committed
        offsets are told to it. `max_records` is shared among partitions by how much waits in each.
        """
        self.topics = [topics] if isinstance(topics, str) else list(topics or ())
        self.pattern = pattern
        self.conn_id = conn_id
        self.group = group
        self.start = Start.declared(self.who, start)
        self.format = format
        self.schema = schema
        self.max_records = max_records
        self.bad = Quarantine(
            on_bad_record, bad_record_limit, None if quarantine_path is None else str(quarantine_path)
        )
        self._check_declaration()

    @property
    def who(self) -> str:
        """Return how messages name this source."""
        return f"kafka source {self.pattern or ', '.join(self.topics)}"

    def _check_declaration(self) -> None:
        problem = None
        if bool(self.topics) == (self.pattern is not None):
            problem = "expected topics or pattern=…, one of the two"
        elif self.format not in FORMATS:
            problem = f"format {self.format!r}: expected one of {', '.join(FORMATS)}"
        elif bool(self.schema) != (self.format == "json"):
            problem = "expected schema=… with format='json', and only there"
        elif self.max_records is not None and not (type(self.max_records) is int and self.max_records > 0):
            problem = f"max_records {self.max_records!r}: expected a whole number above 0"
        elif self.bad.wanted and self.bad.path is None:
            problem = "on_bad_record='quarantine': expected quarantine_path=…, the folder that bad records go to"
        if problem:
            msg = f"{self.who}: {problem}"
            raise ConfigError(msg)
        kafka_records.check_pattern(self.who, self.pattern)
        self.bad.check(self.who, self.format, self.schema, {})

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "topics": self.topics or None,
            "pattern": self.pattern,
            "conn_id": self.conn_id,
            "group": self.group,
            "start": self.start.config(),
            "format": self.format,
            "schema": self.schema,
            "max_records": self.max_records,
            **self.bad.config(),
        }

    def prepare(self) -> None:
        """Check that both clients can use the connection; the broker is asked at begin."""
        kafka.client_settings(self.conn_id)
        kafka.spark_options(self.conn_id)

    # --- at begin ----------------------------------------------------------------------------------------------------

    def discover(
        self,
        slot: str | None = None,  # noqa: ARG002 - goes in order
        known: Known | None = None,  # noqa: ARG002 - remembers positions only
        position: Mapping[str, Position] | None = None,
    ) -> Seen:
        """Ask where each partition begins and ends; refuse a position that no longer means what it meant."""
        cluster = self.cluster()
        read = {Place.parse(name): at for name, at in (position or {}).items()}
        topics = self._topics(cluster, read)
        places = [Place(name, number) for name, topic in topics.items() for number in topic.partitions]
        bounds = cluster.bounds(places)
        there = {place: at for place, at in read.items() if self._selects(place.topic)}
        self._check_topics(topics, bounds, {place: at.mark for place, at in there.items()}, _MOVE)
        for place, at in there.items():
            self._check_start(place, at.offset, bounds[place][0], _MOVE)
        renewed = self._check_logs(cluster, {place: (at.offset, at.mark) for place, at in there.items()}, bounds, _MOVE)
        new = [place for place in places if place not in there]
        starts = (
            {place: bounds[place][0].offset for place in new}
            if read
            else self.start.offsets(cluster, {place: bounds[place] for place in new}, self._group())
        )
        marks = {place: _mark(topics[place.topic], bounds[place][1]) for place in places}
        return Seen(topics, bounds, starts, renewed, marks)

    def fix(self, found: Seen, progress: Progress) -> Input:
        """Cut a range for each partition that has new records, and pin those that are seen for the first time."""
        position = {Place.parse(name): offset for name, offset in progress.position().items()}
        pins = {place: offset for place, offset in found.starts.items() if place not in position}
        renewed = {place: position[place] for place in found.renewed if place in position}
        progress.pin({str(at): Position(offset, found.marks[at]) for at, offset in (pins | renewed).items()})
        starts = {place: position.get(place, found.starts.get(place)) for place in found.bounds}
        lags = {
            place: last.offset - start
            for place, (_, last) in found.bounds.items()
            if (start := starts[place]) is not None and last.offset > start
        }
        ends = {place: starts[place] + taken for place, taken in shared(lags, self.max_records).items()}  # type: ignore[operator]
        ranges = {str(place): (starts[place], end) for place, end in ends.items()}
        return Input(ranges=ranges, marks={str(place): found.marks[place] for place in ends})  # type: ignore[arg-type]

    def cluster(self) -> KafkaCluster:
        """Return the cluster to ask."""
        return KafkaCluster(self.conn_id, self.who)

    def _selects(self, topic: str) -> bool:
        return topic in self.topics or (self.pattern is not None and kafka_records.matches(self.pattern, topic))

    def _topics(self, cluster: KafkaCluster, read: Mapping[Place, Position]) -> dict[str, Topic]:
        """Return the topics that are there; raise if one is missing that was named or read before."""
        names = self.topics or cluster.named(self.pattern or "")
        topics = cluster.topics(names)
        gone = sorted({place.topic for place in read if self._selects(place.topic)} - topics.keys())
        if gone:
            forget = f"`twophase positions PIPELINE --forget READ/{gone[0]} --reason …` goes on without it"
            msg = f"{self.who}: topic {gone[0]}: it was read before and is gone; {forget}"
            raise InputChanged(msg)
        if missing := [name for name in names if name not in topics]:
            msg = f"{self.who}: topic {missing[0]}: there is none; create it, or correct the name"
            raise InputMissing(msg)
        if not topics:
            msg = f"{self.who}: no topic matches; create one, or correct the pattern"
            raise InputMissing(msg)
        return topics

    def _group(self) -> tuple[str | None, str]:
        """Return the consumer group, and where to start in a partition that it has no offset of."""
        told = kafka.settings(self.conn_id)
        return self.group or told.get("group.id"), told.get("auto.offset.reset", "earliest")

    # --- what was fixed ----------------------------------------------------------------------------------------------

    def _check_topics(
        self,
        topics: Mapping[str, Topic],
        bounds: Mapping[Place, Any],
        marks: Mapping[Place, Json | None],
        remedy: str,
    ) -> None:
        """Refuse a topic that was created again: it has another id, and its offsets mean other records."""
        for place, mark in marks.items():
            known, there = (mark or {}).get("topic"), topics.get(place.topic)
            if there is None or place not in bounds or (known is not None and known != there.id):
                found = "none" if there is None else f"id {there.id} with {len(there.partitions)} partitions"
                said = f"it was deleted or created again: expected id {known}, found {found}"
                msg = f"{self.who}: topic {place.topic}: {said}; {remedy.format(place.topic)}"
                raise InputChanged(msg)

    def _check_start(self, place: Place, start: int, first: At, remedy: str) -> None:
        """Refuse an offset whose record has expired."""
        if start < first.offset:
            said = f"offsets {start} to {first.offset - 1} have expired unread: the log begins at {first.offset}"
            msg = f"{self.who}: {place}: {said}; {remedy.format(place)}"
            raise InputChanged(msg)

    def _check_logs(
        self,
        cluster: KafkaCluster,
        read: Mapping[Place, tuple[int, Json | None]],
        bounds: Mapping[Place, tuple[At, At]],
        remedy: str,
    ) -> frozenset[Place]:
        """Refuse a log that lost records before these offsets; return the places whose leader changed since."""
        lost = {place for place, (offset, _) in read.items() if offset > bounds[place][1].offset}
        epochs = {place: At(offset, (mark or {}).get("epoch")) for place, (offset, mark) in read.items()}
        changed = {
            place: at for place, at in epochs.items() if at.epoch is not None and at.epoch != bounds[place][1].epoch
        }
        asked = {place: at for place, at in changed.items() if place not in lost}
        lost |= truncated(cluster, asked) if asked else set()
        for place in sorted(lost):
            offset, end = read[place][0], bounds[place][1].offset
            said = f"its log was truncated: records before offset {offset} are gone or others now, it ends at {end}"
            msg = f"{self.who}: {place}: {said}; {remedy.format(place)}"
            raise InputChanged(msg)
        return frozenset(asked)

    def check(self, fixed: Input) -> None:
        """Raise InputChanged unless the topics are the same and no log lost what was fixed."""
        if not fixed.ranges:
            return
        cluster, ranges, marks = self.cluster(), _places(fixed.ranges), _places(fixed.marks)
        topics, bounds = self._there(cluster, ranges)
        self._check_topics(topics, bounds, {place: marks.get(place) for place in ranges}, _FREE + _MOVE)
        ends = {place: (end, marks.get(place)) for place, (_, end) in ranges.items()}
        self._check_logs(cluster, ends, bounds, _FREE + _MOVE)

    def check_unread(self, fixed: Input) -> None:
        """Raise InputChanged if a record of the fixed ranges has expired; once they are read that does not matter."""
        ranges = _places(fixed.ranges)
        for place, (first, _) in self.cluster().bounds(ranges).items() if ranges else ():
            self._check_start(place, ranges[place][0], first, _FREE + _MOVE)

    # --- for people --------------------------------------------------------------------------------------------------

    def ends(self, partitions: Iterable[str]) -> dict[str, int]:
        """Return where these partitions end for readers of committed records; those that are gone are left out."""
        cluster = self.cluster()
        _, bounds = self._there(cluster, [Place.parse(name) for name in partitions])
        return {str(place): last.offset for place, (_, last) in bounds.items()}

    def moved(self, wanted: Mapping[str, str]) -> dict[str, Position]:
        """Return positions to move to, each with its mark: an offset of the log, `earliest` or `latest`.

        A topic without a partition means all of its partitions.
        """
        cluster, places = self.cluster(), {}
        for name, told in wanted.items():
            topic, _, number = name.rpartition("/")
            if topic and number.isdecimal():
                places[Place(topic, int(number))] = told
            else:
                found = cluster.topic(name)
                places |= {Place(name, one): told for one in (found.partitions if found else ()) or (0,)}
        topics, bounds = self._there(cluster, places)
        return {str(at): self._moved(at, told, topics.get(at.topic), bounds.get(at)) for at, told in places.items()}

    def _moved(self, place: Place, told: str, topic: Topic | None, bounds: tuple[At, At] | None) -> Position:
        if topic is None or bounds is None:
            msg = f"{self.who}: {place}: there is no such partition"
            raise ConfigError(msg)
        first, last = bounds
        words = {"earliest": first.offset, "latest": last.offset}
        offset = words.get(told, int(told) if told.isdecimal() else -1)
        if not first.offset <= offset <= last.offset:
            found = f"expected earliest, latest or an offset from {first.offset} to {last.offset}, found {told}"
            msg = f"{self.who}: {place}: {found}"
            raise ConfigError(msg)
        return Position(offset, _mark(topic, last))

    @staticmethod
    def _there(cluster: KafkaCluster, places: Iterable[Place]) -> tuple[dict[str, Topic], dict[Place, tuple[At, At]]]:
        """Return the topics of partitions, and the bounds of those partitions that exist."""
        wanted = list(places)
        topics = cluster.topics({place.topic for place in wanted})
        there = [at for at in wanted if at.topic in topics and at.partition in topics[at.topic].partitions]
        return topics, cluster.bounds(there)

    # --- in Spark ----------------------------------------------------------------------------------------------------

    def connections(self, fixed: Input) -> tuple[str, ...]:
        """Return the connection, if there is anything to read."""
        return (self.conn_id,) if fixed.ranges else ()

    def read(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> DataFrame:  # noqa: ARG002 - goes in order
        """Return the records of exactly these ranges; a bad one fails."""
        return kafka_records.strict(self, kafka_records.load(self, spark, fixed))

    def quarantine(self) -> FilesSink | None:
        """Return the table that bad records go to."""
        return self.bad.sink(str(self.bad.path)) if self.bad.wanted else None

    @contextmanager
    def sifted(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> Iterator[Sifted]:
        """Yield good and bad records as two frames."""
        if not self.bad.wanted:
            yield Sifted(self.read(spark, fixed, slot))
            return
        with kafka_records.sift(self, kafka_records.load(self, spark, fixed)) as frames:
            yield frames

    def explain(self, fixed: Input, error: Exception) -> Exception | None:  # noqa: ARG002 - the error says it all
        """Return an error that names the record, or what the broker no longer has."""
        return kafka_records.explained(self.who, self.conn_id, error, _FREE + _MOVE)

    # --- after COMMITTED ---------------------------------------------------------------------------------------------

    @property
    def reports(self) -> bool:
        """Return True: lag tools look at the consumer group."""
        return True

    def report(self, offsets: Mapping[str, int]) -> None:
        """Write the offsets to read next to the consumer group, if there is one."""
        group, _ = self._group()
        if group is not None and offsets:
            self.cluster().commit_group(group, _places(offsets))


def _places(named: Mapping[str, Any]) -> dict[Place, Any]:
    return {Place.parse(name): value for name, value in named.items()}


def _mark(topic: Topic, last: At) -> Json:
    return {"topic": topic.id, "epoch": last.epoch}
