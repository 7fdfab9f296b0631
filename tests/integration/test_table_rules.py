"""What a Delta or Iceberg table asks of its rows is asked before the vote: its libraries look at no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema
from deltalake.schema import ArrayType, PrimitiveType, StructType
from pyiceberg import types as iceberg
from pyiceberg.schema import Schema as IcebergSchema

from support.sinks.log_table_outputs import stage
from support.sinks.log_tables import CATALOG, DeltaFormat, IcebergFormat
from twophase import Pipeline, run, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import BadValue, ConfigError, ManifestMismatch
from twophase.core.ports import Outcome
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.formats import iceberg_catalogs
from twophase.sinks.log_tables.base import LogTableSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.usefixtures("home")]

LONG, INTEGER, STRING = map(PrimitiveType, ("long", "integer", "string"))
#: A row that every rule below is fine with, in Spark's SQL.
GOOD = "SELECT 1L AS id, 'abc' AS word, 2 AS twice, array(1) AS marks, named_struct('x', 1) AS place"
#: What breaks a rule, and how the table calls it.
BROKEN = {
    "null": ("id", "CAST(NULL AS BIGINT)", "NOT NULL of id"),
    "element": ("marks", "array(1, NULL)", r"NOT NULL of marks\.element"),
    "field": ("place", "named_struct('x', CAST(NULL AS INT))", r"NOT NULL of place\.x"),
}
#: Of Delta alone.
DELTA = {
    "constraint": ("word", "'no'", r"constraint kind \(word != 'no'\)"),
    "unknown": ("word", "CAST(NULL AS STRING)", r"constraint kind \(word != 'no'\)"),
    "generated": ("twice", "3", r"generated column twice \(CAST\(id \* 2 AS INT\)\)"),
    "length": ("word", "'abcd'", r"length of word \(varchar\(3\)\)"),
}


def delta() -> sinks.Delta:
    """Make a table with every rule that Delta has."""
    sink = sinks.Delta("lake/strict")
    fields = [
        Field("id", LONG, nullable=False),
        Field("word", STRING, metadata={"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}),
        Field("twice", INTEGER, metadata={"delta.generationExpression": "CAST(id * 2 AS INT)"}),
        Field("marks", ArrayType(INTEGER, contains_null=False)),
        Field("place", StructType([Field("x", INTEGER, nullable=False)])),
    ]
    DeltaTable.create(sink.location(), Schema(fields))
    DeltaTable(sink.location()).alter.add_constraint({"kind": "word != 'no'"})
    return sink


def iceberg_table() -> sinks.Iceberg:
    """Make a table with everything required that can be."""
    sink = sinks.Iceberg("db.strict", path="lake/strict", catalog=CATALOG)
    integer = iceberg.IntegerType()
    fields = [
        iceberg.NestedField(1, "id", iceberg.LongType(), required=True),
        iceberg.NestedField(2, "word", iceberg.StringType(), required=False),
        iceberg.NestedField(3, "twice", integer, required=False),
        iceberg.NestedField(4, "marks", iceberg.ListType(5, integer, element_required=True), required=False),
        iceberg.NestedField(
            6, "place", iceberg.StructType(iceberg.NestedField(7, "x", integer, required=True)), required=False
        ),
    ]
    catalog = iceberg_catalogs.client("a test", sink.catalog, sink.storage)
    catalog.create_namespace_if_not_exists("db")
    catalog.create_table("db.strict", IcebergSchema(*fields), location=f"file://{sink.location()}")
    return sink


TABLES = {"delta": delta, "iceberg": iceberg_table}
FORMS: dict[str, Any] = {"delta": DeltaFormat(), "iceberg": IcebergFormat()}
CASES = [
    *((form, *case) for form in TABLES for case in BROKEN.values()),
    *(("delta", *case) for case in DELTA.values()),
]


def strict(sink: LogTableSink, query: str) -> Pipeline:
    landing = data_path("landing/words")
    landing.mkdir(parents=True, exist_ok=True)
    (landing / "1.json").write_text(json.dumps({"n": 1}))

    def transform(words: DataFrame) -> DataFrame:
        return words.sparkSession.sql(query)

    return Pipeline(
        "strict",
        reads={"words": sources.Files("landing/words", "json")},
        transform=transform,
        writes={"lake": sink},
    )


def changed(column: str, value: str) -> str:
    return f"SELECT * EXCEPT ({column}), {value} AS {column} FROM ({GOOD})"


@pytest.mark.spark
@pytest.mark.parametrize("form", TABLES)
def test_rows_that_keep_every_rule_are_committed_and_read(
    spark: SparkSession, record: PostgresRecord, form: str
) -> None:
    sink = TABLES[form]()

    done = run(strict(sink, GOOD), spark)

    assert done is not None
    assert done.state is State.COMMITTED
    expected = {"id": 1, "word": "abc", "twice": 2, "marks": [1], "place": {"x": 1}}
    assert FORMS[form].content(sink) == [expected]


@pytest.mark.spark
@pytest.mark.parametrize(("form", "column", "value", "says"), CASES)
def test_a_row_that_breaks_a_rule_is_refused_before_the_vote(  # noqa: PLR0917 - a case
    spark: SparkSession, record: PostgresRecord, form: str, column: str, value: str, says: str
) -> None:
    sink = TABLES[form]()

    with pytest.raises(BadValue, match=f"the table refuses a row by its rule {says}: row .*; correct it"):
        run(strict(sink, changed(column, value)), spark)

    assert FORMS[form].content(sink) == []
    assert list(Path(f"{sink.location()}").rglob("manifests/*.json")) == []


@pytest.mark.spark
@pytest.mark.parametrize("form", TABLES)
def test_an_output_without_a_required_column_is_refused_before_the_vote(
    spark: SparkSession, record: PostgresRecord, form: str
) -> None:
    with pytest.raises(BadValue, match="NOT NULL of id"):
        run(strict(TABLES[form](), f"SELECT * EXCEPT (id, twice) FROM ({GOOD})"), spark)


@pytest.mark.spark
def test_a_rule_that_spark_cannot_read_is_named(spark: SparkSession, record: PostgresRecord) -> None:
    sink = delta()
    DeltaTable(sink.location()).alter.add_constraint({"odd": "arrow_typeof(id) = 'Int64'"})

    with pytest.raises(ConfigError, match=r"a rule that Spark cannot read.*arrow_typeof.*or drop it"):
        run(strict(sink, GOOD), spark)


def plain() -> sinks.Delta:
    sink = sinks.Delta("lake/words")
    fields = [("id", pa.int64()), ("word", pa.string()), ("frequency", pa.int64())]
    DeltaTable.create(sink.location(), pa.schema(fields))
    sink.prepare()
    return sink


def test_a_rule_that_came_after_staging_stops_the_vote() -> None:
    """Rows that were not held to a rule are not voted for."""
    sink = plain()
    staged = stage(sink)
    DeltaTable(sink.location()).alter.add_constraint({"positive": "id > 0"})

    with pytest.raises(ManifestMismatch, match=r"the table has got constraint positive .* run again"):
        staged.check()


def test_a_rule_that_came_after_the_decision_stops_the_promotion_until_it_is_dropped() -> None:
    """The way out that the message names works."""
    sink = plain()
    staged = stage(sink)
    DeltaTable(sink.location()).alter.add_constraint({"positive": "id > 0"})

    refused = staged.promote()
    DeltaTable(sink.location()).alter.drop_constraint("positive")
    promoted = staged.promote()

    assert refused.outcome is Outcome.FAILED
    assert "the table has got constraint positive" in str(refused.reason)
    assert promoted.outcome is Outcome.PROMOTED


def test_an_identity_is_refused_before_anything_is_recorded() -> None:
    """Nobody here could make its values."""
    sink = sinks.Delta("lake/words")
    made = Field("id", LONG, metadata={"delta.identity.start": 1, "delta.identity.step": 1})
    DeltaTable.create(sink.location(), Schema([made, Field("word", STRING)]))

    with pytest.raises(ConfigError, match="column 'id' is an identity"):
        sink.prepare()
