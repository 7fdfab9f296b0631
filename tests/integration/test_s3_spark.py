"""Whole checkpoints with a real Spark into an object store: staged by the executors, read back by everybody."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from support.crashes.replacement_promises import let_retention_be_over
from support.pipelines.factories import Row, counted, land_words
from support.servers.s3 import CONN_ID, SECRET, S3Server, local
from support.sinks.log_table_format import Format
from support.sinks.log_tables import CATALOG, DeltaFormat, IcebergFormat
from twophase import Pipeline, audits, committed_files, read_committed, run, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import SinkUnavailable, Swept
from twophase.core.settings import data_path
from twophase.revision_diff import diff
from twophase.runner import InProcess, Runner
from twophase.sinks.log_tables.base import LogTableSink
from twophase.storage.base import configured
from twophase.sweep import sweep
from twophase.verification import verify

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def delta(path: str, **options: Any) -> sinks.Delta:
    return sinks.Delta(path, conn_id=CONN_ID, **options)


def iceberg(path: str, **options: Any) -> sinks.Iceberg:
    return sinks.Iceberg(f"db.{Path(path).name}", path=path, conn_id=CONN_ID, catalog=CATALOG, **options)


MAKERS: dict[str, tuple[Callable[..., LogTableSink], Format]] = {
    "delta": (delta, DeltaFormat()),
    "iceberg": (iceberg, IcebergFormat()),
}


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest, home: Path, s3: S3Server) -> tuple[Callable[..., LogTableSink], Format]:
    data_path("landing/words").mkdir(parents=True)
    return MAKERS[request.param]


def copy(words: DataFrame, context: Any) -> DataFrame:
    from pyspark.sql.functions import lit

    return words.withColumn("revision", lit(context.revision))


def words(
    sink: LogTableSink, name: str = "words", transform: Callable[..., Any] | str = copy, **options: Any
) -> Pipeline:
    reads = {"words": sources.Files("landing/words", "json", max_files=1)}
    return Pipeline(name, reads=reads, transform=transform, writes={"lake": sink}, **options)


def first(rows: list[Row], revision: int = 1) -> list[Row]:
    return [{**row, "revision": revision} for row in rows]


def test_checkpoints_go_through_an_object_store_whole_and_once(
    spark: SparkSession, record: PostgresRecord, kind: tuple[Callable[..., LogTableSink], Format]
) -> None:
    make, form = kind
    place = S3Server.place()
    rows = land_words(files=2, rows=4)
    sink = make(f"{place}/words", partition_by=["word"])
    pipeline = words(sink, audits=[audits.row_count(minimum=1), audits.unique("id")])
    runner = Runner(pipeline, InProcess(spark, copy), record=record)
    while runner.run():
        pass

    assert counted(form.content(sink)) == counted(first(rows))
    files = committed_files("words", "lake")
    assert all(file.startswith(f"{sink._home}/0000000") for file in files)
    assert sum(pq.read_metadata(local(file)).num_rows for file in files) == 8
    read = [row.asDict() for row in read_committed(spark, "words", "lake").collect()]
    assert {row.pop("checkpoint") for row in read} == {1, 2}
    assert counted(read) == counted(first(rows))

    runner.replace(1)

    assert counted(form.content(sink)) == counted([*first(rows[:4], 2), *first(rows[4:])])
    assert read_committed(spark, "words", "lake", as_of=2).where("revision = 2").count() == 0
    [compared] = diff(record, pipeline, 1, key=["id"])
    assert (compared.comparison.changed, compared.comparison.added) == (4, 0)
    copied = make(f"{place}/copied")
    hop = {"rows": sources.Committed("words", "lake")}
    run(Pipeline("hop", reads=hop, transform=lambda rows: rows, writes={"lake": copied}), spark)
    assert counted(form.content(copied)) == counted(form.content(sink))

    let_retention_be_over(record)
    assert [one.path for one in sweep(record, pipeline) if one.sink]
    assert not any(verify(record, pipeline))
    with pytest.raises(Swept):
        read_committed(spark, "words", "lake", as_of=2)
    assert counted(form.content(sink)) == counted([*first(rows[:4], 2), *first(rows[4:])])


@pytest.mark.slow
def test_values_of_every_type_come_back_equal(
    spark: SparkSession, record: PostgresRecord, kind: tuple[Callable[..., LogTableSink], Format]
) -> None:
    from pyspark.sql.functions import unix_micros

    make, form = kind
    at = datetime(2026, 11, 15, 12, 30, 1, 123456, tzinfo=UTC)
    row: Row = {
        "i": 2**31 - 1, "l": -(2**63), "d": 1.5, "b": True, "s": "' \" \\\n\t😀 ü", "e": "", "n": None,
        "x": b"\x00\xff",
        "dec": Decimal("12345678901234567890.12"), "day": date(1999, 12, 31), "at": at,
        "a": ["x", None], "st": {"k": 1, "v": ["y"]}, "part": "a b%c:ü/=",
    }  # fmt: skip
    schema = (
        "i int, l bigint, d double, b boolean, s string, e string, n string, x binary, dec decimal(22,2), day date,"
        " at timestamp, a array<string>, st struct<k:int,v:array<string>>, part string"
    )
    land_words(rows=1)
    place = S3Server.place()
    plain, partitioned = make(f"{place}/plain"), make(f"{place}/parts", partition_by=["day", "b", "part"])

    def transform(words: DataFrame, spark: SparkSession) -> DataFrame:
        return spark.createDataFrame([row], schema)

    reads = {"words": sources.Files("landing/words", "json")}
    pipeline = Pipeline("types", reads=reads, transform=transform, writes={"plain": plain, "parts": partitioned})
    with configured(spark, {"spark.sql.session.timeZone": "Asia/Kolkata"}):
        run(pipeline, spark)
        for name, sink in (("plain", plain), ("parts", partitioned)):
            read = read_committed(spark, "types", name).drop("checkpoint")

            assert form.content(sink) == [row], name
            [again] = read.withColumn("at", unix_micros("at")).collect()
            assert again.asDict(recursive=True) == {**row, "at": int(at.timestamp()) * 1_000_000 + at.microsecond}
    assert not any(verify(record, pipeline))


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("home")
def test_a_store_that_goes_down_while_rows_are_staged_costs_an_attempt_and_no_row(
    spark: SparkSession, record: PostgresRecord, s3: S3Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    data_path("landing/words").mkdir(parents=True)
    rows = land_words()
    sink = delta(f"{S3Server.place()}/words")
    monkeypatch.setenv("AIRFLOW_CONN_LAKE_S3", s3.connection(connect_timeout=1, read_timeout=1))

    def failing(words: DataFrame, context: Any) -> DataFrame:
        getattr(s3, how)()
        return copy(words, context)

    with pytest.raises(SinkUnavailable, match=r"sinks\.Delta ") as down:  # nor could what was staged be discarded
        run(words(sink, transform=failing), spark)
    s3.restore()
    done = run(words(sink), spark)

    said = "".join(traceback.format_exception(down.value))
    assert "the object store failed in a task of Spark" in said
    assert SECRET not in said
    assert done is not None
    assert counted(DeltaFormat().content(sink)) == counted(first(rows, 2))
    assert not any(verify(record, words(sink)))
