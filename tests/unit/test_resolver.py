"""Which committer database is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twophase.core.errors import ConfigError, Unreachable
from twophase.local.committer_database import Committer, inside_airflow, resolve
from twophase.local.record_access import open_record

PLUGINS = Path(__file__).parents[2] / "plugins"
VARIABLES = ("TWOPHASE_DSN", "AIRFLOW_CONN_TWOPHASE_COMMITTER", "AIRFLOW_CTX_DAG_ID", "_AIRFLOW_PROCESS_CONTEXT")

ARGUMENT = "postgresql+psycopg2://ann:hunter2@argument/db"
VARIABLE = "postgresql+psycopg2://ann:hunter2@variable/db"
CONNECTION = "postgresql+psycopg2://ann:hunter2@connection/db"


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start from an environment that says nothing, with an empty run folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))


def test_argument_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller says beats the environment."""
    monkeypatch.setenv("TWOPHASE_DSN", VARIABLE)
    monkeypatch.setenv("AIRFLOW_CONN_TWOPHASE_COMMITTER", CONNECTION)

    assert resolve(ARGUMENT) == Committer(ARGUMENT, "argument")


def test_variable_comes_before_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TWOPHASE_DSN` beats Airflow's connection."""
    monkeypatch.setenv("TWOPHASE_DSN", VARIABLE)
    monkeypatch.setenv("AIRFLOW_CONN_TWOPHASE_COMMITTER", CONNECTION)

    assert resolve() == Committer(VARIABLE, "TWOPHASE_DSN")


@pytest.mark.parametrize(
    "declared",
    [
        "postgres://ann:hunter2@connection/db",
        "postgresql://ann:hunter2@connection/db",
        CONNECTION,
        json.dumps(
            {"conn_type": "postgres", "host": "connection", "login": "ann", "password": "hunter2", "schema": "db"}
        ),
    ],
)
def test_connection_of_the_environment_is_used_without_airflow(monkeypatch: pytest.MonkeyPatch, declared: str) -> None:
    """The connection works in each of its forms, and an empty `TWOPHASE_DSN` says nothing."""
    monkeypatch.setenv("TWOPHASE_DSN", "")
    monkeypatch.setenv("AIRFLOW_CONN_TWOPHASE_COMMITTER", declared)

    assert resolve() == Committer(CONNECTION, "connection twophase_committer")


def test_a_database_that_does_not_answer_is_told_with_who_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise people look at a variable that is not set."""
    monkeypatch.setenv("AIRFLOW_CONN_TWOPHASE_COMMITTER", "postgresql://somebody:hidden@127.0.0.1:1/record")

    with pytest.raises(Unreachable, match=r"; check connection twophase_committer and the server$") as told:
        open_record()

    assert "hidden" not in str(told.value)


def test_nothing_declared_and_nothing_running_names_the_remedy(tmp_path: Path) -> None:
    """Without a database the error says how to get one, and nothing was started or made."""
    with pytest.raises(ConfigError, match="run twophase up, or set TWOPHASE_DSN"):
        resolve()

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg2"])
def test_every_spelling_of_postgres_becomes_one(scheme: str) -> None:
    """Whatever the spelling, SQLAlchemy gets the one driver that is used."""
    found = resolve(f"{scheme}://ann:p%40ss@h:5433/db?sslmode=require")

    assert found.dsn == "postgresql+psycopg2://ann:p%40ss@h:5433/db?sslmode=require"


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        ("mysql://ann:hunter2@h/db", "found the scheme 'mysql'"),
        ("postgresql+asyncpg://ann:hunter2@h/db", "found the scheme 'postgresql+asyncpg'"),
        ("host=h password=hunter2", "cannot be read"),
        ("", "cannot be read"),
        ("postgresql://ann:hunter2@h:port/db", "cannot be read"),
        ("postgresql://ann:x@hunter2@h/db", "write the one in the password as %40"),
        ("postgresql://ann:x@1/hunter2@h/db", "write the one in the password as %40, and / as %2F"),
        ("postgresql://ann:x@1?hunter2@h/db", "write the one in the password as %40"),
        ("postgresql://an/n:hunter2@h/db", "and / as %2F"),
    ],
)
def test_unusable_dsn_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, dsn: str, message: str) -> None:
    """The error says where the DSN came from and what is wrong, never the password."""
    with pytest.raises(ConfigError, match=r"^argument dsn: expected postgresql://") as raised:
        resolve(dsn)

    assert message in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize("password", ["hunter/2", "h?unter2", "h#unter2", "h:unter2"])
def test_a_password_with_one_of_the_other_separators_is_read_whole(password: str) -> None:
    """What SQLAlchemy reads as a password is one, and is quoted from then on."""
    from sqlalchemy.engine import make_url

    assert make_url(resolve(f"postgresql://ann:{password}@h/db").dsn).password == password


def test_connection_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to something else is not taken for a committer database."""
    monkeypatch.setenv("AIRFLOW_CONN_TWOPHASE_COMMITTER", "mysql://ann:hunter2@h/db")

    with pytest.raises(ConfigError, match="expected type postgres, found 'mysql'"):
        resolve()


def test_text_of_a_committer_shows_no_password() -> None:
    """Neither the password nor an option is in what a log would show."""
    found = resolve("postgresql://ann:hunter2@h/db?sslpassword=hunter3")

    assert repr(found) == "Committer('postgresql+psycopg2://ann:***@h/db', origin='argument', embedded=False)"
    assert "hunter" not in str(found)


def resolve_in_airflow(tmp_path: Path, **environment: str) -> str:
    """Resolve in a process that Airflow has marked as its own, and return the origin or the error."""
    code = """
from twophase.core.errors import ConfigError
from twophase.local.committer_database import resolve
try:
    found = resolve(may_start=True)
    print("found", found.origin, found.dsn)
except ConfigError as error:
    print("error", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "AIRFLOW_HOME": str(tmp_path), "PYTHONPATH": str(PLUGINS), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_inside_a_task_the_connection_comes_from_airflow(tmp_path: Path) -> None:
    """A task asks Airflow itself, in whichever form the connection was declared."""
    said = resolve_in_airflow(
        tmp_path,
        AIRFLOW_CTX_DAG_ID="word_count",
        AIRFLOW_CONN_TWOPHASE_COMMITTER="postgres://ann:p%40ss@connection:5433/db?sslmode=require",
    )

    assert said == (
        "found connection twophase_committer postgresql+psycopg2://ann:p%40ss@connection:5433/db?sslmode=require"
    )


def test_inside_airflow_the_embedded_database_is_never_used(tmp_path: Path) -> None:
    """A missing committer is an error there even for a caller that may start one, and nothing is made."""
    said = resolve_in_airflow(tmp_path, AIRFLOW_CTX_DAG_ID="word_count")

    assert "expected the Airflow connection twophase_committer or TWOPHASE_DSN, found neither" in said
    assert not (tmp_path / "postgres").exists()


@pytest.mark.parametrize("mark", ["AIRFLOW_CTX_DAG_ID", "_AIRFLOW_PROCESS_CONTEXT"])
def test_airflow_is_recognised_by_what_it_exports(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """A task and what it starts, and Airflow's servers, are inside Airflow; any other process is not."""
    outside = inside_airflow()
    monkeypatch.setenv(mark, "anything")

    assert (outside, inside_airflow()) == (False, True)
