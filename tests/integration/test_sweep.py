"""A sweep looks where something may have been left, not at the history; and any number of sweeps may run at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import text

from benchmarks.filling import fill, fill_table
from benchmarks.plans import long_reads
from benchmarks.workload import pipeline as filled_pipeline
from support.pipelines.factories import PreStaged, land_words, visible, words_pipeline
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Revision, Run
from twophase.core.settings import data_path, home
from twophase.run_folders import run_folder
from twophase.runner import Runner
from twophase.sinks.files.sink import Files
from twophase.sweep import Removed, sweep
from twophase.verification import verify

SWEEPERS = 6
ROUNDS = 4
ME = Run(None, "me")
CHECKPOINTS = 4000


@pytest.fixture
def runner(home: Path, record: PostgresRecord) -> Runner:
    """Return a runner that takes one file at a time."""
    return Runner(words_pipeline(max_files=1), PreStaged(), record=record)


def at_once(runner: Runner) -> list[Removed]:
    """Let several sweep at the same time; return what each removed."""
    barrier = Barrier(SWEEPERS)

    def one(_: int) -> list[Removed]:
        barrier.wait()
        return list(sweep(runner.record, runner.pipeline))

    with ThreadPoolExecutor(SWEEPERS) as pool:
        return [removed for swept in pool.map(one, range(SWEEPERS)) for removed in swept]


def aborted(runner: Runner) -> Revision:
    """Abort a revision."""
    taken = runner.coordinator.begin(ME)
    assert taken is not None
    opened = runner.coordinator.attempt(taken)
    runner.coordinator.abort(opened, "failed")
    return opened


def leave(runner: Runner, dead: Revision) -> list[Path]:
    """Put what zombies and killed processes leave of a dead revision: folders full of files, a manifest, a log."""
    side = data_path("lake/words.twophase")
    prefix = f"{dead.checkpoint_id:08d}.r{dead.revision}.a{dead.epoch}"
    folders = [
        *(side / "staging" / f"{prefix}.{number:08x}" for number in range(3)),
        side / "taken" / f"{prefix}.{'0' * 32}.dead",
        run_folder(dead.key, dead.epoch, "00000000"),
    ]
    for folder in folders:
        for part in ("dt=1", "dt=2"):
            (folder / part).mkdir(parents=True)
            for number in range(20):
                (folder / part / f"part-{number}").touch()
    manifest = side / "manifests" / f"{prefix}.json"
    manifest.write_text("{}")
    return [*folders, manifest]


def test_sweepers_at_once_remove_what_is_dead_and_harm_nobody(runner: Runner) -> None:
    """Folders, manifests, logs, replaced revisions and old events: whatever another removed meanwhile is gone."""
    land_words(files=ROUNDS + 1, rows=1)
    for _ in range(ROUNDS):
        runner.replace(runner.run().checkpoint_id)  # type: ignore[union-attr]
        with runner.record.engine.begin() as connection:
            connection.execute(text("UPDATE twophase.revision SET superseded_at = superseded_at - interval '8 days'"))
            connection.execute(text("ALTER TABLE twophase.event DISABLE TRIGGER keep"))
            connection.execute(text("UPDATE twophase.event SET at = at - interval '401 days'"))
            connection.execute(text("ALTER TABLE twophase.event ENABLE TRIGGER keep"))
        left = leave(runner, aborted(runner))

        removed = {one.path for one in at_once(runner)}

        assert {str(path) for path in left} <= removed
        assert [path for path in left if path.exists()] == []
        assert list(sweep(runner.record, runner.pipeline)) == []
    assert sorted(row["id"] for row in visible("lake/words")) == list(range(ROUNDS))
    assert not [difference for difference in verify(runner.record, runner.pipeline) if difference]
    assert not list((home() / "runs" / "words").iterdir())


@pytest.mark.usefixtures("home")
def test_a_sweep_does_not_read_the_history(
    dsn: str, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the record nor on storage, once what had been left is swept."""
    fill("long", dsn, CHECKPOINTS)
    fill_table("long", 50)
    declared = filled_pipeline("long")
    declared.prepare()  # whose table it is, a manifest says
    list(sweep(record, declared))
    with record.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    monkeypatch.setattr(Files, "attempts", None)
    monkeypatch.setattr(Files, "superseded", None)

    _, long = long_reads(record.engine, lambda: list(sweep(record, declared)))

    assert (long, caplog.messages) == ([], [])


def test_what_a_revision_leaves_after_it_was_swept_is_found_when_everything_is_looked_at(runner: Runner) -> None:
    """A manifest of a writer that outlived its run: no folder leads to it, and the record is done with it."""
    land_words(files=1, rows=1)
    dead = aborted(runner)
    list(sweep(runner.record, runner.pipeline))
    late = data_path(f"lake/words.twophase/manifests/{dead.checkpoint_id:08d}.r{dead.revision}.a{dead.epoch}.json")
    late.write_text("{}")

    assert list(sweep(runner.record, runner.pipeline)) == []
    assert [one.path for one in sweep(runner.record, runner.pipeline, everything=True)] == [str(late)]
    assert not late.exists()


def test_what_is_aborted_after_a_sweep_is_looked_at_by_the_next_one(runner: Runner) -> None:
    """A mark that the record is done with a revision is for what it was when it was looked at."""
    land_words(files=1, rows=1)
    list(sweep(runner.record, runner.pipeline))
    dead = aborted(runner)
    left = data_path(f"lake/words.twophase/manifests/{dead.checkpoint_id:08d}.r{dead.revision}.a{dead.epoch}.json")
    left.write_text("{}")

    assert [one.path for one in sweep(runner.record, runner.pipeline)] == [str(left)]
