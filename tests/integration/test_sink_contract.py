"""The shipped sinks keep the contract that a user's own sink is put through."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import DataFrame, functions

from support.pipelines.factories import visible
from support.servers.s3 import CONN_ID, S3Server
from support.servers.spark import local_session
from support.sinks.log_tables import CATALOG, DeltaFormat, IcebergFormat
from support.sinks.senders import kept
from twophase import committers, sinks
from twophase.committers import CheckpointCommitter
from twophase.core.checkpoint import Key
from twophase.core.slots import Slot
from twophase.sinks.base import Sink
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.write_ahead import delivery
from twophase.storage import database
from twophase.testing import Read, Rows, SinkContract, Stage, Staged

# The session of all tests, not one of the contract's own, which every later test would get.
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark"), pytest.mark.timeout(600)]


class InFiles(SinkContract):
    """A table of files."""

    @pytest.fixture
    def sink(self, home: Path) -> Sink:
        return sinks.Files("lake/words")

    @pytest.fixture
    def read(self, sink: Sink) -> Read:
        return lambda: visible("lake/words")


class TestFiles(InFiles):
    places = 3


@pytest.mark.slow
class TestFilesEverywhere(InFiles):
    pass


class InPostgres(SinkContract):
    """A table of the test's own database."""

    arguments: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @pytest.fixture
    def sink(self, home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Sink:
        monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
        monkeypatch.setattr(database, "LOCK_TIMEOUT", "200ms")
        return sinks.Postgres("words", conn_id="dwh", create=True, **self.arguments)

    @pytest.fixture
    def read(self, sink: Sink) -> Read:
        return rows_in_postgres


def rows_in_postgres() -> Rows:
    with psycopg2.connect(os.environ["AIRFLOW_CONN_DWH"].replace("postgres://", "postgresql://")) as session:
        cursor = session.cursor()
        cursor.execute("SELECT to_regclass('public.words') IS NOT NULL")
        if cursor.fetchone() != (True,):
            return []
        cursor.execute("SELECT id, word FROM public.words")
        return [{"id": number, "word": word} for number, word in cursor.fetchall()]


@pytest.mark.slow
class TestPostgresAppend(InPostgres):
    pass


@pytest.mark.slow
class TestPostgresAttach(InPostgres):
    arguments = {"attach": True}  # noqa: RUF012 - never changed


@pytest.mark.slow
class TestPostgresUpsert(InPostgres):
    arguments = {"mode": "upsert", "key": ["id"]}  # noqa: RUF012 - never changed


class Changelog(Stage):
    """Stages rows as a changelog that adds them."""

    def frame(self, rows: Rows) -> DataFrame:
        return super().frame(rows).withColumn("_change", functions.lit("+I"))


@pytest.mark.slow
class TestPostgresRetract(InPostgres):
    arguments = {"mode": "retract", "key": ["id"]}  # noqa: RUF012 - never changed

    @pytest.fixture
    def stage(self, sink: Sink) -> Stage:
        sink.prepare()
        return Changelog(local_session(), sink)


@pytest.mark.slow
class TestPostgresReplace(InPostgres):
    arguments = {"mode": "replace"}  # noqa: RUF012 - never changed

    def expected(self, *promoted: Staged) -> Rows:
        return promoted[-1].rows if promoted else []


class Days(Stage):
    """Stages each checkpoint as a day of its own."""

    def slot(self, key: Key) -> str:
        start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=key.checkpoint_id)
        return Slot.between(start, start + timedelta(days=1)).text

    def frame(self, rows: Rows) -> DataFrame:
        return super().frame(rows).withColumn("day", functions.expr("date_add(DATE'2026-01-01', int(id / 100))"))


class ByDay(InPostgres):
    """A table that is replaced day by day."""

    @pytest.fixture
    def stage(self, sink: Sink) -> Stage:
        sink.join("contract", "contract", slotted=True)
        stage = Days(local_session(), sink)
        sink.prepare(stage.slot(Key("contract", 1, 1)))
        return stage


@pytest.mark.slow
class TestPostgresReplaceBySlots(ByDay):
    arguments = {"mode": "replace"}  # noqa: RUF012 - never changed


@pytest.mark.slow
class TestPostgresReplaceBySlotColumn(ByDay):
    arguments = {"mode": "replace", "slot_column": "day"}  # noqa: RUF012 - never changed


class Sent(SinkContract):
    """A system that keeps the ids of the rows that it is sent."""

    committer: Callable[[], CheckpointCommitter] = committers.Postgres

    @pytest.fixture
    def sink(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
        monkeypatch.setattr(delivery, "PATIENCE", 0.2)
        return sinks.WriteAhead(
            "support.sinks.senders:Keeping",
            arguments={"path": str(home / "kept.db")},
            committer=type(self).committer(),
            idempotent=True,
            path="write_ahead/words",
        )

    @pytest.fixture
    def read(self, home: Path) -> Read:
        return lambda: kept(home / "kept.db")


@pytest.mark.slow
class TestWriteAhead(Sent):
    pass


@pytest.mark.slow
class TestWriteAheadWithFiles(Sent):
    committer = committers.File


class InDelta(SinkContract):
    """A Delta table, read by polars."""

    @pytest.fixture
    def sink(self, home: Path) -> Sink:
        return sinks.Delta("delta/words")

    @pytest.fixture
    def read(self, sink: Sink) -> Read:
        assert isinstance(sink, LogTableSink)
        return lambda: DeltaFormat().content(sink) if sink.storage.has(f"{sink.location()}/_delta_log") else []


@pytest.mark.slow
class TestDelta(InDelta):
    pass


@pytest.mark.slow
class TestDeltaUpsert(InDelta):
    @pytest.fixture
    def sink(self, home: Path) -> Sink:
        return sinks.Delta("delta/words", mode="upsert", key=["id"])


@pytest.mark.slow
class TestDeltaOnS3(InDelta):
    @pytest.fixture
    def sink(self, home: Path, s3: S3Server) -> Sink:
        return sinks.Delta(f"{s3.place()}/words", conn_id=CONN_ID)


class InIceberg(SinkContract):
    """An Iceberg table, read by pyiceberg."""

    @pytest.fixture
    def sink(self, home: Path) -> Sink:
        return sinks.Iceberg("db.words", path="iceberg/words", catalog=CATALOG)

    @pytest.fixture
    def read(self, sink: Sink) -> Read:
        def rows() -> Rows:
            assert isinstance(sink, sinks.Iceberg)
            assert isinstance(sink.catalog, dict)
            catalog = SqlCatalog("default", **sink.catalog, **sink.storage.for_iceberg())
            return IcebergFormat().content(sink) if catalog.table_exists(sink.table) else []

        return rows


@pytest.mark.slow
class TestIceberg(InIceberg):
    pass


@pytest.mark.slow
class TestIcebergOnS3(InIceberg):
    @pytest.fixture
    def sink(self, home: Path, s3: S3Server) -> Sink:
        return sinks.Iceberg("db.words", path=f"{s3.place()}/words", conn_id=CONN_ID, catalog=CATALOG)
