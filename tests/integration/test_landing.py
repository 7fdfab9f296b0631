"""What begin takes from a landing folder: looked for without a lock, and asked about only as far as it may be new."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import PreStaged, land, land_words, words_pipeline
from twophase.committer import record as records
from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.core.checkpoint import InputFile, Known, Run
from twophase.core.errors import InputChanged
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.sources import new_files
from twophase.sources.files import Files
from twophase.sources.new_files import Found

ME = Run(None, "me")
IDLE = 0.3


@pytest.fixture
def runner(home: Path, record: PostgresRecord) -> Runner:
    return Runner(words_pipeline(), PreStaged(), record=record)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return about which files the record is asked, each time."""
    ask, seen = PostgresTransaction.new_files, []

    def new_files(
        self: PostgresTransaction, pipeline: str, source: str, found: Sequence[InputFile], since: datetime | None = None
    ) -> list[InputFile]:
        seen.append(sorted(file.path for file in found))
        return ask(self, pipeline, source, found, since)

    monkeypatch.setattr(PostgresTransaction, "new_files", new_files)
    return seen


def taken(runner: Runner) -> list[str]:
    """Run a checkpoint; return the files that it took."""
    done = runner.run()
    if done is None:
        return []
    with runner.record.transaction() as tx:
        return [file.path for file in tx.inputs(done.key)["words"].files]


