"""Random schedules of the shipped protocol: runs, recoverers, zombies, crashes; its promises checked at each step.

Every process is a thread that runs real coordinator calls and stops at every primitive step of the record and the
sinks, and at every failpoint. Exactly one has the baton; a schedule says which, and for how long. So a schedule is a
plain list, the same one gives the same history, and it can be shrunk, written down and replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

from support.model.memory_log import MemoryLog
from support.model.memory_ports import MemorySink, MemorySource
from support.model.memory_record import MemoryRecord
from support.model.promises import PIPELINE, Seen, Violation, check_promises, visible_rows
from twophase.core import begin, coordinator, dead_output, finish, restage, steps, votes
from twophase.core.checkpoint import Key, Output, Participant, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.errors import ConfigError, Fenced, IllegalTransition, ManifestMismatch, TwophaseError
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Opened
from twophase.core.states import LIVE, State

LEASE = 10.0
#: How long what was replaced is kept.
RETENTION = 2 * LEASE
#: More than any process ever needs.
TO_THE_END = 100_000

#: A checkpoint takes about 200 steps; who looks for a step that does not come stops here.
FAR = 120

#: What a schedule is made of: a verb and its arguments.
Action = tuple[Any, ...]


class Crash(BaseException):
    """The process is gone: nothing of it runs any more."""


# --- processes -------------------------------------------------------------------------------------------------------


class Process:
    """One operating-system process of the model: a thread that runs only while it holds the baton."""

    def __init__(self, world: World, name: str, run: Run | None, body: Callable[[Process], object]) -> None:
        self.world = world
        self.name = name
        self.run = run
        self.budget = 0
        self.until: str | None = None
        self.killed = False
        self.done = False
        self.at = "start"
        self.outcome: BaseException | None = None
        self._body = body
        self._baton = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def _live(self) -> None:
        self._baton.acquire()
        try:
            if not self.killed:
                self._body(self)
        except Crash:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it was, the scheduler judges it
            self.outcome = error
        self.done = True
        self._back.release()

    def resume(self, budget: int, until: str | None = None) -> None:
        """Let it take some steps, or go on to the next step of a name."""
        if self.done:
            return
        if self.at == "start":
            self._thread.start()
            self.at = "started"
        self.budget, self.until = budget, until
        self.world.current = self
        self._baton.release()
        self._back.acquire()
        self.world.current = None
        if self.done:
            self._thread.join()

    def kill(self) -> None:
        """End it where it stands, without a word."""
        self.killed = True
        if self.at == "start":
            self.done = True
        self.resume(TO_THE_END)

    def pause(self, label: str) -> None:
        """Stop here if the turn is over."""
        self.at = label
        self.budget -= 1
        if self.budget < 0 or label in {self.until, "tx.wait"}:
            self._back.release()
            self._baton.acquire()
            if self.killed:
                raise Crash


# --- the world -------------------------------------------------------------------------------------------------------


@dataclass
class Limits:
    """How large a world may grow, and which of its powers a schedule may use."""

    processes: int = 9
    max_pending: int = 1
    restages: bool = True
    backfills: bool = True
    loses_staging: bool = True
    #: Whether `dwh` is a log table, which takes in what is staged.
    adopts: bool = False
    #: Whether targets may refuse what was voted for.
    objects: bool = False
    #: Whether staged output that was lost may come back.
    brings_back: bool = True
    #: Whether a revision must stay its run's until that run has ended and its lease is out.
    owners: bool = True
    #: Whether two folders can change places in one step.
    exchanges: bool = True


class World:
    """A record, two sinks and a source, and the processes that work on them."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.record = MemoryRecord(self.pause)
        self.source = MemorySource({"0": 2, "1": 1}, limit=1, pause=self.pause)
        kinds = {"dwh": MemoryLog if self.limits.adopts else MemorySink, "lake": MemorySink}
        self.sinks = {name: kind(self.pause, exchanges=self.limits.exchanges) for name, kind in kinds.items()}
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.ended: set[Run] = set()
        self.dag_runs: list[Run] = []
        #: What a stage task hands to the commit and abort tasks of its run.
        self.handed: dict[Run, Revision] = {}
        #: Staged output that was destroyed from outside: (revision, sink).
        self.destroyed: set[tuple[Key, str]] = set()
        #: Where staged output of a replacement came back after it was destroyed: (checkpoint, sink).
        self.returned: set[tuple[int, str]] = set()
        self.seen = Seen()
        self.steps = 0
        self.log: list[str] = []
        self._checked: tuple[int, ...] = ()
        self._trouble: Violation | None = None

    def pause(self, label: str) -> None:
        """Check every promise, then stop the process that has the baton if its turn is over."""
        process = self.current
        if process is None:
            return
        if process.killed:
            raise Crash
        self.steps += 1
        self.check(process)
        process.pause(label)

    def coordinator(self, patience: Sequence[float] = (0.0, 0.0)) -> Coordinator:
        return Coordinator(
            self.record,
            PIPELINE,
            sources={"events": self.source},
            sinks=self.sinks,
            lease=LEASE,
            max_pending=self.limits.max_pending,
            run_ended=self.run_ended,
            patience=patience,
        )

    def run_ended(self, run: Run | None) -> bool | None:
        return run is None or run.dag_id is None or run in self.ended

    # --- what processes do -------------------------------------------------------------------------------------------

    def start(self, kind: str, number: int = 0) -> None:
        """Start a process of a kind; it takes no step yet."""
        name = f"{kind}{len(self.processes)}"
        run: Run | None = None
        if kind == "script":
            run = Run(None, name)
        elif kind == "stage":
            run = Run("dag", name)
            self.dag_runs.append(run)
        elif kind in {"retry", "commit", "abort"}:
            if not self.dag_runs:
                return
            run = self.dag_runs[number % len(self.dag_runs)]
            if run in self.ended:
                return
        bodies: dict[str, Callable[[Process], object]] = {
            "script": self._script,
            "stage": self._stage_task,
            "retry": self._stage_task,
            "commit": self._commit_task,
            "abort": self._abort_task,
            "recover": lambda _: self.coordinator().recover(),
            "sweep": lambda _: self._sweep(),
            "restage": lambda _: self._restage(),
            "backfill": lambda process: self._backfill(process, 1 + number % 3),
            "failing": self._script,
        }
        if kind == "failing":
            run = Run(None, name)
        self.processes.append(Process(self, name, run, bodies[kind]))

    def _script(self, process: Process) -> None:
        """Take one checkpoint through, as `twophase.run` does."""
        assert process.run
        fails = process.name.startswith("failing")
        coordinator = self.coordinator(() if fails else (0.0, 0.0))
        self._bring_to_commit(coordinator, coordinator.open(process.run), fails=fails)

    def _stage_task(self, process: Process) -> None:
        """Stage and vote, hand over to the commit task, and give the lease up."""
        assert process.run
        coordinator = self.coordinator()
        taken = coordinator.open(process.run)
        if taken is None:
            return
        if isinstance(taken, Revision) and self._is_voted_for(coordinator, taken):
            coordinator.rest(taken)
            self.handed[process.run] = taken
            return
        attempt, votes = self._staged(coordinator, taken)
        self.handed[process.run] = attempt
        for vote in votes[:-1]:  # one by one, as who approves does
            coordinator.vote(attempt, vote.name, yes=True, manifest=vote.manifest)
        coordinator.vote_all(attempt, votes, rests=True)

    def _commit_task(self, process: Process) -> None:
        if process.run in self.handed:
            self.coordinator().commit(self.handed[process.run])

    def _abort_task(self, process: Process) -> None:
        if process.run in self.handed:
            self.coordinator().abort(self.handed[process.run], "its run failed")

    def _backfill(self, process: Process, checkpoint_id: int) -> None:
        """Replace one checkpoint."""
        process.run, coordinator = Run(None, process.name), self.coordinator()
        taken = coordinator.open(process.run, checkpoint_id=checkpoint_id, kind="backfill")
        self._bring_to_commit(coordinator, taken)

    def _bring_to_commit(
        self, coordinator: Coordinator, taken: Revision | Opened | None, *, fails: bool = False
    ) -> None:
        """Commit what has every vote already; otherwise stage, vote and commit."""
        if isinstance(taken, Revision) and self._is_voted_for(coordinator, taken):
            coordinator.commit(taken)
        elif taken is not None:
            coordinator.vote_and_commit(*self._staged(coordinator, taken, fails=fails))

    def _is_voted_for(self, coordinator: Coordinator, revision: Revision) -> bool:
        return revision.state is State.PRECOMMITTED and self._still_staged(coordinator, revision)

    def _staged(
        self, coordinator: Coordinator, taken: Revision | Opened, *, fails: bool = False
    ) -> tuple[Revision, list[Participant]]:
        """Stage an attempt, which may be open already; return it with its votes."""
        opened = taken if isinstance(taken, Opened) else coordinator.opened(coordinator.attempt(taken))
        attempt, votes = opened.revision, list[Participant]()
        for participant in opened.participants:
            if participant.attempt != attempt.epoch:
                msg = f"checkpoint {attempt.key}: attempt {participant.attempt} owns it; nothing was staged"
                raise Fenced(msg)
            output = self._write(participant.output(attempt))
            if fails:
                coordinator.vote(attempt, participant.name, yes=False, reason="an audit said no")
                coordinator.abort(attempt, "an audit said no")
                msg = f"checkpoint {attempt.key}: an audit said no"
                raise ManifestMismatch(msg)
            self._kind(participant.name).check(output)
            votes.append(replace(participant, vote=True, manifest=output.manifest))
        return attempt, votes

    def _still_staged(self, coordinator: Coordinator, revision: Revision) -> bool:
        try:
            for participant in coordinator.transact(lambda tx: tx.participants(revision.key)):
                self._kind(participant.name).check(participant.output(revision))
        except ManifestMismatch:
            return False
        return True

    def _kind(self, name: str) -> MemorySink:
        """Return what a participant stages into."""
        return self.sinks[name]

    def _write(self, output: Output) -> Output:
        """Do what Spark does: read the fixed input, write it in two files, seal them."""
        with self.record.transaction() as tx:
            inputs = tx.inputs(output.key)
        rows = MemorySource.read(inputs["events"])
        sink = self.sinks[output.sink]
        for part in range(2):
            sink.write(output.handle, f"part-{part}", rows[part::2])
        return replace(output, manifest=sink.seal(output))

    def _restage(self) -> None:
        """Stage again what a decided revision has lost, and what its target refuses, as a person asks for."""
        coordinator = self.coordinator()
        for found in coordinator.transact(lambda tx: tx.unfinished(PIPELINE)):
            if found.state is not State.COMMITTING:
                continue
            refused = [name for name, kind in found.hindrances.items() if kind == Hindrance.REFUSED]
            try:
                attempt = coordinator.restage(found.key, "a person asked", refused)
            except (ConfigError, IllegalTransition):
                continue
            with self.record.transaction() as tx:
                participants = tx.participants(found.key)
            for participant in participants:
                if participant.attempt == attempt.epoch:
                    output = self._write(participant.output(attempt))
                    self._kind(participant.name).check(output)
                    coordinator.vote(attempt, participant.name, yes=True, manifest=output.manifest)
            coordinator.finish(found.key)

    def _sweep(self) -> None:
        """Remove what the record says is dead, looking at it as `twophase sweep` does."""
        with self.record.transaction() as tx:
            expired = tx.expired(PIPELINE, RETENTION)
        for key in expired:
            with self.record.transaction() as tx:
                tx.mark_swept(key)
        for name, sink in self.sinks.items():
            for old in sink.superseded():
                with self.record.transaction() as tx:
                    swept = tx.revision(Key(PIPELINE, old.checkpoint_id, old.revision)).swept
                if swept:
                    sink.forget(old)
            left = sink.attempts()
            with self.record.transaction() as tx:
                revisions = {item: tx.revision(Key(PIPELINE, item.checkpoint_id, item.revision)) for item in left}
            with self.record.transaction() as tx:
                voted = {
                    item: next(((p.standing or p).attempt for p in tx.participants(found.key) if p.name == name), None)
                    for item, found in revisions.items()
                }
            for item, found in revisions.items():
                if dead_output.why_dead(item.attempt, found, voted[item], manifest=False, copies=sink.copies):
                    sink.remove(item)

    # --- what happens to them ----------------------------------------------------------------------------------------

    def play(self, actions: Sequence[Action]) -> None:
        """Do what a schedule says, then bring everything to its end; raise Violation when a promise was broken."""
        try:
            for action in actions:
                self.log.append(" ".join(map(str, action)))
                self.act(action)
            self.drain()
        finally:
            for process in self.processes:
                process.kill()

    def act(self, action: Action) -> None:
        """Do one thing: `_do_` and its verb."""
        verb, *rest = action
        getattr(self, f"_do_{verb}")(*rest)
        self.check(None)

    def _alive(self, number: int) -> list[Process]:
        """Return the one process that a number stands for, if anybody is alive."""
        alive = [process for process in self.processes if not process.done]
        return [alive[number % len(alive)]] if alive else []

    def _sink(self, number: int) -> tuple[str, MemorySink]:
        return list(self.sinks.items())[number % len(self.sinks)]

    def _do_start(self, kind: str, number: int) -> None:
        if len(self.processes) < self.limits.processes:
            self.start(kind, number)

    def _do_go(self, number: int, steps: int) -> None:
        for process in self._alive(number):
            self.turn(process, steps)

    def _do_upto(self, number: int, label: str) -> None:
        for process in self._alive(number):
            self.turn(process, FAR, label)

    def _do_kill(self, number: int) -> None:
        for process in self._alive(number):
            process.kill()

    def _do_drop(self, _: int) -> None:
        """Let the database give up on sessions that are stopped in a transaction: rolled back, their locks gone."""
        for tx in list(self.record.open):
            tx.end()

    def _do_tick(self, seconds: float) -> None:
        self.record.now += seconds

    def _do_arrive(self, _: int) -> None:
        """Let the database carry out what was sent before its client gave it up for lost."""
        self.record.arrive()

    def _do_fault(self, kind: str) -> None:
        self.record.faults.append(kind)

    def _do_down(self, number: int) -> None:
        _, sink = self._sink(number)
        sink.down = not sink.down

    def _do_object(self, number: int) -> None:
        """Let the target of a sink refuse what was voted for so far, though it was fine at the vote."""
        name, sink = self._sink(number)
        for key, revision in self.record.revisions().items():
            voted = self.record.table("participant").get((key, name))
            if revision.state is State.COMMITTING and voted is not None:
                sink.refused.add((key, voted.attempt))

    def _do_agree(self, number: int) -> None:
        """Let somebody alter the target, so that it takes everything."""
        self._sink(number)[1].refused.clear()

    def _do_unknown(self, number: int) -> None:
        self._sink(number)[1].loses_reply = "before" if number % 3 else "after"

    def _do_grow(self, number: int) -> None:
        self.source.ends[str(number % 2)] += 1

    def _do_end_run(self, number: int) -> None:
        """Let Airflow end a run; its processes may live on as zombies."""
        if self.dag_runs:
            self.ended.add(self.dag_runs[number % len(self.dag_runs)])

    def _do_power(self, number: int) -> None:
        """Cut the power: everybody dies, and renames that nobody made durable did not happen, or only the first few."""
        for process in self.processes:
            process.kill()
        for sink in self.sinks.values():
            sink.power_failure(number)

    def _do_destroy(self, number: int) -> None:
        """Take away staged output of what is decided, as a broken disk or a careless hand does."""
        name, sink = self._sink(number)
        for key, revision in self.record.revisions().items() if self.limits.loses_staging else ():
            if revision.state is State.COMMITTING and sink.hide(key):
                self.destroyed.add((key, name))

    def _do_bring_back(self, number: int) -> None:
        name, sink = self._sink(number)
        for checkpoint_id, revision in sink.bring_back():
            voted = self.record.table("participant").get((Key(PIPELINE, checkpoint_id, revision), name))
            if voted is not None and "replaces" in voted.handle:
                self.returned.add((checkpoint_id, name))

    def _do_straggle(self, number: int) -> None:
        """Let a forgotten executor write one more file into a place that was voted for, or was taken meanwhile."""
        participants = [item for item in sorted(self.record.table("participant").items()) if item[1].vote]
        if participants:
            (_, name), participant = participants[number % len(participants)]
            if name in self.sinks:
                self.sinks[name].write(participant.handle, "straggler", [("0", 0)])

    def turn(self, process: Process, budget: int, until: str | None = None) -> None:
        """Give a process the baton; judge how it ended, if it did."""
        process.resume(budget, until)
        self.log.append(f"  {process.name} at {'its end: ' + repr(process.outcome) if process.done else process.at}")
        if self._trouble:
            raise self._trouble
        if isinstance(process.outcome, Exception) and not isinstance(process.outcome, TwophaseError):
            msg = f"{process.name} broke down"
            raise Violation(msg) from process.outcome
        if isinstance(process.outcome, IllegalTransition):
            msg = f"{process.name} was refused by the record: {process.outcome}"
            raise Violation(msg) from process.outcome

    def drain(self) -> None:
        """Kill everybody, then let recovery and fresh runs finish: everything once, nothing left over."""
        self.end_troubles()
        self.log.append("drain")
        for number in range(20):
            self.record.now += LEASE + 1
            self._finish("recover", number)
            if any(r.parked_reason for r in self.record.revisions().values()):
                self._finish("restage", number)
            process = self._finish("script", number)
            unfinished = [r for r in self.record.revisions().values() if r.state in LIVE | {State.ABORTING}]
            if process.outcome is None and not unfinished and self._whole():
                break
        else:
            if self.returned:  # what came back may stand in the way of the next revision, until a person looks
                return
            msg = f"not drained: {self.describe()}"
            raise Violation(msg)
        for number in range(2):  # what the first one finds in taken/ is put away, which the second one sees
            self._finish("sweep", number)
        left = [f"{name}: {item.path}" for name, sink in self.sinks.items() for item in sink.beside()]
        if left and not self.returned:
            msg = f"not swept: {left}{self.describe()}"
            raise Violation(msg)

    def end_troubles(self) -> None:
        """Kill everybody, and let nothing stand in the way of who comes next."""
        for process in self.processes:
            process.kill()
        self.record.faults.clear()
        self.record.arrive()
        self.ended.update(self.dag_runs)
        for sink in self.sinks.values():
            sink.down, sink.loses_reply = False, None

    def _finish(self, kind: str, number: int) -> Process:
        self.start(kind, number)
        process = self.processes[-1]
        while not process.done:
            self.turn(process, TO_THE_END)
        return process

    def _whole(self) -> bool:
        everything = sorted((p, off) for p, end in self.source.ends.items() for off in range(end))
        return all(sorted(visible_rows(sink)) == everything for sink in self.sinks.values())

    def describe(self) -> str:
        """Return the state of things in a few lines."""
        rows = [f"{r.key} {r.state} e{r.epoch} seq {r.commit_seq}" for r in self.record.revisions().values()]
        for name, sink in self.sinks.items():
            rows += [f"{name}: {path} {folder.marker} {folder.rows()}" for path, folder in sorted(sink.folders.items())]
        return "\n".join(["", *rows])

    # --- the promises ------------------------------------------------------------------------------------------------

    def check(self, process: Process | None) -> None:
        """Check every promise, if anything changed."""
        version = (self.record.version, *(sink.version for sink in self.sinks.values()))
        if version == self._checked or self._trouble:
            return
        self._checked = version
        try:
            check_promises(self, process)
        except Violation as violation:
            self._trouble = violation
            if process is None:
                raise
            process.killed = True
            raise Crash from violation


