"""A committer database that cannot be reached is one line, without the password."""

from __future__ import annotations

import socket

import pytest
from sqlalchemy import make_url

from twophase.core.errors import ConfigError
from twophase.local.record_access import open_record

SECRET = "hunter2"


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def complaint(dsn: str) -> str:
    """Return what opening the record complains of."""
    with pytest.raises(ConfigError) as raised:
        open_record(dsn)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    return str(raised.value)


def test_a_wrong_password_is_one_line_without_it(server: str) -> None:
    said = complaint(make_url(server).set(password=SECRET).render_as_string(hide_password=False))

    assert "password authentication failed" in said
    assert ":***@" in said
    assert SECRET not in said
    assert "\n" not in said


def test_a_closed_port_is_one_line_without_the_password(server: str) -> None:
    wrong = make_url(server).set(password=SECRET, port=closed_port())

    said = complaint(wrong.render_as_string(hide_password=False))

    assert "Connection refused" in said
    assert SECRET not in said
    assert "\n" not in said


def test_a_missing_database_is_one_line_without_the_password(server: str) -> None:
    password = make_url(server).password or ""

    said = complaint(make_url(server).set(database="no_such").render_as_string(hide_password=False))

    assert 'database "no_such" does not exist' in said
    assert password not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "garbage",
    [
        SECRET,
        f"not a dsn {SECRET}",
        f"postgresql://ann:{SECRET}@h:port/db",
        f"postgresql://ann:{SECRET}@[h/db",
        f"mysql://ann:{SECRET}@h/db",
        f"postgresql://ann:{SECRET}@127.0.0.1:99999/db",
        f"postgresql://ann:{SECRET}@127.0.0.1:1/db?nonsense=1",
        f"postgresql://ann:{SECRET}%00@127.0.0.1:1/db",
    ],
)
def test_garbage_is_one_line_without_the_password(garbage: str) -> None:
    said = complaint(garbage)

    assert SECRET not in said
    assert "\n" not in said
