"""What a local Airflow is told: its own places, the user's wishes, and no secret in the wrong place."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from support.pipelines.commands import one_line_error, twophase
from support.servers.postgres import open_folder
from twophase.local import airflow, postgres, supervisor

PREFIXES = ("AIRFLOW", "_AIRFLOW", "TWOPHASE_")


@pytest.fixture
def outside(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a user who has a committer database and nothing else; return the run folder."""
    for name in [name for name in os.environ if name.startswith(PREFIXES[:2])]:
        monkeypatch.delenv(name)
    return home


def secrets() -> dict[str, str]:
    return {path.name: path.read_text() for path in (airflow.home() / "secrets").iterdir()}


def test_the_committer_database_of_commands_is_the_one_of_tasks(outside: Path, dsn: str) -> None:
    found = airflow.environment(8080)

    assert found["AIRFLOW_CONN_TWOPHASE_COMMITTER"] == dsn.replace("postgresql+psycopg2", "postgres")
    assert not (outside / "postgres").exists()


def test_settings_of_the_user_are_kept(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__PARALLELISM", "3")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", "spark://master:7077")
    monkeypatch.setenv("OTHER", "kept")
    found = airflow.environment(8080)

    assert found["AIRFLOW__CORE__PARALLELISM"] == "3"
    assert found["AIRFLOW_CONN_SPARK_DEFAULT"] == "spark://master:7077"
    assert found["OTHER"] == "kept"


def test_there_is_a_spark_on_this_machine_unless_said(outside: Path) -> None:
    found = json.loads(airflow.environment(8080)["AIRFLOW_CONN_SPARK_DEFAULT"])

    assert (found["host"], found["extra"]) == ("local[2]", {"deploy-mode": "client"})


@pytest.mark.parametrize(
    "name",
    [
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_SECRET",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC",
        "AIRFLOW__CORE__SQL_ALCHEMY_CONN",
        "AIRFLOW__CORE__FERNET_KEY",
        "AIRFLOW__API_AUTH__JWT_SECRET",
        "AIRFLOW__API__HOST",
        "AIRFLOW_HOME",
        "AIRFLOW_CONFIG",
    ],
)
def test_nothing_of_another_airflow_is_used(outside: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whoever has the environment of a production Airflow in his shell does not touch it."""
    monkeypatch.setenv(name, "production")

    assert "production" not in airflow.environment(8080).values()


def test_relative_folders_are_those_of_the_one_who_asks(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(outside)
    monkeypatch.delenv("TWOPHASE_SPARK_JOBS", raising=False)
    monkeypatch.setenv("TWOPHASE_DAGS", "flows")
    found = airflow.environment(8080)

    assert found["AIRFLOW__CORE__DAGS_FOLDER"] == found["TWOPHASE_DAGS"] == str(outside / "flows")
    assert found["TWOPHASE_SPARK_JOBS"] == str(outside / "spark_jobs")


def test_the_programs_of_this_environment_come_first(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    first, _, rest = airflow.environment(8080)["PATH"].partition(os.pathsep)

    assert (Path(first) / "spark-submit").exists()
    assert rest == "/usr/bin"


def test_secrets_are_made_once_and_closed(outside: Path) -> None:
    airflow.make_secrets()
    first = secrets()
    airflow.make_secrets()

    assert secrets() == first
    assert set(airflow.passwords()) == {"admin", "viewer"}
    assert {path.stat().st_mode & 0o777 for path in (airflow.home() / "secrets").iterdir()} == {0o600}
    assert not set(first.values()) & set(airflow.environment(8080).values())


def test_a_new_user_gets_a_password_and_the_others_keep_theirs(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow itself would print the password of a user that it finds without one."""
    airflow.make_secrets()
    before = airflow.passwords()
    monkeypatch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS", "admin:admin, op:op")
    airflow.make_secrets()

    assert airflow.passwords().keys() == {"admin", "viewer", "op"}
    assert before.items() <= airflow.passwords().items()


def test_up_without_airflow_names_the_remedy(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(airflow, "version", missing)

    assert "pip install 'twophase[airflow]', or leave it out: --no-airflow" in one_line_error(twophase("up"))
    assert twophase("up", "--no-airflow").exit_code == 0


# --- the database ----------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a run folder with an embedded PostgreSQL of its own to come."""
    folder = open_folder("twophase-database-")
    monkeypatch.delenv("TWOPHASE_DSN", raising=False)
    monkeypatch.setenv("TWOPHASE_HOME", str(folder))
    monkeypatch.setattr(airflow, "migrate", lambda _port: None)
    (folder / "logs").mkdir()
    airflow.make_secrets()
    yield folder
    postgres.stop()
    shutil.rmtree(folder)


class Dependent(supervisor.Child):
    """A child that only counts how often it was stopped."""

    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


def test_users_of_a_database_that_came_back_elsewhere_are_started_again(alone: Path) -> None:
    database = airflow.Database(8080)
    child = Dependent("one", [], dict, alone / "log")
    database.start()
    database.dependents = [child]
    postgres.stop()
    database.start()
    same = child.stopped
    port = int((alone / "postgres" / "port").read_text())
    first = secrets()["database_url"]
    postgres.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        gone = database.pid()
        database.start()

    assert (same, gone, child.stopped) == (0, None, 1)
    assert secrets()["database_url"] != first
    assert database.pid() == postgres.pid()


def test_a_lost_password_of_the_role_is_replaced(alone: Path) -> None:
    """The file says what the password is; the role follows."""
    import psycopg2

    database = airflow.Database(8080)
    database.start()
    (airflow.home() / "secrets" / "database_password").unlink()
    airflow.make_secrets()
    database.start()

    psycopg2.connect(secrets()["database_url"].replace("+psycopg2", "")).close()