# --- schedules -------------------------------------------------------------------------------------------------------

LABELS = (
    "begin.before", "begin.inside", "begin.after", "attempt.before", "attempt.after", "vote.inside", "vote.after",
    "commit.before", "commit.inside", "commit.after", "promote.before", "promote.inside", "promote.after",
    "finish.before", "finish.inside", "finish.after", "abort.before", "abort.inside", "abort.after", "abort.discarded",
    "recover.before", "source.discover", "tx.begin", "tx.commit", "tx.committed", "tx.participants", "tx.hold",
    "sink.rename", "sink.taken", "sink.look", "sink.list", "sink.marker", "sink.marker?", "sink.fsync", "sink.visible",
    "sink.remove", "sink.check_taken", "sink.exchange", "sink.write", "sink.replaced?", "sink.markers", "sink.gap",
    "sink.tombstone",
)  # fmt: skip


#: Where it gets interesting: schedules start from one of these.
PROLOGUES: tuple[list[Action], ...] = (
    [("start", "script", 0)],
    [("start", "script", 0), ("upto", 0, "commit.before")],
    [("start", "script", 0), ("upto", 0, "commit.after")],
    [("start", "script", 0), ("upto", 0, "commit.after"), ("destroy", 0), ("tick", LEASE + 1)],
    [("start", "script", 0), ("upto", 0, "promote.after"), ("destroy", 1), ("start", "restage", 0)],
    [("start", "script", 0), ("upto", 0, "commit.after"), ("down", 0), ("start", "recover", 0), ("start", "script", 0)],
    [("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0)],
    [("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "commit.after")],
    [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("start", "recover", 0), ("tick", LEASE + 1),
    ],
    [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "script", 0), ("go", 0, TO_THE_END),
        ("start", "backfill", 0), ("upto", 0, "commit.after"), ("start", "backfill", 1), ("upto", 1, "commit.after"),
    ],
    [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("go", 0, TO_THE_END),
        ("start", "backfill", 0), ("upto", 0, "commit.after"), ("tick", RETENTION + 1),
    ],
    [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("destroy", 0), ("tick", LEASE + 1), ("start", "restage", 0),
    ],
    [("start", "stage", 0), ("go", 0, TO_THE_END), ("start", "commit", 0), ("start", "abort", 0)],
    [("start", "stage", 0), ("go", 0, TO_THE_END), ("end_run", 0), ("start", "stage", 0), ("start", "recover", 0)],
    [("start", "stage", 0), ("go", 0, 80), ("end_run", 0), ("tick", LEASE + 1), ("start", "stage", 1)],
)  # fmt: skip


@dataclass
class Habits:
    """What one schedule does often and what never: a few things at a time get further than everything at once."""

    kinds: list[str]
    labels: list[str]
    troubles: list[str]
    trouble: float

    @classmethod
    def of(cls, random: Random, limits: Limits) -> Habits:
        """Draw the habits of one schedule."""
        kinds = ["commit", "abort", "recover", "sweep", "failing", "stage", "retry", "script"]
        kinds += ["restage"] * limits.restages + ["backfill"] * limits.backfills
        some = random.sample(kinds, random.randint(2, 5))
        if {"commit", "abort", "retry"} & set(some):
            some += ["stage", "stage"]
        troubles = ["kill", "drop", "grow", "end_run", "down", "unknown", "power", "straggle", "lose", "fail", "refuse"]
        troubles += ["late", "arrive"]
        troubles += ["destroy"] * limits.loses_staging + ["bring_back"] * limits.brings_back
        troubles += ["object", "agree"] * limits.objects
        return cls(
            kinds=["script", *some],
            labels=random.sample(LABELS, random.randint(3, 15)),
            troubles=random.sample(troubles, random.randint(1, 5)),
            trouble=random.choice((0.05, 0.15, 0.3)),
        )


def random_action(random: Random, habits: Habits) -> Action:
    """Return one action."""
    number = random.randrange(12)
    if random.random() < habits.trouble:
        verb = random.choice(habits.troubles)
        return ("fault", verb) if verb in {"lose", "fail", "refuse", "late"} else (verb, number)
    roll = random.random()
    if roll < 0.28:
        return ("start", random.choice(habits.kinds), number)
    if roll < 0.45:
        return ("go", number, random.choice((1, 2, 3, 5, 8, 15, 30)))
    if roll < 0.58:
        return ("go", number, TO_THE_END)
    if roll < 0.90:
        return ("upto", number, random.choice(habits.labels))
    return ("tick", random.choice((LEASE / 2, LEASE + 1, RETENTION + 1)))


def random_schedule(seed: int, limits: Limits | None = None, length: int = 45) -> list[Action]:
    """Return the schedule of a seed."""
    random = Random(seed)
    habits = Habits.of(random, limits or Limits())
    return [*random.choice(PROLOGUES), *(random_action(random, habits) for _ in range(length))]


@contextmanager
def world(limits: Limits | None = None) -> Iterator[World]:
    """Make a world whose processes stop at the failpoints of the shipped code."""
    made = World(limits)
    with ExitStack() as stack:
        for module in (begin, coordinator, finish, restage, steps, votes):
            stack.enter_context(mock.patch.object(module, "hit", made.pause))
        yield made


def replay(actions: Sequence[Action], limits: Limits | None = None) -> World:
    """Play a schedule in a fresh world; raise Violation when a promise was broken, with the history."""
    with world(limits) as made:
        try:
            made.play(actions)
        except Violation as violation:
            violation.add_note("\n".join([*made.log, made.describe()]))
            raise
    return made
