"""Several sinks, one of them down: the others are promoted, it follows when it is back, and people see which waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.crashes import several_sinks
from support.pipelines.commands import listed, twophase
from support.pipelines.factories import counted, land_words
from support.servers.target import Server
from twophase.core import failpoints
from twophase.core.failpoints import FailpointError

pytestmark = pytest.mark.chaos

#: What stops with the target database: its tables, and what has its catalog in it.
DOWN = {*several_sinks.TABLES, "iceberg"}


@pytest.fixture(scope="module")
def server_of_target() -> Iterator[Server]:
    made = Server()
    yield made
    made.remove()


@pytest.fixture
def target(server_of_target: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server_of_target.become_target(monkeypatch)
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")
    monkeypatch.setenv(several_sinks.CATALOG, "dwh")
    return server_of_target


def decide(kinds: str) -> None:
    """Take a checkpoint to its commit point, and no further."""
    failpoints.configure("commit.after=raise")
    with pytest.raises(FailpointError):
        several_sinks.run(kinds)
    failpoints.configure("")


@pytest.mark.parametrize(
    "kinds",
    [
        "files+postgres",
        "files+iceberg",
        pytest.param("postgres+delta", marks=pytest.mark.slow),
        pytest.param("+".join(several_sinks.LOCAL), marks=pytest.mark.slow, id="all"),
    ],
)
def test_a_sink_that_is_down_delays_only_itself_and_is_finished_by_recover(kinds: str, target: Server) -> None:
    rows = land_words(files=2)
    several_sinks.run(kinds)
    rows += land_words(files=2, start=2)
    decide(kinds)
    down, up = (sorted(found) for found in (DOWN & set(kinds.split("+")), set(kinds.split("+")) - DOWN))

    target.stop()
    left = twophase("recover", "words", "--wait")

    assert left.exit_code == 0, left.output
    for kind in up:
        assert counted(several_sinks.held(kind)) == counted(rows), kind
    found = listed("show", "words", "2")
    assert found["state"] == "COMMITTING"
    standing = {one["name"]: one for one in found["participants"]}
    assert sorted(name for name, one in standing.items() if one["promoted_at"]) == up
    assert sorted(name for name, one in standing.items() if "refused" in (one["pending"] or "")) == down
    shown = twophase("show", "words", "2").stdout
    assert shown.count("pending: ") == len(down)

    target.back()
    assert "pending: staged" in twophase("show", "words", "2").stdout
    assert twophase("recover", "words", "--wait").exit_code == 0

    assert listed("show", "words", "2")["state"] == "COMMITTED"
    for kind in kinds.split("+"):
        assert counted(several_sinks.held(kind)) == counted(several_sinks.expected(kind, rows)), kind
    assert not any(one["pending"] for one in listed("show", "words", "2")["participants"])
    assert twophase("verify", "words").exit_code == 0


def test_a_connection_that_is_not_defined_here_delays_only_its_own_sink(
    target: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = "postgres+files"
    rows = land_words(files=2)
    decide(kinds)
    connection = os.environ["AIRFLOW_CONN_DWH"]
    monkeypatch.delenv("AIRFLOW_CONN_DWH")

    assert twophase("recover", "words", "--wait").exit_code == 0

    assert counted(several_sinks.held("files")) == counted(rows)
    shown = twophase("show", "words", "1").stdout
    assert "pending: connection dwh: not found" in shown, shown
    monkeypatch.setenv("AIRFLOW_CONN_DWH", connection)
    assert twophase("recover", "words", "--wait").exit_code == 0
    assert counted(several_sinks.held("postgres")) == counted(rows)
    assert listed("show", "words", "1")["state"] == "COMMITTED"
