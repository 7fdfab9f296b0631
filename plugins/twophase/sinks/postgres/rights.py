"""Checks the rights of the account that promotes. Called before anything is recorded, and again before the vote."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from twophase.sinks.postgres import catalog, owner, promotion, receipts
from twophase.sinks.postgres.promotion import Mode
from twophase.storage.database import TableName


def create_schema(cursor: Any, target: TableName) -> str | None:  # noqa: ANN401 - a cursor
    """Create the schema for a target that will be created, unless it is there; return why not, if it cannot be."""
    from psycopg2 import sql

    if _schema(cursor, target.schema) is not None:
        return None
    cursor.execute(
        "SELECT current_database(), current_user, has_database_privilege(current_user, current_database(), 'CREATE')"
    )
    name, user, may = cursor.fetchone()
    if not may:
        return (
            f"schema {target.schema!r} is not there, and {user} may not create one; create it, or grant CREATE on"
            f" database {name}"
        )
    cursor.execute("SELECT pg_advisory_xact_lock(hashtext('twophase_schema'))")
    if _schema(cursor, target.schema) is None:
        cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(target.schema)))
    return None


def _schema(cursor: Any, name: str) -> int | None:  # noqa: ANN401 - a cursor
    cursor.execute("SELECT oid FROM pg_namespace WHERE nspname = %s", (name,))
    row = cursor.fetchone()
    return row[0] if row else None


def lacking(cursor: Any, target: TableName, mode: Mode) -> Iterator[str]:  # noqa: ANN401 - a cursor
    """Yield each right that is missing, and how to grant it."""
    cursor.execute("SELECT current_user")
    user = cursor.fetchone()[0]
    yield from _of_markers(cursor, user, mode)
    schema = _schema(cursor, target.schema)
    cursor.execute(
        "SELECT has_schema_privilege(%s::oid, 'USAGE'), has_schema_privilege(%s::oid, 'CREATE')", (schema, schema)
    )
    usage, create = cursor.fetchone()
    if not usage:
        yield f"{user} has no USAGE on schema {target.schema}; grant it"
        return
    found = catalog.kind_of(cursor, target)
    if found is None:
        if not create:
            yield f"{user} may not create tables in schema {target.schema}; grant CREATE on it, or make the table"
        return
    yield from _of_target(cursor, user, found, mode)


def _of_markers(cursor: Any, user: str, mode: Mode) -> Iterator[str]:  # noqa: ANN401 - a cursor
    schema = promotion.MARKERS.schema
    cursor.execute("SELECT has_schema_privilege(%s, 'CREATE')", (schema,))
    if mode.keeps and not cursor.fetchone()[0]:
        yield (
            f"{user} may not create tables in schema {schema}, where the history is; grant CREATE on it, or declare"
            " history=0"
        )
    needed = {
        ("markers", promotion.MARKERS): ["SELECT", "INSERT", *(["UPDATE"] if mode.history else [])],
        ("receipts", receipts.RECEIPTS): ["SELECT", "INSERT", "UPDATE"],
        ("owners", owner.OWNERS): ["SELECT", "INSERT", "UPDATE"],
    }
    cursor.execute(
        "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relkind = 'r' AND relpersistence <> 'p' ORDER BY 1 LIMIT 1",
        (schema,),
    )
    if row := cursor.fetchone():
        which = f'"{schema}"."{row[0]}"'
        yield f"{schema}.{row[0]} is UNLOGGED, and a crash of the server empties it; ALTER TABLE {which} SET LOGGED"
    for what, table, right in ((*which, right) for which, all_of_them in needed.items() for right in all_of_them):
        cursor.execute("SELECT has_table_privilege(pg_catalog.to_regclass(%s), %s)", (str(table), right))
        if cursor.fetchone()[0] is False:
            yield f"{user} has no {right} on {table}, where the {what} are; grant it"


def _of_target(cursor: Any, user: str, found: catalog.Relation, mode: Mode) -> Iterator[str]:  # noqa: ANN401 - a cursor
    which = f"{found.schema}.{found.name}"
    owns = is_owner(cursor, found.oid)
    if mode.attach:
        if not owns:
            yield f"{user} does not own {which}, and only its owner may attach partitions; give it to {user}"
        return
    for right in ("INSERT", "SELECT", *(["UPDATE"] if mode.key else [])):
        cursor.execute("SELECT has_any_column_privilege(%s::oid, %s)", (found.oid, right))
        if not cursor.fetchone()[0]:
            yield f"{user} has no {right} on {which}; grant it"
    if mode.name != "upsert" and not may_delete(cursor, found.oid):
        yield f"{user} has no DELETE on {which}, by which a checkpoint is replaced; grant it"


def is_owner(cursor: Any, oid: int) -> bool:  # noqa: ANN401 - a cursor
    """Say whether the account owns a table, and so may alter it."""
    cursor.execute("SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = %s", (oid,))
    return bool(cursor.fetchone()[0])


def may_delete(cursor: Any, oid: int) -> bool:  # noqa: ANN401 - a cursor
    """Say whether the account may delete rows of a table."""
    cursor.execute("SELECT has_table_privilege(%s::oid, 'DELETE')", (oid,))
    return bool(cursor.fetchone()[0])


def lacking_for(
    cursor: Any,  # noqa: ANN401 - a cursor
    oid: int,
    written: Collection[str],
    mode: Mode,
    told_by: Collection[str],
) -> Iterator[str]:
    """Yield what is missing for these columns: rights on each, and on the sequences that fill the other columns.

    By key all written columns are read, too, since what they overwrite is kept. Otherwise only the columns `told_by`
    are read: they say which checkpoint or slot a row belongs to.
    """
    changed = [name for name in written if mode.key and name not in mode.key]
    read = written if mode.key else told_by
    for right, columns in (("INSERT", written), ("UPDATE", changed), ("SELECT", read)):
        cursor.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND attname = ANY(%s)"
            " AND NOT has_column_privilege(attrelid, attnum, %s) ORDER BY attnum LIMIT 1",
            (oid, list(columns), right),
        )
        if row := cursor.fetchone():
            yield f"the account that promotes has no {right} on column {row[0]!r}; grant it"
    cursor.execute(
        "SELECT DISTINCT s.oid::regclass::text FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid"
        " AND a.attnum = d.adnum JOIN pg_depend p ON p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid"
        " JOIN pg_class s ON p.refclassid = 'pg_class'::regclass AND s.oid = p.refobjid"
        " WHERE d.adrelid = %s AND a.attname <> ALL(%s)"
        " AND CASE s.relkind WHEN 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE') END",  # others have none
        (oid, list(written)),
    )
    for (name,) in cursor.fetchall():
        yield f"the account that promotes has no USAGE on sequence {name}, which fills a column; grant it"
