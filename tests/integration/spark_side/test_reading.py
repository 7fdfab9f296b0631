"""What the Spark side reads: the fixed files, intervals, lookup tables; and what is said of bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyarrow import parquet

from twophase.core.checkpoint import Input
from twophase.core.errors import BadRecord, ConfigError, InputChanged, NoSpace
from twophase.core.slots import Slot, between
from twophase.sources import Interval, Lookup
from twophase.spark.plan import PlannedRead
from twophase.spark.stage import stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
from support.pipelines.spark_plans import Kept, everything, plan, put, same, words

pytestmark = pytest.mark.spark


# --- reading ----------------------------------------------------------------------------------------------------------


ODD = (
    "a[1]",
    "b{x,y}",
    "c*",
    "d?",
    "e f",
    "2026-11-16T03:00:00",
    "i%20j",
    "k#l",
    "m\\n",
    "ü",
    "dt=1/o+p&q=r",
    "[x]y",
    "'",
)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "text"])
def test_exactly_the_fixed_files_are_read_whatever_their_names(spark: SparkSession, landing: Path, kind: str) -> None:
    """A name is a name, never a pattern; a file that came later is not read."""
    for number, name in enumerate(ODD):
        path = put(
            landing, f"{name}.{kind}", {"json": f'{{"n": {number}}}', "csv": f"n\n{number}"}.get(kind, str(number))
        )
        if kind == "parquet":
            parquet.write_table(pa.table({"n": [number]}), path)
    source = words(format=kind, schema=None if kind in {"parquet", "text"} else "n int")
    fixed = everything(source)
    put(landing, "a1.json", '{"n": 100}')

    found = sorted(int(row[0]) for row in source.read(spark, fixed).collect())

    assert found == list(range(len(ODD)))


def test_looking_at_many_paths_leaves_the_session_as_it_was(spark: SparkSession, landing: Path) -> None:
    name = "spark.sql.sources.parallelPartitionDiscovery.threshold"
    before = spark.conf.get(name)
    for number in range(100):
        put(landing, f"{number}.json", '{"n": 1}')

    assert words(schema="n int").read(spark, everything(words())).count() == 100
    assert spark.conf.get(name) == before


def test_csv_has_a_header_and_options_pass_through(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.csv", "w;n\nx;1\n")
    source = words(format="csv", options={"sep": ";", "inferSchema": True})

    assert [row.asDict() for row in source.read(spark, everything(source)).collect()] == [{"w": "x", "n": 1}]


def test_no_files_give_an_empty_frame_of_the_declared_schema(spark: SparkSession, landing: Path) -> None:
    frame = words(schema="w string, n int").read(spark, Input())

    assert frame.columns == ["w", "n"]
    assert frame.count() == 0


def test_no_files_and_no_schema_is_a_clear_error(spark: SparkSession, landing: Path) -> None:
    with pytest.raises(ConfigError, match="declare schema="):
        words().read(spark, Input())


DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"

TIMES = {
    "before": "2026-11-14T23:59:59.999999Z",
    "first": "2026-11-15T00:00:00Z",
    "elsewhere": "2026-11-16T01:30:00+02:00",
    "no zone": "2026-11-15T23:30:00",
    "next": "2026-11-16T00:00:00Z",
}


@pytest.fixture
def far_away(spark: SparkSession) -> Iterator[None]:
    """Set a session's time zone that is not ours."""
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize("path", ["landing", "landing/{start:%Y-%m}"])
def test_only_rows_of_the_interval_are_read_in_utc(spark: SparkSession, landing: Path, path: str) -> None:
    """The start belongs to it and the end does not; a row without a time is in no interval."""
    rows = [{"name": name, "ts": ts} for name, ts in TIMES.items()] + [{"name": "null", "ts": None}]
    put(landing, "2026-11/a.json", "\n".join(map(json.dumps, rows)))
    source = Interval(path, "json", column="TS", schema="name string, ts timestamp")
    fixed = everything(source, DAY)

    found = {row["name"] for row in source.read(spark, fixed, DAY).collect()}

    assert found == {"first", "elsewhere", "no zone"}


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize(
    ("slot", "days"),
    [
        (DAY, {15}),
        ("2026-11-14/2026-11-17", {14, 15, 16}),
        ("2026-11-15T00:00/2026-11-15T01:00", {15}),
        ("2026-11-15T01:00/2026-11-15T02:00", set()),
        ("2026-11-15T01:00/2026-11-16T01:00", {16}),
    ],
)
@pytest.mark.parametrize("kind", ["date", "timestamp_ntz"])
def test_a_date_is_its_midnight_and_a_time_without_zone_is_utc(
    spark: SparkSession, landing: Path, kind: str, slot: str, days: set[int]
) -> None:
    put(landing, "a.csv", "day\n" + "\n".join(f"2026-11-{day}" for day in range(13, 19)))
    source = Interval("landing", "csv", column="day", schema=f"day {kind}")

    found = source.read(spark, everything(source, slot), slot).collect()

    assert {row["day"].day for row in found} == days


