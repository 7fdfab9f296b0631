"""The history of a target that is changed by key: keeps the rows that checkpoints overwrote. The promotion calls it.

With it a checkpoint can be replaced, or come late.

    twophase_sinks.h_<pipeline and target>      key, order │ the row before: its columns, and whether there was one

A checkpoint leaves one entry per key that it changes, with the row as it was before. So the entries of a key are a
chain: what one checkpoint made of the row is what the next one found, and what the last one made is the target's row.

    order      4              7              9
    before     none           a              b              target: c
    so         4 made it a    7 made it b    9 made it c

To replace what 7 did, change what 9 found. To replace what 9 did, change the target. So for every key the target is
always the result of the committed revisions applied in their order, whenever each of them was promoted (R19). The order
is the checkpoint's number, or for slots the slot itself. A key that loses its row has an entry like any other; if that
is the last one, the target has no such row: the entry is its tombstone.

A checkpoint that no promoted one comes after only adds entries, and looks for none. The index by key and order is most
of what an entry costs, so it is created only by the first promotion that looks for entries: one that replaces, or comes
late. From then on the cost of a promotion follows the keys that it changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from twophase.core.slots import Slot
from twophase.sinks.postgres import staging_table
from twophase.sinks.postgres.changes import OURS, THERE, Changes, listed
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable

#: The schema of markers, receipts, owners and histories; an account that only stages has no rights in it.
SCHEMA = "twophase_sinks"
ORDER = f"{OURS}order"
#: The order of the next entry of a key.
NEXT = f"{OURS}next"
#: A checkpoint's number, or a text that orders slots.
Order = int | str


def order_of(checkpoint_id: int, slot: str | None) -> Order:
    """Return a checkpoint's place in the order: slots go by their start, others by their number."""
    if slot is None:
        return checkpoint_id
    start = Slot.parse(slot).start
    return f"{start.isoformat()} {slot}" if start else slot


def history_of(pipeline: str, target: TableName) -> TableName:
    """Return the history table of a pipeline and a target: a pipeline of another name begins a new one."""
    return TableName(SCHEMA, f"h_{hashlib.blake2s(f'{pipeline} {target}'.encode(), digest_size=8).hexdigest()}")


def lock(cursor: Any, what: str, pipeline: str, target: TableName, *, shared: bool = False) -> None:  # noqa: ANN401 - a cursor
    """Take an advisory lock, named by what it guards, until this transaction ends."""
    which = "_shared" if shared else ""
    name = f"twophase {what} {pipeline} {target}"
    cursor.execute(f"SELECT pg_advisory_xact_lock{which}(hashtextextended(%s, 0))", (name,))


