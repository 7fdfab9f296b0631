"""A sink or a source that fails in any way holds up only itself, and the exit code says that something failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.commands import twophase
from support.pipelines.factories import PreStaged, Row, counted, land_words, visible, words_pipeline
from twophase import sinks
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key
from twophase.core.errors import AttemptFailed, PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.recovery import Leave
from twophase.core.states import State
from twophase.runner import Runner

KEY = Key("words", 1, 1)


class Bench:
    """One pipeline into two tables of files, `copy` before `lake`; something is wrong beside `copy`."""

    def __init__(self, home: Path, record: PostgresRecord) -> None:
        self.record = record
        self.beside = home / "data/lake/copy.twophase"
        self.archive = home / "data/landing/words.archive"
        self.rows: list[Row] = land_words(rows=4)
        writes = {"copy": sinks.Files("lake/copy"), "lake": sinks.Files("lake/words")}
        self.pipeline = words_pipeline(writes=writes, after_commit="archive")

    def process(self, stager: PreStaged | None = None) -> Runner:
        return Runner(self.pipeline, stager or PreStaged(), record=self.record)

    def upto(self, point: str) -> None:
        failpoints.configure(f"{point}=raise")
        with pytest.raises(FailpointError):
            self.process().run()
        failpoints.configure("")

    def block(self) -> None:
        """Put a file where promoters and sweepers of `copy` need a folder."""
        (self.beside / "taken").rmdir()
        (self.beside / "taken").touch()

    def mend(self) -> None:
        (self.beside / "taken").unlink()
        (self.beside / "taken").mkdir()

    def state(self) -> State:
        with self.record.transaction() as tx:
            return tx.revision(KEY).state


@pytest.fixture
def bench(home: Path, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")
    yield Bench(home, record)
    failpoints.configure("")


def test_a_sink_whose_storage_fails_delays_itself_alone_and_is_finished_once_it_is_mended(bench: Bench) -> None:
    bench.upto("commit.after")
    coordinator = bench.process().coordinator
    bench.block()

    with pytest.raises(PromotionPending, match=r"not promoted yet \(copy: .*NotADirectoryError: .*taken"):
        coordinator.finish(KEY)
    told = twophase("recover", "words", "--wait")
    shown = twophase("show", "words", "1")

    assert counted(visible("lake/words")) == counted(bench.rows)
    assert (told.exit_code, bench.state()) == (0, State.COMMITTING)
    assert "NotADirectoryError" in told.stdout
    assert shown.exit_code == 0
    bench.mend()
    assert twophase("recover", "words").exit_code == 0
    assert bench.state() is State.COMMITTED
    assert counted(visible("lake/copy")) == counted(bench.rows)


def test_folders_that_somebody_removed_because_they_were_empty_are_made_again(bench: Bench) -> None:
    """No run has to come: recovery finishes what is decided, a replacement too."""
    bench.upto("commit.after")
    (bench.beside / "taken").rmdir()
    assert twophase("recover", "words", "--wait").exit_code == 0
    assert bench.state() is State.COMMITTED
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        bench.process().replace(1)
    failpoints.configure("")
    for name in ("taken", "superseded"):
        (bench.beside / name).rmdir()

    assert twophase("recover", "words", "--wait").exit_code == 0

    with bench.record.transaction() as tx:
        assert tx.revision(Key("words", 1, 2)).state is State.COMMITTED
    assert counted(visible("lake/copy")) == counted(bench.rows)
    assert len(list((bench.beside / "superseded").iterdir())) == 1


def test_whatever_a_sink_of_ones_own_raises_is_no_reason_to_stop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in promotion nor in recovery; it is told in one line, and tried again."""
    bench.upto("commit.after")

    def broken(*_: object) -> Any:
        msg = "no such\nthing"
        raise ValueError(msg)

    with monkeypatch.context() as patched:
        for method in ("promote", "find"):
            patched.setattr(bench.pipeline.writes["copy"], method, broken)
        decisions = bench.process().coordinator.recover(decided_only=True)

    assert isinstance(decisions[0][1], Leave)
    assert "ValueError: no such thing" in decisions[0][1].reason
    assert counted(visible("lake/words")) == counted(bench.rows)
    bench.process().coordinator.recover(decided_only=True)
    assert bench.state() is State.COMMITTED


def test_a_person_who_stops_it_is_obeyed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.upto("commit.after")

    def stopped(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.pipeline.writes["copy"], "promote", stopped)

    with pytest.raises(KeyboardInterrupt):
        bench.process().coordinator.finish(KEY)


class Failing(PreStaged):
    """Has staged everything when it fails, and something is in the way of whoever cleans up."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench

    def __call__(self, *arguments: Any) -> Any:
        super().__call__(*arguments)
        self.bench.block()
        msg = "the transform failed, as it was told to"
        raise AttemptFailed(msg)


def test_staged_output_that_cannot_be_removed_keeps_nobody_from_removing_the_rest(bench: Bench) -> None:
    """The run still says what it failed with; recovery says that something is left, and removes it once it can."""
    with pytest.raises(AttemptFailed, match="as it was told to") as failed:
        bench.process(Failing(bench)).run()
    told = twophase("recover", "words", "--wait")

    assert "not discarded yet" in "".join(failed.value.__notes__)
    assert (told.exit_code, bench.state()) == (1, State.ABORTING)
    assert not list((bench.beside.parent / "words.twophase/staging").iterdir())
    bench.mend()
    assert twophase("recover", "words", "--wait").exit_code == 0
    assert bench.state() is State.ABORTED
    assert not list((bench.beside / "staging").iterdir())


def test_a_sweep_goes_on_with_the_other_sinks_and_says_which_one_it_could_not_sweep(bench: Bench) -> None:
    bench.process().run()
    left = [
        bench.beside.with_name(name) / "staging/00000001.r1.a1.left" for name in ("copy.twophase", "words.twophase")
    ]
    for folder in left:
        folder.mkdir()
    bench.block()

    told = twophase("sweep", "words", "--all")

    assert told.exit_code == 1
    assert "sink 'copy': NotADirectoryError" in told.stderr
    assert [folder.exists() for folder in left] == [True, False]
    bench.mend()
    assert twophase("sweep", "words", "--all").exit_code == 0
    assert not left[0].exists()


def test_a_sink_that_cannot_be_verified_is_a_difference_and_the_others_are_verified(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.process().run()
    next((bench.beside.parent / "words").glob("checkpoint=*/*.parquet")).unlink()

    def broken(*_: object) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("twophase.sinks.staged_files.manifest_check.load", _only_for("copy", broken))

    told = twophase("verify", "words")

    assert told.exit_code == 1
    assert "it cannot be verified: OSError: [Errno 5]" in " ".join(told.stdout.split())
    assert "part-" in told.stdout


def _only_for(table: str, instead: Any) -> Any:
    from twophase.sinks.staged_files import manifest_check

    load = manifest_check.load

    def chosen(place: Any, *arguments: Any) -> Any:
        return instead() if place.table.name == table else load(place, *arguments)

    return chosen


def test_input_that_cannot_be_archived_leaves_the_commit_as_it_is_and_recovery_says_so(bench: Bench) -> None:
    bench.archive.touch()

    done = bench.process().run()
    told = twophase("recover", "words")

    assert done is not None
    assert done.state is State.COMMITTED
    assert told.exit_code == 1
    assert "input is not settled" in told.stderr
    bench.archive.unlink()
    assert twophase("recover", "words").exit_code == 0
    assert len(list(bench.archive.rglob("*.json"))) == 1
