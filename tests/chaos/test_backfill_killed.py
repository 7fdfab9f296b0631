"""A long backfill, killed again and again: each interval exactly once, and regular runs go on meanwhile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import text

from support.faults.processes import Child, polls, start, stopped_at_end
from support.pipelines import long_runs
from support.pipelines.factories import visible
from twophase.committer.record import PostgresRecord
from twophase.core.states import State
from twophase.sweep import sweep
from twophase.verification import verify

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "1")
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(Path(__file__).parents[1] / "jobs"))


def decided(record: PostgresRecord) -> int:
    with record.engine.connect() as connection:
        query = "SELECT count(*) FROM twophase.revision WHERE kind = 'backfill' AND commit_seq IS NOT NULL"
        return int(connection.execute(text(query)).scalar_one())


def killed_after(child: Child, record: PostgresRecord, more: int, patience: float) -> bool:
    """Kill a process once it has decided so many more; False: it ended before."""
    goal = decided(record) + more
    for _ in polls(patience):
        if child.process.exitcode is not None:
            return False
        if decided(record) >= goal:
            child.process.kill()
            child.process.join()
            return True
    raise AssertionError(child.said)


def check_exactly_once(record: PostgresRecord, intervals: int, before: int, regular: range) -> None:
    """Each interval has one decided revision of the backfill and its rows once; the others are as they were run."""
    with record.engine.connect() as connection:
        rows = connection.execute(
            text("SELECT slot, kind FROM twophase.revision JOIN twophase.checkpoint USING (pipeline, checkpoint_id)"
                 " WHERE commit_seq IS NOT NULL")
        ).all()  # fmt: skip
        states = set(connection.execute(text("SELECT DISTINCT state FROM twophase.revision")).scalars())
    assert states <= {State.COMMITTED, State.SUPERSEDED, State.ABORTED}
    backfilled = Counter(row.slot[:10] for row in rows if row.kind == "backfill")
    assert backfilled == Counter(str(long_runs.day(number)) for number in range(intervals))
    ordinary = Counter(row.slot[:10] for row in rows if row.kind == "regular")
    assert ordinary == Counter(str(long_runs.day(number)) for number in (*range(before), *regular))
    expected = sorted(2 * number + i for number in (*range(intervals), *regular) for i in range(2))
    assert sorted(row["id"] for row in visible("lake/daily")) == expected
    pipeline = long_runs.daily()
    list(sweep(record, pipeline))
    assert not [difference for difference in verify(record, pipeline) if difference]


def backfill(
    record: PostgresRecord, home: Path, *, intervals: int, before: int, regular: int, kills: int, seed: int
) -> None:
    """Backfill intervals, of which some are committed already, while new ones are run; kill the backfill on the way."""
    random = Random(seed)
    new = range(intervals, intervals + regular)
    long_runs.land_days(range(intervals + regular))
    long_runs.run_days(range(before))
    runs = start(long_runs.run_days, new, log=home / "runs.log")
    with stopped_at_end(runs):
        for number in range(kills):
            work = start(long_runs.backfill_days, intervals, 2, log=home / f"backfill{number}.log")
            with stopped_at_end(work):
                more = random.randint(1, max(1, intervals // kills))
                if not killed_after(work, record, more, 300):
                    assert work.wait() == 0, work.said
        last = start(long_runs.backfill_days, intervals, 2, log=home / "last.log")
        with stopped_at_end(last):
            assert last.wait(600) == 0, last.said
        assert runs.wait(300) == 0, runs.said
    check_exactly_once(record, intervals, before, new)


def test_a_backfill_of_a_quarter_that_is_killed_eight_times(record: PostgresRecord, home: Path) -> None:
    backfill(record, home, intervals=91, before=25, regular=10, kills=8, seed=8)


@pytest.mark.slow
def test_a_backfill_of_a_year_that_is_killed_twenty_times(record: PostgresRecord, home: Path) -> None:
    backfill(record, home, intervals=365, before=100, regular=20, kills=20, seed=7)


@pytest.mark.slow
@pytest.mark.spark
def test_a_backfill_by_real_submissions_that_is_killed(record: PostgresRecord, home: Path) -> None:
    """Twelve spark-submits, and as many more as the kills cost; one dies with its runner."""
    intervals = 12
    long_runs.land_days(range(intervals))
    long_runs.run_days(range(3))
    for number in range(3):
        work = start(long_runs.backfill_days, intervals, 2, "local[1]", log=home / f"backfill{number}.log")
        with stopped_at_end(work):
            assert killed_after(work, record, 2, 600), work.said
    last = start(long_runs.backfill_days, intervals, 2, "local[1]", log=home / "last.log")
    with stopped_at_end(last):
        assert last.wait(900) == 0, last.said

    check_exactly_once(record, intervals, 3, range(0))
