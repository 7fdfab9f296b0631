"""One Airflow for all tests of this folder that need one; each test has DAGs of its own in it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from support.servers.airflow import AirflowServer
from support.servers.folder_end import finish_at_the_end_of_its_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with servers of their own come before those on the shared Airflow, so that one runs at a time."""
    here = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    sorted_here = sorted(
        (items[place] for place in here), key=lambda item: "airflow" in getattr(item, "fixturenames", ())
    )
    for place, item in zip(here, sorted_here, strict=True):
        items[place] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Stop Airflow after the last test of this folder: idle, it costs whatever comes after it a share of the cores."""
    yield
    finish_at_the_end_of_its_folder("airflow", item, nextitem)


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
    """Start Airflow once, until the folder ends: short lease, short time-outs, an empty folder of DAGs, a broker."""
    with AirflowServer(topics=("lines", "word-counts")) as server:
        yield server
