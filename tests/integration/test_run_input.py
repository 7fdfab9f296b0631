"""What a run under Airflow takes: its own again after a retry or a clear, another revision only when asked for one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from support.pipelines.factories import PreStaged, land, land_words, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.attempt import Staging
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.errors import Busy, Fenced
from twophase.core.lease import Lease
from twophase.core.ports import Opened
from twophase.core.settings import data_path
from twophase.core.states import DECIDED, State
from twophase.run_folders import run_folder
from twophase.wiring import coordinator_of, enter

SLOT = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"


class Airflow:
    """What Airflow knows of runs, and the tasks of one pipeline by hand."""

    def __init__(self, record: PostgresRecord, pipeline: Pipeline) -> None:
        self.ended: set[Run | None] = set()
        self.pipeline = pipeline
        pipeline.prepare()
        enter(record, pipeline)
        self.opened: dict[Key, Opened] = {}
        self.coordinator: Coordinator = coordinator_of(record, pipeline, run_ended=lambda run: run in self.ended)

    def take(
        self, run: Run, *, slot: str | None = None, reprocess: bool = False, number: int | None = None
    ) -> Revision:
        taken = self.coordinator.open_for_task(run, slot=slot, reprocess=reprocess, checkpoint_id=number)
        assert taken is not None
        if isinstance(taken, Opened):
            self.opened[taken.revision.key] = taken
            return taken.revision
        return taken

    def stage(self, taken: Revision) -> Revision:
        opened = self.opened.pop(taken.key, None) or self.coordinator.opened(self.coordinator.attempt(taken))
        attempt = opened.revision
        staging = Staging(self.coordinator, self.pipeline)
        with Lease(self.coordinator, attempt) as lease:
            folder = run_folder(attempt.key, attempt.epoch, "test")
            votes = staging.stage(opened, PreStaged(), folder, lease)
            self.coordinator.vote_all(attempt, votes, rests=True)
        return attempt

    def commit(self, key: Key, run: Run) -> Revision:
        revision = self.coordinator.transact(lambda tx: tx.revision(key))
        done = self.coordinator.finish(key) if revision.state in DECIDED else self.coordinator.commit(revision)
        self.coordinator.acknowledge(done, run)
        return done

    def through(self, run: Run, **wanted: str | bool | int | None) -> Revision:
        """Run all tasks of a run, and end it."""
        taken = self.take(run, **wanted)  # type: ignore[arg-type]
        if taken.state not in DECIDED:
            self.stage(taken)
        done = self.commit(taken.key, run)
        self.ended.add(run)
        return done


def run(name: str) -> Run:
    return Run("daily", name)


@pytest.fixture
def intervals(home: Path, record: PostgresRecord) -> Airflow:
    land("a.json", [{"id": 1, "word": "w", "frequency": 1}], "landing/dt=2026-11-15")
    reads = {"words": sources.Interval("landing/dt={start:%Y-%m-%d}", "json")}
    writes = {"lake": sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")}
    return Airflow(record, Pipeline("daily", reads=reads, transform="word_count:copy", writes=writes))


@pytest.fixture
def ordered(home: Path, record: PostgresRecord) -> Airflow:
    return Airflow(record, words_pipeline())


def test_a_retried_stage_goes_on_with_its_own_revision_at_once(intervals: Airflow) -> None:
    first = intervals.take(run("a"), slot=SLOT)

    again = intervals.take(run("a"), slot=SLOT)

    assert again.key == first.key
    assert again.leased


def test_a_run_whose_checkpoint_was_decided_passes_through_when_it_is_cleared(intervals: Airflow) -> None:
    taken = intervals.take(run("a"), slot=SLOT)
    intervals.coordinator.decide_commit(intervals.stage(taken))
    intervals.ended.add(run("a"))
    intervals.coordinator.recover(decided_only=True)  # its commit task never saw the end

    cleared = intervals.take(run("a"), slot=SLOT)

    assert (cleared.key, cleared.state, cleared.acknowledged) == (taken.key, State.COMMITTED, False)
    assert intervals.commit(cleared.key, run("a")).revision == 1


def test_clearing_a_run_that_had_seen_its_commit_makes_a_new_revision(intervals: Airflow) -> None:
    intervals.through(run("a"), slot=SLOT)

    cleared = intervals.through(run("a"), slot=SLOT)

    assert (cleared.revision, cleared.state) == (2, State.COMMITTED)


def test_a_cleared_run_without_intervals_finds_its_checkpoint_by_its_run(ordered: Airflow) -> None:
    for number in (1, 2):
        land_words(start=number)
        ordered.through(Run("words", str(number)))

    cleared = ordered.through(Run("words", "1"))

    assert (cleared.checkpoint_id, cleared.revision) == (1, 2)


def test_a_red_run_whose_checkpoint_another_run_committed_turns_green_without_work(ordered: Airflow) -> None:
    land_words()
    mine = ordered.take(Run("words", "a"))
    ordered.coordinator.abort(mine, "its run failed")
    other = ordered.through(Run("words", "b"))

    cleared = ordered.take(Run("words", "a"))

    assert (mine.key.revision, other.key.revision) == (1, 2)
    assert (cleared.key, cleared.state) == (other.key, State.COMMITTED)


def test_a_replacement_that_failed_is_tried_again_when_its_run_is_cleared(intervals: Airflow) -> None:
    intervals.through(run("a"), slot=SLOT)
    replacing = intervals.take(run("b"), slot=SLOT, reprocess=True)
    intervals.coordinator.abort(replacing, "its run failed")

    again = intervals.through(run("b"), slot=SLOT, reprocess=True)

    assert (replacing.revision, again.revision) == (2, 3)


def test_a_second_run_for_a_committed_interval_has_nothing_to_do(intervals: Airflow) -> None:
    first = intervals.through(run("a"), slot=SLOT)

    second = intervals.take(run("b"), slot=SLOT)

    assert (second.key, second.run) == (first.key, run("a"))


def test_a_backfill_of_a_committed_interval_makes_a_new_revision(intervals: Airflow) -> None:
    intervals.through(run("a"), slot=SLOT)

    backfilled = intervals.through(run("b"), slot=SLOT, reprocess=True)

    assert (backfilled.checkpoint_id, backfilled.revision) == (1, 2)


def test_a_replay_by_number_leaves_the_regular_lane_alone(ordered: Airflow) -> None:
    land_words()
    ordered.through(Run("words", "1"))
    replaying = ordered.take(Run("words__replay", "r"), number=1)
    land_words(start=1)

    regular = ordered.through(Run("words", "2"))

    assert (replaying.checkpoint_id, replaying.revision) == (1, 2)
    assert (regular.checkpoint_id, regular.state) == (2, State.COMMITTED)


def test_a_waiting_revision_is_not_taken_before_its_run_has_ended(ordered: Airflow) -> None:
    land_words()
    waiting = ordered.stage(ordered.take(Run("words", "a")))

    with pytest.raises(Busy, match="which has not ended"):
        ordered.take(Run("words", "b"))

    ordered.ended.add(Run("words", "a"))
    assert ordered.take(Run("words", "b")).key == waiting.key


def test_a_revision_that_waits_for_an_approval_stays_open_until_it_is_given(ordered: Airflow) -> None:
    land_words()
    ordered.coordinator.approvals = ["approval"]
    waiting = ordered.stage(ordered.take(Run("words", "a")))
    with pytest.raises(Fenced):
        ordered.coordinator.commit(waiting)

    state = ordered.coordinator.vote(waiting, "approval", yes=True, reason="by somebody")

    assert state is State.PRECOMMITTED
    assert ordered.commit(waiting.key, Run("words", "a")).state is State.COMMITTED


@pytest.mark.parametrize("seed", range(100))
def test_two_runs_for_one_interval_commit_it_once_however_they_interleave(
    home: Path, shared_record: PostgresRecord, seed: int
) -> None:
    """Each task of either run is one step; who is refused tries again, as Airflow's retries do."""
    chance = random.Random(seed)
    land("a.json", [{"id": 1, "word": "w", "frequency": 1}], "landing/dt=2026-11-15")
    name = f"daily_{seed}"
    reads = {"words": sources.Interval("landing/dt={start:%Y-%m-%d}", "json")}
    writes = {"lake": sinks.Files(f"lake/{name}", slot_folder="dt={start:%Y-%m-%d}")}
    airflow = Airflow(shared_record, Pipeline(name, reads=reads, transform="word_count:copy", writes=writes))
    runs = {one: tasks_of(airflow, Run(name, one)) for one in ("scheduled", "manual")}
    while runs:
        one = chance.choice(sorted(runs))
        if next(runs[one], None) is None:
            del runs[one]

    with shared_record.engine.connect() as connection:
        found = queries.checkpoints(connection, name)
    assert [row["state"] for row in found if row["state"] != "ABORTED"] == ["COMMITTED"]
    with duckdb.connect() as reader:
        rows = reader.execute(f"SELECT id FROM '{data_path(f'lake/{name}')}/**/*.parquet'").fetchall()
    assert rows == [(1,)]


