"""Real parts for the tests: one PostgreSQL per run, one database per test, one Spark per run."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.servers.postgres import FASTER, administer, database, open_folder
from twophase.committer.record import PostgresRecord, connect
from twophase.committer.upgrade import upgrade
from twophase.local import postgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from support.servers.s3 import S3Server
    from twophase.local.kafka import Broker

#: Where Airflow would put a configuration of its own, should a test import it.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="twophase-airflow-home-"))

#: Short, so that a test that waits out a dead process's lease does not wait long.
LEASE = "3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file together when several processes share the run, and all that want Airflow in one.

    A second Airflow would cost more than it gives on two cores; likewise a second Kafka broker.
    """
    for item in items:
        together = str(item.path)
        if "kafka" in item.name or not {"broker", "killed_broker"}.isdisjoint(getattr(item, "fixturenames", ())):
            together = "kafka"
        if item.path.parent.name == "airflow" or item.get_closest_marker("airflow"):
            together = "airflow"
        item.add_marker(pytest.mark.xdist_group(together))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what each folder of tests took, over all processes, so that one that grows is seen."""
    spent: Counter[str] = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            spent[str(Path(report.nodeid.partition("::")[0]).parent)] += round(report.duration * 1000)
    if len(spent) > 1:
        terminalreporter.section("seconds per folder")
        for folder, milliseconds in spent.most_common():
            terminalreporter.line(f"{milliseconds / 1000:7.1f}  {folder}")


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Start PostgreSQL once; return the DSN of a database with an empty record, the template of every test's own."""
    home = open_folder("twophase-server-")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TWOPHASE_HOME", str(home))
        administer(postgres.ensure(), *FASTER)
        dsn = postgres.create_database("template_record")
    engine = connect(dsn)
    upgrade(engine)
    engine.dispose()
    yield dsn
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TWOPHASE_HOME", str(home))
        postgres.stop()
    shutil.rmtree(home)


@pytest.fixture
def dsn(server: str) -> Iterator[str]:
    """Return a database of this test's own, with an empty record."""
    with database(server) as made:
        yield made


@pytest.fixture(scope="module")
def shared_record(server: str) -> Iterator[PostgresRecord]:
    """Return one record for a module whose tests each have a pipeline of their own in it."""
    with database(server) as made:
        opened = PostgresRecord.open(made, who="test")
        yield opened
        opened.engine.dispose()


@pytest.fixture
def record(dsn: str) -> Iterator[PostgresRecord]:
    """Return the record of this test."""
    opened = PostgresRecord.open(dsn, who="test")
    yield opened
    opened.engine.dispose()


@pytest.fixture
def home(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a user with a run folder and a committer database; return the run folder."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    monkeypatch.setenv("TWOPHASE_DSN", dsn)
    monkeypatch.setenv("TWOPHASE_LEASE", LEASE)
    return tmp_path


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Start Spark once."""
    from support.servers.spark import local_session

    session = local_session()
    yield session
    session.stop()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to build the S3 server early, if any test is going to need it."""
    needed = any("s3_server" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        from support.servers.s3 import build

        build()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Start an S3 server once."""
    from support.servers.s3 import serving

    with serving() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Set the environment of a user of the S3 server, which works again at the end."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    yield s3_server
    s3_server.restore()


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """Start a Kafka broker once; nobody kills it."""
    from support.servers.kafka import serving

    with serving() as started:
        yield started


@pytest.fixture
def kafka(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """Set the environment of a user of the Kafka broker."""
    from support.servers.kafka import environment

    for name, value in environment(broker).items():
        monkeypatch.setenv(name, value)
    return broker


@pytest.fixture(scope="session")
def killed_broker() -> Iterator[Broker]:
    """Start another Kafka broker, for tests that kill and stop it; `mortal_kafka` lets it work again."""
    from support.servers.kafka import serving

    with serving() as started:
        yield started


@pytest.fixture
def mortal_kafka(killed_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """Set the environment of a user of a Kafka broker that the test may kill and stop."""
    from support.servers.kafka import environment, restore

    for name, value in environment(killed_broker).items():
        monkeypatch.setenv(name, value)
    yield killed_broker
    restore(killed_broker)
