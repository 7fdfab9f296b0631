"""The target database: how it is reached, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.core import connections
from twophase.core.errors import ConfigError
from twophase.core.secret_texts import without_secrets

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Session  # noqa: N812 - psycopg2's own name says nothing
    from psycopg2.sql import Composable

#: A lock that is held longer is not waited for: the promotion is asked for again (R18).
LOCK_TIMEOUT = "10s"
#: A promoter that was stopped inside its transaction must not hold the target's locks for ever (R18).
IDLE_TIMEOUT = "60s"
#: What every session of ours is set to. A name without a schema is PostgreSQL's own, whatever others have put where it
#: would be looked for; a policy of row security, which runs code of its owner's, is an error instead.
SAFE = "-c search_path=pg_catalog,pg_temp -c row_security=off"
_CONNECT_SECONDS = 10
#: What passes by itself: connections, resources (disk full too), locks, conflicts, a server that is told to stop; a
#: statement that a limit or a person ended; a standby that is not the primary yet.
_PASSING = ("08", "53", "55P03", "40", "57P", "57014", "58030", "25P03", "25P04", "25006")
_TABLE_PARTS = 2
#: Of a longer name PostgreSQL keeps so much, without a word.
NAME_BYTES = 63


class TableName(NamedTuple):
    """A table by its two names."""

    schema: str
    name: str

    def __str__(self) -> str:
        """Read as `schema.name`."""
        return f"{self.schema}.{self.name}"

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `name` or `schema.name`."""
        parts = text.split(".")
        if not all(parts) or len(parts) > _TABLE_PARTS:
            msg = f"sinks.Postgres {text!r}: expected `table` or `schema.table`"
            raise ConfigError(msg)
        if too_long := [part for part in parts if len(part.encode()) > NAME_BYTES]:
            msg = (
                f"sinks.Postgres {text[:100]!r}: the name {too_long[0][:40]!r}… has {len(too_long[0].encode())} bytes,"
                f" and PostgreSQL cuts names after {NAME_BYTES}; choose a shorter one"
            )
            raise ConfigError(msg)
        return cls(*parts) if len(parts) == _TABLE_PARTS else cls("public", text)

    @property
    def sql(self) -> Composable:
        """Return it quoted by the driver."""
        from psycopg2 import sql

        return sql.Identifier(*self)


def dsn(conn_id: str, settings: str = "") -> str:
    """Return how libpq reaches a database, with the settings of a session; password included, so never for showing.

    Texts are UTF-8 in every session, whatever the database keeps them as: it converts them, or says that it cannot.
    """
    found = connections.required(conn_id)
    if found.conn_type not in {"postgres", "postgresql"}:
        msg = f"connection {conn_id}: expected type postgres, found {found.conn_type or 'none'!r}"
        raise ConfigError(msg)
    ours = {"options": options(found.extra, settings), "client_encoding": "UTF8"}
    return replace(found, extra={**found.extra, **ours}).url("postgresql")


def options(extra: Mapping[str, Any], settings: str = "") -> str:
    """Return the settings of a session: those of the connection, and ours, which come last and count."""
    return " ".join(filter(None, (str(extra.get("options", "")), settings, SAFE)))


@contextmanager
def session(conn_id: str) -> Iterator[Session]:
    """Open a session that waits for no lock for long; commit is the caller's, anything else is rolled back.

    Each of its statements sees what was committed before it, whatever the database's default is: a marker that another
    promoter has put in meanwhile is seen.
    """
    import psycopg2

    settings = {
        "lock_timeout": LOCK_TIMEOUT,
        "idle_in_transaction_session_timeout": IDLE_TIMEOUT,
        "default_transaction_isolation": r"read\ committed",
    }
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    opened = psycopg2.connect(
        dsn(conn_id, ours),
        connect_timeout=_CONNECT_SECONDS,
        application_name="twophase",
        cursor_factory=_cursor_class(),
    )
    try:
        yield opened
    finally:
        opened.close()


@cache
def _cursor_class() -> type[Any]:
    """Return a cursor to which a `%` in the name of a table or a column is no placeholder.

    psycopg2 looks for those in the whole statement once it has values to fill in, names included.
    """
    import psycopg2.extensions
    from psycopg2 import sql

    def escaped(part: Any) -> Any:  # noqa: ANN401 - a part of a statement, or its text
        if isinstance(part, sql.Identifier):
            return sql.Identifier(*(name.replace("%", "%%") for name in part.strings))
        return sql.Composed(map(escaped, part.seq)) if isinstance(part, sql.Composed) else part

    class Cursor(psycopg2.extensions.cursor):  # type: ignore[misc]  # psycopg2 has no types
        def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002, ANN401 - psycopg2's own
            super().execute(query if vars is None else escaped(query), vars)

    return Cursor


@contextmanager
def transaction(conn_id: str) -> Iterator[Any]:
    """Open a session, hand out a cursor, and commit what was done with it; an error rolls it back."""
    with session(conn_id) as opened, opened.cursor() as cursor:
        yield cursor
        opened.commit()


#: What is committed has to outlive the server, whatever is usual there; for the rest of a transaction.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"


def commit_durably(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Let the commit of this transaction be on disk before it is acknowledged."""
    cursor.execute(_DURABLE)


def make_durable(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Let the end of this transaction make all durable that anybody committed before, loaded rows for example."""
    commit_durably(cursor)
    cursor.execute("SELECT txid_current()")  # the log is written to disk by a commit that has something to tell


def one_line(error: BaseException) -> str:
    """Return what the server or the client library said, in one line."""
    return " ".join(without_secrets(str(error)).split()) or type(error).__name__


def passes(error: BaseException) -> bool:
    """Say whether an error of psycopg2's may be over by itself: the same call may succeed later."""
    import psycopg2

    code = getattr(error, "pgcode", None) or ""
    if code:
        return code.startswith(_PASSING)
    return isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError)


def columns_of(cursor: Any, table: TableName) -> dict[str, str] | None:  # noqa: ANN401 - a cursor
    """Return the columns of a table with their types; None: there is no such table."""
    cursor.execute(
        "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
        tuple(table),
    )
    row = cursor.fetchone()
    if row is None:
        return None
    cursor.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        row,
    )
    return dict(cursor.fetchall())
