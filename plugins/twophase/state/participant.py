"""`StateRuns`: a pipeline's state as one more participant of its checkpoints; `Pipeline` makes it.

It is a sink that promotes by nothing but the record. Run files stay where an attempt wrote them, and the manifest that
the attempt voted for is the state from the commit point on. Nobody reads those files but through the record, so there
is nothing to make visible: promotion only looks whether the files are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ManifestMismatch
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.base import Attempt, Sink
from twophase.state import verification
from twophase.state.manifest import StateManifest
from twophase.storage import disk

if TYPE_CHECKING:
    from twophase.core.checkpoint import Json, Key, Output
    from twophase.state.declaration import State

#: How the name of a run begins: checkpoint, revision, attempt.
RUN = re.compile(r"(\d{8,})\.r(\d+)\.a(\d+)\.[^/]+\.arrow(?:\.tmp)?")


class StateRuns(Sink):
    """One state of a pipeline."""

    #: Runs stay where they are staged.
    copies = False
    identity = ()
    fixed_while_pending = ()

    def __init__(self, declared: State, pipeline: str, name: str | None = None) -> None:
        """Keep what is declared, and where its runs are."""
        self.declared = declared
        self.pipeline = pipeline
        self.home = declared.home(pipeline, name)
        #: Files that `verify` has read already: later checkpoints list them again.
        self._read: dict[str, list[str]] = {}

    def config(self) -> dict[str, Any]:
        """Return the arguments of what is declared."""
        return self.declared.config()

    def location(self) -> str:
        """Return the folder of the state: only one pipeline may keep its state there."""
        return str(self.home)

    def folders(self) -> tuple[str, ...]:
        """Return the folder of the state."""
        return (str(self.home),)

    def objection(self, *, latest: bool) -> str | None:
        """Say that a checkpoint in the middle cannot be replaced alone: later states were computed from its own."""
        if latest:
            return None
        return "later checkpoints were computed from its state; run them again too: --checkpoints N..latest"

    def prepare(self, slot: str | None = None) -> None:  # noqa: ARG002 - a state has no slots
        """Make the folder of the runs."""
        runs = self.home / "runs"
        if not runs.is_dir():
            runs.mkdir(parents=True, exist_ok=True)
            disk.fsync_folder(self.home)
            disk.fsync_folder(self.home.parent)

    def place(
        self,
        key: Key,
        attempt: int,
        token: str,
        *,
        slot: str | None = None,  # noqa: ARG002 - a state has no slots
        older: Output | None = None,  # noqa: ARG002 - what it replaces stays where it is
    ) -> Json:
        """Name how the files of this attempt begin."""
        return {"home": str(self.home), "name": f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}"}

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401, ARG002 - a DataFrame
        """Refuse: a new state is staged together with the look-ups in the old one, by `spark.kept_state`."""
        self._refuse("it is staged by what reads it, not as a frame of its own")

    def check(self, output: Output) -> None:
        """Raise ManifestMismatch unless every file of the state is there, and those of this attempt byte by byte."""
        manifest = StateManifest.of_json(output.manifest)
        for problem in verification.missing(self.home, manifest):
            msg = f"{output.which}: {problem}; stage it again"
            raise ManifestMismatch(msg)
        for problem in verification.damages(self.home, manifest, only=output.handle["name"]):
            msg = f"{output.which}: {problem}; stage it again"
            raise ManifestMismatch(msg)

    def find(self, output: Output) -> Promotion:
        """Say whether every file that the manifest lists is there; only the record says that it is promoted."""
        if not self.home.is_dir():
            return Promotion(Outcome.RETRY_LATER, f"folder {self.home} is not there; is its storage mounted?")
        gone = verification.missing(self.home, StateManifest.of_json(output.manifest))
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            return Promotion(Outcome.FAILED, f"{gone[0]}{more}", Hindrance.LOST)
        return Promotion(Outcome.RETRY_LATER, "its files are there")

    def promote(self, output: Output) -> Promotion:
        """Look whether the files are there: the decision has made them the state."""
        found = self.find(output)
        there = found.outcome is Outcome.RETRY_LATER and self.home.is_dir()
        return Promotion(Outcome.PROMOTED, attempt=output.attempt) if there else found

    def discard(self, output: Output) -> None:
        """Remove the runs of every attempt of an aborted revision."""
        key = output.key
        for left in self.attempts():
            if (left.checkpoint_id, left.revision) == (key.checkpoint_id, key.revision):
                self.remove(left)

    def attempts(self) -> Iterator[Attempt]:
        """List the runs of all attempts."""
        for path in sorted(self.home.glob("runs/*")):
            if match := RUN.fullmatch(path.name):
                yield Attempt(int(match[1]), int(match[2]), int(match[3]), str(path))

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List the runs of some revisions."""
        return (left for left in self.attempts() if left[:2] in revisions) if revisions else iter(())

    def remove(self, left: Attempt) -> None:
        """Remove one run."""
        Path(left.path).unlink(missing_ok=True)

    def verify(self, output: Output) -> Iterator[str]:
        """Compare every file that the manifest lists with its checksum; each file is read once, whoever lists it."""
        manifest = StateManifest.of_json(output.manifest)
        for run in manifest.files():
            if run.path not in self._read:
                self._read[run.path] = list(verification.damages(self.home, manifest, only=run.path))
            yield from self._read[run.path]

    def newest(self, pipeline: str) -> int | None:  # noqa: ARG002 - it holds nothing but what the record says
        """Return 0: the record is the only one that knows what a state is made of."""
        return 0
