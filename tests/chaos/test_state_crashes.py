"""A pipeline with state, killed at every failpoint: state and table equal a straight count of all that is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.crashes import scenarios, state_ways
from support.faults.processes import call
from support.pipelines.factories import land_words
from twophase.committer.record import PostgresRecord

pytestmark = pytest.mark.chaos

#: Failpoints that only a pipeline with state comes by.
POINTS = ("state.staged", "state.merged", "state.expired", "state.removed")
#: Where state differs most from a table; the others are slow.
USUAL = (*POINTS, "begin.inside", "vote.inside", "commit.inside", "commit.after", "finish.inside")
#: What no run of this pipeline comes by: it has no audit, nothing archived, nothing lost.
NOT_HERE = ("audit.", "settle.", "restage.", "sweep.", "recover.", "abort.", "promote.receipt", "promote.durable")
RUNNING = [point for point in scenarios.HERE if not point.startswith(NOT_HERE) and not point.startswith("promote.")] + [
    "promote.before",
    "promote.inside",
    "promote.after",
]


def marked(points: list[str]) -> list[object]:
    """Mark all but the usual ones as slow."""
    return [point if point in USUAL else pytest.param(point, marks=pytest.mark.slow) for point in points]


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")


def crash(way: object, point: str, home: Path, action: str = "kill") -> None:
    crashed = call(way, log=home / "crash.log", failpoints=f"{point}={action}")  # type: ignore[arg-type]

    assert crashed.hit(point), f"{point} was not reached:\n{crashed.said}"
    assert crashed.wait() == (-9 if action == "kill" else 1), crashed.said


def finish(way: object, home: Path, name: str) -> None:
    done = call(way, log=home / f"{name}.log")  # type: ignore[arg-type]
    assert done.wait() == 0, done.said


@pytest.mark.parametrize("point", marked([*dict.fromkeys([*RUNNING, "state.staged", "state.merged"])]))
def test_a_run_killed_anywhere_leaves_the_state_of_what_is_committed(
    point: str, record: PostgresRecord, home: Path
) -> None:
    """Each record counts once in the state, and the state never runs ahead of the table."""
    rows = land_words(files=1)
    finish(state_ways.run, home, "first")
    rows += land_words(files=2, start=1)

    crash(state_ways.run, point, home)

    finish(state_ways.recover, home, "recover")
    finish(state_ways.drain, home, "drain")
    finish(state_ways.sweep, home, "sweep")
    state_ways.check(record, rows)
    runs = (home / "data/state/counts.twophase/runs").iterdir()
    assert len(list(runs)) == 3  # one for each checkpoint; what dead attempts wrote is swept


@pytest.mark.parametrize("point", marked([point for point in scenarios.HERE if point.startswith("abort.")]))
def test_an_abort_killed_anywhere_leaves_no_state_behind(point: str, record: PostgresRecord, home: Path) -> None:
    """What an aborted revision wrote is removed, and its input counts once with the next one."""
    rows = land_words(files=1)
    finish(state_ways.run, home, "first")
    rows += land_words(files=1, start=1)

    crash(state_ways.fail, point, home)

    finish(state_ways.recover, home, "recover")
    finish(state_ways.drain, home, "drain")
    finish(state_ways.sweep, home, "sweep")
    state_ways.check(record, rows)


@pytest.mark.parametrize(
    "point", marked(["begin.inside", "state.merged", "vote.inside", "commit.inside", "commit.after", "finish.inside"])
)
def test_a_replay_killed_anywhere_goes_on_from_the_state_before_it(
    point: str, record: PostgresRecord, home: Path
) -> None:
    """The same command goes on; then every state from there is the new transform's."""
    rows = land_words(files=3)
    finish(state_ways.drain, home, "drain")

    crash(state_ways.replay, f"{point}", home)

    finish(state_ways.replay, home, "again")
    state_ways.check(record, rows[:10], rows[10:])
    more = land_words(files=1, start=3)
    finish(state_ways.drain, home, "more")
    state_ways.check(record, [*rows[:10], *more], rows[10:])


@pytest.mark.parametrize("point", ["state.expired", "state.removed"])
def test_a_sweep_killed_anywhere_keeps_every_kept_state(point: str, record: PostgresRecord, home: Path) -> None:
    """States are marked before their files go, so whoever comes next finds a whole state or none."""
    rows = land_words(files=14)
    finish(state_ways.drain, home, "drain")
    state_ways.age(record)

    crash(state_ways.sweep, point, home)

    state_ways.check(record, rows)
    finish(state_ways.sweep, home, "again")
    state_ways.check(record, rows)
    with record.transaction() as tx:
        assert tx.oldest_state("counts") == 5
