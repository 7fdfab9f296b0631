"""Every failpoint, killed and raised, in real processes on a real PostgreSQL: no record lost, doubled or half visible.

The table is written by pyarrow and read by DuckDB. A new failpoint is in the matrix as soon as it exists: if no
scenario reaches it, its case fails. Those that only a replacement or a slot comes by are on ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chaos import test_restored_record, test_sink_crashes, test_state_crashes
from integration.rules import test_positions
from support.crashes import scenarios, sink_matrix
from support.crashes.replacement_ways import WAYS
from support.faults.processes import call
from support.pipelines.factories import land_words
from support.sinks import log_table_promises
from twophase.committer.record import PostgresRecord

pytestmark = pytest.mark.chaos

#: What a process must do to get to a failpoint; all others are on the way of a plain run.
ON_THE_WAY_OF = {
    "abort": scenarios.fail,
    "recover": scenarios.recover,
    "restage": scenarios.restage,
    "sweep": scenarios.sweep,
}


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")


def check(record: PostgresRecord, rows: list[dict[str, object]]) -> None:
    with record.engine.connect() as connection:
        scenarios.check_never_wrong(rows, connection)
        scenarios.check_story(connection)


def test_every_failpoint_that_is_not_met_here_is_met_on_another_way() -> None:
    of_sinks = {point for _, _, point, _ in sink_matrix.CASES}

    of_tables = set(log_table_promises.POINTS)
    of_restored = set(test_restored_record.POINTS)

    met = {point for way in WAYS for point in way.points} | of_sinks | of_tables | of_restored
    met |= {*test_sink_crashes.HANDING_OVER, *test_positions.POINTS, *test_state_crashes.POINTS}
    assert met >= scenarios.ELSEWHERE


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("failpoint", scenarios.HERE)
def test_a_crash_anywhere_loses_doubles_and_shows_nothing(
    failpoint: str, action: str, record: PostgresRecord, home: Path
) -> None:
    victim: Callable[[], None] = ON_THE_WAY_OF.get(failpoint.partition(".")[0], scenarios.run)
    rows = land_words(files=2)
    assert call(scenarios.run, log=home / "first.log").wait() == 0
    rows += land_words(files=3, start=2)
    if victim is scenarios.sweep:  # something dead to sweep: an attempt that another one replaced
        call(scenarios.run, log=home / "dead.log", failpoints="vote.before=kill")
        call(scenarios.run, log=home / "second.log")
    if victim is scenarios.restage:  # something decided that lost what one of its sinks had staged
        call(scenarios.run, log=home / "decided.log", failpoints="commit.after=kill")
        (lost,) = (home / "data/lake/words.twophase/staging").iterdir()
        lost.rename(home / "lost")

    crashed = call(victim, log=home / "crash.log", failpoints=f"{failpoint}={action}")

    assert crashed.hit(failpoint), f"{failpoint} was not reached:\n{crashed.said}"
    assert crashed.wait() == (-9 if action == "kill" else 1), crashed.said
    check(record, rows)
    for number in (1, 2):
        recovered = call(scenarios.recover, log=home / f"recover{number}.log")
        assert recovered.wait() == 0, recovered.said
        check(record, rows)
    if victim is scenarios.restage:
        again = call(scenarios.restage, log=home / "again.log")
        assert again.wait() == 0, again.said
    drained = call(scenarios.drain, log=home / "drain.log")
    assert drained.wait() == 0, drained.said
    check(record, rows)
    scenarios.check_all_there(rows)
    assert call(scenarios.sweep, log=home / "sweep.log").wait() == 0
    with record.engine.connect() as connection:
        scenarios.check_finished(connection)
        scenarios.check_story(connection)
    scenarios.check_verified()
