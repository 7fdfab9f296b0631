"""Staging without Spark: rows go into a sink's staging place as its Spark side would have put them there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import pyarrow as pa

from support.pipelines.factories import stage_rows, write_attempt
from support.servers.s3 import local
from twophase.core.checkpoint import Json, Output
from twophase.core.manifest import Column
from twophase.sinks.base import Sink
from twophase.sinks.files.sink import Files
from twophase.sinks.kafka.records import VALUE
from twophase.sinks.kafka.sink import Kafka
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.postgres.sink import Postgres
from twophase.sinks.postgres.staging_table import Loader
from twophase.sinks.write_ahead.sink import WriteAhead
from twophase.storage import database
from twophase.storage.database import TableName

Row = dict[str, Any]
_TYPES = {
    "bigint": pa.int64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


class Rows(NamedTuple):
    """What is staged, and in how many files or parts."""

    rows: list[Row]
    parts: int
    schema: Sequence[Column]

    def changing(self) -> Rows:
        """Return a changelog that adds these and takes back as many of just before them; one that is there stays."""
        if any(column.name == "_change" for column in self.schema):
            return self
        count = len(self.rows)
        older = [{**row, "id": row["id"] - count, "_change": "-D"} for row in self.rows if row["id"] >= count]
        added = [{**row, "_change": "+I"} for row in self.rows]
        return Rows(older + added, self.parts, (*self.schema, Column("_change", "string")))

    def part(self, number: int) -> pa.Table:
        """Return one of them as Arrow has it."""
        columns = pa.schema([(name, _TYPES[kind]) for name, kind in self.schema])
        return pa.Table.from_pylist(self.rows[number :: self.parts], schema=columns)


@singledispatch
def prestage(sink: Sink, to: Output, rows: Rows) -> Json:
    """Stage rows; return the manifest's summary."""
    raise NotImplementedError(type(sink))


@prestage.register
def _(sink: Files | WriteAhead, to: Output, rows: Rows) -> Json:
    stage_rows(sink, to.handle, f"part-r{to.key.revision}-a{to.attempt}", rows.rows, rows.parts, rows.schema)
    return sink.seal(to, tuple(rows.schema))


@prestage.register
def _(sink: Kafka, to: Output, rows: Rows) -> Json:
    schema = (*rows.schema, Column(VALUE, "string"))
    valued = [{**row, VALUE: json.dumps(row)} for row in rows.rows]
    stage_rows(sink, to.handle, f"part-r{to.key.revision}-a{to.attempt}", valued, rows.parts, schema)
    return sink.seal(to, tuple(schema))


@prestage.register
def _(sink: LogTableSink, to: Output, rows: Rows) -> Json:
    folder = local(sink.staging_path(to))
    write_attempt(sink, folder, rows.rows, rows.schema, f"part-r{to.key.revision}-a{to.attempt}", rows.parts)
    return sink.seal(to, tuple(rows.schema))


@prestage.register
def _(sink: Postgres, to: Output, rows: Rows) -> Json:
    rows = rows.changing() if sink.mode == "retract" else rows
    columns = sink.open(to, tuple(rows.schema))
    loader = Loader(database.dsn(sink.connections()[0]), TableName(*to.handle["staging"]))
    for number in range(rows.parts):
        for batch in rows.part(number).to_batches()[:1]:
            loader.load(number, batch, iter(()))
    return sink.seal(to, tuple(rows.schema), columns)
