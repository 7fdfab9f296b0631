"""A pipeline whose checkpoints are replaced, with every step in a test's hands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from support.pipelines import rules_bench
from support.pipelines.rules_bench import ME, words
from twophase.core.checkpoint import Key, Output, Participant, Revision, Run
from twophase.core.ports import Promotion
from twophase.sinks.files.sink import Files
from twophase.storage import disk
from twophase.sweep import sweep
from twophase.verification import verify

if TYPE_CHECKING:
    import pytest

__all__ = ["ME", "Bench", "Killed", "durable", "words"]


class Bench(rules_bench.Bench):
    """One pipeline with the tables `lake` and `copy`, and what a test of replacements does with it."""

    def vote(self, revision: Revision, participant: Participant) -> None:
        """Stage one output, check it, and vote yes for it."""
        manifest = self.write(revision, participant)
        self.sink(participant.name).check(replace(participant, manifest=manifest).output(revision))
        self.coordinator.vote(revision, participant.name, yes=True, manifest=manifest)

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

    def output(self, key: Key, name: str = "lake") -> Output:
        return self.participants(key)[name].output(self.read(key))

    def promote(self, key: Key, name: str = "lake") -> Promotion:
        """Promote one sink as another process would, without a word to the record."""
        return Files.promote(self.sink(name), self.output(key, name))

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


class Killed(BaseException):
    """The process is gone."""


def durable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each folder that is made durable."""
    found: list[str] = []
    monkeypatch.setattr(disk, "fsync_folder", lambda path: found.append(str(path)))
    return found
