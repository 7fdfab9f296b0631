"""A column may go on with a wider type where the sink, what is in it, and all who read it can; nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import twophase
from support.pipelines.factories import land, words_pipeline
from support.sinks.log_tables import DeltaFormat, IcebergFormat
from twophase import sinks
from twophase.core.errors import BadValue, ManifestMismatch, SchemaChanged
from twophase.core.settings import data_path
from twophase.runner import InProcess, Runner
from twophase.sinks.base import Sink
from twophase.verification import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from twophase.committer.record import PostgresRecord

BIG = 2**40
NARROW = ["id int", "ratio float", "price decimal(5,2)"]
WIDE = ["id bigint", "ratio double", "price decimal(12,2)"]


class Case:
    """One pipeline whose transform casts its columns."""

    def __init__(self, spark: SparkSession, record: PostgresRecord, sink: Sink) -> None:
        self.spark, self.record, self.sink = spark, record, sink
        data_path("landing/words").mkdir(parents=True, exist_ok=True)
        self.landed = 0

    def run(self, kinds: list[str], number: int) -> None:
        """Commit one row with a number in each column."""
        casts = [f"CAST({number} AS {kind.partition(' ')[2]}) AS {kind.partition(' ')[0]}" for kind in kinds]
        if not self.landed_left():
            land(f"{self.landed}.json", [{"n": number}])
            self.landed += 1
        pipeline = words_pipeline(transform=lambda words: words.selectExpr(*casts), writes={"lake": self.sink})
        with_spark = Runner(pipeline, InProcess(self.spark, pipeline.transform), record=self.record)
        assert with_spark.run() is not None
        assert not any(verify(self.record, pipeline))

    def landed_left(self) -> bool:
        """Say whether a run that was refused has left its input to the next."""
        with self.record.engine.connect() as connection:
            query = "SELECT count(DISTINCT path) FROM twophase.input_file WHERE gone_at IS NULL"
            states = "SELECT count(*) FROM twophase.revision WHERE state = 'COMMITTED'"
            files = connection.exec_driver_sql(query).scalar_one()
            return bool(files > connection.exec_driver_sql(states).scalar_one())

    def read(self) -> list[tuple[Any, ...]]:
        frame = twophase.read_committed(self.spark, "words", "lake").select("id", "ratio", "price")
        assert [field.dataType.simpleString() for field in frame.schema.fields] == [
            kind.partition(" ")[2] for kind in WIDE
        ]
        return sorted((row.id, row.ratio, int(row.price)) for row in frame.collect())


@pytest.mark.parametrize("format_", ["json", "csv"])
def test_files_of_text_have_no_width(spark: SparkSession, home: Path, record: PostgresRecord, format_: str) -> None:
    case = Case(spark, record, sinks.Files("lake/words", format=format_))
    case.run(NARROW, 1)
    case.run(WIDE, BIG // 2**20)

    assert case.read() == [(1, 1.0, 1), (2**20, 2.0**20, 2**20)]
    with pytest.raises(SchemaChanged, match="column 'id' was bigint and is now int"):
        case.run(NARROW, 2)


def test_a_folder_of_parquet_keeps_its_types(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    """DuckDB, pandas and polars take the types of one file for those of all, and fail at the first that is wider."""
    case = Case(spark, record, sinks.Files("lake/words"))
    case.run(NARROW, 1)

    with pytest.raises(SchemaChanged, match=r"column 'id' was int and is now bigint.*; only new columns may come"):
        case.run(WIDE, 2)


def test_an_iceberg_table_promotes_what_is_in_it(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    form = IcebergFormat()
    sink = form.make("lake/words")
    case = Case(spark, record, sink)
    case.run(NARROW, 1)
    case.run(WIDE, BIG // 2**20)

    assert sorted(row["id"] for row in form.content(sink)) == [1, 2**20]
    assert case.read() == [(1, 1.0, 1), (2**20, 2.0**20, 2**20)]
    with pytest.raises(SchemaChanged, match="column 'id' was bigint and is now int"):
        case.run(NARROW, 2)


def test_a_partition_of_an_iceberg_table_keeps_its_type(
    spark: SparkSession, home: Path, record: PostgresRecord
) -> None:
    case = Case(spark, record, IcebergFormat().make("lake/words", partition_by=["id"]))
    case.run(NARROW, 1)

    with pytest.raises(ManifestMismatch, match="column 'id': expected id int as in the table, found id bigint; cast"):
        case.run(WIDE, 2)


def test_a_delta_table_keeps_its_types(spark: SparkSession, home: Path, record: PostgresRecord) -> None:
    """Its feature for wider types is not one that can be written here."""
    case = Case(spark, record, DeltaFormat().make("lake/words"))
    case.run(NARROW, 1)

    with pytest.raises(SchemaChanged, match="column 'id' was int and is now bigint"):
        case.run(WIDE, 2)


def test_a_postgres_target_takes_wider_types_as_far_as_values_fit(
    spark: SparkSession, home: Path, record: PostgresRecord, target: Any
) -> None:
    """Its column is what it is: a value that has no room there is refused before the vote, until it is altered."""
    case = Case(spark, record, sinks.Postgres("words", conn_id="dwh", create=True))
    case.run(["id int"], 1)
    case.run(["id bigint"], 2)

    with pytest.raises(BadValue):
        case.run(["id bigint"], BIG)
    target.execute("ALTER TABLE words ALTER COLUMN id TYPE bigint")
    case.run(["id bigint"], BIG)

    frame = twophase.read_committed(spark, "words", "lake")
    assert sorted(row.id for row in frame.select("id").collect()) == [1, 2, BIG]
