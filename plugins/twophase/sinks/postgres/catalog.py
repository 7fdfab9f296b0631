"""Questions to PostgreSQL's catalog: what a table demands of its rows. For the checks and promotions of the sink.

Nothing here reads a row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from twophase.storage.database import TableName

#: pg_class.relkind of relations that are no tables.
_OTHERS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}
_TABLES = ("r", "p")


class Relation(NamedTuple):
    """The relation that has a name: a table, a view or something else."""

    oid: int
    #: pg_class.relkind.
    relkind: str
    #: pg_class.relpersistence.
    persistence: str
    schema: str
    name: str

    @property
    def partitioned(self) -> bool:
        """Say whether it is a partitioned table, whose rows are in other tables."""
        return self.relkind == "p"

    @property
    def objection(self) -> str | None:
        """Say why it is no table, or one that could lose its rows; None if it is a table that survives a crash."""
        if self.relkind not in _TABLES:
            return f"expected a table, found {_OTHERS.get(self.relkind, 'something else')}; name the table itself"
        if self.persistence == "u":
            which = f'"{self.schema}"."{self.name}"'
            return (
                f"{self.schema}.{self.name} is UNLOGGED, and a crash of the server empties it; expected a logged table:"
                f" ALTER TABLE {which} SET LOGGED"
            )
        if self.persistence == "t":
            return "it is a temporary table, which ends with its session; expected a lasting one"
        return None


class CatalogColumn(NamedTuple):
    """A column, and what it demands of a row."""

    name: str
    #: Why no value may be given, for a generated column or an identity; else None.
    filled: str | None
    not_null: bool
    #: Whether it gets a value when none is given.
    has_default: bool
    #: Whether that value is generated, or its default calls a function: either can fail.
    computed: bool
    #: The base type, if its own type is a domain.
    base: str | None
    identity: bool


def kind_of(cursor: Any, table: TableName) -> Relation | None:  # noqa: ANN401 - a cursor
    """Return the relation of a name; None if there is none."""
    cursor.execute(
        "SELECT c.oid, c.relkind, c.relpersistence, n.nspname, c.relname FROM pg_class c"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
        tuple(table),
    )
    row = cursor.fetchone()
    return Relation(*row) if row else None


def partitions_of(cursor: Any, oid: int) -> list[Relation]:  # noqa: ANN401 - a cursor
    """Return the partitions of a table, at all levels; no lock is taken on any."""
    cursor.execute(
        "WITH RECURSIVE part AS (SELECT inhrelid FROM pg_inherits WHERE inhparent = %s"
        " UNION ALL SELECT i.inhrelid FROM pg_inherits i JOIN part ON i.inhparent = part.inhrelid)"
        " SELECT c.oid, c.relkind, c.relpersistence, n.nspname, c.relname FROM part"
        " JOIN pg_class c ON c.oid = part.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace",
        (oid,),
    )
    return [Relation(*row) for row in cursor.fetchall()]


def columns_of(cursor: Any, oid: int) -> list[CatalogColumn]:  # noqa: ANN401 - a cursor
    """Return the columns of a table, with what each demands."""
    cursor.execute(
        "SELECT a.attname, CASE WHEN a.attgenerated <> '' THEN 'generated'"
        "  WHEN a.attidentity = 'a' THEN 'an identity that is always generated' END,"
        " a.attnotnull, a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL,"
        " a.attgenerated <> '' OR EXISTS (SELECT FROM pg_attrdef f JOIN pg_depend d ON d.objid = f.oid"
        "  AND d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_proc'::regclass"
        "  WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum),"
        " CASE WHEN t.typtype = 'd' THEN format_type(t.typbasetype, t.typtypmod) END, a.attidentity <> ''"
        " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
        " WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
        (oid,),
    )
    return [CatalogColumn(*row) for row in cursor.fetchall()]


def columns_given_by(cursor: Any, oid: int) -> str | None:  # noqa: ANN401 - a cursor
    """Return the parent table or type that a table's columns come from; None if a column can be added to it."""
    cursor.execute(
        "SELECT CASE WHEN relispartition THEN 'table ' || (SELECT inhparent::regclass FROM pg_inherits"
        " WHERE inhrelid = c.oid) WHEN reloftype <> 0 THEN 'type ' || reloftype::regtype END FROM pg_class c"
        " WHERE oid = %s",
        (oid,),
    )
    found: str | None = cursor.fetchone()[0]
    return found


