"""Replacement, slots, chains and quarantine with Spark itself: what it writes, and what it reads back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.pipelines.factories import land, land_words, visible
from twophase import Pipeline, audits, committed_files, read_committed, run, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import InProcess, Runner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("home")]


def copy(words: DataFrame, context: Any) -> DataFrame:
    from pyspark.sql.functions import lit

    return words.withColumn("revision", lit(context.revision))


def words(**sink: Any) -> Pipeline:
    data_path("landing/words").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        "words",
        reads={"words": sources.Files("landing/words", "json", max_files=1)},
        transform=copy,
        writes={"lake": sinks.Files("lake/words", **sink)},
        audits=[audits.row_count(minimum=1), audits.unique("id")],
    )


def rows(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.select(*columns).collect())


@pytest.mark.parametrize("sink", [{}, {"partition_by": ["word"]}, {"format": "json"}, {"format": "csv"}])
def test_a_snapshot_before_a_replacement_has_the_rows_of_then(
    spark: SparkSession, record: PostgresRecord, sink: dict[str, Any]
) -> None:
    land_words(files=2, rows=2)
    pipeline = words(**sink)
    runner = Runner(pipeline, InProcess(spark, pipeline.transform), record=record)
    while runner.run():
        pass
    runner.replace(1)

    then, now = (read_committed(spark, "words", "lake", as_of=seq) for seq in (2, 3))

    assert rows(then, "checkpoint", "id", "revision") == [(1, 0, 1), (1, 1, 1), (2, 2, 1), (2, 3, 1)]
    assert rows(now, "checkpoint", "id", "revision") == [(1, 0, 2), (1, 1, 2), (2, 2, 1), (2, 3, 1)]
    assert {row.word for row in then.collect()} == {"w0", "w1"}


def test_a_slot_folder_is_a_partition_that_spark_reads(spark: SparkSession, record: PostgresRecord) -> None:
    for day in (14, 15):
        land("a.json", [{"id": day, "word": "w"}], f"landing/daily/dt=2026-11-{day}")
    pipeline = Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/daily/dt={start:%Y-%m-%d}", "json")},
        transform=copy,
        writes={"lake": sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")},
    )
    runner = Runner(pipeline, InProcess(spark, pipeline.transform), record=record)
    for day in (14, 15):
        runner.run(f"2026-11-{day}/2026-11-{day + 1}")
    runner.run("2026-11-15/2026-11-16", reprocess=True)

    plain = spark.read.parquet(str(data_path("lake/daily")))
    then = read_committed(spark, "daily", "lake", as_of=2)

    assert [(str(dt), *rest) for dt, *rest in rows(plain, "dt", "id", "revision")] == [
        ("2026-11-14", 14, 1),
        ("2026-11-15", 15, 2),
    ]
    assert rows(then, "dt", "id", "revision") == [("2026-11-14", 14, 1), ("2026-11-15", 15, 1)]


def test_a_column_that_the_slot_folder_gives_is_refused(spark: SparkSession, record: PostgresRecord) -> None:
    land("a.json", [{"id": 1, "dt": "x"}], "landing/daily/dt=2026-11-15")
    pipeline = Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/daily/dt={start:%Y-%m-%d}", "json")},
        transform=copy,
        writes={"lake": sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")},
    )

    with pytest.raises(Exception, match="a column cannot be named 'dt': the folder's is; rename or drop it"):
        run(pipeline, spark, "2026-11-15/2026-11-16")


def test_a_chain_reads_what_was_fixed_though_it_was_replaced_in_between(
    spark: SparkSession, record: PostgresRecord
) -> None:
    land_words(rows=2)
    upstream = words(partition_by=["word"])
    first = Runner(upstream, InProcess(spark, upstream.transform), record=record)
    first.run()
    data_path("reference").mkdir()
    land("names.json", [{"word": "w0", "name": "null"}, {"word": "w1", "name": "one"}], "reference")

    def count(rows: DataFrame, names: DataFrame) -> DataFrame:
        first.replace(1)
        return rows.join(names, "word")

    downstream = Pipeline(
        "counts",
        reads={
            "rows": sources.Committed("words", "lake"),
            "names": sources.Lookup("reference", "json"),
        },
        transform=count,
        writes={"lake": sinks.Files("lake/counts")},
    )

    with pytest.raises(Exception, match=r"replaced or removed while it was read; run again"):
        run(downstream, spark)
    done = Runner(downstream, InProcess(spark, lambda rows, names: rows.join(names, "word")), record=record).run()

    assert done is not None
    assert done.state is State.COMMITTED
    found = sorted((row["id"], row["name"], row["revision"]) for row in visible("lake/counts"))
    assert found == [(0, "null", 2), (1, "one", 2)]


def test_bad_records_are_committed_beside_the_good_ones_and_replaced_with_them(
    spark: SparkSession, record: PostgresRecord
) -> None:
    folder = data_path("landing/words")
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(
        '{"id": 1, "word": "a"}\nnonsense\n{"id": "x", "word": "b"}\n{"id": 2, "word": "c"}\n'
    )
    pipeline = Pipeline(
        "words",
        reads={"words": sources.Files(folder, "json", schema="id bigint, word string", on_bad_record="quarantine")},
        transform=copy,
        writes={"lake": sinks.Files("lake/words")},
    )
    runner = Runner(pipeline, InProcess(spark, pipeline.transform), record=record)
    runner.run()
    runner.replace(1)

    bad = read_committed(spark, "words", "words_quarantine")
    then = read_committed(spark, "words", "words_quarantine", as_of=1)

    assert sorted(row["id"] for row in visible("lake/words")) == [1, 2]
    assert rows(bad, "line", "raw") == [(2, "nonsense"), (3, '{"id": "x", "word": "b"}')] == rows(then, "line", "raw")
    assert all(row.reason and row.file.endswith("a.json") for row in bad.collect())
    assert len({Path(path).name[:10] for path in committed_files("words", "words_quarantine")}) == 1


@pytest.mark.parametrize("table", ["lake/env=prod/words", "lake/two words", "lake/wörter 100%"])
def test_a_table_may_have_any_name(spark: SparkSession, record: PostgresRecord, table: str) -> None:
    land_words(rows=2)
    made = words()
    pipeline = Pipeline("words", reads=made.reads, transform=copy, writes={"lake": sinks.Files(table)})
    runner = Runner(pipeline, InProcess(spark, pipeline.transform), record=record)
    runner.run()
    runner.replace(1)

    assert rows(read_committed(spark, "words", "lake"), "checkpoint", "id", "revision") == [(1, 0, 2), (1, 1, 2)]
    assert rows(read_committed(spark, "words", "lake", as_of=1), "checkpoint", "id", "revision") == [
        (1, 0, 1),
        (1, 1, 1),
    ]
