"""The same bytes written again are no change: of input files the record keeps checksums, where that costs little."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.factories import PreStaged, land, land_words, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import InputFile, Json, Revision, Run
from twophase.core.errors import InputChanged
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.sources import fixed_files
from twophase.spark.plan import Plan

ME = Run(None, "me")
LATER = 2**61


@pytest.fixture
def runner(home: Path, record: PostgresRecord) -> Runner:
    return Runner(words_pipeline(), PreStaged(), record=record)


def write_again(path: Path, *, change: bool = False, mtime_ns: int = LATER) -> None:
    """Write a file again: the same bytes, or as many others."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1", b"2") if change else content)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def landed() -> list[Path]:
    return sorted(data_path("landing/words").glob("*.json"))


def known(record: PostgresRecord, revision: Revision) -> tuple[InputFile, ...]:
    with record.transaction() as tx:
        return tx.inputs(revision.key)["words"].files


def said(record: PostgresRecord) -> list[str]:
    """Return what the record tells of files that were written again."""
    with record.engine.connect() as connection:
        query = text("SELECT why FROM twophase.event WHERE action = 'input written again' ORDER BY id")
        return list(connection.execute(query).scalars())


def attempted(runner: Runner) -> Revision:
    """Begin, and open an attempt whose process is gone before it stages anything, its checksums recorded."""
    begun = runner.coordinator.begin(ME)
    assert begun is not None
    attempt = runner.coordinator.attempt(begun)
    staging = runner.staging
    staging._know_input(staging._plan(runner.coordinator.opened(attempt), []))
    return attempt


def test_each_attempt_records_the_checksums_that_are_not_known(runner: Runner, record: PostgresRecord) -> None:
    land_words(files=3, rows=2)

    done = runner.run()

    assert done is not None
    assert all(file.xxh3 for file in known(record, done))


@pytest.mark.parametrize("times", [LATER, 10**9], ids=["later", "earlier"])
def test_a_committed_file_that_is_written_again_with_the_same_bytes_is_no_change(
    runner: Runner, record: PostgresRecord, times: int
) -> None:
    """The next begin goes on, the record says so, and the begin after it has nothing to ask about."""
    land_words(files=3, rows=2)
    done = runner.run()
    assert done is not None
    write_again(landed()[1], mtime_ns=times)

    assert runner.run() is None
    land("new.json", [{"id": 100, "word": "w", "frequency": 1}])
    second = runner.run()

    assert second is not None
    assert [file.path for file in known(record, second)] == ["new.json"]
    assert times in {file.mtime_ns for file in known(record, done)}
    assert said(record) == [f"words: {landed()[1].name}: the same bytes"]


def test_other_bytes_of_the_same_size_are_a_change_that_is_named(runner: Runner, record: PostgresRecord) -> None:
    """Also where other files were only written again: the message names the one that was changed."""
    land_words(files=3, rows=2)
    runner.run()
    write_again(landed()[0])
    write_again(landed()[2], change=True)

    with pytest.raises(InputChanged, match=f"{landed()[2].name}.*has changed since"):
        runner.run()
    assert said(record) == []


def test_a_retry_goes_on_with_a_file_that_was_written_again(runner: Runner, record: PostgresRecord) -> None:
    """An attempt died after it had begun; the next one takes the same input, by its bytes."""
    land_words(files=2, rows=2)
    attempted(runner)
    write_again(landed()[0])

    revision = runner.coordinator.begin(ME)
    assert revision is not None
    again = runner.coordinator.attempt(revision)
    runner._stage_and_vote(again)
    done = runner.coordinator.commit(again)

    assert (done.state, done.rows) == (State.COMMITTED, 4)
    assert said(record) == [f"words: {landed()[0].name}: the same bytes"]


