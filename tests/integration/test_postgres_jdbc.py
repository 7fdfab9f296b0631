"""Executors without the ADBC wheel: Spark's JDBC writer loads the same rows, each partition once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from sqlalchemy.engine import make_url

from hard_values import ROWS, hard_rows
from twophase import sinks
from twophase.core.checkpoint import Key
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome
from twophase.sinks.pg import database, jdbc, staging
from twophase.sinks.pg.database import Table

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


def staged(spark: Any, frame: Any, table: str) -> tuple[sinks.Postgres, Any, Any]:
    sink = sinks.Postgres(table, conn_id="dwh", create=True)
    sink.prepare()
    handle = sink.place(KEY, 1, "t0ken")
    return sink, handle, sink.stage(frame, KEY, 1, "dwh", handle)


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
    sink, handle, manifest = staged(spark, frame, "by_adbc")
    assert sink.promote(KEY, handle, manifest).outcome is Outcome.PROMOTED

    monkeypatch.setattr(spark.sparkContext, "pythonExec", bare_python)  # what Spark starts executors' Python with
    with pytest.raises(ConfigError, match="executors lack the ADBC wheel, and Spark PostgreSQL's JDBC driver; install"):
        staged(spark, frame, "by_nobody")
    spark.sql(f"ADD JAR 'ivy://{DRIVER}'")
    sink, handle, manifest = staged(spark, frame, "by_jdbc")
    sink.check(KEY, handle, manifest)
    assert sink.promote(KEY, handle, manifest).outcome is Outcome.PROMOTED

    assert manifest["rows"] == value(target, "SELECT count(*) FROM public.by_jdbc") == ROWS
    names = ", ".join(staging.columns_of(target, Table("public", "by_adbc")) or ())
    assert staging.columns_of(target, Table("public", "by_adbc")) == staging.columns_of(
        target, Table("public", "by_jdbc")
    )
    ours, theirs = (f"SELECT {names} FROM public.{table}" for table in ("by_adbc", "by_jdbc"))
    for one, other in ((ours, theirs), (theirs, ours)):
        assert value(target, f"SELECT count(*) FROM ({one} EXCEPT ALL {other}) AS different") == 0
    assert_unseen(spark, str(make_url(dsn).password))


def assert_unseen(spark: Any, secret: str) -> None:
    """Look at all that Spark's pages show of what was executed."""
    store = spark._jsparkSession.sharedState().statusStore()
    found = store.executionsList()
    shown = [found.apply(number) for number in range(found.size())]
    texts = [f"{one.physicalPlanDescription()} {one.description()} {one.details()}" for one in shown]
    assert any("SaveIntoDataSourceCommand" in text for text in texts)
    assert not [text for text in texts if secret in text]


def test_a_partition_that_was_written_twice_is_kept_once_and_a_late_one_is_shut_out(target: Any) -> None:
    table = Table("public", "staged")
    target.execute(f"CREATE TABLE public.staged (id bigint, {jdbc.PART} integer)")
    target.execute("CREATE TABLE public.staged_parts (part integer PRIMARY KEY, rows bigint NOT NULL)")
    run = f"INSERT INTO public.staged (id, {jdbc.PART}) VALUES "
    for rows in ("(1, 0), (2, 0)", "(3, 1)", "(1, 0), (7, 0)", "(3, 1)"):  # each statement is a transaction
        target.execute(run + rows)

    with database.committed("dwh") as cursor:
        jdbc.settle(cursor, table, staging.parts_of(table))

    assert value(target, "SELECT array_agg(id ORDER BY id) FROM public.staged") in ([1, 2, 3], [1, 3, 7])
    assert staging.look(target, table) == staging.Staged(((0, 2), (1, 1)))
    with pytest.raises(psycopg2.errors.UndefinedColumn):
        target.execute(run + "(9, 2)")


def test_a_name_that_jdbc_would_not_quote_is_refused(target: Any, spark: Any) -> None:
    frame = spark.sql('SELECT 1 AS `a"b`')

    with pytest.raises(ConfigError, match="cannot write a name with a quote"):
        jdbc.load("sink", frame, "dwh", Table("public", "staged"), Table("public", "staged_parts"))
