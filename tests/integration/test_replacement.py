"""A new revision takes the place of a committed one, in one step; until then, and if it fails, the old one stands."""

from __future__ import annotations

from pathlib import Path

import pytest

import twophase
from support.pipelines.factories import PreStaged, Row, land_words, visible, words_pipeline
from twophase import Pipeline
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Revision, Run
from twophase.core.errors import AttemptFailed, Busy, ConfigError, Swept
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.spark.plan import Plan
from twophase.sweep import sweep
from twophase.verification import verify


def marked(rows: list[Row], plan: Plan) -> list[Row]:
    """Let each row say which revision it is from."""
    return [{**row, "word": f"r{plan.revision}"} for row in rows]


@pytest.fixture
def runner(home: Path, record: PostgresRecord) -> Runner:
    """Return a runner of a pipeline whose rows say which revision they are from."""
    return runner_of(words_pipeline(max_files=1), record)


def runner_of(pipeline: Pipeline, record: PostgresRecord) -> Runner:
    return Runner(pipeline, PreStaged(change=marked), record=record)


def run(runner: Runner) -> Revision:
    done = runner.run()
    assert done is not None
    return done


def words(table: str = "lake/words") -> list[tuple[int, str]]:
    return sorted((row["id"], row["word"]) for row in visible(table))


def test_a_new_revision_takes_the_place_of_the_committed_one(runner: Runner) -> None:
    land_words(files=2, rows=1)
    first, second = run(runner), run(runner)

    again = runner.replace(first.checkpoint_id)

    assert (again.revision, again.state, again.kind, again.commit_seq) == (2, State.COMMITTED, "backfill", 3)
    assert words() == [(0, "r2"), (1, "r1")]
    assert [path.name for path in data_path("lake/words.twophase/superseded").iterdir()] == ["00000001.r1"]
    assert second.revision == 1
    assert not [difference for difference in verify(runner.record, runner.pipeline) if difference]


def test_as_of_before_the_replacement_still_reads_the_old_revision(runner: Runner) -> None:
    land_words(rows=1)
    first = run(runner)
    runner.replace(first.checkpoint_id)

    then, now = (twophase.committed_files("words", "lake", as_of=seq) for seq in (1, 2))

    assert {Path(path).name[:10] for path in then} == {"part-r1-a1"}
    assert {Path(path).name[:10] for path in now} == {"part-r2-a1"}
    assert all(Path(path).exists() for path in (*then, *now))


def test_a_replacement_that_fails_leaves_the_committed_revision_as_it_is(runner: Runner) -> None:
    land_words(rows=1)
    first = run(runner)

    def fail(rows: list[Row], plan: Plan) -> list[Row]:
        msg = "the transform failed"
        raise AttemptFailed(msg)

    runner.stager = PreStaged(change=fail)
    with pytest.raises(AttemptFailed):
        runner.replace(first.checkpoint_id)

    assert words() == [(0, "r1")]
    with runner.record.transaction() as tx:
        assert tx.committed_revision("words", 1) == tx.revision(first.key)
        assert tx.newest_of("words", 1).state is State.ABORTED
    assert not [difference for difference in verify(runner.record, runner.pipeline) if difference]


def test_regular_runs_go_on_while_a_replacement_is_open(runner: Runner) -> None:
    land_words(files=2, rows=1)
    first = run(runner)
    held = runner.coordinator.replace(Run(None, "somebody"), first.checkpoint_id)

    second = run(runner)

    assert (second.checkpoint_id, second.revision, second.state) == (2, 1, State.COMMITTED)
    assert held.state is State.OPEN


def test_two_replacements_of_one_checkpoint_wait_for_each_other(runner: Runner) -> None:
    land_words(rows=1)
    first = run(runner)
    runner.coordinator.replace(Run("dag", "one"), first.checkpoint_id)

    with pytest.raises(Busy, match="run dag/one works on it"):
        runner.coordinator.replace(Run("dag", "two"), first.checkpoint_id)


def test_what_is_not_committed_cannot_be_replaced(runner: Runner) -> None:
    land_words(rows=1)
    taken = runner.coordinator.begin(Run(None, "somebody"))
    assert taken is not None
    runner.coordinator.abort(taken, "failed")

    with pytest.raises(ConfigError, match="words/1: nothing of it is committed"):
        runner.replace(1)
    with pytest.raises(ConfigError, match="words/7: it is not in the record"):
        runner.replace(7)


