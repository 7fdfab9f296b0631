"""The write-ahead sink with a real Spark, start to finish: from a landing folder to an HTTP service, exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import twophase
from support.pipelines.factories import land, words_pipeline
from support.sinks import senders
from twophase import sinks
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError
from twophase.core.states import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEXTS = ['with "quotes"', "two\nlines", "tab\there", "ünïcode 🎉", "back\\slash", "", None, "x" * 1_000_000]


def hard(words: DataFrame) -> DataFrame:
    """Give the rows values that are hard to keep, and a column that a table of files could not have."""
    return words.selectExpr(
        "id",
        "text",
        "id AS checkpoint",
        "CAST('12.340' AS decimal(10, 3)) AS price",
        "timestamp '2026-11-15 10:00:00.123456 Europe/Berlin' AS at",
        "timestamp_ntz '2026-11-15 10:00:00' AS wall",
        "array(named_struct('at', timestamp '2026-11-15 10:00:00 UTC')) AS nested",
        "map('at', timestamp '2026-11-15 10:00:00 UTC') AS mapped",
        "date '2026-11-15' AS day",
    ).repartition(3)


def test_a_run_sends_every_row_once_with_every_value(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    land("a.json", [{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    path = home / "received.jsonl"
    sink = sinks.WriteAhead("support.sinks.senders:Appending", arguments={"path": str(path)}, idempotent=True)

    done = twophase.run(words_pipeline(transform=hard, writes={"out": sink}), spark)

    assert done is not None
    assert (done.state, done.rows) == (State.COMMITTED, len(TEXTS))
    rows = sorted((said["row"] for said in senders.received(path)), key=lambda row: row["id"])
    assert [row["text"] for row in rows] == TEXTS
    assert [row["checkpoint"] for row in rows] == list(range(len(TEXTS)))
    assert len({row["_twophase_id"] for row in rows}) == len(TEXTS)
    assert {name: rows[0][name] for name in TYPED} == TYPED


TYPED = {
    "price": "Decimal('12.340')",
    "at": "2026-11-15T09:00:00.123456+00:00",
    "wall": "2026-11-15T10:00:00",
    "nested": [{"at": "2026-11-15T10:00:00+00:00"}],
    "mapped": [["at", "2026-11-15T10:00:00+00:00"]],
    "day": "2026-11-15",
}


def test_a_service_that_keeps_ids_has_each_word_of_each_checkpoint_once(
    spark: SparkSession, home: Path, record: PostgresRecord
) -> None:
    with senders.serving(home / "service.db") as (service, url):
        http = "twophase.examples.http_sender:HttpSender"
        sink = sinks.WriteAhead(http, arguments={"url": url, "batch": 1}, idempotent=True)
        pipeline = words_pipeline(transform=copy, writes={"out": sink}, max_files=1)
        for number in range(2):
            land(f"{number}.json", [{"id": number * 10 + i} for i in range(10)])
            twophase.run(pipeline, spark)

        assert sorted(row["id"] for row in service.rows()) == list(range(20))


def copy(words: DataFrame) -> DataFrame:
    return words.repartition(2)


def test_a_column_with_the_name_of_ours_is_refused_before_anything_is_written(spark: SparkSession, home: Path) -> None:
    land("a.json", [{"_twophase_id": 1}])
    sink = sinks.WriteAhead("support.sinks.senders:Appending", arguments={"path": str(home / "out")}, idempotent=True)

    with pytest.raises(ConfigError, match="a column cannot be named '_twophase_id': rows are sent with ours"):
        twophase.run(words_pipeline(transform=copy, writes={"out": sink}), spark)
