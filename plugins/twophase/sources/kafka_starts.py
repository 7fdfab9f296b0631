"""Where a Kafka source begins, and how much of each partition one checkpoint takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from twophase.core.errors import ConfigError
from twophase.storage.kafka_cluster import At, KafkaCluster, Place

WORDS = ("earliest", "latest", "group")
#: librdkafka's words for `auto.offset.reset` → whether to begin at the end.
_RESETS = {"earliest": False, "smallest": False, "beginning": False, "latest": True, "largest": True, "end": True}


@dataclass(frozen=True)
class Start:
    """Where a pipeline begins that has read nothing yet."""

    who: str
    word: str | None = None
    time: datetime | None = None
    given: Mapping[Place, int] | None = None

    @classmethod
    def declared(cls, who: str, start: str | datetime | Mapping[str, int]) -> Start:
        """Read what a user declared, or what the record keeps of it."""
        if isinstance(start, Mapping):
            return cls(who, given={_place(who, name): _offset(who, name, at) for name, at in start.items()})
        if isinstance(start, str) and start in WORDS:
            return cls(who, word=start)
        try:
            time = datetime.fromisoformat(start) if isinstance(start, str) else start
        except ValueError:
            time = None
        if not isinstance(time, datetime) or time.tzinfo is None:
            expected = f"{', '.join(WORDS)}, a time with its zone, or offsets such as {{'orders/0': 17}}"
            msg = f"{who}: start {start!r}: expected {expected}"
            raise ConfigError(msg)
        return cls(who, time=time)

    def config(self) -> Any:  # noqa: ANN401 - a text or a dict
        """Return what the record keeps."""
        if self.given is not None:
            return {str(place): offset for place, offset in self.given.items()}
        return self.word or (self.time.isoformat() if self.time else None)

    def offsets(
        self, cluster: KafkaCluster, bounds: Mapping[Place, tuple[At, At]], group: tuple[str | None, str]
    ) -> dict[Place, int]:
        """Return the first offset to read of each partition."""
        first = {place: at.offset for place, (at, _) in bounds.items()}
        last = {place: at.offset for place, (_, at) in bounds.items()}
        if self.word == "latest":
            return last
        if self.time is not None:
            found = cluster.since(bounds, int(self.time.timestamp() * 1000))
            return {place: last[place] if offset is None else offset for place, offset in found.items()}
        if self.given is not None:
            return first | self._within(bounds, self.given)
        return first if self.word == "earliest" else self._of_group(cluster, bounds, *group)

    def _within(self, bounds: Mapping[Place, tuple[At, At]], given: Mapping[Place, int]) -> dict[Place, int]:
        for place, offset in given.items():
            if place not in bounds:
                msg = f"{self.who}: start: there is no partition {place}"
                raise ConfigError(msg)
            first, last = bounds[place]
            if not first.offset <= offset <= last.offset:
                msg = f"{self.who}: start: {place}: expected {first.offset} to {last.offset}, found {offset}"
                raise ConfigError(msg)
        return dict(given)

    def _of_group(
        self, cluster: KafkaCluster, bounds: Mapping[Place, tuple[At, At]], group: str | None, reset: str
    ) -> dict[Place, int]:
        """Begin where the consumer group is; in partitions without an offset of it, as `auto.offset.reset` says."""
        committed = cluster.group_offsets(group, bounds) if group else {}
        missing = [place for place in bounds if place not in committed]
        if missing and reset not in _RESETS:
            found = f"group {group} has no offset, and auto.offset.reset is {reset}"
            msg = f"{self.who}: {missing[0]}: {found}; declare start=…"
            raise ConfigError(msg)
        fallback = {place: bounds[place][_RESETS[reset]].offset for place in missing}
        return fallback | self._within(bounds, committed)


def _place(who: str, name: str) -> Place:
    topic, slash, partition = str(name).rpartition("/")
    if not (slash and topic and partition.isdecimal()):
        msg = f"{who}: partition {name!r}: expected the topic and the number, such as 'orders/0'"
        raise ConfigError(msg)
    return Place(topic, int(partition))


def _offset(who: str, name: str, offset: object) -> int:
    if type(offset) is not int or offset < 0:
        msg = f"{who}: start: {name}: expected an offset, a whole number from 0, found {offset!r}"
        raise ConfigError(msg)
    return offset


def shared(lags: Mapping[Place, int], most: int | None) -> dict[Place, int]:
    """Share `most` offsets among partitions by how many wait in each; partitions that get none are left out."""
    waiting = sum(lags.values())
    if most is None or waiting <= most:
        return dict(lags)
    found = {place: lag * most // waiting for place, lag in lags.items()}
    left = most - sum(found.values())
    by_rest = sorted(lags, key=lambda place: (-(lags[place] * most % waiting), place))
    for place in by_rest[:left]:
        found[place] += 1
    return {place: taken for place, taken in found.items() if taken}