def definitions_of(cursor: Any, oid: int) -> dict[str, str]:  # noqa: ANN401 - a cursor
    """Return type, collation and default of each column, as ADD COLUMN takes them for another table."""
    cursor.execute(
        "SELECT a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),"
        " CASE WHEN a.attcollation <> t.typcollation THEN format('COLLATE %%I.%%I', n.nspname, l.collname) END,"
        " CASE a.attgenerated WHEN 's' THEN format('GENERATED ALWAYS AS (%%s) STORED', pg_get_expr(d.adbin, d.adrelid))"
        "  WHEN 'v' THEN format('GENERATED ALWAYS AS (%%s) VIRTUAL', pg_get_expr(d.adbin, d.adrelid))"
        "  ELSE 'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid) END)"
        " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
        " LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum"
        " LEFT JOIN pg_collation l ON l.oid = a.attcollation LEFT JOIN pg_namespace n ON n.oid = l.collnamespace"
        " WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum",
        (oid,),
    )
    return dict(cursor.fetchall())


class CheckConstraint(NamedTuple):
    """A CHECK constraint."""

    name: str
    #: The columns that it looks at; None if it names none, or looks at the row as a whole.
    columns: list[str] | None
    expression: str
    definition: str


def checks_of(cursor: Any, oid: int) -> list[CheckConstraint]:  # noqa: ANN401 - a cursor
    """Return the CHECK constraints that a new row has to pass."""
    cursor.execute(
        "SELECT c.conname, CASE WHEN c.conkey IS NULL OR 0 = ANY(c.conkey) THEN NULL ELSE ARRAY(SELECT a.attname::text"
        "  FROM pg_attribute a WHERE a.attrelid = c.conrelid AND a.attnum = ANY(c.conkey)) END,"
        " pg_get_expr(c.conbin, c.conrelid), pg_get_constraintdef(c.oid)"
        " FROM pg_constraint c WHERE c.conrelid = %s AND c.contype = 'c'"
        " AND to_jsonb(c)->>'conenforced' IS DISTINCT FROM 'false' ORDER BY c.conname",  # new in 18
        (oid,),
    )
    return [CheckConstraint(*row) for row in cursor.fetchall()]


class Index(NamedTuple):
    """An index, also that of a primary key, a unique or an exclusion constraint."""

    name: str
    columns: list[str]
    #: Whether other rows can keep a row out: it is unique, or excludes.
    excludes: bool
    #: Whether it is valid, not deferrable, over all rows, without expressions, and no exclusion constraint.
    plain: bool
    #: Its columns of variable length, included ones too.
    long: list[str]


def indexes_of(cursor: Any, oid: int) -> list[Index]:  # noqa: ANN401 - a cursor
    """Return the indexes of a table that a new row is entered in."""
    cursor.execute(
        "SELECT x.relname, ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = i.indrelid"
        "  AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])), i.indisunique OR i.indisexclusion,"
        " i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL AND NOT i.indisexclusion,"
        " ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = i.indrelid"
        "  AND a.attnum = ANY(i.indkey::int2[]) AND a.attlen = -1)"
        " FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid"
        " WHERE i.indrelid = %s AND i.indisready ORDER BY x.relname",
        (oid,),
    )
    return [Index(*row) for row in cursor.fetchall()]


def has_unique_key(cursor: Any, oid: int, key: Collection[str]) -> bool:  # noqa: ANN401 - a cursor
    """Say whether rows can be changed by a key: a valid unique index on just its columns, not deferrable."""
    found = (index for index in indexes_of(cursor, oid) if index.excludes and index.plain)
    return any(sorted(index.columns) == sorted(key) for index in found)


