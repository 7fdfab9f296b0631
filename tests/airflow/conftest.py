"""One Airflow for all tests of a session that need one; each test has DAGs of its own in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_server import AirflowServer


@pytest.fixture(scope="session")
def airflow() -> Iterator[AirflowServer]:
    """Start Airflow once: short lease, short time-outs, an empty folder of DAGs."""
    with AirflowServer() as server:
        yield server
