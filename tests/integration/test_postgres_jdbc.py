"""Executors without the ADBC wheel: Spark's JDBC writer loads the same rows, each once, and its reader reads them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from sqlalchemy.engine import make_url

from support.sinks.hard_values import ROWS, hard_rows
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome
from twophase.sinks.postgres import jdbc_load, jdbc_read, staging_table
from twophase.sinks.postgres.target import partition_name
from twophase.storage import database
from twophase.storage.database import TableName

DRIVER = "org.postgresql:postgresql:42.7.13"
KEY = Key("hard", 1, 1)
#: What has no plain type: each of these has its own way into PostgreSQL.
NESTED = (
    "array(word, NULL, other) AS words", "IF(id % 2 = 0, array(), NULL) AS nothing", "array(at, NULL) AS times",
    "array(local) AS locals", "array(day, NULL) AS days", "array(raw, NULL) AS bytes", "array(single, NULL) AS singles",
    "array(ratio) AS ratios", "array(flag) AS flags", "array(large, NULL) AS numbers",
    "array(cast(id AS smallint)) AS shorts", "cast(id AS smallint) AS small",
    "named_struct('a', id, 'b', word) AS more", "map(cast(id AS string), word) AS pairs", "array(array(id)) AS deep",
    "IF(id % 5 = 0, NULL, cast(id % 128 AS tinyint)) AS tiny",
    "cast('6f1c1a52-0f0e-4b5c-9c53-5f3f0d7a2b11' AS string) AS name",
)  # fmt: skip


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make an interpreter that has all that this one has, but for the ADBC wheel and twophase itself."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", place], check=True)
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    for entry in (Path(sys.prefix) / packages).iterdir():
        if not entry.name.startswith(("adbc_", "twophase", "__editable__.twophase")):
            (place / packages / entry.name).symlink_to(entry)
    return str(place / "bin" / "python")


def staged(spark: Any, frame: Any, table: str) -> tuple[sinks.Postgres, Output]:
    sink = sinks.Postgres(table, conn_id="dwh", create=True)
    sink.prepare()
    output = Output(KEY, 1, sink.place(KEY, 1, "t0ken"), sink="dwh")
    return sink, replace(output, manifest=sink.stage(frame, output))


def value(cursor: Any, query: str) -> Any:
    cursor.execute(query)
    return cursor.fetchone()[0]


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_executors_without_the_wheel_load_the_same_rows_by_jdbc(
    dsn: str, target: Any, spark: Any, bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = hard_rows(spark, ROWS, *NESTED)
    target.execute("CREATE TABLE public.template (name uuid, _checkpoint bigint NOT NULL)")
    for table in ("by_adbc", "by_jdbc"):
        target.execute(f"CREATE TABLE public.{table} (LIKE public.template)")
    sink, output = staged(spark, frame, "by_adbc")
    assert sink.promote(output).outcome is Outcome.PROMOTED

    monkeypatch.setattr(spark.sparkContext, "pythonExec", bare_python)  # what Spark starts executors' Python with
    with pytest.raises(ConfigError, match="executors lack the ADBC wheel, and Spark PostgreSQL's JDBC driver; install"):
        staged(spark, frame, "by_nobody")
    with pytest.raises(ConfigError, match=r"table public\.by_adbc: the executors lack the ADBC wheel, and Spark"):
        sink.read(spark, [output])
    spark.sql(f"ADD JAR 'ivy://{DRIVER}'")
    sink, output = staged(spark, frame, "by_jdbc")
    sink.check(output)
    assert sink.promote(output).outcome is Outcome.PROMOTED

    assert output.manifest["rows"] == value(target, "SELECT count(*) FROM public.by_jdbc") == ROWS
    names = ", ".join(database.columns_of(target, TableName("public", "by_adbc")) or ())
    assert database.columns_of(target, TableName("public", "by_adbc")) == database.columns_of(
        target, TableName("public", "by_jdbc")
    )
    ours, theirs = (f"SELECT {names} FROM public.{table}" for table in ("by_adbc", "by_jdbc"))
    for one, other in ((ours, theirs), (theirs, ours)):
        assert value(target, f"SELECT count(*) FROM ({one} EXCEPT ALL {other}) AS different") == 0
    assert_unseen(spark, str(make_url(dsn).password))


def assert_unseen(spark: Any, secret: str, what: str = "SaveIntoDataSourceCommand") -> None:
    """Look at all that Spark's pages show of what was executed."""
    store = spark._jsparkSession.sharedState().statusStore()
    found = store.executionsList()
    shown = [found.apply(number) for number in range(found.size())]
    texts = [f"{one.physicalPlanDescription()} {one.description()} {one.details()}" for one in shown]
    assert any(what in text for text in texts)
    assert not [text for text in texts if secret in text]


