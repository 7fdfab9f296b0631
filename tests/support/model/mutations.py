"""Ways to break the protocol, each with a schedule that shows the harm.

A mutation rewrites a few words of a shipped function while it is applied; one that no longer finds its words says so.
`PYTHONPATH=tests python -m support.model.mutations [name …]` looks for schedules that catch them, for when the code has
moved on.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

from support.model import memory_ports, memory_record
from support.model.memory_ports import MemoryPromoter, MemorySink
from support.model.memory_record import MemoryTransaction
from support.model.promises import Violation
from support.model.schedules import LEASE, RETENTION, TO_THE_END, Action, Limits, random_schedule, replay
from twophase.core import begin, dead_output, promotion, recovery, restage, states, steps
from twophase.core.begin import Begin
from twophase.core.coordinator import Coordinator
from twophase.core.restage import Restaging
from twophase.core.states import State
from twophase.core.steps import Steps

#: How far to look when a recorded seed catches nothing any more.
SEARCH = 400


@dataclass(frozen=True)
class Edit:
    """Other words in one function."""

    module: ModuleType
    owner: Any
    function: str
    words: tuple[tuple[str, str], ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(self.owner, self.function))))
        for old, new in self.words:
            if source.count(old) != 1:
                msg = f"{self.function}: expected these words once, found {source.count(old)}: {old!r}"
                raise LookupError(msg)
            source = source.replace(old, new)
        made: dict[str, Callable[..., Any]] = {}
        code = "from __future__ import annotations\n" + source
        exec(compile(code, f"<{self.function}, mutated>", "exec"), vars(self.module), made)
        with mock.patch.object(self.owner, self.function, made[self.function]):
            yield


@dataclass(frozen=True)
class Allow:
    """One more transition in the table of states."""

    before: State
    to: State

    @contextmanager
    def applied(self) -> Iterator[None]:
        with mock.patch.dict(states.ENTERED_FROM, {self.to: states.ENTERED_FROM[self.to] | {self.before}}):
            yield


@dataclass(frozen=True)
class Mutation:
    """One way to break the protocol: the rule that goes, and how."""

    name: str
    rule: str
    changes: tuple[Edit | Allow, ...]
    limits: Limits = field(default_factory=Limits)

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(change.applied())
            yield

    def schedule(self, seed: int | list[Action]) -> list[Action]:
        return random_schedule(seed, self.limits) if isinstance(seed, int) else seed

    def caught_by(self, seed: int | list[Action]) -> str | None:
        """Return the promise that a schedule finds broken; None: it finds nothing."""
        with self.applied():
            try:
                replay(self.schedule(seed), self.limits)
            except Violation as violation:
                return str(violation)
        return None


def core(function: str, *words: tuple[str, str]) -> Edit:
    owner = next(one for one in Coordinator.__mro__ if function in vars(one))
    return Edit(sys.modules[owner.__module__], owner, function, words)


def step(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(steps, Steps, function, words)


def beginner(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(begin, Begin, function, words)


def recovering(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(recovery, recovery, function, words)


def sweeper(*words: tuple[str, str]) -> Edit:
    return Edit(dead_output, dead_output, "why_dead", words)


def sink(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(memory_ports, MemorySink, function, words)


def promoter(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(memory_ports, MemoryPromoter, function, words)


#: What comes before the vote of a restage.
DESTROY = "Restaging(self, revision.key).is_superfluous(revision, name, manifest or {})"
#: Without lost staging and restage: most rules do not need them.
PLAIN = Limits(restages=False, loses_staging=False, brings_back=False)

MUTATIONS = (
    Mutation(
        "promote from the staging place itself",
        "R1",
        (
            promoter(
                "_take",
                ('mine = f"taken/{self.prefix}.{self.sink._fresh()}"', "mine = source"),
                ("self.sink._rename(source, mine)", "self.sink._step('rename')"),
                ('self.sink._rename(mine, f"{mine}.junk")', "pass"),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "exchange without looking at what comes out",
        "R1",
        (
            promoter(
                "_take",
                ('mine = f"taken/{self.prefix}.{self.sink._fresh()}"', 'mine = f"taken/{self.prefix}.same"'),
                ("self.sink._rename(source, mine)", "source == mine or self.sink._rename(source, mine)"),
            ),
            promoter("_exchange", ("if not self._is_replaced(mine):", "if False:"), ("self._supersede(mine)", "pass")),
            promoter("promote", ("self._put_away()", "pass")),
        ),
        PLAIN,
    ),
    Mutation(
        "delete what an exchange brought out",
        "R1",
        (
            promoter(
                "_supersede",
                ('self.sink._rename(mine, f"superseded/', 'self.sink._remove(mine) or str(f"superseded/'),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "take what an exchange brought out for junk",
        "R1",
        (promoter("_take", ("if self._is_replaced(mine):", "if False:")),),
        PLAIN,
    ),
    Mutation(
        "count a marker without making it durable",
        "R2",
        (promoter("_promoted", ("self.sink._fsync()", "pass")),),
        PLAIN,
    ),
    Mutation(
        "count an exchange without making it durable",
        "R2",
        (
            promoter("_promoted", ("self.sink._fsync()", "pass")),
            promoter("_exchange", ("self.sink._fsync()", "pass")),
            promoter("_supersede", ("self.sink._fsync()", "pass")),
        ),
        PLAIN,
    ),
    Mutation(
        "retention frees the name of a replaced revision",
        "R3",
        (sink("forget", ("if self.exchanges:", "if True:")),),
        Limits(restages=False, loses_staging=False, brings_back=False, exchanges=False),
    ),
    Mutation(
        "replace what is not committed",
        "R4",
        (beginner("replace", ("if tx.committed_revision(self.pipeline, checkpoint_id) is None:", "if False:")),),
        PLAIN,
    ),
    Mutation(
        "replace while a revision is live",
        "R5",
        (beginner("replace", ("live = tx.live_revision(self.pipeline, checkpoint_id)", "live = None")),),
        PLAIN,
    ),
    Mutation(
        "the marker of the replaced revision counts",
        "R6",
        (
            promoter(
                "_promoted",
                ("if self._is_replaced(self.visible):", "if False:"),
                ("found.revision > self.marker.revision or", "found.revision != self.marker.revision or"),
                ("if found.revision > self.marker.revision:", "if found.revision != self.marker.revision:"),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "an aborted range goes to the next checkpoint",
        "R4, principle 3",
        (beginner("begin", ("newest.state not in DECIDED", "False")),),
        PLAIN,
    ),
    Mutation(
        "a replacement moves the position",
        "R4",
        (step("decide", ("if replaces is None:", "if True:")),),
        PLAIN,
    ),
    Mutation(
        "a new revision while one is live",
        "R5",
        (
            beginner(
                "_go_on", ("if newest.state in UNDECIDED", "if newest.state in UNDECIDED and newest.run == self.run")
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "a late vote counts for the newer attempt",
        "R7",
        (
            step(
                "vote",
                ("held.epoch != attempt.epoch or mine is None or mine.attempt != attempt.epoch", "mine is None"),
                ("State.PRECOMMITTED, epoch=attempt.epoch", "State.PRECOMMITTED, epoch=held.epoch"),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "one yes is enough",
        "R7",
        (
            step("vote", ("all(p.vote for", "any(p.vote for")),
            step("decide", ("any(not p.vote or p.attempt", "any(p.attempt")),
        ),
        PLAIN,
    ),
    Mutation("an attempt after the decision", "R8", (Allow(State.COMMITTING, State.OPEN),), PLAIN),
    Mutation(
        "abort after the decision",
        "R9",
        (Allow(State.COMMITTING, State.ABORTING), step("abort", ("if held.state in UNDECIDED or", "if True or"))),
        PLAIN,
    ),
    Mutation(
        "sweep an attempt that was voted for",
        "R10",
        (sweeper(("and attempt != voted and not manifest and copies", "and not manifest and copies")),),
    ),
    Mutation(
        "sweep what an adopting sink may still take in",
        "R10",
        (sweeper(("and not manifest and copies", "and not manifest")),),
        Limits(loses_staging=False, brings_back=False, objects=True, adopts=True),
    ),
    Mutation(
        "a sink that keeps the order is promoted lane by lane",
        "R12, R13",
        (step("queue", ("any(sink.ordered for sink in self.sinks.values())", "False")),),
        Limits(restages=False, loses_staging=False, brings_back=False, adopts=True),
    ),
    Mutation(
        "a restage leaves what earlier attempts staged",
        "R21",
        (Edit(restage, Restaging, "is_superfluous", (("if sink.copies:", "if False:"),)),),
        Limits(loses_staging=False, brings_back=False, objects=True),
    ),
    Mutation(
        "a restage votes before it destroys",
        "R21",
        (
            core(
                "vote",
                (f"if restaged and {DESTROY}:", "if False:"),
                (
                    "return self.vote_all(revision, [mine], audits)",
                    f"state = self.vote_all(revision, [mine], audits)\n    restaged and {DESTROY}\n    return state",
                ),
            ),
        ),
        Limits(loses_staging=False, brings_back=False, objects=True),
    ),
    Mutation(
        "the record keeps its own attempt, not the sink's",
        "R10",
        (step("_name_promoted", ("tx.put_participant(", "(")),),
        Limits(loses_staging=False, brings_back=False, objects=True, adopts=True),
    ),
    Mutation(
        "sweep the attempt that is being staged",
        "R11",
        (sweeper(("State.PRECOMMITTED if attempt <", "State.PRECOMMITTED if attempt <=")),),
        PLAIN,
    ),
    Mutation(
        "sweep what an exchange brought out",
        "R11",
        (
            sink("remove", ("if marker is not None and (marker.revision,", "if False and (marker.revision,")),
            promoter("promote", ("self._put_away()", "pass")),
        ),
        PLAIN,
    ),
    Mutation(
        "commit_seq from a sequence",
        "R12",
        (
            core("decide_commit", ("tx.lock(self.pipeline, revision.key)", "pass")),
            core("vote_and_commit", ("tx.lock(self.pipeline, attempt.key)", "tx.reach(self.pipeline)")),
            Edit(
                memory_record,
                MemoryTransaction,
                "take_commit_seq",
                (
                    (
                        'return self._take(pipeline, "commit_seq")',
                        (
                            'numbers = self.record.table("sequence")\n'
                            '    numbers["n"] = numbers.get("n", 0) + 1\n'
                            '    return numbers["n"]'
                        ),
                    ),
                ),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "no limit at the commit point",
        "R13",
        (step("check_pending", ("raise TooManyPending(msg)", "return")),),
        PLAIN,
    ),
    Mutation(
        "promote out of turn",
        "R13",
        (
            core(
                "finish",
                (
                    "self._promote_pending(revision, upto=revision.commit_seq)",
                    "self._promote(self.transact(partial(self._decided, key)), {})",
                ),
            ),
            core("_finish", ("if decided.others or", "if")),
        ),
        Limits(restages=False, loses_staging=False, brings_back=False, max_pending=2),
    ),
    Mutation(
        "the older revision is not superseded",
        "R14",
        (step("finish", ("if older is not None:", "if False:")),),
        PLAIN,
    ),
    Mutation(
        "supersede in a transaction of its own",
        "R14",
        (
            step("finish", ("if older is not None:", "if False:")),
            core(
                "_record_all",
                (
                    'hit("finish.before")',
                    (
                        'hit("finish.before")\n'
                        "    def first(tx):\n"
                        "        older = tx.committed_revision(self.pipeline, key.checkpoint_id)\n"
                        "        if older is not None and tx.hold(key).state is State.COMMITTING:\n"
                        "            tx.move(older.key, State.SUPERSEDED, epoch=older.epoch)\n"
                        "    self.transact(first)"
                    ),
                ),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "COMMITTED while a sink waits",
        "principle 6",
        (core("_promote", ("if not failed and not waiting:", "if not failed:")),),
        PLAIN,
    ),
    Mutation(
        "an unknown outcome counts as promoted",
        "principle 7",
        (
            Edit(promotion, promotion, "promote", (("promotion.outcome is Outcome.UNKNOWN", "False"),)),
            core("_promote", ("found.outcome in VISIBLE", "found.outcome in {*VISIBLE, Outcome.UNKNOWN}")),
        ),
        PLAIN,
    ),
    Mutation(
        "discard before the move to ABORTING",
        "principle 7",
        (
            core(
                "abort",
                (
                    "current = self.transact(",
                    (
                        "for p in self.transact(lambda tx: tx.participants(revision.key)):\n"
                        "        self.sinks[p.name].discard(p.output(revision))\n"
                        "    current = self.transact("
                    ),
                ),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "abort whatever attempt is there",
        "R15",
        (step("abort", ("epoch=revision.epoch,", "epoch=held.epoch,"), ("held.run != revision.run", "False")),),
        PLAIN,
    ),
    Mutation(
        "recovery aborts what waits for its run",
        "R16",
        (recovering("decide", ("State.PRECOMMITTED if run_ended", "State.PRECOMMITTED if True")),),
        PLAIN,
    ),
    Mutation(
        "a replacement takes over what waits for its run",
        "R16",
        (beginner("_take_over", ("if left.run not in {self.run, ended}:", "if False:")),),
        PLAIN,
    ),
    Mutation(
        "recovery aborts under a lease",
        "principle 5",
        (
            recovering("decide", ("case _ if revision.leased", "case _ if False")),
            core("_execute", ("unleased=True", "unleased=False")),
        ),
        PLAIN,
    ),
    Mutation(
        "a new checkpoint without a second look",
        "principle 8",
        (beginner("begin", ("again = self._go_on(tx, newest, slot, ended)", "again = None")),),
        PLAIN,
    ),
    Mutation(
        "begin without the lock",
        "principle 8",
        (beginner("go_on", ("tx.lock(self.pipeline)", "pass")), beginner("begin", ("tx.lock(self.pipeline)", "pass"))),
        PLAIN,
    ),
    Mutation(
        "the commit point twice after a lost reply",
        "principle 7",
        (step("decide", ("if held.state in DECIDED and held.epoch == attempt.epoch:", "if False:")),),
        PLAIN,
    ),
)


#: For each, a schedule that shows the harm: a seed, or the schedule itself where chance seldom finds one.
SCHEDULES: dict[str, int | list[Action]] = {
    "promote from the staging place itself": [
        ("start", "script", 0), ("upto", 0, "commit.after"), ("upto", 0, "sink.check_taken"), ("go", 0, 0),
        ("straggle", 0), ("go", 0, TO_THE_END),
    ],
    "count a marker without making it durable": 10,
    "exchange without looking at what comes out": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, TO_THE_END), ("go", 0, 1),
    ],
    "delete what an exchange brought out": 3,
    "take what an exchange brought out for junk": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("tick", LEASE + 1), ("start", "recover", 0), ("upto", 1, "sink.rename"), ("upto", 1, "sink.rename"),
        ("upto", 0, "sink.visible"), ("go", 1, TO_THE_END),
    ],
    "count an exchange without making it durable": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("go", 0, TO_THE_END), ("power", 0),
    ],
    "retention frees the name of a replaced revision": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.check_taken"),
        ("upto", 0, "sink.rename"), ("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, TO_THE_END),
        ("tick", RETENTION), ("start", "sweep", 0), ("go", 1, TO_THE_END), ("go", 0, TO_THE_END),
    ],
    "replace what is not committed": [
        ("down", 0), ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "failing", 0), ("go", 0, TO_THE_END),
        ("start", "backfill", 1), ("go", 0, TO_THE_END),
    ],
    "replace while a revision is live": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "begin.after"),
        ("start", "backfill", 0), ("go", 1, TO_THE_END),
    ],
    "the marker of the replaced revision counts": 3,
    "sweep what an exchange brought out": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("upto", 0, "sink.visible"), ("kill", 0), ("tick", LEASE + 1), ("start", "recover", 0), ("go", 0, TO_THE_END),
        ("start", "sweep", 0), ("go", 0, TO_THE_END),
    ],
    "supersede in a transaction of its own": 3,
    "a replacement takes over what waits for its run": [
        ("start", "stage", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("go", 0, TO_THE_END),
    ],
    "an aborted range goes to the next checkpoint": 0,
    "a replacement moves the position": 3,
    "a new revision while one is live": 0,
    "a late vote counts for the newer attempt": [
        ("start", "stage", 0), ("upto", 0, "sink.check"), ("end_run", 0), ("tick", LEASE + 1),
        ("start", "script", 0), ("upto", 1, "attempt.after"), ("go", 0, TO_THE_END), ("go", 0, TO_THE_END),
    ],
    "one yes is enough": 0,
    "an attempt after the decision": [
        ("start", "stage", 0), ("go", 0, TO_THE_END), ("start", "retry", 0), ("upto", 0, "begin.after"),
        ("start", "commit", 0), ("upto", 1, "sink.check_taken"), ("go", 0, TO_THE_END),
    ],
    "abort after the decision": 247,
    "sweep an attempt that was voted for": [
        ("start", "script", 0), ("upto", 0, "commit.after"), ("destroy", 0), ("kill", 0), ("tick", LEASE + 1),
        ("start", "restage", 0), ("upto", 0, "sink.write"), ("start", "sweep", 0), ("go", 1, TO_THE_END),
    ],
    "sweep what an adopting sink may still take in": [
        ("start", "script", 0), ("upto", 0, "sink.append"), ("object", 0), ("tick", LEASE + 1), ("start", "recover", 0),
        ("go", 1, TO_THE_END), ("start", "restage", 0), ("upto", 1, "vote.after"), ("start", "sweep", 0),
        ("go", 2, TO_THE_END), ("go", 0, TO_THE_END),
    ],
    "a sink that keeps the order is promoted lane by lane": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("down", 0), ("start", "backfill", 0), ("go", 0, TO_THE_END),
        ("start", "script", 0), ("upto", 0, "commit.before"), ("down", 0), ("go", 0, TO_THE_END),
    ],
    "a restage leaves what earlier attempts staged": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("object", 0), ("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, TO_THE_END),
        ("start", "restage", 0), ("go", 1, TO_THE_END), ("go", 0, 1),
    ],
    "a restage votes before it destroys": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "sink.exchange"),
        ("object", 0), ("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, TO_THE_END),
        ("start", "restage", 0), ("upto", 1, "vote.inside"), ("upto", 1, "sink.list"), ("tick", LEASE + 1),
        ("start", "recover", 0), ("go", 2, TO_THE_END), ("go", 0, 1),
    ],
    "the record keeps its own attempt, not the sink's": [
        ("start", "script", 0), ("upto", 0, "sink.append"), ("object", 0), ("tick", LEASE + 1), ("start", "recover", 0),
        ("go", 1, TO_THE_END), ("start", "restage", 0), ("upto", 1, "vote.after"), ("go", 0, TO_THE_END),
    ],
    "sweep the attempt that is being staged": 195,
    "commit_seq from a sequence": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "script", 0), ("upto", 0, "commit.inside"),
        ("start", "backfill", 0), ("go", 1, TO_THE_END), ("go", 0, TO_THE_END),
    ],
    "no limit at the commit point": 25,
    "promote out of turn": 333,
    "the older revision is not superseded": 3,
    "COMMITTED while a sink waits": 10,
    "an unknown outcome counts as promoted": 35,
    "discard before the move to ABORTING": 247,
    "abort whatever attempt is there": [
        ("start", "failing", 0), ("upto", 0, "abort.before"), ("tick", LEASE + 1),
        ("start", "script", 0), ("upto", 1, "attempt.after"), ("go", 0, TO_THE_END),
    ],
    "recovery aborts what waits for its run": 0,
    "recovery aborts under a lease": 44,
    "a new checkpoint without a second look": 13,
    "begin without the lock": 20,
    "the commit point twice after a lost reply": [
        ("start", "script", 0), ("upto", 0, "commit.before"), ("fault", "lose"), ("go", 0, TO_THE_END),
    ],
}  # fmt: skip


def search(mutation: Mutation, seeds: range) -> tuple[int, str] | None:
    """Look for a schedule that is fine with the shipped code and catches a mutation."""
    for seed in seeds:
        caught = mutation.caught_by(seed)
        if caught:
            try:
                replay(mutation.schedule(seed), mutation.limits)
            except Violation:
                continue
            return seed, caught
    return None


if __name__ == "__main__":
    for one in MUTATIONS:
        if len(sys.argv) == 1 or one.name in sys.argv[1:]:
            print(one.rule, one.name, search(one, range(1500)), sep=" | ", flush=True)  # noqa: T201 - its product
