"""Delta and Iceberg tables in the tests: staged without Spark, promoted by processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

from support.pipelines.factories import SCHEMA, Row, write_attempt
from support.servers.s3 import local
from twophase.core.checkpoint import Json, Key, Output
from twophase.core.manifest import Column
from twophase.core.ports import Promotion
from twophase.sinks.base import Sink
from twophase.sinks.log_tables.base import LogTableSink

PIPELINE = "words"


class Staged(NamedTuple):
    """What an attempt staged, as the record keeps it once it is decided."""

    sink: LogTableSink
    output: Output

    @property
    def key(self) -> Key:
        return self.output.key

    @property
    def handle(self) -> Json:
        return self.output.handle

    @property
    def folder(self) -> Path:
        return local(self.sink.staging_path(self.output))

    def check(self) -> None:
        self.sink.check(self.output)

    def promote(self) -> Promotion:
        return self.sink.promote(self.output)

    def find(self) -> Promotion:
        return self.sink.find(self.output)


def rows(checkpoint_id: int, count: int = 4, revision: int = 1) -> list[Row]:
    """Return rows that say whose they are."""
    return [{"id": 100 * checkpoint_id + i, "word": f"w{i % 2}", "frequency": revision} for i in range(count)]


def stage(
    sink: LogTableSink,
    checkpoint_id: int = 1,
    seq: int | None = None,
    content: Sequence[Row] | None = None,
    *,
    revision: int = 1,
    attempt: int = 1,
    token: str = "7c1e",
    older: Staged | None = None,
    earlier: Sequence[Staged] = (),
    schema: Sequence[Column] = SCHEMA,
    files: int = 2,
) -> Staged:
    """Stage some rows as a Spark job would, partition columns where the sink wants them."""
    key = Key(PIPELINE, checkpoint_id, revision)
    place = sink.place(key, attempt, token, older=older.output if older else None)
    before = tuple(one.output.manifest["digest"] for one in earlier)
    output = Output(key, attempt, place, commit_seq=checkpoint_id if seq is None else seq, sink="lake", earlier=before)
    found = list(rows(checkpoint_id, revision=revision) if content is None else content)
    write_attempt(sink, local(sink.staging_path(output)), found, schema, f"part-r{revision}-a{attempt}", files)
    return Staged(sink, replace(output, manifest=sink.seal(output, tuple(schema))))


# --- what processes do -----------------------------------------------------------------------------------------------


def promote(declaration: dict[str, Any], output: Output, barrier: Barrier | None = None) -> None:
    """Promote; print the outcome, as a process of its own."""
    sink = Sink.load(declaration)
    if barrier is not None:
        barrier.wait(30)
    promotion = sink.promote(output)
    print(f"outcome {promotion.outcome.value}: {promotion.reason}", flush=True)  # noqa: T201 - for the test that waits
