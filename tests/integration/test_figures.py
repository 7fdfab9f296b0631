"""Rows, bytes and files are told per sink, and what is set aside apart: five rows in three tables are five rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed, twophase
from support.pipelines.factories import PreStaged, land_words, words_pipeline
from twophase import Pipeline, sinks, sources
from twophase.committer import upgrade
from twophase.committer.record import PostgresRecord
from twophase.core.settings import data_path
from twophase.runner import Runner

pytestmark = pytest.mark.usefixtures("home")


def three_tables(record: PostgresRecord) -> None:
    """Commit five rows to three tables, and two bad records beside them."""
    land_words(rows=5)
    with (data_path("landing/words") / "bad.json").open("w") as bad:
        bad.write("no JSON\nneither\n")
    declared = Pipeline(
        "words",
        reads={
            "words": sources.Files(
                "landing/words",
                format="json",
                schema="id bigint, word string, frequency bigint",
                on_bad_record="quarantine",
            )
        },
        transform="word_count:copy",
        writes={name: sinks.Files(f"lake/{name}") for name in ("a", "b", "c")},
    )
    assert Runner(declared, PreStaged(), record=record).run()


def test_the_rows_of_a_revision_are_those_of_one_write(record: PostgresRecord) -> None:
    three_tables(record)

    (row,) = listed("checkpoints", "words")
    shown = listed("show", "words", "1")
    (pipeline,) = listed("pipelines")

    assert row["rows"] == shown["rows"] == pipeline["last_rows"] == 5
    assert row["sinks"] == shown["sinks"] == pipeline["sinks"]
    assert {name: one["rows"] for name, one in row["sinks"].items()} == {"a": 5, "b": 5, "c": 5}
    assert row["bytes"] == sum(one["bytes"] for one in row["sinks"].values())
    assert all(one["files"] == 2 for one in row["sinks"].values())
    assert {name: one["rows"] for name, one in row["quarantine"].items()} == {"words_quarantine": 2}


def test_a_listing_tells_each_sink_only_where_that_says_more(record: PostgresRecord) -> None:
    three_tables(record)

    several = twophase("checkpoints", "words").stdout
    assert "a: 5 rows, 2 files, " in several
    assert "set aside in words_quarantine: 2 rows" in several
    assert " quarantine " in twophase("show", "words", "1").stdout

    Runner(words_pipeline("one", writes={"lake": sinks.Files("lake/one")}), PreStaged(), record=record).run()
    assert "by sink" not in twophase("checkpoints", "one").stdout


def test_what_was_counted_over_all_sinks_before_is_counted_again(record: PostgresRecord) -> None:
    """A record of an earlier version has the sum over all sinks, the quarantine included."""
    (migration,) = (Path(upgrade.__file__).parent / "migrations" / "versions").glob("*_rows.py")
    counting = runpy.run_path(str(migration))["COUNT"]
    three_tables(record)
    before = listed("show", "words", "1")
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET rows = 17, bytes = 1"))
        connection.exec_driver_sql(counting)

    after = listed("show", "words", "1")

    assert (after["rows"], after["bytes"]) == (before["rows"], before["bytes"])
