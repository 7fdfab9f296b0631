"""Two promoters of the same decided revision, each stopped anywhere while the other works: one promotion, one end.

A stopped process holds whatever it held: a folder it took, a row it locked. The other one finishes all the same, and
the first finds nothing left to do when it wakes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.crashes import scenarios
from support.faults.processes import Child, call, polls, start, stopped_at_end
from support.pipelines.factories import Row, land_words
from twophase.committer.record import PostgresRecord

pytestmark = pytest.mark.chaos

#: Every place where whoever promotes may be stopped, in the order in which they are met.
POINTS = scenarios.HERE[scenarios.HERE.index("commit.after") : scenarios.HERE.index("settle.after") + 1]
#: The process that decided meets this one, and nobody else.
OWN = "commit.after"
#: One of each kind: a folder taken, a folder shown, a row locked, nothing held.
FEW = ("promote.taken", "promote.visible", "promote.inside", "finish.before")

Promoter = Callable[[], None]


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")


def decided(record: PostgresRecord, log: Path, first: int = 0) -> list[Row]:
    """Let a run die right after the commit point of its checkpoint, and its lease run out."""
    rows = land_words(files=2, start=first)
    killed = call(scenarios.run, log=log, failpoints="commit.after=kill")
    assert killed.wait() == -9, killed.said
    wait_for_lease(record)
    return rows


def wait_for_lease(record: PostgresRecord) -> None:
    for _ in polls(30):
        with record.engine.connect() as connection:
            leased = "SELECT count(*) FROM twophase.revision WHERE lease_until > clock_timestamp()"
            if not connection.execute(text(leased)).scalar_one():
                return


def promoter(function: Promoter, log: Path, point: str | None = None) -> Child:
    failpoints = f"{point}=stop" if point else ""
    return start(scenarios.impatiently, function, log=log, failpoints=failpoints)


def ended_well(child: Child) -> None:
    assert child.wait() == 0, child.said
    assert "Error" not in child.said, child.said


def state(record: PostgresRecord) -> tuple[object, ...]:
    """Return what a late promoter must leave as it is: the tables, and the whole record."""
    queries = (
        "SELECT checkpoint_id, revision, state, epoch, commit_seq, parked_reason FROM twophase.revision ORDER BY 1, 2",
        "SELECT * FROM twophase.committed ORDER BY checkpoint_id, operator_id",
        "SELECT id, action FROM twophase.event ORDER BY id",
        "SELECT path, gone_at FROM twophase.input_file ORDER BY path",
    )
    with record.engine.connect() as connection:
        return scenarios.tables(), *(connection.execute(text(query)).fetchall() for query in queries)


def _one_stopped() -> list[Any]:
    """Every point; `make test` meets each with one combination of promoters, in turn."""
    kinds = [(scenarios.run, scenarios.recover), (scenarios.recover, scenarios.run)]
    kinds += [(scenarios.recover, scenarios.recover), (scenarios.run, scenarios.run)]
    cases = []
    for number, point in enumerate(POINTS):
        for which, (first, second) in enumerate(kinds):
            if point == OWN and first is scenarios.recover:
                continue
            marks = [] if which == (0 if point == OWN else number % 2) else [pytest.mark.slow]
            name = f"{point}-{first.__name__}-{second.__name__}"
            cases.append(pytest.param(point, first, second, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("point", "first", "second"), _one_stopped())
def test_a_promoter_that_wakes_after_another_has_finished_changes_nothing(
    point: str, first: Promoter, second: Promoter, record: PostgresRecord, home: Path
) -> None:
    rows = decided(record, home / "decided.log") if point != OWN else land_words(files=2)
    late = promoter(first, home / "late.log", point)
    with stopped_at_end(late):
        assert late.until_stopped(), f"{point} was not reached:\n{late.said}"
        wait_for_lease(record)
        ended_well(promoter(second, home / "other.log"))
        scenarios.check_all_there(rows)
        before = state(record)

        late.wake()
        ended_well(late)

    assert state(record) == before
    scenarios.check_end(record, rows)


def both_stopped(record: PostgresRecord, home: Path, pairs: list[tuple[str, str]]) -> None:
    rows: list[Row] = []
    for number, ((p, q), reverse) in enumerate(product(pairs, (False, True))):
        case = f"{p} {q}{' reversed' if reverse else ''}"
        rows += decided(record, home / f"{case} decided.log", 2 * number)
        a = promoter(scenarios.recover, home / f"{case} a.log", p)
        with stopped_at_end(a):
            assert a.until_stopped(), f"{case}: not reached:\n{a.said}"
            b = promoter(scenarios.recover, home / f"{case} b.log", q)
            with stopped_at_end(b):
                b.until_stopped()  # or it ends: what the other one has done it need not do
                for child in (b, a) if reverse else (a, b):
                    if child.process.exitcode is None:
                        child.wake()
                    ended_well(child)
        with scenarios.looking(record) as connection:
            scenarios.check_never_wrong(rows, connection)
            scenarios.check_once(connection)
        scenarios.check_all_there(rows)
    scenarios.check_end(record, rows)


@pytest.mark.parametrize("point", FEW)
def test_two_promoters_that_were_both_stopped_promote_once(point: str, record: PostgresRecord, home: Path) -> None:
    both_stopped(record, home, [(point, FEW[(FEW.index(point) + 1) % len(FEW)])])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", POINTS[1:])
def test_two_promoters_stopped_at_any_pair_of_places_promote_once(
    point: str, record: PostgresRecord, home: Path
) -> None:
    both_stopped(record, home, [(point, other) for other in POINTS if other != OWN])