@pytest.fixture
def bare(spark: Any, bare_python: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what takes the wheel from the executors; Spark has the driver."""
    spark.sql(f"ADD JAR 'ivy://{DRIVER}'")
    return lambda: monkeypatch.setattr(spark.sparkContext, "pythonExec", bare_python)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_executors_without_the_wheel_read_the_same_rows_with_the_same_types_by_jdbc(
    dsn: str, target: Any, spark: Any, bare: Callable[[], None]
) -> None:
    target.execute(
        "CREATE TABLE public.hard (name uuid, deep jsonb, words jsonb, small bigint, _checkpoint bigint NOT NULL)"
    )
    target.execute(f"ALTER DATABASE {target.connection.info.dbname} SET timezone TO 'Pacific/Auckland'")
    written = hard_rows(spark, ROWS, *NESTED)
    sink, output = staged(spark, written, "hard")
    assert sink.promote(output).outcome is Outcome.PROMOTED
    by_adbc = sink.read(spark, [output]).collect()

    bare()
    found = sink.read(spark, [output])

    assert found.dtypes == [*written.dtypes, ("checkpoint", "bigint")]
    assert same(found.drop("checkpoint").collect(), written.collect())
    assert same(found.collect(), by_adbc)
    assert_unseen(spark, str(make_url(dsn).password), "JDBCRelation")


def same(found: list[Any], expected: list[Any]) -> bool:
    """Compare rows with repetitions; NaN is itself."""
    return Counter(map(repr, found)) == Counter(map(repr, expected))


class Numbers:
    """A table of numbers, each checkpoint with some."""

    def __init__(self, spark: Any, **more: Any) -> None:
        self.spark = spark
        self.sink = sinks.Postgres("numbers", conn_id="dwh", create=True, **more)
        self.sink.prepare()

    def put(self, checkpoint: int, *numbers: int, older: Output | None = None) -> Output:
        key = Key("hard", checkpoint, older.key.revision + 1 if older else 1)
        output = Output(key, 1, self.sink.place(key, 1, "t0ken", older=older), sink="dwh")
        frame = self.spark.createDataFrame([(number,) for number in numbers], "id bigint")
        output = replace(output, manifest=self.sink.stage(frame, output))
        assert self.sink.promote(output).outcome is Outcome.PROMOTED
        return output


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attach", [False, True])
def test_each_checkpoint_is_read_by_jdbc_as_it_was_committed_or_not_at_all(
    target: Any, spark: Any, bare: Callable[[], None], attach: bool
) -> None:
    numbers = Numbers(spark, attach=attach)
    outputs = [numbers.put(1, 1, 2), numbers.put(2), numbers.put(3, 3)]
    later = numbers.put(4, 4)
    bare()
    found = numbers.sink.read(spark, outputs)

    assert found.rdd.getNumPartitions() == 3
    assert sorted(map(tuple, found.collect())) == [(1, 1), (2, 1), (3, 3)]
    assert (found.where("id = 3").count(), found.where("id = 9").count(), found.count()) == (1, 0, 3)

    target.execute("INSERT INTO public.numbers VALUES (5, 2)")
    refused(target, numbers.sink.read(spark, outputs[1:2]), outputs[1], "checkpoint 2: expected 0 rows, found 1")
    partitions = [partition_name(TableName(*output.handle["staging"])) for output in (*outputs, later)]
    target.execute(f"DROP TABLE {partitions.pop()}" if attach else "DELETE FROM public.numbers WHERE id = 4")
    refused(target, numbers.sink.read(spark, [later]), later, "checkpoint 4: expected 1 rows, found 0")
    if attach:
        target.execute(f"DROP TABLE {', '.join(map(str, partitions))}")
        refused(target, numbers.sink.read(spark, [later]), later, "checkpoint 4: expected 1 rows, found 0")


def refused(cursor: Any, found: Any, output: Output, told: str) -> None:
    """See that nothing of a frame can be read, however little is asked for, and what the server says to that.

    Spark cannot tell it: the driver of a test comes by ADD JAR, so the error's class is not known where it arrives.
    """
    for asked in (found, found.where("id = 9"), found.select("checkpoint"), found.limit(1)):
        with pytest.raises(Exception, match="Job aborted due to stage failure"):
            asked.collect()
    check = jdbc_read.check(TableName("public", "numbers"), output).as_string(cursor)
    with pytest.raises(psycopg2.DataError, match=f"table public.numbers: {told}"):
        cursor.execute(f"SELECT FROM (SELECT NULL::bigint AS checkpoint, false AS there) AS committed WHERE {check}")


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_frame_over_jdbc_gives_nothing_of_what_has_replaced_its_rows(
    target: Any, spark: Any, bare: Callable[[], None]
) -> None:
    numbers = Numbers(spark)
    first = numbers.put(1, 1, 2)
    bare()
    found = numbers.sink.read(spark, [first])
    assert found.count() == 2
    numbers.put(1, 3, 4, older=first)
    told = "checkpoint 1: expected the rows of revision 1, found those of 2; read it again"

    refused(target, found, first, told)
    target.execute("DELETE FROM public.numbers")
    refused(target, found, first, told)


def test_a_partition_that_was_written_twice_is_kept_once_and_a_late_one_is_shut_out(target: Any) -> None:
    table = TableName("public", "staged")
    target.execute(f"CREATE TABLE public.staged (id bigint, {jdbc_load.PART} integer)")
    target.execute("CREATE TABLE public.staged_parts (part integer PRIMARY KEY, rows bigint NOT NULL)")
    run = f"INSERT INTO public.staged (id, {jdbc_load.PART}) VALUES "
    for rows in ("(1, 0), (2, 0)", "(3, 1)", "(1, 0), (7, 0)", "(3, 1)"):  # each statement is a transaction
        target.execute(run + rows)

    with database.transaction("dwh") as cursor:
        jdbc_load.settle(cursor, table, staging_table.parts_of(table))

    assert value(target, "SELECT array_agg(id ORDER BY id) FROM public.staged") in ([1, 2, 3], [1, 3, 7])
    assert staging_table.look(target, table) == staging_table.StagedParts(((0, 2), (1, 1)))
    with pytest.raises(psycopg2.errors.UndefinedColumn):
        target.execute(run + "(9, 2)")


def test_a_name_that_jdbc_would_not_quote_is_refused(target: Any, spark: Any) -> None:
    frame = spark.sql('SELECT 1 AS `a"b`')

    with pytest.raises(ConfigError, match="cannot write a name with a quote"):
        jdbc_load.load("sink", frame, "dwh", TableName("public", "staged"), TableName("public", "staged_parts"))