def test_a_retry_does_not_go_on_with_other_bytes(runner: Runner) -> None:
    land_words(files=2, rows=2)
    attempted(runner)
    write_again(landed()[0], change=True)

    revision = runner.coordinator.begin(ME)
    assert revision is not None
    with pytest.raises(InputChanged, match=rf"checkpoint words/1 r1: .*{landed()[0].name}.*put the file back"):
        runner._stage_and_vote(runner.coordinator.attempt(revision))


def test_a_replay_reads_a_file_that_was_written_again(runner: Runner, record: PostgresRecord) -> None:
    land_words(files=2, rows=2)
    first = runner.run()
    assert first is not None
    write_again(landed()[0])

    second = runner.replace(1)

    assert (second.revision, second.rows) == (2, 4)
    assert len(said(record)) == 1


def test_a_file_that_is_written_while_it_is_read_fails_the_attempt(home: Path, record: PostgresRecord) -> None:
    """Whoever reads in the middle of it sees a part; the bytes are the same, so the next run reads them all."""
    staged = PreStaged()

    def written_meanwhile(plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        found = staged(plan, folder, lost)
        if plan.revision == 1:
            write_again(landed()[0])
        return found

    runner = Runner(words_pipeline(), written_meanwhile, record=record)
    land_words(files=2, rows=2)

    with pytest.raises(InputChanged, match="the same bytes were written again while they were read; run it again"):
        runner.run()
    done = runner.run()

    assert done is not None
    assert (done.revision, done.state) == (2, State.COMMITTED)


@pytest.mark.parametrize("after_commit", ["archive", "delete"])
def test_what_was_written_again_leaves_the_folder_with_its_checkpoint(
    home: Path, record: PostgresRecord, after_commit: str
) -> None:
    """It is no new file: nothing is read twice. Also if the process dies before the names are free."""
    runner = Runner(words_pipeline(after_commit=after_commit), PreStaged(), record=record)
    land_words(files=2, rows=2)
    begun = attempted(runner)
    runner._stage_and_vote(begun)
    runner.coordinator.decide_commit(begun)
    write_again(landed()[0])
    files = known(record, begun)
    runner.pipeline.reads["words"].settle(1, files)  # and the process is gone

    runner.coordinator.finish(begun.key)

    assert (runner.run(), landed()) == (None, [])
    archived = sorted(data_path("landing/words.archive").rglob("*.json"))
    assert len(archived) == (2 if after_commit == "archive" else 0)


def test_an_interval_goes_on_with_a_file_that_was_written_again(home: Path, record: PostgresRecord) -> None:
    days = Pipeline(
        "days",
        reads={"words": sources.Interval("landing/dt={start:%Y-%m-%d}", "json")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/days")},
    )
    runner = Runner(days, PreStaged(), record=record)
    file = land("day.json", [{"id": 1, "word": "w", "frequency": 1}], folder="landing/dt=2026-03-30")
    slot = "2026-03-30/2026-03-31"
    begun = runner.coordinator.begin(ME, slot=slot)
    assert begun is not None
    attempt = runner.coordinator.attempt(begun)
    runner.staging._know_input(runner.staging._plan(runner.coordinator.opened(attempt), []))
    write_again(file)

    again = runner.coordinator.attempt(attempt)
    runner._stage_and_vote(again)

    assert runner.coordinator.commit(again).state is State.COMMITTED


def test_of_an_input_beyond_the_limit_only_the_smallest_files_are_read(
    runner: Runner, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are known by size and time alone, as a change of any of them shows."""
    small = land("small.json", [{"id": 1, "word": "w", "frequency": 1}])
    land("large.json", [{"id": number, "word": "w", "frequency": 1} for number in range(2, 20)])
    monkeypatch.setattr(fixed_files, "MOST_SUMMED", small.stat().st_size)
    done = runner.run()
    assert done is not None
    assert [file.path for file in known(record, done) if file.xxh3] == ["small.json"]

    write_again(data_path("landing/words") / "large.json")

    with pytest.raises(InputChanged, match=r"large\.json"):
        runner.run()
