"""Checks that all staged rows arrived in the target: a trigger or a rule may swallow some.

The promotion calls it inside its transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from twophase.sinks.postgres import catalog
from twophase.sinks.postgres.changes import THERE, Changes
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable


def is_watched(cursor: Any, target: TableName) -> bool:  # noqa: ANN401 - a cursor
    """Say whether triggers or rules of the target see the rows; if so, run the deferred ones now."""
    found = catalog.kind_of(cursor, target)
    if found is None or not catalog.watchers_of(cursor, found.oid):
        return False
    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    return True


def count(cursor: Any, table: TableName, where: Composable | None = None) -> int:  # noqa: ANN401 - a cursor
    """Count the rows of a table, or some of them."""
    from psycopg2 import sql

    cursor.execute(sql.SQL("SELECT count(*) FROM {} {}").format(table.sql, where or sql.SQL("")))
    found: int = cursor.fetchone()[0]
    return found


def swallowed(cursor: Any, changes: Changes, rows: Composable, columns: Iterable[str]) -> int:  # noqa: ANN401 - a cursor
    """Count the keys that are not as `rows` want them: there or not there, and with these columns.

    A trigger may change values of rows that it lets through. So the columns are compared only in rows that this
    transaction has not written.
    """
    from psycopg2 import sql

    unlike = [sql.SQL("t.{0}::text IS DISTINCT FROM c.{0}::text").format(sql.Identifier(name)) for name in columns]
    query = sql.SQL(
        "SELECT count(*) FROM ({rows}) AS c LEFT JOIN {target} AS t ON {same}"
        " WHERE c.{there} <> (t.{first} IS NOT NULL) OR (c.{there} AND age(t.xmin) > 0 AND ({unlike}))"
    )
    parts = {
        "rows": rows,
        "target": changes.target.sql,
        "same": changes.same("t", "c"),
        "there": sql.Identifier(THERE),
        "first": sql.Identifier(changes.key[0]),
        "unlike": sql.SQL(" OR ").join(unlike) if unlike else sql.SQL("false"),
    }
    cursor.execute(query.format(**parts))
    found: int = cursor.fetchone()[0]
    return found
