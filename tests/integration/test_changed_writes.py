"""A pipeline that changes: writes that come, go and move, and what is then said of what they lack."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy import text

import twophase
from support.pipelines.commands import listed
from support.pipelines.commands import twophase as command
from support.pipelines.factories import PreStaged, land_words, visible, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.committer import upgrade
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError
from twophase.runner import Runner

LAKE = "lake/words"


@pytest.fixture(autouse=True)
def _without_spark(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged())


def commit(record: PostgresRecord, number: int, **writes: str) -> None:
    """Land one more file and commit it to these tables."""
    land_words(files=1, rows=1, start=number)
    made = words_pipeline(writes={name: sinks.Files(path) for name, path in writes.items()})
    assert Runner(made, PreStaged(), record=record).run() is not None


def ids(table: str) -> list[int]:
    return sorted(row["id"] for row in visible(table))


def lacking() -> list[str]:
    (row,) = listed("pipelines")
    found: list[str] = row["lacking"]
    return found


def test_a_write_that_is_added_says_what_it_lacks_until_a_backfill_fills_it(record: PostgresRecord) -> None:
    for number in range(3):
        commit(record, number, lake=LAKE)
    commit(record, 3, lake=LAKE, lake2="lake/second")
    said = "lake2: checkpoints 1..3 not there, added or moved at 4; a backfill fills it"

    before = command("verify", "words")
    assert before.stdout == "words: 4 checkpoints verified in lake, 1 checkpoint verified in lake2: all as recorded\n"
    assert before.stderr == f"words: {said}\n"
    assert lacking() == [said]
    assert said in command("pipelines").stdout
    shown = command("show", "words", "2")
    assert "write lake2 has nothing of it, it was added or moved later; `twophase backfill words" in shown.stderr
    assert "lake2" not in command("show", "words", "4").stderr
    assert ids("lake/second") == [3]

    listed("backfill", "words", "--checkpoints", "2")
    assert lacking() == ["lake2: checkpoints 1,3 not there, added or moved at 4; a backfill fills it"]
    listed("backfill", "words", "--checkpoints", "1..3")

    assert lacking() == []
    assert ids("lake/second") == ids(LAKE) == [0, 1, 2, 3]
    assert command("verify", "words").stdout == "words: 4 checkpoints verified in lake, lake2: all as recorded\n"
    with record.engine.connect() as connection:
        assert connection.execute(text("SELECT max(since) FROM twophase.write")).scalar() == 1  # nobody looks again


def test_readers_of_a_write_that_lacks_something_are_told(
    record: PostgresRecord, caplog: pytest.LogCaptureFixture
) -> None:
    commit(record, 0, lake=LAKE)
    commit(record, 1, lake=LAKE, lake2="lake/second")

    with caplog.at_level(logging.WARNING, "twophase"):
        caplog.clear()
        assert len(twophase.committed_files("words", "lake")) == 4
        assert not caplog.messages
        assert len(twophase.committed_files("words", "lake2")) == 2

    assert caplog.messages == ["words: lake2: checkpoint 1 not there, added or moved at 2; a backfill fills it"]


def test_what_a_backfill_fills_comes_to_a_chain_as_new_input(record: PostgresRecord) -> None:
    """Whoever reads the added write has read nothing of what it lacked, so nothing is read twice."""
    commit(record, 0, lake=LAKE)
    commit(record, 1, lake=LAKE, lake2="lake/second")
    counts = Pipeline(
        "counts",
        reads={"rows": sources.Committed("words", "lake2")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/counts")},
    )
    runner = Runner(counts, PreStaged(), record=record)

    runner.run()
    first = ids("lake/counts")
    listed("backfill", "words", "--checkpoints", "1")
    runner.run()

    assert first == [1]
    assert ids("lake/counts") == [0, 1]
    assert runner.run() is None


def test_a_write_that_is_dropped_is_named_and_keeps_what_it_has(record: PostgresRecord) -> None:
    for number in range(2):
        commit(record, number, lake=LAKE, lake2="lake/second")
    commit(record, 2, lake=LAKE)

    verified = command("verify", "words")
    assert verified.exit_code == 0
    assert verified.stdout == "words: 3 checkpoints verified in lake: all as recorded\n"
    assert verified.stderr == "words: lake2: not declared any more, nothing goes there after checkpoint 2\n"
    assert ids("lake/second") == [0, 1]
    with pytest.raises(ConfigError, match="no write 'lake2', expected lake"):
        twophase.committed_files("words", "lake2")

    commit(record, 3, lake=LAKE, lake2="lake/second")  # and back again

    assert lacking() == ["lake2: checkpoints 1..3 not there, added or moved at 4; a backfill fills it"]
    listed("backfill", "words", "--checkpoints", "1..3")
    assert ids("lake/second") == ids(LAKE) == [0, 1, 2, 3]
    assert lacking() == []
    assert command("verify", "words").exit_code == 0


def test_a_write_that_moves_begins_anew_where_it_is_and_a_backfill_brings_the_rest(record: PostgresRecord) -> None:
    """What is committed stays in the old place, and is read there by the record until it is replaced."""
    for number in range(2):
        commit(record, number, lake=LAKE)
    commit(record, 2, lake="lake/moved")

    assert lacking() == ["lake: checkpoints 1..2 not there, added or moved at 3; a backfill fills it"]
    assert (ids(LAKE), ids("lake/moved")) == ([0, 1], [2])
    assert len(twophase.committed_files("words", "lake")) == 6

    listed("backfill", "words", "--checkpoints", "1..2")

    assert ids("lake/moved") == [0, 1, 2]
    assert lacking() == []
    assert {Path(path).parents[1].name for path in twophase.committed_files("words", "lake")} == {"moved"}
    assert command("verify", "words").exit_code == 0


def test_a_write_is_renamed_by_another_one_beside_it(record: PostgresRecord) -> None:
    """Its name is what its checkpoints are known by: the same table under another name is refused."""
    commit(record, 0, lake=LAKE)
    with pytest.raises(ConfigError, match=r"write 'orders' goes to .*, which is that of write 'lake'"):
        commit(record, 1, orders=LAKE)

    commit(record, 1, lake=LAKE, orders="lake/orders")
    listed("backfill", "words", "--checkpoints", "1")
    commit(record, 2, orders="lake/orders")

    assert ids("lake/orders") == [0, 1, 2]
    assert lacking() == []
    assert "lake: not declared any more, nothing goes there after checkpoint 2" in command("verify", "words").stderr


def test_a_pipeline_is_renamed_by_another_one_that_reads_the_first(record: PostgresRecord) -> None:
    """It takes what is committed over, whatever became of the input, and then the input that is new."""
    for number in range(2):
        commit(record, number, lake=LAKE)
    taken = Pipeline(
        "orders",
        reads={"rows": sources.Committed("words", "lake")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/orders")},
    )
    same = Pipeline("orders", reads=taken.reads, transform="word_count:copy", writes={"lake": sinks.Files(LAKE)})

    with pytest.raises(ConfigError, match="belongs to pipeline 'words', and two cannot share one"):
        Runner(same, PreStaged(), record=record)
    Runner(taken, PreStaged(), record=record).run()

    assert ids("lake/orders") == [0, 1]
    assert ids(LAKE) == [0, 1]


def test_an_older_record_learns_what_its_writes_lack(record: PostgresRecord) -> None:
    """The migration goes by what is committed: a hole that is there on the day of the upgrade is said."""
    for number in range(2):
        commit(record, number, lake=LAKE)
    commit(record, 2, lake=LAKE, lake2="lake/second")
    (path,) = (Path(upgrade.__file__).parent / "migrations" / "versions").glob("*_writes.py")
    script = path.read_text()
    fill = script[script.index("INSERT INTO twophase.write") : script.index('"""\n\n\ndef upgrade')]
    with record.engine.begin() as connection:
        connection.execute(text("DELETE FROM twophase.write"))
        connection.execute(text(fill))

    assert lacking() == ["lake2: checkpoints 1..2 not there, added or moved at 3; a backfill fills it"]
