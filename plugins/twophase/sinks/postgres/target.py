"""Changes to the target table itself: creates it, adds columns, attaches a staging table as a partition.

Called by the promotion, and by its trial before the vote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from twophase.core.checkpoint import Key
from twophase.sinks.postgres import catalog, staging_table
from twophase.storage import database
from twophase.storage.database import TableName


class Made(NamedTuple):
    """What a new target consists of."""

    #: Each name with its type and its constraints.
    columns: Mapping[str, str]
    key: tuple[str, ...] = ()
    partitioned_by: str | None = None
    indexed: str | None = None


def create(cursor: Any, target: TableName, made: Made) -> None:  # noqa: ANN401 - a cursor
    """Create the target, or add the columns that are new; of several promotions at once, one does it."""
    from psycopg2 import sql

    there = database.columns_of(cursor, target)
    if there is None or made.columns.keys() - there.keys():
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"twophase_sinks {target}",))
        there = database.columns_of(cursor, target)
    if there is None:
        _create(cursor, target, made)
        return
    for name, kind in made.columns.items():
        if name not in there:
            add = sql.SQL("ALTER TABLE {} ADD COLUMN {} {}")
            cursor.execute(add.format(target.sql, sql.Identifier(name), sql.SQL(kind)))


def _create(cursor: Any, target: TableName, made: Made) -> None:  # noqa: ANN401 - a cursor
    from psycopg2 import sql

    lines = [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in made.columns.items()]
    if made.key:
        lines.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, made.key))))
    by = sql.SQL("")
    if made.partitioned_by:
        by = sql.SQL(" PARTITION BY LIST ({})").format(sql.Identifier(made.partitioned_by))
    cursor.execute(sql.SQL("CREATE TABLE {} ({}){}").format(target.sql, sql.SQL(", ").join(lines), by))
    if made.indexed:
        cursor.execute(sql.SQL("CREATE INDEX ON {} ({})").format(target.sql, sql.Identifier(made.indexed)))


def lock(cursor: Any, target: TableName) -> None:  # noqa: ANN401 - a cursor
    """Lock the target for changes before anything in it is read.

    A transaction that reads first and changes later could deadlock with one that rebuilds the indexes. Partitions are
    not locked: there may be more of them than the server has room for locks. An account that has rights on columns only
    may not lock the table: its promotion may be the victim of a deadlock.
    """
    from psycopg2 import sql

    cursor.execute(
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s"
        " AND has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')",
        tuple(target),
    )
    if cursor.fetchone():
        cursor.execute(sql.SQL("LOCK TABLE ONLY {} IN ROW EXCLUSIVE MODE").format(target.sql))


def attach(cursor: Any, target: TableName, staged: TableName, key: Key) -> None:  # noqa: ANN401 - a cursor
    """Make the staging table a partition; a replacement drops the old partition in the same transaction."""
    from psycopg2 import sql

    if found := catalog.kind_of(cursor, target):
        fit(cursor, found.oid, staged)
    if old := partition_of(cursor, target, key.checkpoint_id):
        cursor.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {}").format(target.sql, old.sql))
        cursor.execute(sql.SQL("DROP TABLE {} CASCADE").format(old.sql))  # CASCADE: see staging_table.drop
    attach = sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES IN ({})")
    cursor.execute(attach.format(target.sql, staged.sql, sql.Literal(key.checkpoint_id)))
    cursor.execute(sql.SQL("DROP TABLE {} CASCADE").format(staging_table.parts_of(staged).sql))
    named = partition_name(staged)
    cursor.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(staged.sql, sql.Identifier(named.name)))
    told = sql.Literal(f"checkpoint {key.checkpoint_id} of {target}, revision {key.revision} of {key.pipeline}")
    cursor.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(named.sql, told))


def fit(cursor: Any, oid: int, staged: TableName) -> None:  # noqa: ANN401 - a cursor
    """Give a staging table the columns, NOT NULL and CHECK of the target, which a partition must have.

    It only adds what is missing. So it may be repeated, and does nothing if the target has not changed since.
    """
    from psycopg2 import sql

    own = catalog.kind_of(cursor, staged)
    if own is None:
        return
    there = {column.name: column for column in catalog.columns_of(cursor, own.oid)}
    changes = [
        sql.SQL("ADD COLUMN {} {}").format(sql.Identifier(name), sql.SQL(definition))
        for name, definition in catalog.definitions_of(cursor, oid).items()
        if name not in there
    ]
    changes += [
        sql.SQL("ALTER COLUMN {} SET NOT NULL").format(sql.Identifier(column.name))
        for column in catalog.columns_of(cursor, oid)
        if column.not_null and not (column.name in there and there[column.name].not_null)
    ]
    names = {check.name for check in catalog.checks_of(cursor, own.oid)}
    changes += [
        sql.SQL("ADD CONSTRAINT {} {}").format(sql.Identifier(check.name), sql.SQL(check.definition))
        for check in catalog.checks_of(cursor, oid)
        if check.name not in names
    ]
    if changes:
        cursor.execute(sql.SQL("ALTER TABLE {} {}").format(staged.sql, sql.SQL(", ").join(changes)))


def partition_name(staged: TableName) -> TableName:
    """Return the name of a staging table once it is a partition.

    Like the name before, it belongs to one attempt only, so no other table has it. It is not the name of a staging
    table any more: if somebody detaches the partition one day, the sweeper leaves it alone.
    """
    return TableName(staged.schema, f"p{staged.name.removeprefix('s')}")


def partition_of(cursor: Any, target: TableName, checkpoint_id: int) -> TableName | None:  # noqa: ANN401 - a cursor
    """Return the partition that holds a checkpoint's rows; None if there is none."""
    cursor.execute(
        "SELECT n.nspname, c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_class p ON p.oid = i.inhparent"
        " JOIN pg_namespace s ON s.oid = p.relnamespace WHERE s.nspname = %s AND p.relname = %s"
        " AND pg_get_expr(c.relpartbound, c.oid) = %s",
        (*target, f"FOR VALUES IN ('{checkpoint_id}')"),
    )
    row = cursor.fetchone()
    return TableName(*row) if row else None
