"""One interval owns one folder of a Hive-style table: written once, replaced in one step, adopted if it was there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

import twophase
import twophase.core.errors
from support.pipelines.factories import PreStaged, Row, land
from twophase import Pipeline, sinks, sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError, InputMissing, NotYet
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.spark.plan import Plan
from twophase.sweep import sweep
from twophase.verification import verify


def slot(day: int) -> str:
    return f"2026-11-{day:02d}/2026-11-{day + 1:02d}"


def marked(rows: list[Row], plan: Plan) -> list[Row]:
    return [{**row, "word": f"r{plan.revision}"} for row in rows]


def daily(sink: sinks.Files | None = None, **source: Any) -> Pipeline:
    """Declare a pipeline from one folder a day to one folder a day."""
    return Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/dt={start:%Y-%m-%d}", "json", **source)},
        transform="word_count:copy",
        writes={"lake": sink or sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")},
    )


def land_day(day: int, *ids: int, name: str = "a.json") -> None:
    land(name, [{"id": number, "word": "w", "frequency": 1} for number in ids], f"landing/dt=2026-11-{day:02d}")


@pytest.fixture
def runner_of(home: Path, record: PostgresRecord) -> Callable[..., Runner]:
    data_path("landing").mkdir(parents=True)
    return lambda pipeline=None, **rest: Runner(pipeline or daily(), PreStaged(change=marked), record=record, **rest)


RunnerOf = Callable[..., Runner]


def table() -> list[tuple[str, int, str]]:
    """Read the table as DuckDB does a Hive-style one."""
    query = "SELECT dt::text, id, word FROM read_parquet(?, hive_partitioning = true) ORDER BY ALL"
    with duckdb.connect() as connection:
        return connection.execute(query, [f"{data_path('lake/daily')}/**/*.parquet"]).fetchall()


def test_each_interval_owns_one_folder_without_a_checkpoint_level(runner_of: RunnerOf) -> None:
    land_day(15, 1, 2)
    land_day(14, 3)
    runner = runner_of()

    done = [runner.run(slot(day)) for day in (15, 14)]

    assert [(d.checkpoint_id, d.slot) for d in done if d] == [
        (1, "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"),
        (2, "2026-11-14T00:00:00+00:00/2026-11-15T00:00:00+00:00"),
    ]
    assert sorted(path.name for path in data_path("lake/daily").iterdir()) == ["dt=2026-11-14", "dt=2026-11-15"]
    assert table() == [("2026-11-14", 3, "r1"), ("2026-11-15", 1, "r1"), ("2026-11-15", 2, "r1")]
    assert not [difference for difference in verify(runner.record, runner.pipeline) if difference]


def test_a_second_run_of_a_committed_slot_does_nothing(runner_of: RunnerOf) -> None:
    land_day(15, 1)
    runner = runner_of()
    first = runner.run(slot(15))
    land_day(15, 2, name="late.json")

    second = runner.run("2026-11-15T00:00:00Z/2026-11-16")

    assert first is not None
    assert second == first
    assert table() == [("2026-11-15", 1, "r1")]


def test_reprocessing_a_slot_replaces_its_folder_and_reads_what_is_there_now(runner_of: RunnerOf) -> None:
    land_day(15, 1)
    runner = runner_of()
    runner.run(slot(15))
    land_day(15, 2, name="late.json")

    again = runner.run(slot(15), reprocess=True)

    assert again is not None
    assert (again.checkpoint_id, again.revision, again.kind, again.state) == (1, 2, "backfill", State.COMMITTED)
    assert table() == [("2026-11-15", 1, "r2"), ("2026-11-15", 2, "r2")]
    assert [Path(path).parent.name for path in twophase.committed_files("daily", "lake", as_of=1)] == [
        "00000001.r1"
    ] * 2


def test_a_slot_that_failed_is_read_anew_by_the_next_run(runner_of: RunnerOf) -> None:
    """The input of an interval is its revision's: what was wrong in it may be put right."""
    land_day(15, 1)
    runner = runner_of()

    def fail(rows: list[Row], plan: Plan) -> list[Row]:
        land_day(15, 7)
        return rows

    runner.stager = PreStaged(change=fail)
    with pytest.raises(twophase.core.errors.InputChanged, match=r"a\.json: expected"):
        runner.run(slot(15))
    runner.stager = PreStaged(change=marked)

    done = runner.run(slot(15))

    assert done is not None
    assert (done.checkpoint_id, done.revision) == (1, 2)
    assert table() == [("2026-11-15", 7, "r2")]


@pytest.mark.parametrize(("how", "error"), [("error", InputMissing), ("wait", NotYet)])
def test_a_missing_folder_is_told_before_anything_is_recorded(
    runner_of: RunnerOf, how: str, error: type[Exception], record: PostgresRecord
) -> None:
    runner = runner_of(daily(on_missing=how), waits=False)

    with pytest.raises(error, match="2026-11-15"):
        runner.run(slot(15))

    with record.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM twophase.checkpoint")).scalar() == 0


def test_a_missing_folder_may_be_an_empty_interval(runner_of: RunnerOf) -> None:
    runner = runner_of(daily(on_missing="empty", schema="id bigint, word string, frequency bigint"))

    done = runner.run(slot(15))

    assert done is not None
    assert (done.state, done.rows) == (State.COMMITTED, 0)


