"""The moments of a promotion in PostgreSQL: right before and right after each statement and each COMMIT.

They are found by promoting, so that a new statement is met without anybody remembering it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2
from psycopg2 import extensions

from twophase.core.ports import Promotion
from twophase.sinks.postgres.sink import Postgres
from twophase.storage.session_pool import POOL

#: What is told of each moment: what it is, and the session it is in.
Moment = Callable[[str, "Watched"], None]


class Watched(extensions.connection):  # type: ignore[misc]
    """A session that tells of each of its moments."""

    tell: Moment

    def cursor(self, *arguments: Any, **more: Any) -> Any:
        """Return a cursor that tells of each statement."""
        return super().cursor(*arguments, **{"cursor_factory": _Cursor, **more})

    def commit(self) -> None:
        """Tell of a COMMIT."""
        self.tell("before COMMIT", self)
        super().commit()
        self.tell("after COMMIT", self)


class _Cursor(extensions.cursor):  # type: ignore[misc]
    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002 - psycopg2's own name
        session = self.connection
        assert isinstance(session, Watched)
        text = query if isinstance(query, str) else query.as_string(session)
        what = " ".join(text.split()[:2])
        session.tell(f"before {what}", session)
        super().execute(query, vars)
        session.tell(f"after {what}", session)


@contextmanager
def watching(moment: Moment) -> Iterator[None]:
    """Tell of each moment in which `Postgres` sinks promote meanwhile; what they ask before or after does not count."""
    connect, promote = psycopg2.connect, Postgres.promote

    def connected(dsn: str | None = None, **more: Any) -> Any:
        if dsn is None:  # the record's
            return connect(**more)
        session = connect(dsn, connection_factory=Watched, **more)
        session.tell = moment
        return session

    def promoted(sink: Postgres, *arguments: Any) -> Promotion:
        POOL.close()  # what waits there is not watched
        psycopg2.connect = connected
        try:
            return promote(sink, *arguments)
        finally:
            psycopg2.connect = connect
            POOL.close()

    Postgres.promote = promoted  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Postgres.promote = promote  # type: ignore[method-assign]
