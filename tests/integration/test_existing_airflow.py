"""A command beside an Airflow of somebody's own finds the connections where that Airflow keeps them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from support.pipelines.commands import listed, twophase
from twophase.core import connections
from twophase.core.errors import ConfigError, Unreachable
from twophase.local import existing_airflow, postgres
from twophase.local.committer_database import resolve
from twophase.spark.submit import child_environment

SECRET = "p@ss/w:rd?%"  # every sign that has a meaning in a URL

#: Makes the tables that are asked, as Airflow declares them, and puts connections into them.
KEEP = """
import json, sys
from airflow.models import Connection
from airflow.models.team import Team
from airflow import settings
from airflow.utils.session import create_session
for table in (Team.__table__, Connection.__table__):
    table.create(settings.engine)
with create_session() as session:
    for one in json.load(sys.stdin):
        session.add(Connection(**one))
"""


@pytest.fixture(autouse=True)
def _ask_anew() -> Iterator[None]:
    existing_airflow._answers.clear()
    yield
    existing_airflow._answers.clear()


@pytest.fixture(scope="module")
def kept(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an Airflow that keeps its connections in its own database; return its home."""
    home = tmp_path_factory.mktemp("airflow")
    url = make_url(server)
    kept = [
        {"conn_id": "twophase_committer", "conn_type": "postgres", "host": url.host, "port": url.port,
         "login": url.username, "password": url.password, "schema": url.database},
        {"conn_id": "dwh", "conn_type": "postgres", "host": "Db.Example", "login": "ann", "password": SECRET,
         "extra": json.dumps({"sslmode": "require", "retries": 3})},
    ]  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    subprocess.run(
        [sys.executable, "-c", KEEP],
        input=json.dumps(kept),
        env={**inherited, "AIRFLOW_HOME": str(home)},
        text=True,
        check=True,
        capture_output=True,
    )
    return home


@pytest.fixture
def airflow(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand beside that Airflow, with nothing of Twophase's set."""
    for name in [name for name in os.environ if name.startswith(("AIRFLOW", "TWOPHASE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AIRFLOW_HOME", str(kept))
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path / "home"))
    return kept


def test_the_committer_database_is_the_one_that_airflow_keeps(airflow: Path, server: str) -> None:
    committer = resolve()

    assert (make_url(committer.dsn), committer.origin) == (make_url(server), "connection twophase_committer")
    assert not committer.embedded


def test_a_connection_arrives_whole_and_is_asked_for_once(airflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = connections.required("dwh")
    monkeypatch.setattr(subprocess, "run", None)

    assert connections.required("dwh") == found
    assert found == connections.Connection(
        "dwh", "postgres", "Db.Example", None, "ann", SECRET, None, {"sslmode": "require", "retries": 3}
    )


def test_the_environment_needs_no_airflow(airflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DWH", "postgres://bob@elsewhere/db")
    monkeypatch.setattr(subprocess, "run", None)

    assert connections.required("dwh").host == "elsewhere"


def test_a_missing_connection_is_told_with_every_place_that_was_looked_in(airflow: Path) -> None:
    with pytest.raises(ConfigError) as missing:
        connections.required("nowhere")

    assert str(missing.value) == (
        f"connection nowhere: not found in AIRFLOW_CONN_NOWHERE and the Airflow in {airflow} (environment, metadata"
        " database); define it in Airflow (airflow connections add nowhere), or set AIRFLOW_CONN_NOWHERE"
    )


def test_a_secrets_backend_is_asked_as_airflow_asks_it(
    airflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "secrets.json"
    secrets.write_text(json.dumps({"dwh": "postgres://carol:hush@vault/db"}))
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND", "airflow.secrets.local_filesystem.LocalFilesystemBackend")
    monkeypatch.setenv("AIRFLOW__SECRETS__BACKEND_KWARGS", json.dumps({"connections_file_path": str(secrets)}))

    found = connections.required("dwh")

    assert (found.login, found.password, found.host) == ("carol", "hush", "vault")


def test_an_airflow_that_cannot_be_asked_is_not_one_without_the_connection(
    airflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record would go into another database: nothing is started, and nothing else is used."""
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql+psycopg2://ann:hush@127.0.0.1:1/airflow")
    with pytest.raises(Unreachable, match=r"could not be asked for it: metadata database \(OperationalError\)") as told:
        resolve(may_start=True)

    assert "hush" not in str(told.value)
    assert postgres.running() is None


def test_a_spark_job_asks_no_airflow(airflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = child_environment(os.environ, sys.executable, Path("/spark"), Path("/java/bin/java"))
    beside = existing_airflow.there()
    for name in os.environ.keys() - given.keys():
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AIRFLOW_HOME", str(airflow))  # even if it is told again where there is one

    assert beside is not None
    assert existing_airflow.there() is None


def test_where_nothing_says_where_connections_are_no_airflow_is_started(
    airflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow may be installed for `twophase up` alone: other commands stay quick, and make no folder for it."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "never"))
    monkeypatch.setattr(subprocess, "run", None)

    assert connections.lookup("dwh") is None
    assert "there is no Airflow here that keeps connections" in connections.where("dwh")
    assert not (tmp_path / "never").exists()


def test_the_local_airflow_counts_where_there_is_one(airflow: Path, tmp_path: Path) -> None:
    secrets = tmp_path / "home" / "airflow" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "fernet_key").touch()

    found = existing_airflow.there()

    assert found == existing_airflow.Existing(tmp_path / "home" / "airflow", local=True)
    assert "is not running" in connections.where("dwh")
    with pytest.raises(ConfigError, match="run twophase up, or set TWOPHASE_DSN"):
        resolve()


def test_status_speaks_of_the_airflow_that_is_there_and_of_what_it_lacks(
    airflow: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWOPHASE_HOME")
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(airflow / "nowhere"))
    found: dict[str, Any] = listed("status")

    there = found["existing"]
    assert (there["home"], there["executor"]) == (str(airflow), "LocalExecutor")
    assert there["dags"] == str(airflow / "dags")
    assert there["plugin"]
    assert found["origin"] == "connection twophase_committer"
    assert str(make_url(server).password) not in json.dumps(found)
    folder, jobs, spark = found["problems"]
    assert folder.startswith(f"TWOPHASE_HOME: not set here, so that each component of the Airflow in {airflow} would")
    assert jobs == f"TWOPHASE_SPARK_JOBS: no folder of transforms at {airflow}/nowhere; make it, or name another"
    assert spark.startswith(
        f"connection spark_default: not found in the Airflow in {airflow} (environment, metadata database); add it:"
    )


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("TWOPHASE_HOME", "expected a folder, found a file at"),
        ("TWOPHASE_SPARK_JOBS", "expected a folder, found a file at"),
    ],
)
def test_status_names_what_stands_in_the_way(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, told: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file"))

    assert f"{variable}: {told}" in " ".join(twophase("status").stdout.split())


def test_status_names_a_mixed_spark_and_a_missing_java(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_SPARK_PYTHON", str(tmp_path / "python"))
    problems = listed("status")["problems"]

    assert any(problem.startswith(f"spark: cannot run the interpreter {tmp_path}/python") for problem in problems)


def test_help_asks_no_airflow(airflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)

    assert twophase("--help").exit_code == 0
