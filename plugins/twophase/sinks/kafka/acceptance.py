"""Would the topic take the staged rows? Asked before the vote, so that what is decided can be promoted.

Called by the sink's `check`. A broker refuses a record only when it gets it, which is after the commit point.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.core.checkpoint import Output
from twophase.core.errors import BadValue, ConfigError
from twophase.core.hindrances import Refused
from twophase.sinks.kafka.promotion import time_out
from twophase.sinks.kafka.records import RecordColumns, arrow_batches, milliseconds
from twophase.sinks.kafka.transaction import NotSent, Producing, transactional_id
from twophase.storage.kafka_cluster import KafkaCluster, Topic, TopicSettings

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes that a record and its batch take beside key, value and headers.
OVERHEAD = 256
#: Milliseconds that the broker's clock may differ from ours.
_CLOCKS = 60_000


def check_topic(which: str, name: str, topic: Topic | None) -> Topic:
    """Raise ConfigError unless the topic is there, and this account may write to it."""
    if topic is None:
        msg = f"{which}: kafka topic {name}: expected a topic that this account may see, found none; create it"
        raise ConfigError(msg)
    if topic.rights is not None and "WRITE" not in topic.rights:
        found = ", ".join(sorted(topic.rights)) or "none"
        msg = f"{which}: kafka topic {name}: expected the right WRITE, found {found}; grant it by kafka-acls"
        raise ConfigError(msg)
    return topic


def check_markers(which: str, topic: Topic) -> None:
    """Raise ConfigError unless this account may read and write markers."""
    if topic.rights is not None and (missing := {"READ", "WRITE"} - topic.rights):
        lacking = ", ".join(sorted(missing))
        msg = f"{which}: kafka topic {topic.name}: expected the rights READ and WRITE, missing {lacking}; grant them"
        raise ConfigError(msg)


def check_transactions(which: str, cluster: KafkaCluster, output: Output) -> None:
    """Raise ConfigError unless the broker grants a transaction of the length that these rows need.

    It is tried with a transactional id of its own: that of the promotion would fence a promoter that is at work.
    """
    seconds = time_out(output.manifest)
    name = transactional_id(output.key.pipeline, output.handle["write"]) + ".vote"
    try:
        Producing(cluster, name, seconds).close()
    except Refused as refused:
        msg = (
            f"{which}: {output.manifest['rows']} rows need a transaction of up to {seconds:.0f} s: {refused}; raise"
            " transaction.max.timeout.ms of the broker, or take less input per checkpoint"
        )
        raise ConfigError(msg) from refused
    except NotSent as refused:
        if not refused.forbidden:
            raise cluster.unavailable(refused) from refused
        prefix = transactional_id(output.key.pipeline, output.handle["write"])
        msg = (
            f"{which}: {refused}; grant WRITE and DESCRIBE on transactional ids with the prefix {prefix}:"
            f" kafka-acls --add --transactional-id {prefix} --resource-pattern-type prefixed"
        )
        raise ConfigError(msg) from refused


def check_rows(  # noqa: PLR0913, PLR0917 - the topic, and the rows
    which: str, topic: Topic, settings: TopicSettings, columns: RecordColumns, files: Iterable[Path], headers: int
) -> None:
    """Raise BadValue if the topic would refuse a record; `headers`: bytes of those that each record gets."""
    where, now = f"{which}: kafka topic {topic.name}", round(time.time() * 1000)
    for path in files:
        for batch in arrow_batches(path, columns):
            _check_size(where, settings.largest, columns, batch, headers)
            if columns.key and settings.compacted:
                _expect_keys(where, columns.key, batch)
            if columns.partition:
                _check_partitions(where, len(topic.partitions), columns.partition, batch)
            if columns.timestamp:
                _check_times(where, settings.times, columns.timestamp, batch, now)
    if settings.compacted and columns.key is None:
        msg = f"{where} is compacted, so each record needs a key; declare key="
        raise BadValue(msg)


def _check_size(where: str, most: int, columns: RecordColumns, batch: pa.RecordBatch, headers: int) -> None:
    import pyarrow.compute as pc

    parts = [name for name in (columns.staged_value, columns.key, columns.headers) if name]
    allowed = most - OVERHEAD - headers
    if sum(batch[name].nbytes for name in parts) <= allowed:
        return
    sizes = [pc.fill_null(pc.binary_length(batch[name]), 0) for name in parts if name != columns.headers]
    total = sizes[0] if len(sizes) == 1 else pc.add(*sizes)
    if columns.headers:
        written = [
            sum(len(str(part)) for pair in one or () for part in _parts(pair))
            for one in batch[columns.headers].to_pylist()
        ]
        total = pc.add(total, written)
    largest = pc.max(total).as_py() or 0
    if largest > allowed:
        msg = (
            f"{where}: a record of {largest} bytes, expected at most {allowed}; raise"
            " max.message.bytes of the topic, or make the rows smaller"
        )
        raise BadValue(msg)


def _parts(pair: object) -> Iterable[object]:
    return pair.values() if isinstance(pair, dict) else pair  # type: ignore[return-value]


def _expect_keys(where: str, column: str, batch: pa.RecordBatch) -> None:
    if batch[column].null_count:
        msg = f"{where} is compacted: column {column!r} is null in some rows; filter them out"
        raise BadValue(msg)


def _check_partitions(where: str, partitions: int, column: str, batch: pa.RecordBatch) -> None:
    import pyarrow.compute as pc

    found = pc.min_max(batch[column]).as_py()
    for number in (found["min"], found["max"]):
        if number is not None and not 0 <= number < partitions:
            msg = f"{where}: column {column!r}: expected a partition from 0 to {partitions - 1}, found {number}"
            raise BadValue(msg)


def _check_times(
    where: str, limits: tuple[int | None, int | None], column: str, batch: pa.RecordBatch, now: int
) -> None:
    import pyarrow.compute as pc

    before, after = limits
    found = pc.min_max(milliseconds(batch[column])).as_py()
    if found["max"] is not None and after is not None and found["max"] > now + after - _CLOCKS:
        msg = (
            f"{where}: column {column!r}: a time {(found['max'] - now) // 1000} s ahead,"
            f" expected at most {(after - _CLOCKS) // 1000} s; correct it, or raise message.timestamp.after.max.ms"
        )
        raise BadValue(msg)
    if found["min"] is not None and (
        found["min"] < 0 or (before is not None and found["min"] < now - before + _CLOCKS)
    ):
        limit = "1970" if found["min"] < 0 else f"{before} ms ago, by message.timestamp.before.max.ms"
        msg = f"{where}: column {column!r}: a time before {limit}; correct it"
        raise BadValue(msg)
