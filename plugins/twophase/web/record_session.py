"""Connect to the record for the length of a request; the routes of `app` and `access` use it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from twophase.committer import upgrade
from twophase.committer.record import connect
from twophase.core.errors import ConfigError
from twophase.local.committer_database import resolve

log = logging.getLogger(__name__)


class Unavailable(Exception):
    """The record cannot be shown; the text says why, and what to do."""


@contextmanager
def reading() -> Iterator[Connection]:
    """Connect to the record; Unavailable when there is none, it does not answer, or it is of another version.

    The server's own words may name hosts and accounts, so they go to the log and not to the page.
    """
    try:
        committer = resolve()
        engine = _engine(committer.dsn)
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    try:
        with _checked(engine) as connection:
            yield connection
    except DBAPIError as error:
        log.warning("the commit table cannot be shown: %s", " ".join(str(error.orig).split()))
        msg = f"committer database: it does not answer; check {committer.origin} and the server"
        raise Unavailable(msg) from None


@lru_cache(maxsize=1)
def _engine(dsn: str) -> Engine:
    """Return the connection pool of a database; only the last one is kept, because the address seldom changes."""
    return connect(dsn)


def _checked(engine: Engine) -> Connection:
    """Return a connection, after a check that the record has the version of this code."""
    connection = engine.connect()
    try:
        try:
            upgrade.check(connection)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            # The server was started again since; with this one the pool has forgotten its other connections too.
            connection.close()
            connection = engine.connect()
            upgrade.check(connection)
    except ConfigError as error:
        connection.close()
        raise Unavailable(str(error)) from None
    except DBAPIError:
        connection.close()
        raise
    return connection
