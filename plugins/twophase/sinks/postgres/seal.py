"""Seals a staging table: checks that it is a plain table, and makes the promoting account its owner.

`Postgres.check` calls it before the vote, the promoter before it reads. The account that stages owns the table that it
made. PostgreSQL lets an owner attach code to a table: policies, rules, a view in its place, expressions of indexes,
constraints and statistics that the planner evaluates. Such code would run with the rights of whoever reads the table.
So a promoter reads nothing that belongs to another account. In one transaction it locks the table, which waits for
whatever is under way in it, checks that it is plain, and takes it over. From then on nobody else can change the rows
or the table.

In our sessions a name without a schema is PostgreSQL's own (`database.SAFE`). So the text of a type or an expression
shows whose it is: anything that is not PostgreSQL's comes with its schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from twophase.core.errors import ConfigError
from twophase.sinks.postgres import staging_table
from twophase.storage import database
from twophase.storage.database import TableName

_PARTS = {"part": "integer", "rows": "bigint"}
_LOOK = """SELECT c.oid, c.relkind = 'r', c.relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"""
#: What a plain table does not have → the query that finds it, by the table's oid.
_STRANGE = {
    "row security": "pg_class WHERE oid = {0} AND (relrowsecurity OR relforcerowsecurity)",
    "a policy": "pg_policy WHERE polrelid = {0}",
    "a rule": "pg_rewrite WHERE ev_class = {0}",
    "a trigger or a foreign key": "pg_trigger WHERE tgrelid = {0}",
    "a parent, a child or partitions": "pg_inherits WHERE {0} IN (inhrelid, inhparent)",
    "a composite type that it is made of": "pg_class WHERE oid = {0} AND reloftype <> 0",
    "rows that do not outlive a crash": "pg_class WHERE oid = {0} AND relpersistence <> 'p'",
    "an index by an expression, or on some rows": "pg_index WHERE indrelid = {0}"
    " AND (indexprs IS NOT NULL OR indpred IS NOT NULL OR indisexclusion)",
    "statistics of its own": "pg_statistic_ext WHERE stxrelid = {0}",
    "a generated or an identity column": "pg_attribute WHERE attrelid = {0}"
    " AND (attgenerated <> '' OR attidentity <> '')",
    "a cast of its rows": "pg_cast JOIN pg_type t ON t.oid IN (castsource, casttarget)"
    " WHERE t.typrelid = {0} OR t.typelem = (SELECT reltype FROM pg_class WHERE oid = {0})",
    "a collation of its own": "pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
    " WHERE attrelid = {0} AND attnum > 0 AND attcollation <> typcollation",
}
#: The expressions of a table: its defaults and its checks.
_EXPRESSIONS = """SELECT 'default', pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = %(oid)s
    UNION ALL SELECT 'check', pg_get_expr(conbin, conrelid) FROM pg_constraint
    WHERE conrelid = %(oid)s AND contype NOT IN ('n', 'p', 'u')"""
#: What we put into a staging table that becomes a partition: default and check of the checkpoint's number.
_OURS = re.compile(rf"(\({staging_table.CHECKPOINT} = )?'?\d+'?(::bigint)?\)?")
_GRANTED = """SELECT DISTINCT grantee, rolname FROM
    (SELECT (aclexplode(relacl)).grantee FROM pg_class WHERE oid = %(oid)s
        UNION ALL SELECT (aclexplode(attacl)).grantee FROM pg_attribute WHERE attrelid = %(oid)s) AS granted
    LEFT JOIN pg_roles r ON r.oid = grantee WHERE grantee <> (SELECT oid FROM pg_roles WHERE rolname = current_user)"""


def seal(cursor: Any, staged: TableName, target: TableName, expected: Mapping[str, str] | None = None) -> str | None:  # noqa: ANN401 - a cursor
    """Take over a staging table and its table of parts; return why not, if one of them is not a plain table.

    `expected` are its columns with their types, if they are known. Otherwise each column has to be of a type of
    PostgreSQL's own, or of the type that the target's column has. A sealed table is not checked again, so this costs a
    promotion one short query per table.
    """
    for table in (staged, staging_table.parts_of(staged)):
        cursor.execute(_LOOK, tuple(table))
        found = cursor.fetchone()
        if found is None or found[2]:
            continue
        oid, is_table, _ = found
        strange = "something else than a table" if not is_table else _locked(cursor, table, oid)
        if strange is None:
            columns = _PARTS if table != staged else expected
            strange = next(_strange(cursor, table, target, oid, columns), None)
        if strange is not None:
            return (
                f"staging table {table}: expected a plain table, found {strange}; see what its account has made of it"
            )
        _take(cursor, table, oid)
    return None


def _locked(cursor: Any, table: TableName, oid: int) -> str | None:  # noqa: ANN401 - a cursor
    """Lock a table against all others; say so if it is not the one that was looked at before."""
    from psycopg2 import sql

    cursor.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(table.sql))
    cursor.execute(_LOOK, tuple(table))
    return None if cursor.fetchone() == (oid, True, False) else "another one in its place"


def _strange(
    cursor: Any,  # noqa: ANN401 - a cursor
    table: TableName,
    target: TableName,
    oid: int,
    expected: Mapping[str, str] | None,
) -> Iterator[str]:
    """Yield whatever a plain table would not have."""
    kinds = " UNION ALL ".join(
        f"SELECT {number} WHERE EXISTS (SELECT FROM {where.format('%(oid)s')})"  # noqa: S608 - ours
        for number, where in enumerate(_STRANGE.values())
    )
    cursor.execute(kinds, {"oid": oid})
    for (number,) in cursor.fetchall():
        yield list(_STRANGE)[number]
    there = database.columns_of(cursor, table) or {}
    known = database.columns_of(cursor, target) or {}
    for name, kind in there.items():
        if kind != (expected or {}).get(name) and (expected is not None or not _is_known(kind, known.get(name))):
            yield f"column {name!r} of type {kind}"
    if missing := (expected or {}).keys() - there.keys():
        yield f"no column {', '.join(sorted(missing))}"
    cursor.execute(_EXPRESSIONS, {"oid": oid})
    expressions = cursor.fetchall()
    trusted = {text for _, text in _expressions_of(cursor, target)}
    for what, text in expressions:
        if text not in trusted and not (text and _OURS.fullmatch(text)):
            yield f"a {what} {text or 'of another kind'}"


def _is_known(kind: str, targets: str | None) -> bool:
    """Say whether a type is PostgreSQL's own, which has no schema in its text, or that of the target's column."""
    return kind == targets or "." not in kind


def _expressions_of(cursor: Any, table: TableName) -> list[tuple[str, str]]:  # noqa: ANN401 - a cursor
    cursor.execute(_LOOK, tuple(table))
    found = cursor.fetchone()
    if found is None:
        return []
    cursor.execute(_EXPRESSIONS, {"oid": found[0]})
    return list(cursor.fetchall())


def _take(cursor: Any, table: TableName, oid: int) -> None:  # noqa: ANN401 - a cursor
    """Become the owner, and revoke what the old one has granted to others, directly or through them."""
    from psycopg2 import sql

    cursor.execute(sql.SQL("ALTER TABLE {} OWNER TO CURRENT_USER").format(table.sql))
    cursor.execute(_GRANTED, {"oid": oid})
    for grantee, role in cursor.fetchall():
        whom = sql.Identifier(role) if grantee else sql.SQL("PUBLIC")
        cursor.execute(sql.SQL("REVOKE ALL ON TABLE {} FROM {} CASCADE").format(table.sql, whom))


# --- before anything is recorded -------------------------------------------------------------------------------------


_RIGHTS = """SELECT s.rolname = current_user, current_user, s.rolsuper,
    pg_has_role(current_user, s.oid, 'USAGE') AND has_schema_privilege(%(staging)s, 'CREATE'),
    ARRAY(SELECT nspname FROM pg_namespace WHERE nspname IN (%(staging)s, %(markers)s, %(schema)s)
        AND pg_has_role(s.oid, nspowner, 'MEMBER')),
    has_schema_privilege(s.oid, %(markers)s, 'CREATE'),
    ARRAY(SELECT nspname || '.' || relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
        WHERE (nspname = %(markers)s OR (nspname, relname) = (%(schema)s, %(name)s))
        AND relkind IN ('r', 'p', 'v', 'm', 'f') AND pg_has_role(s.oid, relowner, 'MEMBER')),
    ARRAY(SELECT nspname FROM pg_namespace WHERE nspname = %(schema)s AND has_schema_privilege(s.oid, oid, 'CREATE')
        AND NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_namespace.oid AND relname = %(name)s))
    FROM pg_roles s WHERE s.rolname = %(stager)s"""


def check_accounts(cursor: Any, which: str, stager: str, target: TableName, *, schemas: tuple[str, str]) -> None:  # noqa: ANN401 - a cursor
    """Raise ConfigError if the account that stages is another than the promoting one, and may do more than stage.

    `schemas` are those of the staging tables and of the markers.
    """
    staged, markers = schemas
    names = {"stager": stager, "staging": staged, "markers": markers}
    cursor.execute(_RIGHTS, {**names, "schema": target.schema, "name": target.name})
    same, promoter, is_super, can_take, theirs, may_mark, tables, may_make = cursor.fetchone()
    if same:
        return
    if is_super:
        why = f"{stager} may only stage, but is a superuser; stage by an account of its own"
    elif not can_take:
        why = f"{promoter} takes over what {stager} staged; GRANT {stager} TO {promoter}, and CREATE on schema {staged}"
    elif owned := [*theirs, *tables]:
        why = f"{stager} may only stage, but {owned[0]} belongs to it; make {promoter} its owner"
    elif may_mark or may_make:
        schema = markers if may_mark else may_make[0]
        why = f"{stager} may only stage, but can create in schema {schema}; REVOKE CREATE ON SCHEMA {schema} from it"
    else:
        return
    msg = f"{which}: {why}"
    raise ConfigError(msg)
