"""Airflow's connections, read from the environment without Airflow."""

from __future__ import annotations

import json

import pytest

from twophase.core.connections import Connection, connection
from twophase.core.errors import ConfigError

SECRET = "p@ss/w:rd?%"  # every sign that has a meaning in a URL
QUOTED = "p%40ss%2Fw%3Ard%3F%25"


def declare(monkeypatch: pytest.MonkeyPatch, value: object) -> Connection | None:
    """Declare the connection `dwh` and read it."""
    monkeypatch.setenv("AIRFLOW_CONN_DWH", value if isinstance(value, str) else json.dumps(value))
    return connection("dwh")


@pytest.mark.parametrize("value", [None, "", "  "])
def test_undeclared_connection_is_none(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """A variable that is not set, or empty, declares nothing."""
    monkeypatch.delenv("AIRFLOW_CONN_DWH", raising=False)
    if value is not None:
        monkeypatch.setenv("AIRFLOW_CONN_DWH", value)

    assert connection("dwh") is None


def test_uri_and_json_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of Airflow's forms give the same connection."""
    by_uri = declare(monkeypatch, f"postgres://ann:{QUOTED}@Db.Example:5433/ware%2Fhouse?sslmode=require&retries=3")
    by_json = declare(
        monkeypatch,
        {
            "conn_type": "postgresql",
            "host": "Db.Example",
            "port": "5433",
            "login": "ann",
            "password": SECRET,
            "schema": "ware/house",
            "extra": '{"sslmode": "require", "retries": 3}',
            "description": "the warehouse",
        },
    )

    assert by_uri == by_json
    assert by_uri == Connection(
        "dwh", "postgres", "Db.Example", 5433, "ann", SECRET, "ware/house", {"sslmode": "require", "retries": 3}
    )


def test_extra_of_a_uri_may_be_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """`__extra__` carries what parameters cannot."""
    found = declare(monkeypatch, "postgres://h/db?__extra__=%7B%22nested%22%3A%20%7B%22a%22%3A%201%7D%7D")

    assert found is not None
    assert found.extra == {"nested": {"a": 1}}


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("postgres://h/db", "postgresql+psycopg2://h/db"),
        ("postgres://ann@h/db", "postgresql+psycopg2://ann@h/db"),
        (f"postgres://ann:{QUOTED}@h:5433/db", f"postgresql+psycopg2://ann:{QUOTED}@h:5433/db"),
        ("postgres://ann:x@[::1]:5433/db", "postgresql+psycopg2://ann:x@[::1]:5433/db"),
        ("postgres://h/db?sslmode=require&keepalives=true", "postgresql+psycopg2://h/db?sslmode=require&keepalives=1"),
        ("postgres://h/db?cursor=dictcursor&iam=true", "postgresql+psycopg2://h/db"),
    ],
)
def test_url_is_what_sqlalchemy_takes(monkeypatch: pytest.MonkeyPatch, uri: str, expected: str) -> None:
    """Every part survives; options of Airflow's own hook are left out."""
    found = declare(monkeypatch, uri)

    assert found is not None
    assert found.url() == expected


def test_text_of_a_connection_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the password nor an extra is in what a log would show."""
    found = declare(monkeypatch, "postgres://ann:hunter2@h/db?sslpassword=hunter3")

    assert "hunter" not in repr(found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("postgres://ann:hunter2@h:port/db", "expected type://login:password@host:port/schema"),
        ("postgres://ann:hunter2@[h/db", "expected type://login:password@host:port/schema"),
        ("postgres://ann:7/hunter2@h/db", "write them as %40, %2F, %3F and %23"),
        ("postgres://ann:7?hunter2@h/db", "write them as %40, %2F, %3F and %23"),
        ("postgres://ann:7#hunter2@h/db", "write them as %40, %2F, %3F and %23"),
        ("postgres://ann:x@y/hunter2@h/db", "write them as %40, %2F, %3F and %23"),
        ("postgres://ann:x@y?hunter2@h/db", "write them as %40, %2F, %3F and %23"),
        ("postgres://ann:x@y#hunter2", "write them as %40, %2F, %3F and %23"),
        ("hunter2", "found neither"),
        ('{"password": "hunter2"', "cannot be read"),
        ('{"pasword": "hunter2"}', "found also pasword"),
        ('{"conn_type": "postgres", "port": "hunter2"}', "expected a whole number as port, found str"),
        ('{"conn_type": "postgres", "password": ["hunter2"]}', "expected a text as password, found list"),
        ('{"conn_type": "postgres", "extra": "hunter2"}', "expected a json object as extra, found str"),
    ],
)
def test_unreadable_connection_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    """The error says which variable and what was expected, never what was in it."""
    with pytest.raises(ConfigError, match=r"^AIRFLOW_CONN_DWH: ") as raised:
        declare(monkeypatch, value)

    assert message in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
