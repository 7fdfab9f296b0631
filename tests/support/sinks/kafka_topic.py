"""A Kafka sink with topics of its own, and outputs that are staged, decided and promoted without a record."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from support.servers.kafka import CONN_ID, make_topic, read
from support.sinks.staged_rows import Rows, prestage
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.manifest import Column
from twophase.local.kafka import Broker

SCHEMA = (Column("id", "bigint"), Column("word", "string"))
PIPELINE = "orders"


def kafka_sink(broker: Broker, *, partitions: int = 2, write: str | None = None, **options: Any) -> sinks.Kafka:
    """Return a sink on a topic of its own, which is joined to a pipeline and prepared."""
    sink = sinks.Kafka(options.pop("topic", None) or make_topic(broker, partitions), conn_id=CONN_ID, **options)
    sink.join(PIPELINE, write or f"w{uuid.uuid4().hex[:8]}")
    sink.prepare()
    return sink


def rows_of(checkpoint_id: int, count: int = 3, word: str = "a") -> list[dict[str, Any]]:
    return [{"id": checkpoint_id * 100 + number, "word": word} for number in range(count)]


def staged(  # noqa: PLR0917 - what differs from test to test
    sink: sinks.Kafka,
    checkpoint_id: int,
    rows: list[dict[str, Any]] | None = None,
    revision: int = 1,
    attempt: int = 1,
    seq: int | None = None,
    **known: Any,
) -> Output:
    """Stage a checkpoint, check it, and decide it."""
    key = Key(PIPELINE, checkpoint_id, revision)
    handle = sink.place(key, attempt, uuid.uuid4().hex[:8])
    output = Output(key, attempt, handle, began=datetime(2026, 1, 1, tzinfo=UTC), sink="out", **known)
    made = rows_of(checkpoint_id) if rows is None else rows
    output = replace(output, manifest=prestage(sink, output, Rows(made, 2, SCHEMA)))
    sink.check(output)
    number = checkpoint_id if seq is None else seq
    receipt = {**key._asdict(), "commit_seq": number, "epoch": attempt}
    return replace(output, commit_seq=number, receipt=receipt)


def seen(broker: Broker, topic: str) -> list[Mapping[str, Any]]:
    """Return the rows that a reader of committed records finds, by id."""
    rows = [json.loads(message.value()) for message in read(broker, topic)]
    return sorted(rows, key=lambda row: (row["id"], row["word"]))
