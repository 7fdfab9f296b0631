"""A pipeline of two tables with every step in a test's hands, a table that is down when told, a source of offsets."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import text

from support.pipelines.factories import SCHEMA, land_words, stage_rows, visible, words_pipeline
from twophase import Pipeline
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Output, Participant, Position, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.ports import Outcome, Progress, Promotion
from twophase.sinks.files.sink import Files
from twophase.wiring import enter

ME = Run("dag", "run_1")


class Flaky(Files):
    """A table that is down, or cannot tell, for the checkpoints it is told."""

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        #: Checkpoints, or single revisions of them.
        self.down: set[int | tuple[int, int]] = set()
        self.silent: set[int] = set()

    def find(self, output: Output) -> Promotion:
        if output.key.checkpoint_id in self.silent:
            return Promotion(Outcome.UNKNOWN)
        return super().find(output)

    def promote(self, output: Output) -> Promotion:
        if {output.key.checkpoint_id, output.key[1:]} & self.down:
            return Promotion(Outcome.RETRY_LATER, "the disk is away")
        if output.key.checkpoint_id in self.silent:
            return Promotion(Outcome.UNKNOWN)
        return super().promote(output)


class Offsets:
    """A source of one partition that has grown to `end`."""

    settles = False
    reports = False
    per_revision = False

    def __init__(self) -> None:
        self.end = 10
        self.found: Mapping[str, Position] = {}
        self.told: list[Mapping[str, int]] = []
        self.pins = False

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> int:
        self.found = position or {}
        return self.end

    def fix(self, found: int, progress: Progress) -> Input:
        start = progress.position().get("0", found if self.pins else 0)
        if self.pins:
            progress.pin({"0": Position(start, {"end": start})})
        return Input(ranges={"0": (start, found)}, marks={"0": {"end": found}})

    def written_again(self, fixed: Any) -> list[InputFile]:
        return []

    def settle(self, checkpoint_id: int, files: Any) -> None:
        raise AssertionError

    def report(self, offsets: Mapping[str, int]) -> None:
        self.told.append(offsets)


class Bench:
    """One pipeline with the tables `lake` and `copy`, and what a test does with it."""

    def __init__(self, record: PostgresRecord) -> None:
        self.record = record
        self.name = f"words_{uuid.uuid4().hex[:8]}"
        self.lake, self.copy = Flaky("lake/words"), Flaky("lake/copy")
        self.pipeline: Pipeline = words_pipeline(self.name, writes={"lake": self.lake, "copy": self.copy})
        self.pipeline.prepare()
        enter(record, self.pipeline)
        self.ended: dict[Run | None, bool | None] = {}
        self.coordinator = self.process()
        self.topic = Offsets()
        self.landed = 0

    def process(self, **kwargs: Any) -> Coordinator:
        """Return a coordinator as another process would have it."""
        parts: dict[str, Any] = {"sources": self.pipeline.reads, "sinks": self.pipeline.writes, "lease": 60.0}
        return Coordinator(self.record, self.name, run_ended=self.ended.get, patience=(), **{**parts, **kwargs})

    def key(self, checkpoint_id: int, revision: int = 1) -> Key:
        return Key(self.name, checkpoint_id, revision)

    def begin(self, run: Run = ME, slot: str | None = None) -> Revision:
        """Land a file if there is nothing to go on with, and take a checkpoint."""
        land_words(start=self.landed, rows=2)
        self.landed += 1
        taken = self.coordinator.begin(run, slot=slot)
        assert taken is not None
        return taken

    def stage(self, revision: Revision) -> Revision:
        """Stage every output that has no vote yet, and vote yes for it."""
        for participant in self.participants(revision.key).values():
            if participant.vote is None:
                self.vote(revision, participant)
        return self.read(revision.key)

    def vote(self, revision: Revision, participant: Participant) -> None:
        """Stage one output, and vote yes for it."""
        self.coordinator.vote(revision, participant.name, yes=True, manifest=self.write(revision, participant))

    def write(self, revision: Revision, participant: Participant) -> Json:
        """Write what Spark would: one row that says which revision and attempt it is from."""
        name = f"r{revision.revision}a{participant.attempt}"
        rows = [{"id": revision.checkpoint_id, "word": name, "frequency": 1}]
        sink = self.sink(participant.name)
        stage_rows(sink, participant.handle, f"part-r{revision.revision}-a{participant.attempt}", rows, 1)
        return sink.seal(participant.output(revision), SCHEMA)

    def sink(self, name: str) -> Flaky:
        return {"lake": self.lake, "copy": self.copy}[name]

    def precommitted(self, revision: Revision | None = None) -> Revision:
        """Take a revision up to where everybody has voted yes."""
        return self.stage(self.coordinator.attempt(revision or self.begin()))

    def committing(self) -> Revision:
        """Take a new checkpoint just past its commit point."""
        revision = self.precommitted()
        self.coordinator.decide_commit(revision)
        return self.read(revision.key)

    def committed(self) -> Revision:
        """Take a new checkpoint all the way."""
        return self.coordinator.commit(self.precommitted())

    def again(self, checkpoint_id: int, kind: str = "backfill") -> Revision:
        """Begin another revision of a checkpoint."""
        with self.record.transaction() as tx:
            return tx.add_revision(self.name, checkpoint_id, kind, ME, 60.0)

    def staged(self, key: Key, name: str = "lake") -> Path:
        """Return the staging folder that the record names for a sink."""
        handle = self.participants(key)[name].handle
        return Path(f"{handle['table']}.twophase/staging/{handle['name']}")

    def lose(self, key: Key, name: str = "lake") -> Path:
        """Move a staged folder away; return where it is now."""
        staged = self.staged(key, name)
        return staged.rename(staged.parents[2] / f"lost-{staged.name}")

    def expire(self, revision: Revision) -> None:
        """Let the lease of a revision have run out."""
        with self.record.transaction() as tx:
            tx.renew(revision.key, epoch=tx.revision(revision.key).epoch, lease=-1)

    def read(self, key: Key) -> Revision:
        with self.record.transaction() as tx:
            return tx.revision(key)

    def participants(self, key: Key) -> dict[str, Participant]:
        with self.record.transaction() as tx:
            return {participant.name: participant for participant in tx.participants(key)}

    def events(self, key: Key) -> list[str]:
        with self.record.engine.connect() as connection:
            found = queries.show(connection, self.name, key.checkpoint_id)["events"]
        return [event["action"] for event in found if event["revision"] == key.revision]

    def sql(self, statement: str) -> Any:
        """Do something behind the protocol's back; `:p` is the name of the pipeline."""
        with self.record.engine.begin() as connection:
            found = connection.execute(text(statement), {"p": self.name} if ":p" in statement else {})
            return found.scalar() if found.returns_rows else None

    def position(self) -> int | None:
        with self.record.transaction() as tx:
            return tx.position(self.name, "topic").get("0")


def words(table: str = "lake/words") -> list[tuple[int, str]]:
    """Return what a reader of a table sees: checkpoint, and the revision and attempt it is from."""
    return sorted((row["id"], row["word"]) for row in visible(table))
