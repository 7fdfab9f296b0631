"""What the tests of the Postgres and the write-ahead sinks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from support.sinks import senders
from support.sinks.write_ahead_bench import Bench
from twophase import committers
from twophase.committer.record import PostgresRecord
from twophase.committers import CheckpointCommitter
from twophase.core import failpoints


@pytest.fixture
def target(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the test a database by the connection `dwh`, and a session to look into it."""
    plain = dsn.replace("postgresql+psycopg2", "postgres")
    monkeypatch.setenv("AIRFLOW_CONN_DWH", plain)
    session = psycopg2.connect(plain.replace("postgres://", "postgresql://"))
    session.autocommit = True
    with session.cursor() as cursor:
        yield cursor
    session.close()


@pytest.fixture
def bench(home: Path, record: PostgresRecord) -> Iterator[Bench]:
    """Return a pipeline with a write-ahead sink, and the system it sends to."""
    yield Bench(home, record)
    failpoints.configure("")


@pytest.fixture(params=[committers.Postgres, committers.File], ids=["postgres", "file"])
def committer(request: pytest.FixtureRequest) -> CheckpointCommitter:
    """Return each of the shipped committers in turn."""
    made: CheckpointCommitter = request.param()
    return made


@pytest.fixture
def service(home: Path) -> Iterator[tuple[senders.Service, str]]:
    """Return an HTTP service that keeps the ids of its rows, and its address."""
    with senders.serving(home / "service.db") as found:
        yield found
