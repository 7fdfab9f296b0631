"""Three hops in processes of their own, killed at any moment: the end equals a straight recomputation."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from sqlalchemy import text

from support.faults.processes import call, start, stopped_at_end
from support.pipelines import long_runs
from support.pipelines.commands import listed
from support.pipelines.factories import Row, land, visible
from twophase.committer.record import PostgresRecord
from twophase.core.settings import data_path
from twophase.sweep import sweep
from twophase.verification import verify

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

#: Where a hop is killed: before and after each of its decisions.
POINTS = (
    "begin.after",
    "stage.marked",
    "vote.after",
    "commit.before",
    "commit.after",
    "promote.visible",
    "finish.after",
)


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "1")


def land_files(count: int) -> list[Row]:
    rows: list[Row] = []
    for number in range(count):
        batch = [{"id": 10 * number + i, "word": ("a", "b", "bad")[i % 3], "frequency": i} for i in range(10)]
        land(f"{number:03d}.json", batch, "landing")
        rows += batch
    return rows


def straight(rows: list[Row]) -> dict[str, int]:
    """Compute the end of the chain in one go."""
    return long_runs.totals([{**row, "frequency": row["frequency"] * 10} for row in rows if row["word"] != "bad"])


def check_agreed(record: PostgresRecord) -> None:
    """Nothing is pending or stale, and every table is what the record says."""
    for name, declare in long_runs.HOPS.items():
        pipeline = declare()
        list(sweep(record, pipeline))
        assert not [difference for difference in verify(record, pipeline) if difference], name
    assert listed("pending") == []
    assert listed("stale") == []


def test_a_chain_with_kills_and_a_backfill_ends_as_a_straight_recomputation(record: PostgresRecord, home: Path) -> None:
    random = Random(11)
    rows = land_files(16)
    for number in range(12):
        name = random.choice(list(long_runs.HOPS))
        point = random.choice(POINTS)
        failpoints = f"{point}=kill@{random.randint(1, 3)}"
        call(long_runs.drain, name, log=home / f"{number} {name} {point}.log", failpoints=failpoints)
    for name in long_runs.HOPS:
        assert call(long_runs.drain, name, log=home / f"{name}.log").wait() == 0
    wrong = long_runs.totals(visible("lake/report"))
    data_path("corrected").touch()

    for number in range(4):
        failpoints = f"{random.choice(POINTS)}=kill@{random.randint(1, 4)}"
        call(long_runs.correct, 1, 8, log=home / f"correct{number}.log", failpoints=failpoints)
    last = call(long_runs.correct, 1, 8, log=home / "correct.log")
    assert last.wait() == 0, last.said

    assert wrong == {word: number // 10 for word, number in straight(rows).items()}
    assert long_runs.totals(visible("lake/report")) == straight(rows)
    assert long_runs.totals(visible("lake/daily")) == straight(rows)
    check_agreed(record)


def test_a_replacement_upstream_between_begin_and_read_downstream_is_told_as_stale_and_put_right(
    record: PostgresRecord, home: Path
) -> None:
    """Each pipeline in a process of its own; the middle one is stopped between its begin and its read."""
    rows = land_files(4)
    assert call(long_runs.drain, "clean", log=home / "clean.log").wait() == 0
    middle = start(long_runs.run_once, "daily", log=home / "middle.log", failpoints="submit.before=stop")
    with stopped_at_end(middle):
        assert middle.until_stopped(), middle.said
        data_path("corrected").touch()
        assert call(long_runs.replace, "clean", 1, log=home / "replace.log").wait() == 0
        middle.wake()
        assert middle.wait() == 0, middle.said
    read = long_runs.totals(visible("lake/daily"))
    assert call(long_runs.drain, "report", log=home / "report.log").wait() == 0
    stale = listed("stale")

    done = call(long_runs.correct, 1, 2, log=home / "correct.log")

    assert done.wait() == 0, done.said
    assert read == {word: number // 10 for word, number in straight(rows).items()}
    assert [(row["pipeline"], row["read_revision"], row["committed_revision"]) for row in stale] == [("daily", 1, 2)]
    assert long_runs.totals(visible("lake/report")) == straight(rows)
    check_agreed(record)


def test_what_a_stopped_reader_fixed_is_not_swept_from_under_it(record: PostgresRecord, home: Path) -> None:
    rows = land_files(2)
    assert call(long_runs.drain, "clean", log=home / "clean.log").wait() == 0
    middle = start(long_runs.run_once, "daily", log=home / "middle.log", failpoints="submit.before=stop")
    with stopped_at_end(middle):
        assert middle.until_stopped(), middle.said
        data_path("corrected").touch()
        assert call(long_runs.replace, "clean", 1, log=home / "replace.log").wait() == 0
        with record.engine.begin() as connection:
            connection.execute(text("UPDATE twophase.revision SET superseded_at = superseded_at - interval '30 days'"))
        kept = list(sweep(record, long_runs.landing()))
        middle.wake()
        assert middle.wait() == 0, middle.said
    gone = [Path(one.path).name for one in sweep(record, long_runs.landing())]

    assert [one for one in kept if "superseded" in one.path] == []
    assert long_runs.totals(visible("lake/daily")) == {w: n // 10 for w, n in straight(rows).items()}
    assert "00000001.r1" in gone
