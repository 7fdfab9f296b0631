"""Ways to break the protocol, each with a schedule that shows the harm.

A mutation rewrites a few words of a shipped function while it is applied; one that no longer finds its words says so.
`python tests/mutations.py [name …]` looks for schedules that catch them, for when the code has moved on.
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

import memory
from memory import MemorySink, MemoryTransaction
from model import LEASE, TO_THE_END, Action, Limits, random_schedule, replay
from promises import Violation
from twophase.core import coordinator, recovery, states, sweeping
from twophase.core.coordinator import Coordinator
from twophase.core.states import State

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
    return Edit(coordinator, Coordinator, function, words)


def recovering(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(recovery, recovery, function, words)


def sweeper(*words: tuple[str, str]) -> Edit:
    return Edit(sweeping, sweeping, "why_dead", words)


def sink(function: str, *words: tuple[str, str]) -> Edit:
    return Edit(memory, MemorySink, function, words)


#: Without lost staging and restage: most rules do not need them.
PLAIN = Limits(restages=False, loses_staging=False, brings_back=False)

MUTATIONS = (
    Mutation(
        "promote from the staging place itself",
        "R1",
        (
            sink(
                "_take",
                ("mine = f\"taken/{handle['prefix']}.{self._fresh()}\"", "mine = source + '.'"),
                ("self._rename(source, mine)", "mine = source"),
            ),
        ),
        PLAIN,
    ),
    Mutation("count a marker without making it durable", "R2", (sink("_promoted", ("self._fsync()", "pass")),), PLAIN),
    Mutation(
        "an aborted range goes to the next checkpoint",
        "R4, principle 3",
        (core("_take_again", ("newest.state in DECIDED", "newest.state not in UNDECIDED")),),
        PLAIN,
    ),
    Mutation(
        "a replacement moves the position",
        "R4",
        (
            core(
                "decide_commit",
                ("if tx.committed_revision(self.pipeline, revision.checkpoint_id) is None:", "if True:"),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "a new revision while one is live",
        "R5",
        (
            core(
                "_take_again", ("if newest.state in UNDECIDED:", "if newest.state in UNDECIDED and newest.run == run:")
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "a late vote counts for the newer attempt",
        "R7",
        (
            core(
                "vote",
                ("held.epoch != revision.epoch or mine is None or mine.attempt != revision.epoch", "mine is None"),
                ("epoch=revision.epoch, why=", "epoch=held.epoch, why="),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "one yes is enough",
        "R7",
        (
            core("vote", ("all(p.vote for", "any(p.vote for")),
            core("decide_commit", ("any(not p.vote or p.attempt", "any(p.attempt")),
        ),
        PLAIN,
    ),
    Mutation("an attempt after the decision", "R8", (Allow(State.COMMITTING, State.OPEN),), PLAIN),
    Mutation(
        "abort after the decision",
        "R9",
        (Allow(State.COMMITTING, State.ABORTING), core("abort", ("if held.state in UNDECIDED or", "if True or"))),
        PLAIN,
    ),
    Mutation(
        "sweep an attempt that was voted for",
        "R10",
        (sweeper(("and attempt != voted and not manifest", "and not manifest")),),
    ),
    Mutation(
        "the record keeps its own attempt, not the sink's",
        "R10",
        (core("_adopt_promoted", ("tx.put_participant(", "(")),),
    ),
    Mutation(
        "sweep the attempt that is being staged",
        "R11",
        (sweeper(("State.PRECOMMITTED if attempt <", "State.PRECOMMITTED if attempt <=")),),
        PLAIN,
    ),
    Mutation(
        "commit_seq from a sequence",
        "R12",
        (
            core("decide_commit", ("tx.lock(self.pipeline)", "pass")),
            Edit(
                memory,
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
        (core("_check_pending", ("raise TooManyPending(msg)", "return")),),
        PLAIN,
    ),
    Mutation(
        "promote out of turn",
        "R13",
        (core("finish", ("self._promote_pending(revision.kind, upto=revision.commit_seq)", "self._promote(key)")),),
        Limits(restages=False, loses_staging=False, brings_back=False, max_pending=2),
    ),
    Mutation(
        "the older revision is not superseded",
        "R14",
        (core("_mark_committed", ("if older is not None:", "if False:")),),
        PLAIN,
    ),
    Mutation("COMMITTED while a sink waits", "principle 6", (core("_promote", ("if waiting:", "if False:")),), PLAIN),
    Mutation(
        "an unknown outcome counts as promoted",
        "principle 7",
        (core("_promote_sink", ("promotion.outcome is Outcome.UNKNOWN", "False")),),
        PLAIN,
    ),
    Mutation(
        "discard before the move to ABORTING",
        "principle 7",
        (
            core(
                "abort",
                (
                    "current = self.transact(step)",
                    (
                        "for p in self.transact(lambda tx: tx.participants(revision.key)):\n"
                        "        self.sinks[p.name].discard(revision.key, p.handle)\n"
                        "    current = self.transact(step)"
                    ),
                ),
            ),
        ),
        PLAIN,
    ),
    Mutation(
        "abort whatever attempt is there",
        "R15",
        (core("abort", ("epoch=revision.epoch,", "epoch=held.epoch,"), ("held.run != revision.run", "False")),),
        PLAIN,
    ),
    Mutation(
        "recovery aborts what waits for its run",
        "R16",
        (recovering("decide", ("State.PRECOMMITTED if observed.run_ended", "State.PRECOMMITTED if True")),),
        PLAIN,
    ),
    Mutation(
        "recovery aborts under a lease",
        "principle 5",
        (
            recovering("decide", ("case _ if revision.leased", "case _ if False")),
            recovering("_execute", ("unleased=True", "unleased=False")),
        ),
        PLAIN,
    ),
    Mutation(
        "a new checkpoint without a second look",
        "principle 8",
        (core("_take_new", ("again = self._take_again(tx, run, slot, ended)", "again = tx.lock(self.pipeline)")),),
        PLAIN,
    ),
    Mutation(
        "begin without the lock", "principle 8", (core("_take_again", ("tx.lock(self.pipeline)", "pass")),), PLAIN
    ),
    Mutation(
        "the commit point twice after a lost reply",
        "principle 7",
        (core("decide_commit", ("if held.state in DECIDED and held.epoch == revision.epoch:", "if False:")),),
        PLAIN,
    ),
)


#: For each, a schedule that shows the harm: a seed, or the schedule itself where chance seldom finds one.
SCHEDULES: dict[str, int | list[Action]] = {
    "promote from the staging place itself": 1125,
    "count a marker without making it durable": 10,
    "an aborted range goes to the next checkpoint": 0,
    "a replacement moves the position": 3,
    "a new revision while one is live": 0,
    "a late vote counts for the newer attempt": [
        ("start", "script", 0), ("upto", 0, "sink.check"), ("tick", LEASE + 1),
        ("start", "script", 0), ("upto", 1, "attempt.after"), ("go", 0, TO_THE_END), ("go", 0, TO_THE_END),
    ],
    "one yes is enough": 0,
    "an attempt after the decision": [
        ("start", "stage", 0), ("go", 0, TO_THE_END), ("start", "retry", 0), ("upto", 0, "begin.after"),
        ("start", "commit", 0), ("upto", 1, "promote.after"), ("go", 0, TO_THE_END),
    ],
    "abort after the decision": 37,
    "sweep an attempt that was voted for": [
        ("start", "script", 0), ("upto", 0, "commit.after"), ("destroy", 0), ("kill", 0), ("tick", LEASE + 1),
        ("start", "restage", 0), ("upto", 0, "sink.write"), ("start", "sweep", 0), ("go", 1, TO_THE_END),
    ],
    "the record keeps its own attempt, not the sink's": [
        ("start", "script", 0), ("upto", 0, "commit.after"), ("upto", 0, "sink.rename"), ("destroy", 0),
        ("start", "restage", 0), ("upto", 1, "sink.write"), ("bring_back", 0),
        ("upto", 0, "sink.visible"), ("kill", 0), ("go", 0, TO_THE_END),
    ],
    "sweep the attempt that is being staged": 30,
    "commit_seq from a sequence": [
        ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "script", 0), ("upto", 0, "commit.inside"),
        ("start", "backfill", 0), ("go", 1, TO_THE_END), ("go", 0, TO_THE_END),
    ],
    "no limit at the commit point": 25,
    "promote out of turn": 154,
    "the older revision is not superseded": 3,
    "COMMITTED while a sink waits": 2,
    "an unknown outcome counts as promoted": 19,
    "discard before the move to ABORTING": 37,
    "abort whatever attempt is there": [
        ("start", "failing", 0), ("upto", 0, "abort.before"), ("tick", LEASE + 1),
        ("start", "script", 0), ("upto", 1, "attempt.after"), ("go", 0, TO_THE_END),
    ],
    "recovery aborts what waits for its run": 2,
    "recovery aborts under a lease": 55,
    "a new checkpoint without a second look": 87,
    "begin without the lock": 20,
    "the commit point twice after a lost reply": 30,
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
