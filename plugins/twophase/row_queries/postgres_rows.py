"""Queries over rows in the target database, in its own SQL. The PostgreSQL sink returns it to audits and comparisons.

Nothing is created but temporary tables: a view on a staging table would get in the way of its promotion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from twophase.core.errors import AttemptFailed, ConfigError
from twophase.core.manifest import Column
from twophase.core.row_samples import CHARACTERS, ROW_BYTES, ROWS, Row, sample
from twophase.row_queries.duckdb_rows import DuckDBRows, quote
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation
    from psycopg2.sql import Composable

#: Types whose values are short and have a counterpart in JSON.
_SHOWN = {"boolean", "smallint", "integer", "bigint", "real", "double precision"}
#: Types that PostgreSQL cannot compare; their texts are compared instead.
_AS_TEXT = {"json", "xml"}


class RowSelection(NamedTuple):
    """Which rows of which table are meant."""

    table: TableName
    #: The WHERE clause; None: all rows.
    where: Composable | None = None
    #: A source to select from instead of the table, with the same columns.
    instead: Composable | None = None


class PostgresSession:
    """A session in the target database that knows sets of rows by names."""

    def __init__(self, cursor: Any, views: Mapping[str, PostgresRows]) -> None:  # noqa: ANN401 - a cursor
        """Define each set of rows under its name."""
        self._cursor = cursor
        self._types = {name: rows.columns(cursor) for name, rows in views.items()}
        known = (f"{quote(name)} AS NOT MATERIALIZED ({rows.select(cursor)})" for name, rows in views.items())
        self._known = f"WITH {', '.join(known)}"

    def types(self, view: str) -> dict[str, str]:
        """Return PostgreSQL's type of each column, by its name in lower case."""
        return {name.lower(): "text" if kind in _AS_TEXT else kind for name, kind in self._types[view].items()}

    def keep(self, name: str, select: str) -> None:
        """Keep the result of a query in a temporary table."""
        with explained():
            self._cursor.execute(f"CREATE TEMP TABLE {quote(name)} AS {self._known} {select}")

    def rows(self, query: str) -> list[Row]:
        """Return all rows of a query."""
        with explained():
            self._cursor.execute(f"{self._known} {query}")
            names = [column.name for column in self._cursor.description]
            return [dict(zip(names, row, strict=True)) for row in self._cursor.fetchall()]

    def value(self, query: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""
        with explained():
            self._cursor.execute(f"{self._known} {query}")
            row = self._cursor.fetchone()
        return None if row is None else row[0]

    def sample(self, query: str, limit: int = ROWS, size: int = ROW_BYTES) -> list[Row]:
        """Return some rows of a query as the record can keep them; values are cut before they reach Python."""
        with explained():
            self._cursor.execute(f"{self._known} SELECT * FROM ({query}\n) AS asked LIMIT 0")  # noqa: S608 - the caller's
            found = list(self._cursor.description)
            kinds = [self._kind(column.type_code) for column in found]
            names = [f"c{number}" for number in range(len(found))]
            cells = [_cut(name, kind) for name, kind in zip(names, kinds, strict=True)]
            shown = f"SELECT {', '.join(cells)} FROM ({query}\n) AS asked({', '.join(names)}) LIMIT {limit}"  # noqa: S608 - likewise
            self._cursor.execute(f"{self._known} {shown}")
            rows = self._cursor.fetchall()
        return sample((dict(zip((column.name for column in found), row, strict=True)) for row in rows), limit, size)

    def _kind(self, oid: int) -> str:
        self._cursor.execute("SELECT format_type(%s, NULL)", (oid,))
        return str(self._cursor.fetchone()[0])


def _cut(name: str, kind: str) -> str:
    """Return the SQL expression of a column as the record can keep it."""
    if kind in _SHOWN:
        return name
    if kind == "bytea":
        return f"encode(substring({name} FROM 1 FOR {CHARACTERS}), 'hex')"
    return f"left(CAST({name} AS text), {CHARACTERS + 1})"


class PostgresRows:
    """Some rows of a table in the target database. The first query opens a session."""

    def __init__(
        self, conn_id: str, place: RowSelection, schema: Sequence[Sequence[str]], name: str = "staged"
    ) -> None:
        """Name the rows, and the columns that count, with Spark's types."""
        self.conn_id = conn_id
        self.place = place
        self.schema = tuple(Column(*column) for column in schema)
        self.name = name
        self._stack = ExitStack()
        self._asking: PostgresSession | None = None

    def __enter__(self) -> Self:
        """Return itself; nothing is opened yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self._asking = None
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return [column.name for column in self.schema]

    def nothing(self) -> PostgresRows:
        """Return an empty set of rows with the same columns."""
        from psycopg2 import sql

        return PostgresRows(self.conn_id, self.place._replace(where=sql.SQL("WHERE false")), self.schema, "nothing")

    # --- asking ------------------------------------------------------------------------------------------------------

    @property
    def asking(self) -> PostgresSession:
        """Return a read-only session."""
        if self._asking is None:
            cursor = self._stack.enter_context(_opened(self.conn_id))
            self._asking = PostgresSession(cursor, {self.name: self})
            cursor.execute("SET default_transaction_read_only = on")
        return self._asking

    def types(self) -> dict[str, str]:
        """Return PostgreSQL's type of each column, by its name in lower case."""
        return self.asking.types(self.name)

    def rows(self, sql: str) -> list[Row]:
        """Return all rows of a query."""
        return self.asking.rows(sql)

    def value(self, sql: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""
        return self.asking.value(sql)

    def sample(self, sql: str, limit: int = ROWS, size: int = ROW_BYTES) -> list[Row]:
        """Return some rows of a query as the record can keep them."""
        return self.asking.sample(sql, limit, size)

    def query(self, text: str) -> str:
        """Return a user's query as a subquery, which can only read."""
        bare = re.sub(r"[;\s]+$", "", text)
        return f"(\n{bare}\n) AS audited"

    @contextmanager
    def beside(self, old: PostgresRows) -> Iterator[PostgresSession]:
        """Open a session that knows these rows as `new`, and others as `old`."""
        with _opened(self.conn_id) as cursor:
            yield PostgresSession(cursor, {"old": old, "new": self})

    def view(self) -> DuckDBPyRelation:
        """Return a copy of the rows in DuckDB, for functions of the user's own."""
        import tempfile
        from pathlib import Path

        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="twophase-staged-"))
        path = Path(folder) / "staged.parquet"
        with _opened(self.conn_id) as cursor:
            query, kinds = self.select(cursor), self.columns(cursor)
        _copy(database.dsn(self.conn_id), query, path)
        texts = ("json", "jsonb")
        schema = [(name, "string" if kinds[name] in texts else kind) for name, kind in self.schema]
        return self._stack.enter_context(DuckDBRows([str(path)], schema, name=self.name)).view()

    # --- where they are ----------------------------------------------------------------------------------------------

    def columns(self, cursor: Any) -> dict[str, str]:  # noqa: ANN401 - a cursor
        """Return the columns that count, with PostgreSQL's types; ConfigError if the table lacks one."""
        there = database.columns_of(cursor, self.place.table)
        if there is None:
            msg = f"table {self.place.table} is not there"
            raise ConfigError(msg)
        if missing := [name for name in self.names if name not in there]:
            msg = f"table {self.place.table} has no column {', '.join(missing)}"
            raise ConfigError(msg)
        return {name: there[name] for name in self.names}

    def select(self, cursor: Any) -> str:  # noqa: ANN401 - a cursor
        """Return the query that gives the rows."""
        from psycopg2 import sql

        cells = [
            sql.SQL("CAST({0} AS text) AS {0}" if kind in _AS_TEXT else "{0}").format(sql.Identifier(name))
            for name, kind in self.columns(cursor).items()
        ]
        source = self.place.instead or self.place.table.sql
        made = sql.SQL("SELECT {} FROM {} {}").format(
            sql.SQL(", ").join(cells), source, self.place.where or sql.SQL("")
        )
        return str(made.as_string(cursor))


def _copy(dsn: str, query: str, path: Any) -> None:  # noqa: ANN401 - a Path
    """Write the result of a query to a Parquet file, a batch at a time."""
    import pyarrow.parquet as pq
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'UTC'")
        cursor.execute(query)
        with cursor.fetch_record_batch() as reader, pq.ParquetWriter(path, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)


@contextmanager
def _opened(conn_id: str) -> Iterator[Any]:
    """Open a session with autocommit; times are in UTC."""
    with explained(), database.session(conn_id) as session:
        session.autocommit = True
        with session.cursor() as cursor:
            cursor.execute("SET TIME ZONE 'UTC'")
            yield cursor


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors of the server into one line: AttemptFailed if the error may pass, ConfigError for a wrong query."""
    import psycopg2

    try:
        yield
    except psycopg2.Error as error:
        raise (AttemptFailed if database.passes(error) else ConfigError)(_said(error)) from error


def _said(error: Exception) -> str:
    """Return what the server said, without the query that it quotes."""
    diagnosed = getattr(getattr(error, "diag", None), "message_primary", None)
    return str(diagnosed or database.one_line(error))
