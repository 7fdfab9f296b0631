"""A process dies on any way on which something is replaced, adopted, passed on, set aside or swept.

The old revision stands, whole, until the new one does, and can still be read as of its time afterwards. Who comes next
recovers what was left, from the record alone, or takes it over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.crashes import replacement_promises, replacements
from support.crashes.combinations import covering, marks, pairs
from support.crashes.replacement_ways import WAYS, Way
from support.faults.processes import call
from twophase.committer.record import PostgresRecord
from twophase.core.states import ENDED, State
from twophase.storage import disk

pytestmark = pytest.mark.chaos

#: How it dies, and who comes next.
KILLED, TAKEN_OVER, RAISED = ("kill", "recovery"), ("kill", "the same again"), ("raise", "recovery")
#: Where there are two tables: at the second one.
SECOND = ("kill@2", "recovery")
TWO_TABLES = ("replacement", "gap", "quarantine", "quarantine again")

#: What `make test` meets of each way, besides a death at every point of the first: that in which they differ.
FEW = {
    "gap": ("promote.gap", "promote.visible"),
    "slot": ("begin.inside", "promote.visible"),
    "slot again": ("vote.after", "promote.visible", "finish.inside"),
    "adopted": ("adopt.before", "adopt.after", "begin.after", "promote.visible", "finish.inside"),
    "hop": ("begin.inside", "begin.after", "commit.inside", "commit.after", "finish.after"),
    "hop again": ("commit.before", "promote.visible"),
    "quarantine": ("stage.marked", "vote.inside", "promote.after"),
    "quarantine again": ("promote.superseded",),
    "refused": ("audit.after", "abort.before", "abort.after", "abort.discarded"),
    "recovery": ("recover.before", "promote.visible"),
    "sweep": ("sweep.before", "sweep.after", "sweep.inside", "sweep.swept", "sweep.forgotten", "sweep.clean"),
    "sweep with tombstones": ("sweep.swept", "sweep.forgotten"),
}
#: Nobody comes by these but on these ways: killed and raised, always.
ONLY_HERE = {"adopt.before", "adopt.after", "promote.gap", "sweep.inside", "sweep.swept", "sweep.forgotten"}

Round = tuple[str, str]


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.3")
    monkeypatch.setattr(disk, "_renameat2", disk._renameat2)  # what a test does about it is undone at its end


class Crash:
    """One round on one way: somebody dies at a failpoint, and others bring it to its end."""

    def __init__(self, way: Way, record: PostgresRecord, home: Path, number: int) -> None:
        self.way, self.record, self.home, self.number = way, record, home, number
        way.prepare(number)
        self.before = replacement_promises.Recorded(record)

    def die(self, failpoint: str, action: str) -> None:
        log = self.home / f"round {self.number}.log"
        died = call(self.way.go, self.number, log=log, failpoints=f"{failpoint}={action}")
        assert died.hit(failpoint), f"{failpoint} was not reached:\n{died.said}"
        assert died.wait() == (1 if action == "raise" else -9), died.said
        self.check()
        replacement_promises.check_as_of(self.record)

    def check(self) -> None:
        replacement_promises.check_never_wrong(self.record, gap=not self.way.exchanges)
        replacement_promises.check_story(self.record)

    def recover_twice(self) -> None:
        """Recovery alone carries out what was decided; of what was not decided nothing is left.

        A sweep may come before it: what is not promoted yet is not dead, and what is replaced not yet superseded.
        """
        replacements.sweep()
        self.check()
        replacement_promises.wait_for_lease(self.record)
        for _ in range(2):
            replacements.recover()
            self.check()
        replacement_promises.check_put_away(self.record)
        left = replacement_promises.Recorded(self.record)
        assert {State(row.state) for row in left.revisions.values()} <= ENDED
        if left.decided == self.before.decided and not self.way.decided:
            for pipeline in self.before.declared:
                stood = self.before.of(pipeline.name, State.COMMITTED)
                assert left.of(pipeline.name, State.COMMITTED).items() >= stood.items()

    def ask_again(self) -> None:
        undone = replacement_promises.Recorded(self.record).decided < self.before.decided + self.way.decisions
        if undone or not self.way.anew:
            self.way.go(self.number)
            self.check()

    def end(self) -> None:
        """Whoever decided, it was decided as often as it should be."""
        replacement_promises.check_end(self.record, tombstones=not self.way.exchanges)
        assert replacement_promises.Recorded(self.record).decided == self.before.decided + self.way.decisions


def _every(way: Way, point: str) -> list[Round]:
    """Return the rounds that there can be at a point of a way."""
    both = way.name in TWO_TABLES and point.partition(".")[0] in {"stage", "vote", "promote"} and point != "stage.after"
    return [KILLED, TAKEN_OVER, RAISED, *([SECOND] if both else [])]


def _usual(way: Way, point: str) -> list[Round]:
    """Return those that `make test` has."""
    if way is WAYS[0]:
        return [TAKEN_OVER if way.points.index(point) % 2 else KILLED]
    if point in FEW[way.name]:
        return [TAKEN_OVER if FEW[way.name].index(point) % 2 else KILLED, *([RAISED] if point in ONLY_HERE else [])]
    return []


def _cases() -> Iterator[Any]:
    """Return ways, points and rounds: of those that are not usual first what `make chaos` has, then all others."""
    places = [(way, point) for way in WAYS for point in way.points]
    usual = {(way.name, point, one) for way, point in places for one in _usual(way, point)}
    chosen = covering([(way.name, point, one) for way, point in places for one in _every(way, point)], pairs, usual)
    for way, point in places:
        every = {(way.name, point, one) for one in _every(way, point)}
        for name, cases in (("", every & usual), ("-rest", every & chosen - usual), ("-repeated", every - chosen)):
            if cases:
                rounds, marked = [one for *_, one in sorted(cases)], marks(min(cases), chosen, usual)
                yield pytest.param(way, point, rounds, id=f"{way.name}-{point}{name}", marks=marked)


@pytest.mark.parametrize(("way", "failpoint", "rounds"), list(_cases()))
def test_a_crash_on_any_way_leaves_the_old_or_the_new_and_both_can_be_read(
    way: Way, failpoint: str, rounds: list[Round], record: PostgresRecord, home: Path
) -> None:
    if not way.exchanges:
        disk._renameat2 = None
    for number, (action, next_comes) in enumerate(rounds, start=1):
        one = Crash(way, record, home, number)
        one.die(failpoint, action)
        if next_comes == "recovery":
            one.recover_twice()
        one.ask_again()
        one.end()


@pytest.mark.parametrize("name", ["sweep", "sweep with tombstones"])
def test_a_sweep_that_dies_while_it_removes_something_leaves_it_to_the_next_one(
    name: str, record: PostgresRecord, home: Path
) -> None:
    way = next(way for way in WAYS if way.name == name)
    if not way.exchanges:
        disk._renameat2 = None
    way.prepare(1)

    died = call(replacements.dying_while_removing, way.go, 1, log=home / "sweep.log")

    assert died.wait() == -9, died.said
    replacement_promises.check_never_wrong(record)
    replacement_promises.check_end(record, tombstones=not way.exchanges)


@pytest.mark.parametrize("failpoint", ["adopt.before", "adopt.after"])
def test_a_folder_whose_adoption_died_and_was_given_up_is_no_difference(
    failpoint: str, record: PostgresRecord, home: Path
) -> None:
    way = next(way for way in WAYS if way.name == "adopted")
    one = Crash(way, record, home, 1)
    one.die(failpoint, "kill")

    one.recover_twice()

    replacement_promises.check_verified(record)
