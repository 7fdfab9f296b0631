"""Read a committed table as of now, a time or a commit_seq; users call `committed_files` and `read_committed`."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from twophase.core.errors import ConfigError, NothingCommitted, Swept
from twophase.local.record_access import open_record
from twophase.wiring import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from twophase.committer.record import PostgresRecord
    from twophase.core.checkpoint import Output
    from twophase.sinks.base import Sink

log = logging.getLogger("twophase")

AsOf = datetime | int | str | None


def committed_files(pipeline: str, sink: str, as_of: AsOf = None, *, dsn: str | None = None) -> list[str]:
    """List the files of every committed checkpoint, for pandas, DuckDB, polars or anything else that reads files.

    `as_of` is a commit_seq, or a time (a datetime, or ISO 8601 text; without a zone it is UTC).
    """
    with _opened(dsn) as record:
        table = _sink(record, pipeline, sink)
        _tell_of_holes(record, pipeline, sink)
        return [path for output in _promoted(record, pipeline, sink, as_of) for path in table.files(output)]


def read_committed(
    spark: SparkSession, pipeline: str, sink: str, as_of: AsOf = None, *, dsn: str | None = None
) -> DataFrame:
    """Return a DataFrame over every committed checkpoint, with its number in the column `checkpoint`.

    A table with slot folders has instead the columns that the folders' names give. What is committed later is not in
    the DataFrame, even while it is being read. See `committed_files` for `as_of`.
    """
    with _opened(dsn) as record:
        table = _sink(record, pipeline, sink)
        found = list(_promoted(record, pipeline, sink, as_of))
        _tell_of_holes(record, pipeline, sink)
    if not found:
        when = "yet" if as_of is None else f"as of {as_of}"
        msg = f"pipeline {pipeline!r}: nothing is committed to {sink!r} {when}"
        raise NothingCommitted(msg)
    return cast("DataFrame", table.read(spark, found))


def _opened(dsn: str | None) -> Any:  # noqa: ANN401 - a context manager around the record
    from contextlib import contextmanager

    @contextmanager
    def opened() -> Iterator[PostgresRecord]:
        record = open_record(dsn)
        try:
            yield record
        finally:
            record.engine.dispose()

    return opened()


def _sink(record: PostgresRecord, pipeline: str, sink: str) -> Sink:
    writes = load(record, pipeline).sinks
    if sink not in writes:
        msg = f"pipeline {pipeline!r}: no write {sink!r}, expected {', '.join(writes)}"
        raise ConfigError(msg)
    return writes[sink]


def _tell_of_holes(record: PostgresRecord, pipeline: str, sink: str) -> None:
    """Warn if the sink was added or moved later and lacks what was committed before."""
    from twophase.committer import writes

    with record.engine.connect() as connection:
        for hole in writes.holes(connection, [pipeline]):
            if hole.name == sink:
                log.warning("%s: %s", pipeline, hole)


def _promoted(record: PostgresRecord, pipeline: str, sink: str, as_of: AsOf) -> Iterator[Output]:
    from twophase.committer import queries

    for promoted in queries.promoted(record.engine, pipeline, sink, _moment(as_of)):
        if promoted.swept_at is not None:
            msg = (
                f"checkpoint {promoted.output.key}: it was replaced and its retention is over, swept at"
                f" {promoted.swept_at:%Y-%m-%d %H:%M} UTC; as of {as_of} cannot be read any more"
            )
            raise Swept(msg)
        yield promoted.output


def _moment(as_of: AsOf) -> datetime | int | None:
    if isinstance(as_of, bool):
        msg = f"as_of: expected a commit_seq or a time, found {as_of!r}"
        raise ConfigError(msg)
    if isinstance(as_of, str):
        if as_of.isdigit():
            return int(as_of)
        try:
            as_of = datetime.fromisoformat(as_of)
        except ValueError:
            msg = f"as_of: expected a commit_seq or a time in ISO 8601, found {as_of!r}"
            raise ConfigError(msg) from None
    if isinstance(as_of, datetime) and as_of.tzinfo is None:
        return as_of.replace(tzinfo=UTC)
    return as_of