def test_slow_storage_does_not_cost_begin_its_session(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a file takes longer than a session may idle in a transaction: nothing is looked at in one."""
    monkeypatch.setattr(
        records, "SESSION", f"-c idle_in_transaction_session_timeout={int(IDLE * 1000)}ms -c timezone=UTC"
    )
    look = os.stat

    def slow(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if "landing" in os.fspath(path) if isinstance(path, str | os.PathLike) else False:
            time.sleep(2 * IDLE)
        return look(path, *args, **kwargs)

    land_words(files=1, rows=1)
    runner = Runner(words_pipeline(), PreStaged(), dsn=dsn)
    runner.coordinator.patience = ()
    runner.coordinator.transact(lambda tx: tx.outlook("words", None))  # the first time its statements are built
    monkeypatch.setattr(os, "stat", slow)

    begun = runner.coordinator.begin(ME)

    assert begun is not None
    assert begun.state is State.OPEN
    runner.record.engine.dispose()


def test_known_files_are_not_asked_about_again(runner: Runner, asked: list[list[str]]) -> None:
    """Neither when nothing has come, nor when something has; the sums in the record speak for them."""
    land_words(files=50, rows=1)
    first = taken(runner)
    nothing = taken(runner)
    land("new.json", [{"id": 100, "word": "w", "frequency": 1}])
    second = taken(runner)
    taken(runner)

    assert (len(first), nothing, second) == (50, [], ["new.json"])
    assert [len(paths) for paths in asked] == [50, 0, 1, 0]


def test_a_file_that_comes_with_an_old_time_is_taken(runner: Runner) -> None:
    """Moved from elsewhere with its time kept: its bucket of names tells."""
    land_words(files=20, rows=1)
    taken(runner)
    old = land("old.json", [{"id": 100, "word": "w", "frequency": 1}])
    os.utime(old, ns=(10**9, 10**9))

    assert taken(runner) == ["old.json"]


@pytest.mark.parametrize("later", [True, False])
def test_a_known_file_that_changed_is_an_error_however_many_are_known(runner: Runner, *, later: bool) -> None:
    land_words(files=20, rows=1)
    name = taken(runner)[7]
    file = data_path("landing/words") / name
    file.write_text('{"id": 77, "word": "changed", "frequency": 1}\n')
    if not later:
        os.utime(file, ns=(10**9, 10**9))

    with pytest.raises(InputChanged, match=name):
        runner.run()


def test_released_files_are_taken_again_though_they_were_known(runner: Runner, record: PostgresRecord) -> None:
    land_words(files=3, rows=1)
    begun = runner.coordinator.begin(ME)
    assert begun is not None
    runner.coordinator.abort(begun, "wrong")
    runner.coordinator.release(begun.checkpoint_id, "corrected")

    assert len(taken(runner)) == 3


def test_who_looked_before_a_release_does_not_bring_back_what_was_known(runner: Runner) -> None:
    """It would say that the files have an owner, and nobody would ever take them."""
    land_words(files=3, rows=1)
    begun = runner.coordinator.begin(ME)
    assert begun is not None
    runner.coordinator.abort(begun, "wrong")
    with runner.record.transaction() as tx:
        look = tx.outlook("words", None).look
    found = runner.pipeline.reads["words"].discover(None, look.known["words"])
    land("later.json", [{"id": 100, "word": "w", "frequency": 1}])
    runner.coordinator.release(begun.checkpoint_id, "corrected")

    with runner.record.transaction() as tx:
        tx.remember("words", "words", look.known["words"], found.after([]), look.at)

    assert len(taken(runner)) == 4


def test_a_file_that_was_committed_and_archived_since_it_was_found_is_not_taken(
    home: Path, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is free by then, but there is nothing to read: the record knows since when."""
    runner = Runner(words_pipeline(after_commit="archive"), PreStaged(), record=record)
    land_words(files=2, rows=1)
    discover = Files.discover

    def held_up(self: Files, slot: str | None = None, known: Known | None = None, *_: Any) -> Found:
        found = discover(self, slot, known)
        monkeypatch.setattr(Files, "discover", discover)
        assert len(taken(runner)) == 2
        return found

    monkeypatch.setattr(Files, "discover", held_up)

    assert runner.coordinator.begin(ME) is None


def test_files_that_people_remove_cost_one_look(runner: Runner, asked: list[list[str]]) -> None:
    """Known ones may go from the folder: their buckets are asked about once, and remembered without them."""
    land_words(files=50, rows=1)
    for name in taken(runner)[:5]:
        (data_path("landing/words") / name).unlink()

    assert (taken(runner), taken(runner)) == ([], [])
    assert asked[-1] == []


def test_what_is_left_for_later_by_a_limit_is_not_taken_for_known(home: Path, record: PostgresRecord) -> None:
    runner = Runner(words_pipeline(max_files=2), PreStaged(), record=record)
    land_words(files=5, rows=1)
    for path in data_path("landing/words").iterdir():
        os.utime(path, ns=(10**9, 10**9))  # all of one time: it does not tell the later ones

    assert [len(taken(runner)) for _ in range(4)] == [2, 2, 1, 0]


def test_a_look_finds_all_that_is_new_or_changed_whatever_happens_to_a_folder(tmp_path: Path) -> None:
    """Files come, change, go, are touched and come back, in any order; against a comparison file by file."""
    chance = random.Random(16)
    owned: dict[str, InputFile] = {}
    known: Known | None = None
    for _ in range(150):
        for _ in range(chance.randrange(4)):
            path = tmp_path / f"f{chance.randrange(60)}"
            if path.exists() and chance.random() < 0.3:
                path.unlink()
            else:
                path.write_text("x" * chance.randrange(3))
                os.utime(path, ns=(0, chance.randrange(1, 40)))
        there = {f.name: InputFile(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in tmp_path.iterdir()}
        expected = {file for file in there.values() if owned.get(file.path) != file}

        found = new_files.look(str(tmp_path), "test", known)

        assert expected <= set(found.files)
        new = [file for file in found.files if owned.get(file.path) != file]
        later = [file for file in new if chance.random() < 0.3]
        owned |= {file.path: file for file in new if file not in later}
        known = found.after(later)


def test_a_look_at_many_files_leaves_out_what_is_unfinished_wherever_it_stands(tmp_path: Path) -> None:
    """Names are asked about many at a time: one that is odd is found among those that are not, in each folder."""
    names = [f"{folder}f{number:04d}" for folder in ("", "below/", "below/deep/", "a:b/") for number in range(250)]
    odd = ["_x", ".x", "x.tmp", "x._COPYING_", "below/_x", "below/x.tmp", "_below/x", "below/.deep/x", "a:b/.x"]
    fine = ["ü", "below/ü", "x:y", "tmp", "x_", "a:b/ü"]
    for name in [*names, *odd, *fine]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "below" / "link").symlink_to(tmp_path / "f0001")
    (tmp_path / "folder").symlink_to(tmp_path / "below")

    whole = new_files.look(str(tmp_path), "test", None)
    (tmp_path / "f0007").write_text("another")
    again = new_files.look(str(tmp_path), "test", whole.after([]))

    assert sorted(file.path for file in whole.files) == sorted([*names, *fine, "below/link"])
    assert "f0007" in {file.path for file in again.files}
    assert len(again.files) < 50
