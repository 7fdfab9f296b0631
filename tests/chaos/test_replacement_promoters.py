"""Two promoters of the same replacement, one stopped anywhere while others go on, and later replacements come.

Whoever wakes late finds its work done, and perhaps replaced again: it changes nothing. The last revision stands, and
every one before it lies under superseded/, whole, until retention takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.crashes import replacement_promises, replacements, scenarios
from support.crashes.combinations import covering, marks, pairs
from support.faults.processes import Child, start, stopped_at_end
from twophase.committer.record import PostgresRecord
from twophase.core.failpoints import FAILPOINTS
from twophase.core.states import State
from twophase.storage import disk

pytestmark = pytest.mark.chaos

_NAMES = [name for name in FAILPOINTS if name not in scenarios.OTHER_SINKS]
_PROMOTING = _NAMES[_NAMES.index("commit.after") : _NAMES.index("finish.after") + 1]
#: Between the last look at what is visible and the step that replaces it: no failpoint is there, a test stops it.
EXCHANGE = "exchange"
MODES = ("exchange", "gap")


#: Every place where a promoter of a replacement may be stopped, in the order in which they are met.
POINTS = [*_PROMOTING]
POINTS.insert(POINTS.index("promote.checked") + 1, EXCHANGE)


def points(mode: str) -> list[str]:
    """Return those of them that are met where folders can change places, or cannot."""
    return [name for name in POINTS if name != ("promote.gap" if mode == "exchange" else "promote.superseded")]


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.3")
    monkeypatch.setattr(disk, "_renameat2", disk._renameat2)  # what a test does about it is undone at its end


class Table:
    """A checkpoint that is replaced again and again, where folders can change places or cannot."""

    def __init__(self, mode: str, record: PostgresRecord, home: Path) -> None:
        self.mode, self.record, self.home = mode, record, home
        if mode == "gap":
            disk._renameat2 = None
        replacements.land("words", 1)
        replacements.run("words")

    def promoter(self, function: Callable[..., None], *arguments: Any, at: str | None = None, name: str) -> Child:
        """Start a process that stops at a point."""
        call: tuple[Any, ...] = (function, *arguments)
        failpoints = ""
        if at == EXCHANGE:
            call = (replacements.stopping_before_the_exchange, *call)
        elif at is not None:
            failpoint, _, nth = at.partition("@")
            failpoints = f"{failpoint}=stop@{nth or 1}"
        if self.mode == "gap":
            call = (replacements.without_exchange, *call)
        return start(scenarios.impatiently, *call, log=self.home / f"{name}.log", failpoints=failpoints)

    def decide(self) -> None:
        """Let a replacement be decided by a run that has died since."""
        replacements.decided_only(replacements.replace, "words")
        replacement_promises.wait_for_lease(self.record)

    def late(self, kind: str, at: str) -> Child:
        """Start the promoter that will be late: the run that decided, or a recovery."""
        if kind == "run":
            return self.promoter(replacements.replace, "words", at=at, name="late")
        self.decide()
        return self.promoter(replacements.recover, at=at, name="late")

    def finish(self) -> None:
        """Let another promoter finish what is decided."""
        replacement_promises.wait_for_lease(self.record)
        replacements.recover()

    def sweep(self) -> None:
        replacement_promises.let_retention_be_over(self.record)
        replacements.sweep()

    @property
    def stands(self) -> int:
        """Return the revision that both tables show, whole."""
        replacement_promises.check_never_wrong(self.record)
        return replacement_promises.Recorded(self.record).of("words", State.COMMITTED)[1].revision

    def state(self) -> tuple[object, ...]:
        """Return what a late promoter must leave as it is: the tables, what lies beside them, and the whole record."""
        queries = (
            "SELECT checkpoint_id, revision, state, epoch, commit_seq, parked_reason FROM twophase.revision ORDER BY 2",
            "SELECT * FROM twophase.committed ORDER BY revision, operator_id",
            "SELECT id, action FROM twophase.event ORDER BY id",
        )
        with self.record.engine.connect() as connection:
            return replacement_promises.everything(), *(connection.execute(text(query)).fetchall() for query in queries)

    def check_end(self) -> None:
        replacement_promises.check_end(self.record, tombstones=self.mode == "gap")


def ended_well(child: Child) -> None:
    assert child.wait() == 0, child.said
    assert "Error" not in child.said, child.said


# --- one is stopped --------------------------------------------------------------------------------------------------

#: What `make test` meets: the step without which R1 breaks, what is in the middle of it, a row locked, the last step.
FEW = {
    "exchange": ("promote.taken", EXCHANGE, "promote.visible", "promote.inside"),
    "gap": ("promote.checked", EXCHANGE, "promote.gap", "finish.before"),
}
#: What happens before the late one wakes: another finishes its work, and then?
MEANWHILE = ("nothing", "replaced", "swept")


def _one_stopped() -> Iterator[Any]:
    cases, usual = [], []
    for mode, meanwhile in product(MODES, MEANWHILE):
        second = [f"{name}@2" for name in points(mode) if name.startswith("promote.")]
        for number, point in enumerate([*points(mode), *second]):
            for kind in ("run", "recovery"):
                if point == "commit.after" and kind == "recovery":
                    continue  # the process that decided meets this one, and nobody else
                cases.append(case := (mode, meanwhile, point, kind))
                few = meanwhile == ("swept" if point == EXCHANGE and mode == "gap" else "replaced")
                few &= point in FEW[mode] and kind == ("recovery", "run")[number % 2]
                if few or case == ("exchange", "swept", "promote.taken", "run"):
                    usual.append(case)
    chosen = covering(cases, pairs, usual)
    for case in cases:
        yield pytest.param(case, id="-".join(case), marks=marks(case, chosen, usual))


@pytest.mark.parametrize("case", list(_one_stopped()))
def test_a_promoter_that_wakes_after_its_replacement_was_finished_or_replaced_changes_nothing(
    case: tuple[str, str, str, str], record: PostgresRecord, home: Path
) -> None:
    mode, meanwhile, point, kind = case
    table = Table(mode, record, home)
    late = table.late(kind, point)
    with stopped_at_end(late):
        assert late.until_stopped(), f"{point} was not reached:\n{late.said}"
        replacement_promises.check_never_wrong(record, gap=mode == "gap")
        table.finish()
        assert table.stands == 2
        if meanwhile != "nothing":
            replacements.replace("words")
        if meanwhile == "swept":
            table.sweep()
        stood, before = table.stands, table.state()

        late.wake()
        ended_well(late)

    assert table.state() == before
    assert table.stands == stood == (2 if meanwhile == "nothing" else 3)
    replacement_promises.check_as_of(record)
    table.check_end()


def _under_way() -> Iterator[Any]:
    for mode in MODES:
        halfway = "promote.visible" if mode == "exchange" else "promote.gap"
        for point in points(mode):
            marks = [] if point == EXCHANGE else [pytest.mark.slow]
            yield pytest.param(mode, point, halfway, id=f"{mode}-{point}", marks=marks)


@pytest.mark.parametrize(("mode", "point", "halfway"), list(_under_way()))
def test_a_promoter_that_wakes_while_the_next_replacement_is_half_done_changes_nothing(
    mode: str, point: str, halfway: str, record: PostgresRecord, home: Path
) -> None:
    table = Table(mode, record, home)
    late = table.late("run", point)
    with stopped_at_end(late):
        assert late.until_stopped(), f"{point} was not reached:\n{late.said}"
        table.finish()
        table.decide()
        other = table.promoter(replacements.recover, at=halfway, name="other")
        with stopped_at_end(other):
            assert other.until_stopped(), other.said
            before = table.state()

            late.wake()
            ended_well(late)

            assert table.state() == before
            other.wake()
            ended_well(other)

    assert table.stands == 3
    table.check_end()


# --- both are stopped ------------------------------------------------------------------------------------------------


def both_stopped(table: Table, pairs: list[tuple[str, str]]) -> None:
    """Replace a checkpoint again and again; each time two promoters are stopped somewhere and wake in either order."""
    for number, ((p, q), reverse) in enumerate(product(pairs, (False, True)), start=2):
        case = f"{p} {q}{' reversed' if reverse else ''}"
        table.decide()
        a = table.promoter(replacements.recover, at=p, name=f"{case} a")
        with stopped_at_end(a):
            assert a.until_stopped(), f"{case}: not reached:\n{a.said}"
            b = table.promoter(replacements.recover, at=q, name=f"{case} b")
            with stopped_at_end(b):
                b.until_stopped()  # or it ends: what the other one has done it need not do
                replacement_promises.check_never_wrong(table.record, gap=table.mode == "gap")
                for child in (b, a) if reverse else (a, b):
                    if child.process.exitcode is None:
                        child.wake()
                    ended_well(child)
        assert table.stands == number, case
        replacement_promises.check_once(table.record)
    replacement_promises.check_as_of(table.record)
    table.check_end()


@pytest.mark.parametrize("mode", MODES)
def test_two_promoters_of_a_replacement_that_were_both_stopped_promote_once(
    mode: str, record: PostgresRecord, home: Path
) -> None:
    halfway = "promote.visible" if mode == "exchange" else "promote.gap"
    both_stopped(Table(mode, record, home), [(EXCHANGE, halfway), (halfway, EXCHANGE)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "point"), [(mode, point) for mode in MODES for point in points(mode)[1:]])
def test_two_promoters_of_a_replacement_stopped_at_any_pair_of_places_promote_once(
    mode: str, point: str, record: PostgresRecord, home: Path
) -> None:
    both_stopped(Table(mode, record, home), [(point, other) for other in points(mode)[1:]])
