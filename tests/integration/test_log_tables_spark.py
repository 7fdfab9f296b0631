"""Whole checkpoints with a real Spark into Delta and Iceberg tables, read back by the record and by others."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from support.crashes.replacement_promises import let_retention_be_over
from support.pipelines.factories import Row, counted, land_words
from twophase import Pipeline, audits, committed_files, read_committed, run, sinks, sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Revision
from twophase.core.errors import ConfigError, Swept
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.revision_diff import diff
from twophase.runner import InProcess, Runner
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sweep import sweep
from twophase.verification import verify

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("home")]


class Format(NamedTuple):
    """How a table is declared, and read by somebody who did not write it."""

    sink: Callable[..., LogTableSink]
    read: Callable[[LogTableSink], pl.DataFrame]


def iceberg(path: str, **options: Any) -> sinks.Iceberg:
    catalog = {"type": "sql", "uri": "sqlite:///catalog.db"}
    return sinks.Iceberg(f"db.{Path(path).name}", path=path, catalog=catalog, **options)


def read_iceberg(sink: LogTableSink) -> pl.DataFrame:
    assert isinstance(sink, sinks.Iceberg)
    assert isinstance(sink.catalog, dict)
    table = SqlCatalog("default", **sink.catalog).load_table(sink.table)
    return pl.scan_iceberg(table, reader_override="pyiceberg").collect()


FORMATS = {
    "delta": Format(sinks.Delta, lambda sink: pl.read_delta(sink.location())),
    "iceberg": Format(iceberg, read_iceberg),
}


@pytest.fixture(params=FORMATS)
def table(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def copy(words: DataFrame, context: Any) -> DataFrame:
    from pyspark.sql.functions import lit

    return words.withColumn("revision", lit(context.revision))


def words(sink: LogTableSink, name: str = "words", transform: Callable[..., Any] = copy, **options: Any) -> Pipeline:
    data_path("landing/words").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        name,
        reads={"words": sources.Files("landing/words", "json", max_files=1)},
        transform=transform,
        writes={"lake": sink},
        **options,
    )


def runner(spark: SparkSession, record: PostgresRecord, pipeline: Pipeline) -> Runner:
    made = Runner(pipeline, InProcess(spark, pipeline.transform), record=record)
    while made.run():
        pass
    return made


def differences(record: PostgresRecord, pipeline: Pipeline) -> list[Any]:
    return [difference for difference in verify(record, pipeline) if difference]


def first(rows: list[Row], revision: int = 1) -> list[Row]:
    return [{**row, "revision": revision} for row in rows]


def test_a_run_commits_what_landed_and_every_reader_sees_it(
    spark: SparkSession, record: PostgresRecord, table: Format
) -> None:
    rows = land_words()
    sink = table.sink("lake/words")
    pipeline = words(sink, audits=[audits.row_count(minimum=1), audits.unique("id")])

    done = run(pipeline, spark)

    assert done is not None
    assert (done.state, done.rows) == (State.COMMITTED, 10)
    assert counted(table.read(sink).to_dicts()) == counted(first(rows))
    assert counted(pl.read_parquet(committed_files("words", "lake")).to_dicts()) == counted(first(rows))
    assert differences(record, pipeline) == []


@pytest.mark.parametrize("partition_by", [[], ["word", "frequency"]])
def test_a_replacement_is_one_step_and_time_travel_reads_what_it_replaced_until_that_is_swept(
    spark: SparkSession, record: PostgresRecord, table: Format, partition_by: list[str]
) -> None:
    rows = land_words(files=2, rows=2)
    sink = table.sink("lake/words", partition_by=partition_by)
    pipeline = words(sink)
    runs = runner(spark, record, pipeline)
    runs.replace(1)

    then, now = (read_committed(spark, "words", "lake", as_of=seq) for seq in (2, 3))
    found = {(row.checkpoint, row.id, row.revision) for row in then.collect()}
    assert found == {(1, 0, 1), (1, 1, 1), (2, 2, 1), (2, 3, 1)}
    assert {(row.checkpoint, row.id, row.revision) for row in now.collect()} == {
        *((1, 0, 2), (1, 1, 2), (2, 2, 1), (2, 3, 1))
    }
    assert counted(table.read(sink).to_dicts()) == counted([*first(rows[:2], 2), *first(rows[2:])])
    [compared] = diff(record, pipeline, 1, key=["id"])
    assert (compared.comparison.changed, compared.comparison.added) == (2, 0)
    assert differences(record, pipeline) == []

    let_retention_be_over(record)
    removed = list(sweep(record, pipeline))

    assert {"r1." in Path(one.path).name and "00000001" in one.path for one in removed if one.sink} == {True}
    assert differences(record, pipeline) == []
    assert counted(table.read(sink).to_dicts()) == counted([*first(rows[:2], 2), *first(rows[2:])])
    with pytest.raises(Swept):
        read_committed(spark, "words", "lake", as_of=2)


def test_another_pipeline_reads_each_commit_once_and_anew_what_was_replaced(
    spark: SparkSession, record: PostgresRecord, table: Format
) -> None:
    rows = land_words(files=2, rows=2)
    clean = runner(spark, record, words(table.sink("lake/words", partition_by=["word"]), "clean"))
    sink = table.sink("lake/copied", partition_by=["word"])
    reads = {"rows": sources.Committed("clean", "lake")}
    hop = Pipeline("copied", reads=reads, transform=lambda rows: rows, writes={"lake": sink})
    copied = Runner(hop, InProcess(spark, hop.transform), record=record)

    taken, nothing = copied.run(), copied.run()
    rows += land_words(rows=2, start=2)
    clean.run()
    third = copied.run()

    assert taken is not None
    assert third is not None
    assert (taken.rows, nothing, third.rows) == (4, None, 2)
    assert ranges(record, taken, third) == [(1, 3), (3, 4)]
    assert counted(table.read(sink).to_dicts()) == counted(first(rows))

    clean.replace(2)

    assert copied.run() is None
    assert stale(record) == [("copied", 1)]
    assert counted(table.read(sink).to_dicts()) == counted(first(rows))

    again = copied.replace(1)

    assert stale(record) == []
    assert ranges(record, again) == [(1, 3)]
    now = counted([*first(rows[:2]), *first(rows[2:4], 2), *first(rows[4:])])
    assert counted(table.read(sink).to_dicts()) == now
    for seq, expected in ((1, first(rows[:4])), (2, first(rows))):
        then = read_committed(spark, "copied", "lake", as_of=seq).drop("checkpoint")
        assert counted(row.asDict() for row in then.collect()) == counted(expected)
    upstream = read_committed(spark, "clean", "lake", as_of=3).drop("checkpoint")
    assert counted(row.asDict() for row in upstream.collect()) == counted(first(rows))
    assert differences(record, hop) == []


def ranges(record: PostgresRecord, *revisions: Revision) -> list[tuple[int, int]]:
    """Return which commits upstream were read, as the record has it."""
    with record.transaction() as tx:
        return [tx.inputs(revision.key)["rows"].ranges["commit_seq"] for revision in revisions]


def stale(record: PostgresRecord) -> list[tuple[str, int]]:
    with record.engine.connect() as connection:
        return [(row["pipeline"], row["checkpoint_id"]) for row in queries.stale(connection, None)]


def test_values_of_every_type_come_back_equal(spark: SparkSession, record: PostgresRecord, table: Format) -> None:
    at = datetime(2026, 11, 15, 12, 30, 1, 123456, tzinfo=UTC)
    text = "quote ' \" back\\slash\nline\ttab 😀 ü"
    row: Row = {
        "i": 2**31 - 1, "l": -(2**63), "d": 1.5, "b": True, "s": text, "e": "", "n": None, "x": b"\x00\xff",
        "dec": Decimal("12345678901234567890.12"), "day": date(1999, 12, 31), "at": at,
        "a": ["x", None], "st": {"k": 1, "v": ["y"]},
    }  # fmt: skip
    schema = (
        "i int, l bigint, d double, b boolean, s string, e string, n string, x binary, dec decimal(22,2), day date,"
        " at timestamp, a array<string>, st struct<k:int,v:array<string>>"
    )
    land_words(rows=1)
    sink = table.sink("lake/types")

    def transform(words: DataFrame, spark: SparkSession) -> DataFrame:
        return spark.createDataFrame([row], schema)

    run(words(sink, "types", transform), spark)

    [found] = table.read(sink).to_dicts()
    assert found == row
    [again] = read_committed(spark, "types", "lake").drop("checkpoint").collect()
    assert again.asDict(recursive=True) | {"at": at} == row
    assert again.at.replace(tzinfo=UTC) - at < timedelta(days=1)  # Spark gives local time without a zone


def test_a_column_may_come_later_and_is_empty_in_what_was_before(
    spark: SparkSession, record: PostgresRecord, table: Format
) -> None:
    land_words(files=1, rows=1)
    sink = table.sink("lake/words")
    runner(spark, record, words(sink))
    land_words(files=1, rows=1, start=1)

    runner(spark, record, words(sink, transform=lambda words: words.selectExpr("*", "1 AS revision", "'Ulm' AS city")))

    assert {row["id"]: row["city"] for row in table.read(sink).to_dicts()} == {0: None, 1: "Ulm"}
    read = read_committed(spark, "words", "lake")
    assert {row.id: row.city for row in read.collect()} == {0: None, 1: "Ulm"}


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 AS `a b`", "the table cannot have the name 'a b'"),
        ("1 AS checkpoint", "which reads by the record give"),
        ("INTERVAL 1 DAY AS span", "the table cannot have the type interval day"),
        ("named_struct('x y', 1) AS s", "the table cannot have the name 'x y'"),
    ],
)
def test_what_the_table_cannot_have_is_refused_before_anything_is_written(
    spark: SparkSession, record: PostgresRecord, table: Format, expression: str, says: str
) -> None:
    land_words(rows=1)

    with pytest.raises(ConfigError, match=says):
        run(words(table.sink("lake/words"), transform=lambda words: words.selectExpr("*", expression)), spark)


@pytest.mark.parametrize(("column", "found"), [("nothing", "no such column"), ("ratio", "double")])
def test_a_partition_column_that_folders_cannot_say_is_refused(
    spark: SparkSession, record: PostgresRecord, table: Format, column: str, found: str
) -> None:
    land_words(rows=1)
    sink = table.sink("lake/words", partition_by=[column])

    with pytest.raises(ConfigError, match=f"partition column {column!r}.*found {found}"):
        run(words(sink, transform=lambda words: words.selectExpr("*", "id / 2 AS ratio")), spark)