def numbers_left(cursor: Any, oid: int, written: Collection[str]) -> dict[str, int]:  # noqa: ANN401 - a cursor
    """Return how many numbers each sequence has left for the columns that the output lacks.

    A sequence that this account may not look at is left out: an identity works without that right.
    """
    cursor.execute(
        "WITH fills AS (SELECT a.atttypid, d.refobjid AS oid FROM pg_attribute a"
        "  JOIN pg_attrdef f ON f.adrelid = a.attrelid AND f.adnum = a.attnum"
        "  JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid"
        "  AND d.refclassid = 'pg_class'::regclass WHERE a.attrelid = %(oid)s AND a.attname <> ALL(%(written)s)"
        " UNION SELECT a.atttypid, d.objid FROM pg_attribute a"
        "  JOIN pg_depend d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = a.attrelid"
        "  AND d.refobjsubid = a.attnum AND d.classid = 'pg_class'::regclass AND d.deptype = 'i'"
        "  WHERE a.attrelid = %(oid)s AND a.attname <> ALL(%(written)s) AND a.attidentity <> ''),"
        " held AS (SELECT s.*, CASE atttypid WHEN 'int2'::regtype THEN 32767 WHEN 'int4'::regtype THEN 2147483647"
        "   ELSE seqmax END AS holds, COALESCE(pg_sequence_last_value(seqrelid), seqstart - seqincrement) AS last"
        "  FROM pg_sequence s JOIN fills ON fills.oid = seqrelid"
        "  WHERE NOT seqcycle AND has_sequence_privilege(seqrelid, 'USAGE, SELECT'))"
        " SELECT seqrelid::regclass::text, min(CASE WHEN seqincrement > 0 THEN least(seqmax, holds)::numeric - last"
        "  ELSE last::numeric - seqmin END / abs(seqincrement)) FROM held GROUP BY 1 ORDER BY 1",
        {"oid": oid, "written": list(written)},
    )
    return {name: int(left) for name, left in cursor.fetchall()}


def has_event_triggers(cursor: Any) -> bool:  # noqa: ANN401 - a cursor
    """Say whether the database has event triggers: they may refuse CREATE, ALTER or DROP."""
    cursor.execute("SELECT FROM pg_event_trigger WHERE evtenabled IN ('O', 'A') AND evtevent <> 'login' LIMIT 1")
    return cursor.fetchone() is not None


def watchers_of(cursor: Any, oid: int) -> list[str]:  # noqa: ANN401 - a cursor
    """Return the triggers and rules of a table and of its partitions: they may see, change or swallow rows."""
    cursor.execute(
        "WITH RECURSIVE part AS (SELECT %s::oid AS oid"
        " UNION ALL SELECT i.inhrelid FROM pg_inherits i JOIN part ON i.inhparent = part.oid)"
        " SELECT DISTINCT 'trigger ' || t.tgname FROM pg_trigger t JOIN part ON part.oid = t.tgrelid"
        " WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'A')"
        " UNION SELECT 'rule ' || r.rulename FROM pg_rewrite r JOIN part ON part.oid = r.ev_class"
        " WHERE r.ev_enabled IN ('O', 'A') ORDER BY 1",
        (oid,),
    )
    return [row[0] for row in cursor.fetchall()]


def references_of(cursor: Any, oid: int, changed: Collection[str], *, deletes: bool) -> list[str]:  # noqa: ANN401 - a cursor
    """Return the foreign keys of a table, and those of other tables to its changed columns or deleted rows."""
    cursor.execute(
        "SELECT 'foreign key ' || c.conname FROM pg_constraint c WHERE c.contype = 'f' AND (c.conrelid = %s"
        " OR (c.confrelid = %s AND (%s OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.confrelid"
        "  AND a.attnum = ANY(c.confkey) AND a.attname = ANY(%s))))) ORDER BY 1",
        (oid, oid, deletes, list(changed)),
    )
    return [row[0] for row in cursor.fetchall()]