def test_input_that_was_archived_is_read_again(home: Path, record: PostgresRecord) -> None:
    runner = runner_of(words_pipeline(after_commit="archive"), record)
    land_words(rows=2)
    first = run(runner)

    again = runner.replace(first.checkpoint_id)

    assert again.rows == 2
    assert words() == [(0, "r2"), (1, "r2")]


def test_input_that_was_deleted_is_missed_before_anything_changes(home: Path, record: PostgresRecord) -> None:
    runner = runner_of(words_pipeline(after_commit="delete"), record)
    land_words(rows=1)
    first = run(runner)

    with pytest.raises(AttemptFailed, match=r"000000.json: expected .* found nothing"):
        runner.replace(first.checkpoint_id)

    assert words() == [(0, "r1")]


# --- retention -------------------------------------------------------------------------------------------------------


def old(record: PostgresRecord, days: int) -> None:
    """Let everything that was superseded have been so for some days."""
    from sqlalchemy import text

    with record.engine.begin() as connection:
        age = text("UPDATE twophase.revision SET superseded_at = superseded_at - make_interval(days => :days)")
        connection.execute(age, {"days": days})


def swept(runner: Runner, **options: bool) -> list[str]:
    return [Path(one.path).name for one in sweep(runner.record, runner.pipeline, **options)]


def test_a_superseded_revision_is_kept_until_its_retention_is_over(runner: Runner) -> None:
    land_words(rows=1)
    runner.replace(run(runner).checkpoint_id)
    old(runner.record, 6)
    early = swept(runner)
    old(runner.record, 1)

    listed = swept(runner, dry_run=True)
    folder = data_path("lake/words.twophase/superseded")
    there = [path.name for path in folder.iterdir()]
    gone = swept(runner)

    assert early == []
    assert listed == ["00000001.r1"]
    assert there == ["00000001.r1"]
    assert sorted(gone) == ["00000001.r1", "00000001.r1.a1.json"]
    assert list(folder.iterdir()) == []
    assert swept(runner) == []
    assert words() == [(0, "r2")]


def test_time_travel_to_a_swept_revision_is_an_error_in_words(runner: Runner) -> None:
    land_words(rows=1)
    runner.replace(run(runner).checkpoint_id)
    old(runner.record, 8)
    swept(runner)

    with pytest.raises(Swept, match=r"words/1 r1: it was replaced and its retention is over, swept at .*; as of 1"):
        twophase.committed_files("words", "lake", as_of=1)

    assert twophase.committed_files("words", "lake")


def test_the_last_few_superseded_revisions_may_be_kept_for_ever(home: Path, record: PostgresRecord) -> None:
    pipeline = words_pipeline()
    pipeline.retention = twophase.Retention(superseded="1d", keep_last=1)
    runner = runner_of(pipeline, record)
    land_words(rows=1)
    first = run(runner)
    for _ in range(3):
        runner.replace(first.checkpoint_id)
    old(record, 30)

    gone = [name for name in swept(runner) if not name.endswith(".json")]

    assert sorted(gone) == ["00000001.r1", "00000001.r2"]
    assert [path.name for path in data_path("lake/words.twophase/superseded").iterdir()] == ["00000001.r3"]


@pytest.mark.parametrize("age", [399, 401])
def test_events_go_when_their_retention_is_over_and_their_revision_has_ended(runner: Runner, age: int) -> None:
    from sqlalchemy import text

    land_words(files=2, rows=1)
    run(runner)
    taken = runner.coordinator.begin(Run(None, "somebody"))
    assert taken is not None
    with runner.record.engine.begin() as connection:
        connection.execute(text("ALTER TABLE twophase.event DISABLE TRIGGER keep"))
        connection.execute(text("UPDATE twophase.event SET at = at - make_interval(days => :age)"), {"age": age})
        connection.execute(text("ALTER TABLE twophase.event ENABLE TRIGGER keep"))

    gone = list(sweep(runner.record, runner.pipeline))

    with runner.record.engine.connect() as connection:
        left = connection.execute(text("SELECT checkpoint_id, count(*) FROM twophase.event GROUP BY 1")).all()
    kept = {row[0]: row[1] for row in left}
    assert (1 in kept) == (age == 399)
    assert kept[2] == 1
    assert [one.path for one in gone] == ([] if age == 399 else ["7 events"])
