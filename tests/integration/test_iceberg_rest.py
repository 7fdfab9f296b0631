"""The Iceberg sink over a REST catalog: a server of its own decides who commits, and replies can be lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import counted
from support.servers import iceberg_rest
from support.servers.iceberg_rest import CONN_ID
from support.servers.s3 import losing_reply
from support.sinks.log_table_outputs import rows, stage
from support.sinks.log_table_promises import Promises
from support.sinks.log_tables import IcebergFormat
from twophase.core.ports import Outcome
from twophase.sinks import Iceberg

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class RestFormat(IcebergFormat):
    """Iceberg in the REST catalog, each test in a namespace of its own."""

    def __init__(self) -> None:
        self.namespace = f"db_{uuid.uuid4().hex[:8]}"

    def make(self, path: str, **options: Any) -> Iceberg:
        return Iceberg(f"{self.namespace}.{Path(path).name}", path=path, catalog=CONN_ID, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with iceberg_rest.serving() as port:
        yield port


@pytest.fixture
def form(server: int, monkeypatch: pytest.MonkeyPatch) -> RestFormat:
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", iceberg_rest.connection(server))
    return RestFormat()


class TestRest(Promises):
    """All that a table promises."""

    @pytest.fixture
    def form(self, form: RestFormat) -> RestFormat:
        return form


@pytest.mark.parametrize("replacing", [False, True])
def test_a_commit_whose_reply_the_network_lost_is_there_once_and_whole(
    server: int, form: RestFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, replacing: bool
) -> None:
    """The library must not clean up after itself, either: what it wrote is the table by then."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    old = stage(form.make("lake/words"), 1)
    old.promote()
    commit = f"POST /v1/namespaces/{form.namespace}/tables/words ".encode()
    with losing_reply(server, commit) as (port, lost):
        monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", iceberg_rest.connection(port))
        relayed = form.make("lake/words")
        new = stage(relayed, 1, 2, revision=2, older=old) if replacing else stage(relayed, 2)
        found = new.promote()

    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", iceberg_rest.connection(server))
    sink = form.make("lake/words")
    assert lost.is_set()
    assert found.outcome is Outcome.ALREADY_PROMOTED
    assert counted(form.content(sink)) == counted(rows(1, revision=2) if replacing else [*rows(1), *rows(2)])
    assert stage(sink, 3).promote().outcome is Outcome.PROMOTED
