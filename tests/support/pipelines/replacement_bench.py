"""A pipeline whose checkpoints are replaced, with every step in a test's hands."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from support.pipelines.factories import SCHEMA, land_words, stage_rows, visible, words_pipeline
from twophase import Pipeline
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Json, Key, Output, Participant, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.files.sink import Files
from twophase.storage import disk
from twophase.sweep import sweep
from twophase.verification import verify
from twophase.wiring import enter

if TYPE_CHECKING:
    import pytest

ME = Run("dag", "run_1")


class Flaky(Files):
    """A table that is down for the revisions it is told."""

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.down: set[tuple[int, int]] = set()

    def promote(self, output: Output) -> Promotion:
        if output.key[1:] in self.down:
            return Promotion(Outcome.RETRY_LATER, "the disk is away")
        return super().promote(output)


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
        self.landed = 0

    def process(self, **kwargs: Any) -> Coordinator:
        """Return a coordinator as another process would have it."""
        parts: dict[str, Any] = {"sources": self.pipeline.reads, "sinks": self.pipeline.writes, "lease": 60.0}
        return Coordinator(self.record, self.name, run_ended=self.ended.get, patience=(), **{**parts, **kwargs})

    def key(self, checkpoint_id: int, revision: int = 1) -> Key:
        return Key(self.name, checkpoint_id, revision)

    def begin(self, run: Run = ME) -> Revision:
        """Land a file, and take a checkpoint."""
        land_words(start=self.landed, rows=2)
        self.landed += 1
        taken = self.coordinator.begin(run)
        assert taken is not None
        return taken

    def stage(self, revision: Revision) -> Revision:
        """Stage every output that has no vote yet, and vote yes for it."""
        for participant in self.participants(revision.key).values():
            if participant.vote is None:
                self.vote(revision, participant)
        return self.read(revision.key)

    def vote(self, revision: Revision, participant: Participant) -> None:
        """Stage one output, check it, and vote yes for it."""
        manifest = self.write(revision, participant)
        self.sink(participant.name).check(replace(participant, manifest=manifest).output(revision))
        self.coordinator.vote(revision, participant.name, yes=True, manifest=manifest)

    def write(self, revision: Revision, participant: Participant) -> Json:
        """Write what Spark would: one row that says which revision and attempt it is from."""
        name = f"r{revision.revision}a{participant.attempt}"
        rows = [{"id": revision.checkpoint_id, "word": name, "frequency": 1}]
        sink = self.sink(participant.name)
        prefix = f"part-r{revision.revision}-a{participant.attempt}"
        stage_rows(sink, participant.handle, prefix, rows, 1)
        return sink.seal(participant.output(revision), SCHEMA)

    def sink(self, name: str) -> Flaky:
        return {"lake": self.lake, "copy": self.copy}[name]

    def precommitted(self, revision: Revision | None = None) -> Revision:
        """Take a revision up to where everybody has voted yes."""
        return self.stage(self.coordinator.attempt(revision or self.begin()))

    def committed(self) -> Revision:
        """Take a new checkpoint all the way."""
        return self.coordinator.commit(self.precommitted())

    def replace(self, checkpoint_id: int = 1, run: Run = ME) -> Revision:
        """Begin a replacement."""
        return self.coordinator.replace(run, checkpoint_id)

    def replacing(self, checkpoint_id: int = 1) -> Revision:
        """Take a replacement just past its commit point."""
        revision = self.precommitted(self.replace(checkpoint_id))
        self.coordinator.decide_commit(revision)
        return self.read(revision.key)

    def replaced(self, checkpoint_id: int = 1) -> Revision:
        """Take a replacement all the way."""
        return self.coordinator.commit(self.precommitted(self.replace(checkpoint_id)))

    def staged(self, key: Key, name: str = "lake") -> Path:
        """Return the staging folder that the record names for a sink."""
        handle = self.participants(key)[name].handle
        return Path(f"{handle['table']}.twophase/staging/{handle['name']}")

    def lose(self, key: Key, name: str = "lake") -> Path:
        """Move a staged folder away; return where it is now."""
        staged = self.staged(key, name)
        return staged.rename(staged.parents[2] / f"lost-{staged.name}")

    def read(self, key: Key) -> Revision:
        with self.record.transaction() as tx:
            return tx.revision(key)

    def participants(self, key: Key) -> dict[str, Participant]:
        with self.record.transaction() as tx:
            return {participant.name: participant for participant in tx.participants(key)}

    def output(self, key: Key, name: str = "lake") -> Output:
        return self.participants(key)[name].output(self.read(key))

    def promote(self, key: Key, name: str = "lake") -> Promotion:
        """Promote one sink as another process would, without a word to the record."""
        return Files.promote(self.sink(name), self.output(key, name))

    def events(self, key: Key) -> list[str]:
        with self.record.engine.connect() as connection:
            found = queries.show(connection, self.name, key.checkpoint_id)["events"]
        return [event["action"] for event in found if event["revision"] == key.revision]

    def sql(self, statement: str) -> Any:
        """Do something behind the protocol's back; `:p` is the name of the pipeline."""
        with self.record.engine.begin() as connection:
            found = connection.execute(text(statement), {"p": self.name} if ":p" in statement else {})
            return found.scalar() if found.returns_rows else None

    def age(self, days: int = 30) -> None:
        """Let everything that was superseded have been so for some days."""
        self.sql(
            f"UPDATE twophase.revision SET superseded_at = superseded_at - interval '{days} days' WHERE pipeline = :p"
        )

    def sweep(self) -> list[str]:
        """Sweep; return the names of what went from the table `lake` or beside it."""
        swept = list(sweep(self.record, self.pipeline))
        return sorted(Path(one.path).name for one in swept if one.sink == "lake")

    def beside(self, *kinds: str) -> set[str]:
        """Return what lies beside the table `lake`."""
        side = Path(f"{self.lake.location()}.twophase")
        return {f"{kind}/{path.name}" for kind in kinds for path in (side / kind).iterdir()}

    def differences(self) -> list[object]:
        return [found for found in verify(self.record, self.pipeline) if found]


def words(table: str = "lake/words") -> list[tuple[int, str]]:
    """Return what a reader of a table sees: checkpoint, and the revision and attempt it is from."""
    return sorted((row["id"], row["word"]) for row in visible(table))


class Killed(BaseException):
    """The process is gone."""


def durable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each folder that is made durable."""
    found: list[str] = []
    monkeypatch.setattr(disk, "fsync_folder", lambda path: found.append(str(path)))
    return found