def test_a_pipeline_with_intervals_asks_for_a_slot(runner_of: RunnerOf) -> None:
    with pytest.raises(ConfigError, match="it reads intervals; say which"):
        runner_of().run()
    with pytest.raises(ConfigError, match="slot '2026-11-16/2026-11-15': expected"):
        runner_of().run("2026-11-16/2026-11-15")


# --- adopt -----------------------------------------------------------------------------------------------------------


def there_before(day: int, *ids: int) -> Path:
    """Leave a folder as an older job did."""
    folder = data_path(f"lake/daily/dt=2026-11-{day:02d}")
    folder.mkdir(parents=True)
    rows = {"id": list(ids), "word": ["old"] * len(ids), "frequency": [1] * len(ids)}
    schema = pa.schema([("id", pa.int64()), ("word", pa.string()), ("frequency", pa.int64())])
    pq.write_table(pa.table(rows, schema=schema), folder / "part-00000.parquet")
    return folder


def test_a_folder_that_is_not_ours_is_refused_before_anything_changes(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    land_day(15, 1)
    folder = there_before(15, 9)
    before = sorted(path.name for path in folder.iterdir())

    with pytest.raises(ConfigError, match=r"dt=2026-11-15 is there already and not ours; declare adopt=True"):
        runner_of().run(slot(15))

    assert sorted(path.name for path in folder.iterdir()) == before
    with record.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM twophase.checkpoint")).scalar() == 0


ADOPTING = "lake/daily"


def adopting() -> Pipeline:
    return daily(sinks.Files(ADOPTING, slot_folder="dt={start:%Y-%m-%d}", adopt=True))


def test_an_adopted_folder_is_revision_0_until_the_first_commit_supersedes_it(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    land_day(15, 1)
    there_before(15, 8, 9)
    there_before(14, 7)
    runner = runner_of(adopting())

    done = runner.run(slot(15))

    assert done is not None
    assert (done.revision, done.commit_seq) == (1, 2)
    assert table() == [("2026-11-14", 7, "old"), ("2026-11-15", 1, "r1")]
    with record.engine.connect() as connection:
        adopted = queries.show(connection, "daily", 1, 0)
    assert (adopted["state"], adopted["rows"], adopted["commit_seq"]) == ("SUPERSEDED", 2, 1)
    old = twophase.committed_files("daily", "lake", as_of=1)
    assert [Path(path).name for path in old] == ["part-00000.parquet"]
    assert pq.read_table(old[0])["id"].to_pylist() == [8, 9]
    assert not [difference for difference in verify(record, runner.pipeline) if difference]
    assert list(sweep(record, runner.pipeline)) == []


def test_an_adopted_folder_is_recorded_before_anything_is_staged_and_stands_when_that_fails(
    runner_of: RunnerOf, record: PostgresRecord
) -> None:
    land_day(15, 1)
    there_before(15, 8)
    runner = runner_of(adopting())
    seen: list[str] = []

    def fail(rows: list[Row], plan: Plan) -> list[Row]:
        with record.transaction() as tx:
            committed = tx.committed_revision("daily", 1)
        seen.append(str(committed and committed.key))
        msg = "the transform failed"
        raise twophase.core.errors.AttemptFailed(msg)

    runner.stager = PreStaged(change=fail)
    with pytest.raises(twophase.core.errors.AttemptFailed):
        runner.run(slot(15))
    standing = table()
    runner.stager = PreStaged(change=marked)
    done = runner.run(slot(15))

    assert seen == ["daily/1 r0"]
    assert standing == [("2026-11-15", 8, "old")]
    assert done is not None
    assert done.revision == 2
    assert table() == [("2026-11-15", 1, "r2")]


def test_slot_folders_may_lie_deeper(runner_of: RunnerOf) -> None:
    land_day(15, 1)
    sink = sinks.Files("lake/daily", slot_folder="year={start:%Y}/dt={start:%Y-%m-%d}")
    runner = runner_of(daily(sink))

    runner.run(slot(15))
    runner.run(slot(15), reprocess=True)

    assert [path.name for path in data_path("lake/daily/year=2026").iterdir()] == ["dt=2026-11-15"]
    assert table() == [("2026-11-15", 1, "r2")]
    assert not [difference for difference in verify(runner.record, runner.pipeline) if difference]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"slot_folder": "dt"}, "expected a folder's name that a slot fills"),
        ({"slot_folder": "../{start}"}, "expected a folder's name that a slot fills"),
        ({"slot_folder": "dt={day}"}, "unknown {day}"),
        ({"adopt": True}, "adopt=True is for slot folders"),
    ],
)
def test_a_wrong_slot_folder_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sinks.Files("lake/daily", **arguments)


def test_slot_folders_need_a_read_that_goes_by_slots(home: Path) -> None:
    with pytest.raises(ConfigError, match="write 'lake' has places for slots, but no read goes by intervals"):
        Pipeline(
            "daily",
            reads={"words": sources.Files("landing", "json")},
            transform="word_count:copy",
            writes={"lake": sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")},
        )
