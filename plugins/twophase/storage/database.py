"""Sessions in a target database, and what its errors mean. Called by whatever talks to PostgreSQL for a sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.core import connections
from twophase.core.errors import ConfigError
from twophase.core.secret_texts import without_secrets
from twophase.storage.session_pool import POOL

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Session  # noqa: N812 - psycopg2's own name says nothing
    from psycopg2.sql import Composable

#: A session waits no longer for a lock; the promotion is tried again later (R18).
LOCK_TIMEOUT = "10s"
#: The server ends a session that idles in a transaction: a stopped promoter must not hold locks for ever (R18).
IDLE_TIMEOUT = "60s"
#: The settings of all our sessions. Names without a schema are looked up among PostgreSQL's own only, so nobody can put
#: theirs in the way. Row security that applies raises an error: a policy would run code of its author.
SAFE = "-c search_path=pg_catalog,pg_temp -c row_security=off"
CONNECT_SECONDS = 10
#: Error codes that may pass by themselves: connections, resources (also a full disk), locks, conflicts, a server that
#: is shutting down; a statement that a timeout or a person ended; a standby that is not the primary yet.
_PASSING = ("08", "53", "55P03", "40", "57P", "57014", "58030", "25P03", "25P04", "25006")
_TABLE_PARTS = 2
#: The length of a name: PostgreSQL cuts a longer one without an error.
NAME_BYTES = 63


class TableName(NamedTuple):
    """A table, by its schema and its name."""

    schema: str
    name: str

    def __str__(self) -> str:
        """Return `schema.name`."""
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
        """Return it as SQL, quoted by the driver."""
        from psycopg2 import sql

        return sql.Identifier(*self)


def dsn(conn_id: str, settings: str = "") -> str:
    """Return the URL by which libpq reaches a database, with session settings and the password: never print it.

    Texts are UTF-8 in every session, whatever the database's encoding: the server converts them, or says that it
    cannot.
    """
    found = connections.required(conn_id)
    if found.conn_type not in {"postgres", "postgresql"}:
        msg = f"connection {conn_id}: expected type postgres, found {found.conn_type or 'none'!r}"
        raise ConfigError(msg)
    ours = {"options": options(found.extra, settings), "client_encoding": "UTF8"}
    return replace(found, extra={**found.extra, **ours}).url("postgresql")


def options(extra: Mapping[str, Any], settings: str = "") -> str:
    """Return the settings of a session: those of the connection, then ours, which win."""
    return " ".join(filter(None, (str(extra.get("options", "")), settings, SAFE)))


@contextmanager
def session(conn_id: str, *, keep: bool = True) -> Iterator[Session]:
    """Hand out a session that gives up on a lock after a while; the caller commits, anything else is rolled back.

    It is READ COMMITTED, whatever the database's default is: each statement sees a marker that another promoter has
    committed meanwhile. The next caller in this process gets the same one, reset; after any error, or without `keep`,
    it is closed instead.
    """
    settings = {
        "lock_timeout": LOCK_TIMEOUT,
        "idle_in_transaction_session_timeout": IDLE_TIMEOUT,
        "default_transaction_isolation": r"read\ committed",
    }
    reached = dsn(conn_id, " ".join(f"-c {name}={value}" for name, value in settings.items()))
    taken = POOL.take(conn_id, reached, lambda: connect(reached, cursor_factory=_cursor_class()))
    is_sound = False
    try:
        yield taken
        is_sound = keep
    finally:
        POOL.give_back(conn_id, taken, keep=is_sound)


def connect(reached: str, **more: Any) -> Session:  # noqa: ANN401 - arguments of psycopg2's own
    """Open a session by its URL."""
    import psycopg2

    return psycopg2.connect(reached, connect_timeout=CONNECT_SECONDS, application_name="twophase", **more)


@cache
def _cursor_class() -> type[Any]:
    """Return a cursor class that does not take a `%` in the name of a table or a column for a placeholder.

    psycopg2 looks for placeholders in the whole statement, names included, if it has values to fill in.
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
    """Hand out a cursor in a session, and commit what was done with it; an error rolls it back."""
    with session(conn_id) as opened, opened.cursor() as cursor:
        yield cursor
        opened.commit()


#: Makes commits survive a crash of the server, whatever its default is; for the rest of a transaction.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"


def commit_durably(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Have the commit of this transaction on disk before it is acknowledged."""
    cursor.execute(_DURABLE)


def make_durable(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Have the commit of this transaction make durable all that others committed before: loaded rows, for example."""
    commit_durably(cursor)
    cursor.execute("SELECT txid_current()")  # only a transaction with an id writes the log to disk when it commits


def one_line(error: BaseException) -> str:
    """Return what the server or the client library said, in one line."""
    return " ".join(without_secrets(str(error)).split()) or type(error).__name__


def passes(error: BaseException) -> bool:
    """Say whether an error of psycopg2 may pass by itself: the same call may succeed later."""
    import psycopg2

    code = getattr(error, "pgcode", None) or ""
    if code:
        return code.startswith(_PASSING)
    return isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError)


def columns_of(cursor: Any, table: TableName) -> dict[str, str] | None:  # noqa: ANN401 - a cursor
    """Return the columns of a table with their types; None if there is no such table."""
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
