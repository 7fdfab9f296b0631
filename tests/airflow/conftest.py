"""One Airflow for all tests of a session that need one; each test has DAGs of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers.airflow import AirflowServer


@pytest.fixture(autouse=True)
def _no_dag_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the DAGs of a test away at its end, so that nobody parses them for ever."""
    yield
    if "airflow" in request.fixturenames:
        server: AirflowServer = request.getfixturevalue("airflow")
        for file in server.dags.glob("case_*.py"):
            file.unlink()


@pytest.fixture(scope="session")
def airflow() -> Iterator[AirflowServer]:
    """Start Airflow once: short lease, short time-outs, an empty folder of DAGs."""
    with AirflowServer() as server:
        yield server
