"""A pipeline with a write-ahead sink, the system it sends to, and what a test does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import SCHEMA, PreStaged, Row, land, stage_rows, words_pipeline
from support.sinks import senders
from twophase import Pipeline, sinks
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Output, Revision
from twophase.core.errors import PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Promotion
from twophase.core.states import State
from twophase.runner import Runner
from twophase.wiring import coordinator_of, load

HTTP = "twophase.examples.http_sender:HttpSender"


class Bench:
    """One pipeline with the write `out`, the system it sends to, and what a test does with them."""

    def __init__(self, home: Path, record: PostgresRecord) -> None:
        self.home = home
        self.record = record
        self.received = home / "received.jsonl"
        self.landed: list[Row] = []
        self.pipeline = self.declare()

    def declare(
        self, *, sender: str = "support.sinks.senders:Appending", max_pending: int = 1, **options: Any
    ) -> Pipeline:
        """Declare the pipeline; the tests after this one use it."""
        arguments = options.pop("arguments", {"path": str(self.received)} if "Appending" in sender else {})
        sink = sinks.WriteAhead(sender, arguments=arguments, **options)
        self.pipeline = words_pipeline(writes={"out": sink}, max_files=1)
        self.pipeline.max_pending = max_pending
        return self.pipeline

    @property
    def sink(self) -> sinks.WriteAhead:
        found = self.pipeline.writes["out"]
        assert isinstance(found, sinks.WriteAhead)
        return found

    def land(self, rows: int = 4) -> None:
        """Land the input of one checkpoint."""
        start = len(self.landed)
        made = [{"id": start + i, "word": "w", "frequency": 1} for i in range(rows)]
        land(f"{start:06d}.json", made)
        self.landed += made

    def run(self, files: int = 2, rows: int = 4) -> Revision:
        """Land input, and take a checkpoint through."""
        self.land(rows)
        with Runner(self.pipeline, PreStaged(files=files), record=self.record) as runner:
            done = runner.run()
        assert done is not None
        return done

    def pending(self, files: int = 2) -> PromotionPending:
        """Do the same while the system is down."""
        with pytest.raises(PromotionPending) as waiting:
            self.run(files)
        return waiting.value

    def decided(self, files: int = 2, *, at: str = "commit.after") -> None:
        """Take a checkpoint just past its commit point, and crash."""
        failpoints.configure(f"{at}=raise")
        with pytest.raises(FailpointError):
            self.run(files)
        failpoints.configure("")

    def recover(self) -> None:
        """Finish what is decided, as a process that knows the record alone."""
        coordinator_of(self.record, load(self.record, "words")).recover(decided_only=True)

    def key(self, checkpoint_id: int, revision: int = 1) -> Key:
        return Key("words", checkpoint_id, revision)

    def state(self, checkpoint_id: int, revision: int = 1) -> State:
        with self.record.transaction() as tx:
            return tx.revision(self.key(checkpoint_id, revision)).state

    def output(self, checkpoint_id: int, revision: int = 1) -> Output:
        """Return what is staged, without its number: so no receipt tells that it was sent, only the committer."""
        key = self.key(checkpoint_id, revision)
        with self.record.transaction() as tx:
            return replace(tx.participants(key)[0].output(tx.revision(key)), commit_seq=None)

    def promote(self, checkpoint_id: int, revision: int = 1) -> Promotion:
        return self.sink.promote(self.output(checkpoint_id, revision))

    def find(self, checkpoint_id: int) -> Promotion:
        return self.sink.find(self.output(checkpoint_id))

    def staged(self, checkpoint_id: int) -> Path:
        return Path(self.sink.staging_path(self.output(checkpoint_id)))

    def down(self, how: str | None) -> None:
        """Let the system be down: `2` after two rows of a subtask, `2 text` with an exception; None: it is back."""
        path = self.home / "down"
        if how is None:
            path.unlink()
        else:
            path.write_text(how)

    def sent(self) -> list[tuple[int, int]]:
        """Return what the system has received, in order: checkpoint and row."""
        return [(said["checkpoint"], said["row"]["id"]) for said in senders.received(self.received)]

    def ids(self) -> list[int]:
        return sorted(row for _, row in self.sent())


FOUR = [{"id": number, "word": "w", "frequency": 1} for number in range(4)]


def staged_output(
    bench: Bench,
    checkpoint_id: int,
    rows: list[Row] = FOUR,
    *,
    files: int = 2,
    attempt: int = 1,
    earlier: Sequence[str] = (),
) -> Output:
    """Stage rows as a decided checkpoint has them."""
    key = bench.key(checkpoint_id)
    output = Output(key, attempt, bench.sink.place(key, attempt, "7c1e"), sink="out", earlier=tuple(earlier))
    stage_rows(bench.sink, output.handle, f"part-r1-a{attempt}", rows, files)
    output = replace(output, manifest=bench.sink.seal(output, SCHEMA))
    bench.sink.check(output)
    return replace(output, commit_seq=checkpoint_id, began=datetime(2026, 11, 15, tzinfo=UTC))
