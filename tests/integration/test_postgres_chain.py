"""Pipelines that read what others committed to PostgreSQL: each checkpoint once, as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import twophase
from support.pipelines.factories import PreStaged, Row, land_words, visible
from twophase import Pipeline, sinks, sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Json
from twophase.core.errors import ConfigError, ManifestMismatch
from twophase.core.manifest import Column
from twophase.core.settings import data_path
from twophase.runner import InProcess, Runner
from twophase.spark.plan import Plan

TYPED = (
    "id", "word", "cast(frequency AS decimal(20,4)) / 8 AS amount", "named_struct('a', id, 'b', word) AS more",
    "cast(id % 128 AS tinyint) AS tiny", "cast(frequency AS int) AS whole", "array(word, NULL) AS words",
    "array(array(id)) AS deep", "timestamp_micros(id) AS at", "cast(word AS binary) AS raw", "uuid",
)  # fmt: skip
SCHEMA = (Column("id", "bigint"), Column("word", "string"))
UUID = "6f1c1a52-0f0e-4b5c-9c53-5f3f0d7a2b11"
#: What is added to each word by the first hop; a bug that a backfill puts right.
bug = {"is": ""}


@pytest.fixture(autouse=True)
def _connected(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
    data_path("landing/words").mkdir(parents=True)
    yield
    bug["is"] = ""


def typed(words: Any) -> Any:
    from pyspark.sql import functions

    return words.withColumn("uuid", functions.lit(UUID)).selectExpr(*TYPED)


def first_hop(**options: Any) -> Pipeline:
    return Pipeline(
        "clean",
        reads={"words": sources.Files("landing/words", "json", schema="id bigint, word string, frequency bigint")},
        transform=typed,
        writes={"dwh": sinks.Postgres("words", conn_id="dwh", create=True, **options)},
    )


def second_hop() -> Pipeline:
    return Pipeline(
        "counts",
        reads={"rows": sources.Committed("clean", "dwh")},
        transform=lambda rows: rows.select("id", "word"),
        writes={"lake": sinks.Files("lake/counts")},
    )


class Chain:
    """Two pipelines: the first one needs no Spark, the second one reads with it."""

    def __init__(self, record: PostgresRecord, spark: Any, **options: Any) -> None:
        self.plans: list[Plan] = []
        stager = PreStaged(schema=SCHEMA, change=lambda rows, _: [self.cleaned(row) for row in rows])
        self.first = Runner(first_hop(**options), stager, record=record)
        self.second = Runner(second_hop(), self.stage, record=record)
        self._spark = spark

    def cleaned(self, row: Row) -> Row:
        return {"id": row["id"], "word": row["word"] + bug["is"]}

    def stage(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        self.plans.append(plan)
        return InProcess(self._spark, second_hop().transform)(plan, folder, lost)

    def land(self, number: int) -> None:
        land_words(rows=3, start=number)
        self.first.run()


@pytest.mark.spark
@pytest.mark.parametrize("options", [{}, {"attach": True}], ids=str)
def test_each_commit_to_postgres_is_read_once_downstream(
    spark: Any, record: PostgresRecord, options: dict[str, Any]
) -> None:
    chain = Chain(record, spark, **options)
    chain.land(0)
    chain.land(1)
    first = chain.second.run()
    nothing = chain.second.run()
    chain.land(2)
    second = chain.second.run()

    assert first is not None
    assert second is not None
    assert (first.rows, nothing, second.rows) == (6, None, 3)
    assert sorted(row["id"] for row in visible("lake/counts")) == list(range(9))
    assert [plan.connections() for plan in chain.plans] == [["dwh"], ["dwh"]]

    bug["is"] = "!"
    chain.first.replace(1)
    with record.engine.connect() as connection:
        stale = [(row["pipeline"], row["checkpoint_id"]) for row in queries.stale(connection, None)]
    chain.second.replace(1)

    assert stale == [("counts", 1)]
    assert sorted(row["id"] for row in visible("lake/counts") if row["word"].endswith("!")) == [0, 1, 2]
    assert len(visible("lake/counts")) == 9


@pytest.mark.spark
def test_rows_are_read_with_the_types_that_they_were_written_with(spark: Any, dsn: str) -> None:
    from support.servers.postgres import administer

    administer(dsn, "CREATE TABLE public.words (uuid uuid, whole bigint, _checkpoint bigint NOT NULL)")
    land_words(rows=50)
    twophase.run(first_hop(), spark=spark)
    written = typed(spark.read.schema("id bigint, word string, frequency bigint").json(str(data_path("landing/words"))))

    found = twophase.read_committed(spark, "clean", "dwh").drop("checkpoint")

    assert found.dtypes == written.dtypes
    assert sorted(found.collect()) == sorted(written.collect())


@pytest.mark.spark
def test_a_frame_of_rows_that_were_replaced_since_gives_none_of_the_new_ones(
    spark: Any, record: PostgresRecord
) -> None:
    chain = Chain(record, spark)
    chain.land(0)
    found = twophase.read_committed(spark, "clean", "dwh")
    chain.first.replace(1)

    with pytest.raises(Exception, match="expected the rows of revision 1, found those of 2; read it again"):
        found.collect()
    with pytest.raises(ManifestMismatch, match="were replaced since and are not kept"):
        twophase.read_committed(spark, "clean", "dwh", as_of=1)


@pytest.mark.parametrize("options", [{"mode": "upsert", "key": ["id"]}, {"mode": "replace"}], ids=str)
def test_rows_that_do_not_say_whose_they_are_are_refused_before_anything_is_recorded(
    record: PostgresRecord, options: dict[str, Any]
) -> None:
    chain = Chain(record, None, **options)
    chain.land(0)

    with pytest.raises(ConfigError, match="do not say whose they are; read the table itself"):
        chain.second.run()
    with pytest.raises(ConfigError, match="do not say whose they are; read the table itself"):
        twophase.read_committed(None, "clean", "dwh")  # type: ignore[arg-type]

    assert chain.plans == []
    with record.engine.connect() as connection:
        assert queries.checkpoints(connection, "counts") == []