@pytest.mark.usefixtures("far_away")
def test_every_row_is_in_one_interval_of_a_zone_also_in_the_hour_that_comes_twice(
    spark: SparkSession, landing: Path
) -> None:
    """A date is a midnight there, and a time without zone is what the clock shows there."""
    clock = [f"2026-10-25 {half // 2:02d}:{half % 2 * 30:02d}:00" for half in range(48)]
    put(landing, "a.csv", "at,shown,day\n" + "\n".join(f"{time},{time},2026-10-25" for time in clock))
    schema = "at timestamp, shown timestamp_ntz, day date"
    berlin = ZoneInfo("Europe/Berlin")
    first, last = (datetime(2026, 10, day, tzinfo=berlin) for day in (25, 26))
    halves = between(first, last, timedelta(minutes=30))
    whole, morning = (Slot.parse(f"2026-10-25/{end}", berlin) for end in ("2026-10-26", "2026-10-25T12"))
    slots = [whole, *list(halves)[4:8], morning]

    found = {}
    for column in ("at", "shown", "day"):
        source = Interval("landing", "csv", column=column, schema=schema, timezone="Europe/Berlin")
        fixed = everything(source, slots[0].text)
        found[column] = [source.read(spark, fixed, slot.text).count() for slot in slots]

    assert found == {"at": [48, 1, 1, 0, 0, 24], "shown": [48, 1, 1, 0, 0, 24], "day": [48, 0, 0, 0, 0, 48]}


def test_an_interval_column_that_is_no_time_is_named(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"ts": "2026-11-15"}')

    for column, said in (("ts", "found string"), ("day", "found no such column among ts")):
        source = Interval("landing", "json", column=column)
        with pytest.raises(ConfigError, match=f"expected a date or a timestamp, {said}; declare schema="):
            source.read(spark, everything(source, DAY), DAY)


@pytest.mark.parametrize("pattern", ["dt={start:%Y-%m-%d}", "{start:%Y-%m-%dT%H:%M}", "{start} x"])
def test_an_interval_reads_its_folder_whatever_its_name(spark: SparkSession, landing: Path, pattern: str) -> None:
    source = Interval(f"landing/{pattern}", "json", schema="n int")
    for number, day in enumerate((14, 15, 16)):
        folder = pattern.format(start=datetime(2026, 11, day, tzinfo=UTC))
        put(landing, f"{folder}/{number}.json", f'{{"n": {day}}}')
    attempt = plan(source, slot=DAY)

    stage(spark, attempt, same)

    assert Kept.rows["lake"] == [{"n": 15}]


def test_an_interval_without_files_is_an_empty_frame(spark: SparkSession, landing: Path) -> None:
    source = Interval("landing/{key}", "json", column=None, schema="n int", on_missing="empty")

    stage(spark, plan(source, slot="berlin"), same)

    assert Kept.rows["lake"] == []


