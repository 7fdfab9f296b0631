"""Ten thousand rows with every hard value come back equal from each sink; one run writes to all of them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from psycopg2.extras import RealDictCursor

import twophase
from support.pipelines.factories import land
from support.servers.postgres import database
from support.sinks.hard_values import LONG, ROWS, TEXTS, hard_rows, plain
from twophase import Pipeline, sinks, sources
from twophase.core.settings import data_path
from twophase.sinks import Sender

Row = dict[str, Any]
CATALOG = {"type": "sql", "uri": "sqlite:///lake/catalog.db"}
POSTGRES: dict[str, dict[str, Any]] = {
    "append": {},
    "attach": {"attach": True},
    "upsert": {"mode": "upsert", "key": ["id"]},
    "retract": {"mode": "retract", "key": ["id"]},
    "replace": {"mode": "replace"},
}


class Keeping(Sender):
    """Keeps what is sent, as it is."""

    def __init__(self, path: str) -> None:
        self.path = path

    def send_values(self, rows: Iterator[Row], checkpoint_id: int, timestamp: datetime) -> bool:
        with Path(self.path).open("ab") as file:
            for row in rows:
                pickle.dump(row, file)
        return True


def in_files() -> list[Row]:
    from pyspark.sql import SparkSession

    table = SparkSession.active().read.parquet(str(data_path("lake/files"))).drop("checkpoint").toArrow()
    found: list[Row] = table.to_pylist()
    return found


def in_delta() -> list[Row]:
    from deltalake import DeltaTable

    found: list[Row] = DeltaTable(data_path("lake/delta")).to_pyarrow_table().to_pylist()
    return found


def in_iceberg() -> list[Row]:
    from pyiceberg.catalog.sql import SqlCatalog

    properties = {**CATALOG, "uri": f"sqlite:///{data_path('lake/catalog.db')}"}
    found: list[Row] = SqlCatalog("default", **properties).load_table("db.hard").scan().to_arrow().to_pylist()
    return found


def sent() -> list[Row]:
    with data_path("sent").open("rb") as file:
        found = []
        while file.peek(1):
            found.append(pickle.load(file))
    return found


def in_postgres(mode: str) -> list[Row]:
    session = psycopg2.connect(os.environ["AIRFLOW_CONN_DWH"].replace("postgres://", "postgresql://"))
    with session, session.cursor(cursor_factory=RealDictCursor) as cursor:
        cursor.execute(f"SELECT * FROM public.hard_{mode}")
        found = [{name: value for name, value in row.items() if name != "_checkpoint"} for row in cursor.fetchall()]
    session.close()
    return found


READERS: dict[str, Callable[[], list[Row]]] = {
    "files": in_files,
    "delta": in_delta,
    "iceberg": in_iceberg,
    "sent": sent,
    **{mode: lambda mode=mode: in_postgres(mode) for mode in POSTGRES},  # type: ignore[misc]
}


@pytest.fixture(scope="module")
def written(server: str, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Row]]:
    """Write to every sink in one checkpoint; return the rows as Spark has them."""
    home = tmp_path_factory.mktemp("hard")
    with database(server) as dsn, pytest.MonkeyPatch.context() as environment:
        environment.setenv("TWOPHASE_HOME", str(home))
        environment.setenv("TWOPHASE_DSN", dsn)
        environment.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
        environment.syspath_prepend(Path(__file__).parent)
        land("1.json", [{"id": 1}], "landing")
        data_path("lake").mkdir()
        frame = hard_rows(spark).cache()
        catalog = {**CATALOG, "uri": f"sqlite:///{data_path('lake/catalog.db')}"}
        pipeline = Pipeline(
            "hard",
            reads={"words": sources.Files("landing", "json", schema="id bigint")},
            transform=lambda words: _to_each(frame),  # noqa: ARG005 - the rows come from elsewhere
            writes={
                "files": sinks.Files("lake/files"),
                "delta": sinks.Delta("lake/delta"),
                "iceberg": sinks.Iceberg("db.hard", path="lake/iceberg", catalog=catalog),
                "sent": sinks.WriteAhead("test_hard_values:Keeping", arguments={"path": str(data_path("sent"))}),
                **{
                    mode: sinks.Postgres(f"hard_{mode}", conn_id="dwh", create=True, **options)
                    for mode, options in POSTGRES.items()
                },
            },
        )
        assert twophase.run(pipeline, spark=spark) is not None
        yield plain(frame.toArrow().to_pylist())
        frame.unpersist()


def _to_each(frame: Any) -> dict[str, Any]:
    from pyspark.sql import functions

    return {name: frame.withColumn("_change", functions.lit("+I")) if name == "retract" else frame for name in READERS}


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_every_hard_value_comes_back_equal(written: dict[int, Row], name: str) -> None:
    rows = READERS[name]()

    found = plain(rows)

    assert len(rows) == len(found) == len(written) == ROWS
    wrong = [number for number, row in written.items() if found[number] != row]
    assert not wrong, _told(written[wrong[0]], found[wrong[0]])
    assert {*TEXTS, *LONG} == {row["word"] for row in found.values()}


def _told(expected: Row, found: Row) -> str:
    names = [name for name in expected if expected[name] != found.get(name)]
    return ", ".join(f"{name}: expected {expected[name]!r:.100}, found {found.get(name)!r:.100}" for name in names)