class History:
    """The history of one target, as the promotion of one checkpoint changes it."""

    def __init__(self, cursor: Any, pipeline: str, changes: Changes, order: Order) -> None:  # noqa: ANN401 - a cursor
        """Create the table, or the columns that it lacks; the caller holds the lock."""
        self.cursor = cursor
        self.changes = changes
        self.order = order
        self.table = history_of(pipeline, changes.target)
        self.columns = self._columns()

    def _columns(self) -> list[str]:
        """Return the columns that are kept besides the key; add those that are staged for the first time."""
        from psycopg2 import sql

        known = database.columns_of(self.cursor, self.changes.target) or {}
        there = database.columns_of(self.cursor, self.table)
        if there is None:
            self._create({name: known[name] for name in self.changes.columns})
            return self.changes.others
        kept = {**dict.fromkeys(name for name in there if name in known), **self.changes.columns}
        for name in kept:
            if there.get(name) != known[name]:  # new, or the target's owner has changed its type
                change = "ALTER COLUMN {} TYPE {kind} USING {}::{kind}" if name in there else "ADD COLUMN {} {kind}"
                column = sql.Identifier(name)
                how = sql.SQL(change).format(column, column, kind=sql.SQL(known[name]))
                self._run(sql.SQL("ALTER TABLE {} {}"), self.table.sql, how)
        return [name for name in kept if name not in self.changes.key]

    def _create(self, kinds: Mapping[str, str]) -> None:
        from psycopg2 import sql

        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in kinds.items()
        )
        kind = sql.SQL("bigint" if isinstance(self.order, int) else 'text COLLATE "C"')
        self._run(
            sql.SQL("CREATE TABLE {} ({}, {order} {} NOT NULL, {} boolean NOT NULL)"),
            self.table.sql, columns, kind, sql.Identifier(THERE),
        )  # fmt: skip
        # A checkpoint's entries lie together, so a BRIN index on the order costs next to nothing.
        self._run(sql.SQL("CREATE INDEX ON {} USING brin ({order}) WITH (autosummarize = on)"), self.table.sql)
        told = f"what checkpoints overwrote in {self.changes.target}"
        self._run(sql.SQL("COMMENT ON TABLE {} IS {}"), self.table.sql, sql.Literal(told))

    def _index(self) -> None:
        """Create the index by key and order, unless it is there; readers of the history go on meanwhile."""
        from psycopg2 import sql

        self.cursor.execute("SELECT FROM pg_index WHERE indrelid = %s::regclass AND indisunique", (str(self.table),))
        if self.cursor.fetchone() is None:
            self._run(sql.SQL("CREATE UNIQUE INDEX ON {} ({}, {order})"), self.table.sql, listed(self.changes.key))

    # --- a checkpoint that no promoted one comes after ---------------------------------------------------------------

    def add(self) -> None:
        """Add the entries of a checkpoint that is the last in order, from the rows of the target."""
        from psycopg2 import sql

        self._add(sql.SQL(""), lambda name: sql.Identifier("t", name), sql.SQL("t.{} IS NOT NULL").format(self._first))

    # --- a checkpoint that is replaced, or late ----------------------------------------------------------------------

    def insert(self) -> None:
        """Add entries for keys that the checkpoint did not change before, from each key's next entry, or the target."""
        from psycopg2 import sql

        self._index()

        def found(name: str) -> Composable:
            chosen = sql.SQL("CASE WHEN n.{order} IS NULL THEN t.{0} ELSE n.{0} END")
            return self._filled(chosen, sql.Identifier(name))

        there = sql.SQL("coalesce(n.{}, t.{} IS NOT NULL)").format(sql.Identifier(THERE), self._first)
        self._add(self._next("c", "*"), found, there, sql.SQL(" ON CONFLICT DO NOTHING"))
        # The next statements join the checkpoint's entries; without this they would be planned for a few of them.
        self._run(sql.SQL("ANALYZE {}"), self.table.sql)

    def missing(self) -> int:
        """Count the retracted rows that were not there at the checkpoint's place in the order; after `insert` only."""
        from psycopg2 import sql

        there = sql.SQL("SELECT 1 FROM {} AS h WHERE {} AND h.{order} = {at} AND h.{}")
        return self.changes.missing(
            self.cursor,
            self._filled(there, self.table.sql, self.changes.same("h", "gone"), sql.Identifier(THERE)),
        )

    def replace(self, changed: Iterable[str]) -> tuple[Composable, list[str]]:
        """Give the next entry of each key, or the target, the row that the checkpoint now makes of it.

        This goes for each key that the checkpoint changes now, or did before. `changed` are the columns of the older
        and of this revision. Returns what the target has to have now: the rows, and which of their columns.
        """
        from psycopg2 import sql

        others = [name for name in self.columns if name in {*changed, *self.changes.others}]
        rows = self._made()
        sets = [
            sql.SQL("{0} = v.{0}").format(sql.Identifier(name))
            if name in others
            else sql.SQL("{0} = CASE WHEN n.{1} THEN n.{0} ELSE v.{0} END").format(*map(sql.Identifier, (name, THERE)))
            for name in self.columns
        ]
        sets.append(sql.SQL("{0} = v.{0}").format(sql.Identifier(THERE)))
        self._run(
            sql.SQL("UPDATE {} AS n SET {} FROM ({}) AS v WHERE {} AND n.{order} = v.{next}"),
            self.table.sql, sql.SQL(", ").join(sets), rows, self.changes.same("n", "v"),
        )  # fmt: skip
        last = self._filled(sql.SQL("SELECT * FROM ({}) AS v WHERE v.{next} IS NULL"), rows)
        self.changes.delete(self.cursor, last)
        self.changes.upsert(self.cursor, last, [*self.changes.key, *self.columns], others)
        return last, others

    def carry(self, later: Order, columns: Iterable[str]) -> None:
        """Copy columns that a later checkpoint does not write from its entries to what comes after it."""
        from psycopg2 import sql

        names = [sql.Identifier(name) for name in columns if name in self.columns]
        if not names:
            return
        there = sql.Identifier(THERE)
        sets = sql.SQL(", ").join(sql.SQL("{0} = CASE WHEN j.{1} THEN j.{0} END").format(name, there) for name in names)
        ours = self._filled(
            sql.SQL("EXISTS (SELECT 1 FROM {} AS h WHERE {} AND h.{order} = {at})"),
            self.table.sql, self.changes.same("h", "j"),
        )  # fmt: skip
        after = self._filled(
            sql.SQL("(SELECT min(m.{order}) FROM {} AS m WHERE {} AND m.{order} > {})"),
            self.table.sql, self.changes.same("m", "j"), sql.Literal(later),
        )  # fmt: skip
        at = self._filled(sql.SQL("j.{order} = {}"), sql.Literal(later))
        self._run(
            sql.SQL("UPDATE {} AS n SET {} FROM {} AS j WHERE {} AND {} AND {} AND n.{} AND n.{order} = {}"),
            self.table.sql, sets, self.table.sql, at, ours, self.changes.same("n", "j"), there, after,
        )  # fmt: skip
        self._run(
            sql.SQL("UPDATE {} AS t SET {} FROM {} AS j WHERE {} AND {} AND {} AND {} IS NULL"),
            self.changes.target.sql, sets, self.table.sql, at, ours, self.changes.same("t", "j"), after,
        )  # fmt: skip

    def forget(self) -> None:
        """Remove the entries of keys that the checkpoint no longer changes."""
        from psycopg2 import sql

        self._run(
            sql.SQL(
                "DELETE FROM {} AS h WHERE h.{order} = {at} AND NOT EXISTS (SELECT 1 FROM ({}) AS c WHERE {})"
            ),
            self.table.sql, self.changes.rows, self.changes.same("c", "h"),
        )  # fmt: skip

    # --- the limit ---------------------------------------------------------------------------------------------------

    def drop(self, before: Order) -> None:
        """Remove the entries of all checkpoints before one."""
        from psycopg2 import sql

        self._run(sql.SQL("DELETE FROM {} WHERE {order} < {}"), self.table.sql, sql.Literal(before))

    # --- SQL ---------------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> Composable:
        from psycopg2 import sql

        return sql.Identifier(self.changes.key[0])

    def _add(self, joined: Composable, found: Any, there: Composable, then: Composable | None = None) -> None:  # noqa: ANN401 - names a column
        """Insert an entry for each key that is changed."""
        from psycopg2 import sql

        keys = [sql.Identifier("c", name) for name in self.changes.key]
        values = sql.SQL(", ").join([*keys, *map(found, self.columns)])
        self._run(
            sql.SQL(
                "INSERT INTO {} ({}, {order}, {}) SELECT {}, {at}, {} FROM ({}) AS c LEFT JOIN {} AS t ON {}{}{}"
            ),
            self.table.sql, listed([*self.changes.key, *self.columns]), sql.Identifier(THERE), values, there,
            self.changes.rows, self.changes.target.sql, self.changes.same("t", "c"), joined, then or sql.SQL(""),
        )  # fmt: skip

    def _next(self, of: str, what: str) -> Composable:
        """Return the join with the next entry of a key."""
        from psycopg2 import sql

        return self._filled(
            sql.SQL(
                " LEFT JOIN LATERAL (SELECT {} FROM {} AS n WHERE {} AND n.{order} > {at}"
                " ORDER BY n.{order} LIMIT 1) AS n ON true"
            ),
            sql.SQL(what), self.table.sql, self.changes.same("n", of),
        )  # fmt: skip

    def _made(self) -> Composable:
        """Return the row that the checkpoint makes of each key, and the order of the next entry of that key."""
        from psycopg2 import sql

        def value(name: str) -> Composable:
            if name not in {*self.changes.columns, THERE}:
                return sql.Identifier("h", name)
            chosen = sql.SQL("CASE WHEN c.{0} IS NULL THEN h.{1} ELSE c.{1} END AS {1}")
            return chosen.format(sql.Identifier(THERE), sql.Identifier(name))

        keys = [sql.Identifier("h", name) for name in self.changes.key]
        values = sql.SQL(", ").join([*keys, *map(value, [*self.columns, THERE])])
        return self._filled(
            sql.SQL("SELECT {}, n.{order} AS {next} FROM {} AS h LEFT JOIN ({}) AS c ON {}{} WHERE h.{order} = {at}"),
            values, self.table.sql, self.changes.rows, self.changes.same("c", "h"), self._next("h", "n.*"),
        )  # fmt: skip

    def _filled(self, statement: Any, *parts: Composable) -> Composable:  # noqa: ANN401 - psycopg2's SQL
        """Fill in a statement: {order} and {next} are columns of ours, {at} is this checkpoint's place in the order."""
        from psycopg2 import sql

        ours = {"order": sql.Identifier(ORDER), "next": sql.Identifier(NEXT), "at": sql.Literal(self.order)}
        found: Composable = statement.format(*parts, **ours)
        return found

    def _run(self, statement: Any, *parts: Composable) -> None:  # noqa: ANN401 - psycopg2's SQL
        self.cursor.execute(self._filled(statement, *parts))


def entries(cursor: Any, table: TableName, order: Order, target: TableName, key: tuple[str, ...]) -> tuple[int, int]:  # noqa: ANN401 - a cursor
    """Count the entries of a checkpoint, and those of them whose key has no row in the target."""
    from psycopg2 import sql

    changes = Changes(target, target, key, {}, equals=staging_table.equals(cursor, target))
    query = sql.SQL(
        "SELECT count(*), count(*) FILTER (WHERE t.{} IS NULL) FROM {} h LEFT JOIN {} t ON {} WHERE {} = {}"
    )
    first, at = sql.Identifier(key[0]), sql.Literal(order)
    cursor.execute(query.format(first, table.sql, target.sql, changes.same("t", "h"), sql.Identifier(ORDER), at))
    found: tuple[int, int] = cursor.fetchone()
    return found
