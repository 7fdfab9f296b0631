"""Changelogs through Spark into topics: as rows that say what they mean, or as one record per key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.servers.kafka import CONN_ID, make_topic, read
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import BadValue
from twophase.core.settings import data_path
from twophase.local.kafka import Broker
from twophase.runner import Runner, stager_for
from twophase.verification import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ROWS = [("+I", "a", 1), ("-U", "b", 2), ("+U", "b", 3), ("-D", "c", 4)]


def land(name: str, rows: list[tuple[str, str, int]]) -> None:
    lines = [json.dumps({"_change": kind, "word": word, "frequency": number}) for kind, word, number in rows]
    data_path("landing").mkdir(parents=True, exist_ok=True)
    data_path(f"landing/{name}.json").write_text("\n".join(lines))


def test_a_changelog_is_sent_as_rows_and_as_one_record_per_key(
    home: Path, kafka: Broker, record: PostgresRecord, spark: SparkSession
) -> None:
    """A retract says `_change` in each value; of an upsert a deletion has no value, and what was before is not sent.

    A key that is there twice fails the attempt before the vote: which of the two came last nobody could tell.
    """
    topics = {mode: make_topic(kafka, 2) for mode in ("retract", "upsert", "whole")}
    common: dict[str, Any] = {"conn_id": CONN_ID, "key": "word"}
    writes: dict[str, sinks.Sink] = {
        "retract": sinks.Kafka(
            topics["retract"], mode="retract", value=["frequency"], markers=f"markers-{topics['retract']}", **common
        ),
        "upsert": sinks.Kafka(topics["upsert"], mode="upsert", markers=f"markers-{topics['upsert']}", **common),
        "whole": sinks.Kafka(
            topics["whole"], mode="upsert", value="text", markers=f"markers-{topics['whole']}", **common
        ),
    }
    schema = "word string, frequency bigint, _change string"
    pipeline = Pipeline(
        "topics",
        reads={"rows": sources.Files("landing", "json", schema=schema, max_files=1)},
        transform=lambda rows: {
            "retract": rows,
            "upsert": rows,
            "whole": rows.selectExpr("word", "string(frequency) AS text", "_change"),
        },
        writes=writes,
    )
    land("1", ROWS)
    with Runner(pipeline, stager_for(pipeline, spark), record=record) as runner:
        runner.run()
        found = {
            mode: sorted((one.key().decode(), one.value() and json.loads(one.value())) for one in read(kafka, topic))
            if mode != "retract"
            else sorted(
                (json.loads(one.value())["_change"], json.loads(one.value())["frequency"]) for one in read(kafka, topic)
            )
            for mode, topic in topics.items()
        }
        assert found["retract"] == sorted((kind, number) for kind, _, number in ROWS)
        assert found["upsert"] == [("a", {"frequency": 1}), ("b", {"frequency": 3}), ("c", None)]
        assert found["whole"] == [("a", 1), ("b", 3), ("c", None)]
        assert not any(verify(record, pipeline))

        land("2", [("-D", "a", 1), ("+I", "a", 5)])
        with pytest.raises(BadValue, match="key word: 2 rows have word 'a'; keep one row per key"):
            runner.run()
