"""The SQL of an upsert or a retract: each key in the staged rows gets a row in the target, or loses it.

Called by the promotion and by the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twophase.sinks.postgres import staging_table
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable

#: The prefix of our own columns.
OURS = "_twophase_"
#: The column that says whether a key has a row.
THERE = f"{OURS}there"
#: From this version on a server has MERGE.
_MERGES = 150_000
#: From this correlation on, the rows of a table are taken to lie in the order of their key.
_IN_ORDER = 0.9


@dataclass(frozen=True)
class Changes:
    """The staged rows of an upsert, or the net result of a changelog."""

    target: TableName
    staged: TableName
    key: tuple[str, ...]
    #: The staged columns that are the target's too, with their types.
    columns: Mapping[str, str]
    retracts: bool = False
    #: The staged rows of an upsert say by `_change` which keys are deleted.
    deletes: bool = False
    #: The operators that compare values of some columns (`staging_table.equals`).
    equals: Mapping[str, Composable] = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        """Return the columns besides the key."""
        return [name for name in self.columns if name not in self.key]

    def same(self, one: str, other: str) -> Composable:
        """Return the condition that the rows of two table aliases have the same key."""
        from psycopg2 import sql

        equal = sql.SQL("{0}.{2} {3} {1}.{2}")
        sides = sql.SQL(one), sql.SQL(other)
        by = ((sql.Identifier(name), self.equals.get(name, sql.SQL("="))) for name in self.key)
        return sql.SQL(" AND ").join(equal.format(*sides, *each) for each in by)

    @property
    def rows(self) -> Composable:
        """Return one row per key that is changed; where THERE is false the key loses its row."""
        from psycopg2 import sql

        names, there = listed(self.columns), sql.Identifier(THERE)
        if not self.retracts:
            stays = staging_table.staying() if self.deletes else sql.SQL("true")
            return sql.SQL("SELECT {}, {} AS {} FROM {}").format(names, stays, there, self.staged.sql)
        gone, added = (staging_table.net(self.staged, list(self.columns), sign) for sign in "<>")
        nothing = sql.SQL(", ").join(
            sql.Identifier("gone", name)
            if name in self.key
            else sql.SQL("NULL::{} AS {}").format(sql.SQL(kind), sql.Identifier(name))
            for name, kind in self.columns.items()
        )
        return sql.SQL(
            "SELECT {names}, true AS {there} FROM ({added}) AS added UNION ALL"
            " SELECT DISTINCT {nothing}, false FROM ({gone}) AS gone"
            " WHERE NOT EXISTS (SELECT 1 FROM ({added}) AS added WHERE {same})"
        ).format(names=names, there=there, added=added, gone=gone, nothing=nothing, same=self.same("added", "gone"))

    @property
    def there(self) -> Composable:
        """Return the condition that a key of `gone` has a row in the target."""
        from psycopg2 import sql

        return sql.SQL("SELECT 1 FROM {} AS t WHERE {}").format(self.target.sql, self.same("t", "gone"))

    def missing(self, cursor: Any, there: Composable) -> int:  # noqa: ANN401 - a cursor
        """Count the retracted rows that are not there; `there` is the query that finds the key of `gone`."""
        from psycopg2 import sql

        if not self.retracts:
            return 0
        query = sql.SQL("SELECT count(*) FROM ({}) AS gone WHERE NOT EXISTS ({})")
        cursor.execute(query.format(staging_table.net(self.staged, list(self.columns), "<"), there))
        found: int = cursor.fetchone()[0]
        return found

    def read_in_order(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Switch hash joins off for this transaction, if the rows of the target lie in the order of the key.

        Then both sides are read in that order by their indexes, and the target's pages are visited one after the other.
        A hash join visits them in random order, which costs more than the planner expects.
        """
        query = "SELECT FROM pg_stats WHERE (schemaname, tablename, attname) = (%s, %s, %s) AND abs(correlation) > %s"
        cursor.execute(query, (*self.target, self.key[0], _IN_ORDER))
        if not self.retracts and cursor.fetchone() is not None:
            cursor.execute("SET LOCAL enable_hashjoin = off")

    def apply(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Change the target; only for a checkpoint that no promoted one comes after, or without history.

        A MERGE is less work than ON CONFLICT, but it fails if somebody else has just added one of the keys.
        """
        from psycopg2 import errors

        if cursor.connection.server_version >= _MERGES:
            cursor.execute("SAVEPOINT merging")
            try:
                self._merge(cursor)
            except errors.UniqueViolation:
                cursor.execute("ROLLBACK TO SAVEPOINT merging")
            else:
                return
        if self.retracts or self.deletes:
            self.delete(cursor, self.rows)
        self.upsert(cursor, self.rows, list(self.columns), self.others)

    def _merge(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Update the rows whose keys are there, add the others, and delete the keys that lose theirs."""
        from psycopg2 import sql

        sets = [sql.SQL("{0} = c.{0}").format(sql.Identifier(name)) for name in self.others]
        then = sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(sets)) if sets else sql.SQL("DO NOTHING")
        there = sql.Identifier(THERE)
        gone = sql.SQL(" WHEN MATCHED AND NOT c.{} THEN DELETE").format(there)
        merge = sql.SQL(
            "MERGE INTO {target} AS t USING ({rows}) AS c ON {same}{gone} WHEN MATCHED THEN {then}"
            " WHEN NOT MATCHED AND c.{there} THEN INSERT ({names}) VALUES ({values})"
        )
        parts = {
            "target": self.target.sql,
            "rows": self.rows,
            "same": self.same("t", "c"),
            "gone": gone if self.retracts or self.deletes else sql.SQL(""),
            "then": then,
            "there": there,
            "names": listed(self.columns),
            "values": sql.SQL(", ").join(sql.Identifier("c", name) for name in self.columns),
        }
        cursor.execute(merge.format(**parts))

    def delete(self, cursor: Any, rows: Composable) -> None:  # noqa: ANN401 - a cursor
        """Delete the keys that lose their row."""
        from psycopg2 import sql

        delete = sql.SQL("DELETE FROM {} AS t USING ({}) AS c WHERE {} AND NOT c.{}")
        cursor.execute(delete.format(self.target.sql, rows, self.same("t", "c"), sql.Identifier(THERE)))

    def upsert(self, cursor: Any, rows: Composable, columns: list[str], changed: list[str]) -> None:  # noqa: ANN401 - a cursor
        """Insert the rows of the keys that have one; in rows that are there, change only the `changed` columns."""
        from psycopg2 import sql

        sets = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in changed]
        then = sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(sets)) if sets else sql.SQL("NOTHING")
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM ({}) AS c WHERE c.{} ON CONFLICT ({}) DO {}")
        names = listed(columns)
        there = sql.Identifier(THERE)
        cursor.execute(insert.format(self.target.sql, names, names, rows, there, listed(self.key), then))


def listed(names: Iterable[str]) -> Composable:
    """Return names of columns as SQL, quoted and separated by commas."""
    from psycopg2 import sql

    return sql.SQL(", ").join(map(sql.Identifier, names))