def tasks_of(airflow: Airflow, me: Run) -> Iterator[str]:
    """Yield after each step of a run; a step that is refused is tried again later."""

    def tried(step: Callable[[], Revision]) -> Iterator[Revision | None]:
        while True:
            try:
                yield step()
            except (Busy, Fenced):
                yield None
            else:
                return

    for taken in tried(lambda: airflow.take(me, slot=SLOT)):
        yield "took" if taken else "was refused"
    assert taken is not None
    if taken.state not in DECIDED:
        airflow.stage(taken)
        yield "staged"
    airflow.commit(taken.key, me)
    airflow.ended.add(me)
    yield "committed"


def test_the_spark_job_of_an_attempt_is_kept_for_that_attempt_only(ordered: Airflow) -> None:
    land_words()
    first = ordered.coordinator.attempt(ordered.take(Run("words", "a")))
    ordered.coordinator.transact(lambda tx: tx.keep_job(first.key, epoch=first.epoch, job={"id": "driver-1"}))
    second = ordered.coordinator.attempt(ordered.take(Run("words", "a")))

    with pytest.raises(Fenced):
        ordered.coordinator.transact(lambda tx: tx.keep_job(first.key, epoch=first.epoch, job={"id": "driver-2"}))

    assert second.epoch == first.epoch + 1
    assert data_path("landing").exists()