@pytest.mark.parametrize("alone", [True, False])
def test_a_lookup_table_is_read_whole_as_it_stands(spark: SparkSession, landing: Path, alone: bool) -> None:
    table = Lookup("names [1].parquet" if alone else "names")
    place = table.table if alone else table.table / "part-0.parquet"
    place.parent.mkdir(exist_ok=True)
    found = []
    for name in ("one", "uno"):
        parquet.write_table(pa.table({"n": [1], "name": [name]}), place)
        found.append([row["name"] for row in table.read(spark, Input()).collect()])

    assert found == [["one"], ["uno"]]


def test_a_lookup_table_joins_what_is_read(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n{"n": 2}')
    put(landing.parent, "names.csv", "n,name\n1,one\n2,two\n")
    names = Lookup("names.csv", "csv", schema="n int, name string")
    attempt = plan(words(schema="n int"))
    attempt = replace(attempt, reads={**attempt.reads, "names": PlannedRead(names.declaration(), Input())})

    stage(spark, attempt, lambda words, names: words.join(names, "n").select("name"))

    assert sorted(row["name"] for row in Kept.rows["lake"]) == ["one", "two"]


# --- bad input --------------------------------------------------------------------------------------------------------


BAD = [
    ({"format": "json"}, '{"n": 1}\n{"n": \n', "landing/bad, line 2: not JSON"),
    ({"format": "json", "schema": "n int"}, '{"n": 1}\n{"n": "x"}\n', "line 2: column 'n': expected int, found"),
    ({"format": "json", "schema": "d date"}, '{"d": "someday"}\n', "landing/bad: .*someday"),
    ({"format": "csv", "schema": "n int"}, "n\n1\nx\n", "line 3: column 'n': expected int, found 'x'"),
    ({"format": "csv", "schema": "n int, m int"}, "m,n\n1,2\n", "line 1: expected the header n,m, found m,n"),
    ({"format": "csv", "schema": "n int"}, "1\n2\n", "line 1: expected the header n, found 1"),
    ({"format": "csv"}, "n,m\n1,2\n3\n", "line 3: expected 2 fields, found 1"),
    ({"format": "parquet"}, "no parquet", "landing/bad: not a whole Parquet file"),
    ({"format": "parquet", "schema": "n int"}, "no parquet", "landing/bad: not a whole Parquet file"),
]


@pytest.mark.parametrize(("arguments", "content", "message"), BAD)
def test_a_bad_record_is_named_by_file_and_line(
    spark: SparkSession, landing: Path, arguments: dict[str, Any], content: str, message: str
) -> None:
    """Spark's own error names the file at best."""
    put(landing, "bad", content)

    with pytest.raises(BadRecord, match=message):
        stage(spark, plan(words(**arguments)), same)


def test_a_file_that_vanished_is_named(spark: SparkSession, landing: Path) -> None:
    file = put(landing, "a.json", '{"n": 1}')
    attempt = plan(words(schema="n int"))
    file.unlink()

    with pytest.raises(InputChanged, match=r"file a\.json: .* found nothing"):
        stage(spark, attempt, same)


def test_a_users_own_error_goes_through(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')

    def transform(words: DataFrame) -> DataFrame:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage(spark, plan(words()), transform)


def test_a_full_disk_is_told_as_such_and_not_as_an_error_of_java(spark: SparkSession, landing: Path) -> None:
    """Wherever in Spark it was met: a person has to make room, not to read a stack."""
    put(landing, "a.json", '{"n": 1}')

    def transform(words: DataFrame) -> DataFrame:
        java: Any = spark._jvm
        java.java.io.FileOutputStream("/dev/full").write(1)
        return words

    with pytest.raises(NoSpace, match=r"checkpoint wc/17 r1: attempt 3: No space left on device, .*; make room"):
        stage(spark, plan(words()), transform)
