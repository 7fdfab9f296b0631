"""A pipeline with state in the model: one more participant, replays of it, and what must hold after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast
from unittest import mock

from support.model import schedules
from support.model.memory_ports import ATTEMPT, Left, MemorySink, MemorySource
from support.model.memory_record import Pause, Row
from support.model.promises import PIPELINE, Violation, must
from support.model.schedules import LEASE, Action, Limits, Process, World
from twophase.core import begin, coordinator, finish, restage, steps, votes
from twophase.core.checkpoint import Base, Json, Key, Output, Revision, Run
from twophase.core.claims import Claim
from twophase.core.coordinator import Coordinator
from twophase.core.errors import ManifestMismatch
from twophase.core.hindrances import Hindrance
from twophase.core.lineage import Lineage
from twophase.core.ports import Lane, Outcome, Promotion
from twophase.core.states import State

#: A row of the source, and the revision that brought it into the state.
StateRow = tuple[str, int, int]


class MemoryState:
    """Files that stay where they are staged; the manifest in the record says which of them are the state."""

    copies = False
    ordered = False

    def __init__(self, pause: Pause) -> None:
        self.pause = pause
        self.files: dict[str, tuple[StateRow, ...]] = {}
        self.version = 0

    def objection(self, *, latest: bool) -> str | None:
        return None if latest else "later checkpoints were computed from its state"

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        return {"name": f"{key.checkpoint_id}.r{key.revision}.a{attempt}.{token}"}

    def prepare(self, slot: str | None = None) -> None:
        pass

    def claim(self, slot: str) -> Claim | None:
        raise NotImplementedError  # a state has no slots

    def adopt(self, key: Key, slot: str) -> Output | None:
        raise NotImplementedError  # a state has no slots

    def newest(self, pipeline: str) -> int | None:
        return 0

    def markers(self, pipeline: str) -> Iterable[tuple[int, int]]:
        return ()

    def stage(self, output: Output, before: Sequence[StateRow], rows: Sequence[Row]) -> Json:
        """Write what was there and what came, as one file."""
        self.pause("state.write")
        name = output.handle["name"]
        self.files[name] = (*before, *((*row, output.key.revision) for row in rows))
        self.version += 1
        return {"digest": name, "file": name, "content": self.files[name], "rows": 0, "bytes": 0}

    def check(self, output: Output) -> None:
        self.pause("state.check")
        if output.manifest["file"] not in self.files:
            msg = f"checkpoint {output.key}: state {output.manifest['file']} is gone"
            raise ManifestMismatch(msg)

    def find(self, output: Output) -> Promotion:
        self.pause("state.look")
        if output.manifest["file"] in self.files:
            return Promotion(Outcome.RETRY_LATER, "its files are there")
        return Promotion(Outcome.FAILED, "its file is gone", Hindrance.LOST)

    def promote(self, output: Output) -> Promotion:
        found = self.find(output)
        return found if found.outcome is Outcome.FAILED else Promotion(Outcome.PROMOTED, attempt=output.attempt)

    def discard(self, output: Output) -> None:
        prefix = f"{output.key.checkpoint_id}.r{output.key.revision}."
        for name in [name for name in self.files if name.startswith(prefix)]:
            self.pause("state.remove")
            self.files.pop(name, None)
            self.version += 1

    def discard_earlier(self, output: Output, voted: Output) -> None:
        raise NotImplementedError  # it takes in what is staged

    # --- for the sweep of the model ----------------------------------------------------------------------------------

    def superseded(self) -> list[Any]:
        return []

    def attempts(self) -> list[Left]:
        found = [(name, ATTEMPT.fullmatch(name)) for name in self.files]
        return [Left(int(match[1]), int(match[2]), int(match[3]), name) for name, match in found if match]

    def remove(self, left: Left) -> None:
        self.pause("state.remove")
        self.files.pop(left.path, None)
        self.version += 1


class StateWorld(World):
    """A world whose pipeline keeps every row it has ever read as its state."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.state = MemoryState(self.pause)
        self._looked: tuple[int, int] = (0, 0)

    def coordinator(self, patience: Sequence[float] = (0.0, 0.0)) -> Coordinator:
        made = super().coordinator(patience)
        made.sinks, made.states = {**self.sinks, "state": self.state}, {"state"}
        return made

    def start(self, kind: str, number: int = 0) -> None:
        if kind != "replay":
            super().start(kind, number)
            return
        name = f"replay{len(self.processes)}"
        body: Callable[[Process], object] = lambda process: self._replay(process, 1 + number % 3)  # noqa: E731
        self.processes.append(Process(self, name, Run(None, name), body))

    def _replay(self, process: Process, first: int) -> None:
        """Replay from a checkpoint through the latest, as a backfill does; another one from there goes on with it."""
        process.run, coordinator = Run(None, process.name), self.coordinator()
        replay = f"from {first}"
        coordinator.recover(decided_only=True)
        with self.record.transaction() as tx:
            tx.lock(PIPELINE)
            Lineage(PIPELINE).check_idle(tx, "a replay")
            if tx.committed_revision(PIPELINE, first) is None or not tx.hold_lane(PIPELINE, replay, first):
                return
        number = first
        while True:
            with self.record.transaction() as tx:
                if tx.committed_revision(PIPELINE, number) is None and tx.live_revision(PIPELINE, number) is None:
                    break
            taken = coordinator.open(process.run, checkpoint_id=number, kind="backfill", backfill=replay)
            if isinstance(taken, Revision) and taken.state not in {State.OPEN, State.PRECOMMITTED}:
                coordinator.finish(taken.key)
            else:
                self._bring_to_commit(coordinator, taken)
            number += 1
        with self.record.transaction() as tx:
            tx.lock(PIPELINE)
            if tx.lane(PIPELINE).replay == replay and tx.lane(PIPELINE).stale_from is None:
                tx.hold_lane(PIPELINE, None, first)

    def _write(self, output: Output) -> Output:
        if output.sink != "state":
            return super()._write(output)
        with self.record.transaction() as tx:
            rows = MemorySource.read(tx.inputs(output.key)["events"])
            before = tx.states(PIPELINE, tx.base(output.key) or Base()).get("state", {}).get("content", ())
        return replace(output, manifest=self.state.stage(output, before, rows))

    def _kind(self, name: str) -> MemorySink:
        return cast("MemorySink", self.state) if name == "state" else self.sinks[name]  # it is asked the same

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self, process: Process | None) -> None:
        super().check(process)
        version = (self.record.version, self.state.version)
        if version == self._looked or self._trouble:
            return
        self._looked = version
        try:
            self._check_states()
        except Violation as violation:
            self._trouble = violation
            if process is None:
                raise
            process.killed = True
            raise schedules.Crash from violation

    def _check_states(self) -> None:
        """See that each standing state, up to the first stale one, holds every row once, and has its file.

        A row says which revision brought it, so a state that was computed from one that no longer stands shows.
        """
        standing: dict[int, Key] = {}
        for key, revision in self.record.revisions().items():
            if revision.commit_seq is not None:
                standing[key.checkpoint_id] = key
        lane: Lane = self.record.table("lane").get(PIPELINE, Lane())
        expected: list[StateRow] = []
        for number in sorted(standing):
            fixed = self.record.table("checkpoint")[PIPELINE, number]["inputs"]["events"]
            expected += [(*row, standing[number].revision) for row in MemorySource.read(fixed)]
            found = self.record.table("participant")[standing[number], "state"]
            manifest = (found.standing or found).manifest
            must(manifest["file"] in self.state.files, "the state of {} is gone", standing[number])
            if lane.stale_from is None or number < lane.stale_from:
                content = sorted(manifest["content"])
                must(
                    content == sorted(expected),
                    "the state of {} is {}, expected {}",
                    standing[number],
                    content,
                    expected,
                )

    def drain(self) -> None:
        """Let a replay that is under way, or has to come, end first."""
        self.end_troubles()
        for number in range(20):
            lane: Lane = self.record.table("lane").get(PIPELINE, Lane())
            if lane == Lane():
                break
            self.record.now += LEASE + 1
            self._finish("recover", number)
            first = lane.first or lane.stale_from or 1
            self._finish("replay", first - 1)
        super().drain()


def replay_with_state(actions: Sequence[Action], limits: Limits | None = None) -> StateWorld:
    """Play a schedule in a fresh world with state; raise Violation when a promise was broken, with the history."""
    made = StateWorld(limits)
    with ExitStack() as stack:
        for module in (begin, coordinator, finish, restage, steps, votes):
            stack.enter_context(mock.patch.object(module, "hit", made.pause))
        try:
            made.play(actions)
        except Violation as violation:
            violation.add_note("\n".join([*made.log, made.describe()]))
            raise
    return made
