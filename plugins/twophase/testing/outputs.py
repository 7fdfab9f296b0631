"""Outputs that the contract stages for its tests, with all that the record would keep of them."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome
from twophase.sinks.base import Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIPELINE = "contract"
_SCHEMA = "id bigint, word string"
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
#: How long, in seconds, a promotion may take.
PATIENCE = 120.0
_POLL = 0.1
#: What says that it has to be asked again.
WAITING = {Outcome.RETRY_LATER, Outcome.UNKNOWN}

Rows = list[dict[str, Any]]
Read = Callable[[], Rows]


@dataclass
class Staged:
    """One staged output, and all that the record would keep of it."""

    sink: Sink
    #: As the record has it after the decision.
    output: Output
    rows: Rows

    @property
    def key(self) -> Key:
        """Return its revision."""
        return self.output.key

    @property
    def commit_seq(self) -> int:
        """Return the number of its decision."""
        return self.output.commit_seq or 0

    def promote(self) -> Outcome:
        """Promote it with a newly built sink, which has nothing in memory."""
        return again(self.sink).promote(self.output).outcome

    def finish(self) -> Outcome:
        """Promote it as recovery does, trying again: a process that died may still hold a lock for a moment."""
        deadline = time.monotonic() + PATIENCE
        while (outcome := self.promote()) in WAITING and time.monotonic() < deadline:
            time.sleep(_POLL)
        return outcome

    def find(self) -> Outcome:
        """Ask a newly built sink where it stands."""
        return again(self.sink).find(self.output).outcome


def again(sink: Sink) -> Sink:
    """Build a sink again from its declaration, as the record keeps it."""
    return Sink.load(json.loads(json.dumps(sink.declaration())))


@dataclass
class Stage:
    """Stages outputs of a sink, one checkpoint after the other."""

    spark: SparkSession
    sink: Sink
    decided: int = 0
    checkpoints: int = 0

    def __call__(self, *, of: Staged | None = None, attempt: int = 1, rows: int = 3) -> Staged:
        """Stage the next checkpoint, or the next revision of one."""
        if of is None:
            self.checkpoints += 1
        key = Key(PIPELINE, *((self.checkpoints, 1) if of is None else (of.key.checkpoint_id, of.key.revision + 1)))
        return self.attempt(key, attempt, rows, of)

    def frame(self, rows: Rows) -> DataFrame:
        """Return the rows as the transform gives them to the sink."""
        return self.spark.createDataFrame([(row["id"], row["word"]) for row in rows], _SCHEMA).coalesce(1)

    def slot(self, key: Key) -> str | None:  # noqa: ARG002 - for sinks where it matters
        """Return the slot of a checkpoint; None: it has none."""
        return None

    def again(self, first: Staged, rows: int = 2) -> Staged:
        """Stage a decided output again, as a restage does: the next attempt of the same decision."""
        return self.attempt(first.key, first.output.attempt + 1, rows, earlier=first)

    def attempt(
        self, key: Key, attempt: int, rows: int = 3, of: Staged | None = None, *, earlier: Staged | None = None
    ) -> Staged:
        """Stage one attempt of a revision; `earlier` was voted for when it was decided."""
        made = [{"id": key.checkpoint_id * 100 + number, "word": f"r{key.revision}"} for number in range(rows)]
        older = of.output if of else None
        place = self.sink.place(key, attempt, secrets.token_hex(4), slot=self.slot(key), older=older)
        before = (str(earlier.output.manifest.get("digest")),) if earlier else ()
        output = Output(key, attempt, place, began=_BEGAN, sink="contract", earlier=before)
        output = replace(output, manifest=self.sink.stage(self.frame(made), output))
        again(self.sink).check(output)
        self.decided += earlier is None
        number = earlier.commit_seq if earlier else self.decided
        receipt = {**key._asdict(), "commit_seq": number, "epoch": attempt}
        return Staged(self.sink, _plain(replace(output, commit_seq=number, receipt=receipt)), made)


def _plain(output: Output) -> Output:
    """Return an output as it comes back from the record."""
    return Output.of_json(json.loads(json.dumps(output.to_json())))


def session() -> SparkSession:
    """Return a small Spark session in this process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("twophase contract")
    for name, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": path(),
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def path() -> str:
    """Return a Python path that lets other processes import what this one can."""
    return os.pathsep.join(entry for entry in sys.path if entry)
