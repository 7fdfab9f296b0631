"""The owner of a target: a table in the target's database names the one pipeline that may write there.

The sink and the promotion call it. The table is found by whichever connection the database is reached. Rows carry the
number of their checkpoint, not its pipeline. So nobody could tell apart what two pipelines put into one table, and a
replacement in one would delete rows of the other. Rows of a partition, or of an inheriting table, are also rows of the
table above.
"""

from __future__ import annotations

from typing import Any

from twophase.sinks.base import two_owners
from twophase.sinks.postgres import history
from twophase.sinks.postgres.staging_table import CHECKPOINT
from twophase.storage import database
from twophase.storage.database import TableName

OWNERS = TableName(history.SCHEMA, "owner")
_CREATE = """CREATE TABLE IF NOT EXISTS {} (target text PRIMARY KEY, pipeline text NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now())"""


def create(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Create the table of owners, unless it is there."""
    from psycopg2 import sql

    cursor.execute("SELECT to_regclass(%s)", (str(OWNERS),))
    if cursor.fetchone()[0] is None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('twophase_sinks'))")
        cursor.execute(sql.SQL(_CREATE).format(OWNERS.sql))


def owner_of(cursor: Any, target: TableName) -> str | None:  # noqa: ANN401 - a cursor
    """Return the owner of a target, None if it has none; nobody can hand it over before this transaction ends."""
    from psycopg2 import sql

    cursor.execute("SELECT to_regclass(%s)", (str(OWNERS),))
    if cursor.fetchone()[0] is None:
        return None
    cursor.execute(sql.SQL("SELECT pipeline FROM {} WHERE target = %s FOR SHARE").format(OWNERS.sql), (str(target),))
    row = cursor.fetchone()
    return row[0] if row else None


def claim(cursor: Any, pipeline: str, target: TableName, markers: TableName) -> str | None:  # noqa: ANN401 - a cursor
    """Make a pipeline the owner of a target; return why not, if another owns it or has promoted to it."""
    from psycopg2 import sql

    owner = owner_of(cursor, target)
    if owner is None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('twophase_sinks owner'))")  # one claim at a time
        before = sql.SQL("SELECT pipeline FROM {} WHERE target = %s AND pipeline <> %s LIMIT 1")
        cursor.execute(before.format(markers.sql), (str(target), pipeline))
        if row := cursor.fetchone():
            return two_owners(f"table {target}", row[0])
        create(cursor)
        if objection := _shared(cursor, pipeline, target) or _renamed(cursor, pipeline, target, markers):
            return objection
        take = sql.SQL("INSERT INTO {} (target, pipeline) VALUES (%s, %s) ON CONFLICT DO NOTHING")
        cursor.execute(take.format(OWNERS.sql), (str(target), pipeline))
        owner = owner_of(cursor, target)
    return two_owners(f"table {target}", str(owner)) if owner != pipeline else _shared(cursor, pipeline, target)


def carries_checkpoints(cursor: Any, target: TableName) -> bool:  # noqa: ANN401 - a cursor
    """Say whether any row of a table carries the number of a checkpoint."""
    from psycopg2 import sql

    if CHECKPOINT not in (database.columns_of(cursor, target) or {}):
        return False
    query = sql.SQL("SELECT FROM {} WHERE {} IS NOT NULL LIMIT 1")
    cursor.execute(query.format(target.sql, sql.Identifier(CHECKPOINT)))
    return cursor.fetchone() is not None


def _renamed(cursor: Any, pipeline: str, target: TableName, markers: TableName) -> str | None:  # noqa: ANN401 - a cursor
    """Say that a table holds checkpoints that nobody promoted to it: it had another name, or is a copy; else None.

    Its rows would be taken for rows of this pipeline's checkpoints with the same numbers.
    """
    from psycopg2 import sql

    mine = sql.SQL("SELECT FROM {} WHERE target = %s AND pipeline = %s LIMIT 1")
    cursor.execute(mine.format(markers.sql), (str(target), pipeline))
    if cursor.fetchone() is not None or not _may_ask(cursor, target) or not carries_checkpoints(cursor, target):
        return None
    return (
        f"table {target} holds rows with checkpoints, and nobody promoted any to a table of this name: it had another"
        f" one, or is a copy; rename its column {CHECKPOINT} and add a new one, or write to another table"
    )


def _may_ask(cursor: Any, target: TableName) -> bool:  # noqa: ANN401 - a cursor
    """Say whether the column of checkpoints may be read; if not, the check of rights names it before the vote."""
    cursor.execute(
        "SELECT has_column_privilege(c.oid, attname, 'SELECT') FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid"
        " JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s AND attname = %s",
        (*target, CHECKPOINT),
    )
    found = cursor.fetchone()
    return found is None or bool(found[0])


def _shared(cursor: Any, pipeline: str, target: TableName) -> str | None:  # noqa: ANN401 - a cursor
    """Say that a parent or a partition of the target belongs to another pipeline: they share rows; else None."""
    from psycopg2 import sql

    query = sql.SQL(
        "WITH RECURSIVE it AS (SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        "  WHERE n.nspname = %(schema)s AND c.relname = %(name)s),"
        " above AS (SELECT oid FROM it UNION SELECT inhparent FROM pg_inherits JOIN above ON inhrelid = above.oid),"
        " below AS (SELECT oid FROM it UNION SELECT inhrelid FROM pg_inherits JOIN below ON inhparent = below.oid)"
        " SELECT o.target, o.pipeline FROM (SELECT oid FROM above UNION SELECT oid FROM below) AS r"
        " JOIN pg_class c ON c.oid = r.oid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " JOIN {} AS o ON o.target = n.nspname || '.' || c.relname WHERE o.pipeline <> %(pipeline)s LIMIT 1"
    )
    names = {"schema": target.schema, "name": target.name, "pipeline": pipeline}
    cursor.execute(query.format(OWNERS.sql), names)
    other = cursor.fetchone()
    return two_owners(f"table {target} shares rows with {other[0]}, which", other[1]) if other else None


def hand_over(cursor: Any, target: TableName, old: str, new: str) -> str | None:  # noqa: ANN401 - a cursor
    """Make another pipeline the owner of a target; return the owner if that is a third one, else None."""
    from psycopg2 import sql

    create(cursor)
    take = sql.SQL(
        "INSERT INTO {0} AS o (target, pipeline) VALUES (%s, %s)"
        " ON CONFLICT (target) DO UPDATE SET pipeline = EXCLUDED.pipeline, taken_at = now() WHERE o.pipeline = %s"
    )
    cursor.execute(take.format(OWNERS.sql), (str(target), new, old))
    owner = owner_of(cursor, target)
    return None if owner == new else owner
