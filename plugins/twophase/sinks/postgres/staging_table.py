"""The staging table of one attempt: the driver creates it, executors load it in parallel, `seal` checks it.

    <staging schema>.s_<sink>_00000017_r1_a3_7c1e09ab          the rows, LOGGED: they outlive a crash of the server
    <staging schema>.s_<sink>_00000017_r1_a3_7c1e09ab_parts    which Spark partitions are in it, one row each

One transaction loads a partition and inserts its row in `…_parts`, whose key is the partition's number. So a task that
Spark runs twice, or whose reply is lost, is in the table once. Called by the sink, the promotion and their checks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.changelog import ADDED, BEFORE, CHANGE, DELETE, KINDS
from twophase.core.errors import BadValue, ConfigError, SinkUnavailable, TwophaseError
from twophase.core.manifest import Column, Schema
from twophase.sinks.postgres import column_types, jdbc_load
from twophase.sinks.postgres.column_types import Loading
from twophase.storage import database, spark_task_errors
from twophase.storage.database import TableName
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg2.sql import Composable
    from pyspark.sql import DataFrame

CHECKPOINT = "_checkpoint"
_SAID = re.compile(
    r"ERROR:\s*((?:(?!\s+Call getNextException)[^\n])*)[^\n]*(?:\n\s*(?:CONTEXT|DETAIL|Detail):\s*([^\n]*))?"
)
_AWAY = re.compile(
    r"could not connect|Connection (?:to \S+ )?refused|server closed the connection|terminating connection|SSL SYSCALL"
    r"|An I/O error occurred|No space left on device"
)
_NO_WHEEL = re.compile(r"No module named '(adbc_driver_\w+)'")


class StagedParts(NamedTuple):
    """The parts of a staging table: the number of each, and how many rows it has."""

    parts: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Return how many rows there are."""
        return sum(rows for _, rows in self.parts)

    def digest(self, table: TableName) -> str:
        """Return the digest of the parts and of the table's name, which belongs to one attempt only."""
        import xxhash

        return xxhash.xxh3_64_hexdigest(repr((str(table), self.parts)).encode())


def parts_of(table: TableName) -> TableName:
    """Return the table that lists the parts of a staging table."""
    return TableName(table.schema, f"{table.name}_parts")


# --- in the driver ---------------------------------------------------------------------------------------------------


Columns = dict[str, tuple[str, Loading]]


def plan(  # noqa: PLR0913 - what is known of the output and the target
    which: str,
    schema: Schema,
    target: dict[str, str] | None,
    *,
    create: bool,
    changes: bool = False,
    bases: Mapping[str, str] | None = None,
) -> Columns:
    """Return for each column its type in PostgreSQL, and how it gets there; ConfigError if one does not fit.

    `target` are the columns of the target, None if it does not exist yet; with `create` missing ones will be added.
    With `changes` the output is a changelog, and the column that says what a row means is not one of the target's.
    `bases` are the base types of columns that have a domain: values are loaded as the base type, and become values of
    the domain in the staging table.
    """
    found: Columns = {}
    if changes:
        found[CHANGE] = ("text", Loading(None))
        schema = tuple(column for column in schema if column.name != CHANGE)
    for column in schema:
        if column.name.lower() == CHECKPOINT:
            msg = f"{which}: a column cannot be named {column.name!r}: the checkpoint's is; rename or drop it"
            raise ConfigError(msg)
        if (size := len(column.name.encode())) > database.NAME_BYTES:
            msg = f"{which}: column {column.name[:40]!r}… has a name of {size} bytes, and PostgreSQL cuts names after"
            msg = f"{msg} {database.NAME_BYTES}; rename it"
            raise ConfigError(msg)
        made = create and column.name not in (target or {})
        postgres = column_types.created(column.type) if made else (target or {}).get(column.name)
        if postgres is None:
            what = "no type of Postgres' holds it" if made else "the target has no such column"
            msg = f"{which}: column {column.name!r} is {column.type}: {what}; cast, rename or drop it"
            raise ConfigError(msg)
        base = (bases or {}).get(column.name)
        how = column_types.loading(column.type, base or postgres)
        if how and base:
            how = how._replace(staged=how.staged or base)
        if how is None:
            msg = f"{which}: column {column.name!r} is {column.type} and does not fit the target's {postgres}; cast it"
            raise ConfigError(msg)
        found[column.name] = (postgres, how)
    return found


def create_schema(cursor: Any, schema: str, stager: str) -> None:  # noqa: ANN401 - a cursor
    """Create the schema of the staging tables, unless it is there; the account that stages may create tables in it."""
    from psycopg2 import sql

    cursor.execute("SELECT to_regnamespace(%s)", (schema,))
    if cursor.fetchone()[0] is None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('twophase_staging'))")
        cursor.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        grant = sql.SQL("GRANT USAGE, CREATE ON SCHEMA {} TO {}")
        cursor.execute(grant.format(sql.Identifier(schema), sql.Identifier(stager)))


def tables(cursor: Any, schema: str, prefix: str) -> list[str]:  # noqa: ANN401 - a cursor
    """List the staging tables with this prefix; one that has become a partition is no staging table any more."""
    cursor.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind = 'r' AND NOT c.relispartition AND starts_with(c.relname, %s)",
        (schema, prefix),
    )
    return [row[0] for row in cursor.fetchall()]


def create(cursor: Any, table: TableName, columns: Columns, checkpoint: int | None) -> None:  # noqa: ANN401 - a cursor
    """Create the staging table; with `checkpoint` it can become a partition of the target."""
    from psycopg2 import sql

    lines = [
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(how.staged or postgres))
        for name, (postgres, how) in columns.items()
    ]
    if checkpoint is not None:
        lines.append(
            sql.SQL("{0} bigint NOT NULL DEFAULT {1} CHECK ({0} = {1})").format(
                sql.Identifier(CHECKPOINT), sql.Literal(checkpoint)
            )
        )
    cursor.execute(sql.SQL("CREATE TABLE {} ({})").format(table.sql, sql.SQL(", ").join(lines)))
    cursor.execute(
        sql.SQL("CREATE TABLE {} (part integer PRIMARY KEY, rows bigint NOT NULL)").format(parts_of(table).sql)
    )


def converted(frame: DataFrame, columns: Columns, *, upserts: bool = False) -> DataFrame:
    """Convert the columns that need it; a value that does not fit stops the job with an error that names it.

    With `upserts` the rows that are as a key was before are left out: an upsert goes by what it has now.
    """
    from pyspark.sql import functions

    if upserts and CHANGE in columns:
        frame = frame.where(~functions.col(CHANGE).eqNullSafe(BEFORE))

    def convert(name: str, postgres: str, how: Loading) -> Any:  # noqa: ANN401 - a Column
        column = functions.col(quoted(name))
        if how.spark is None:
            return column
        if how.spark == "json":
            return functions.to_json(column).alias(name)
        fitting = functions.expr(f"try_cast({quoted(name)} as {how.spark})")
        stop = spark_task_errors.stop(f"column {name!r}: value ", column.cast("string"), f" does not fit {postgres}")
        fits = column.isNull() | fitting.isNotNull()
        return functions.when(fits, fitting).otherwise(stop.cast(how.spark)).alias(name)

    return frame.select(*(convert(name, postgres, how) for name, (postgres, how) in columns.items()))


def load(which: str, frame: DataFrame, conn_id: str, table: TableName) -> None:
    """Let the executors load every partition; they get the connection's password over Spark's own channel.

    If one of them lacks the ADBC wheel, Spark's JDBC writer loads the rows.
    """
    try:
        if jdbc_load.is_needed(frame.sparkSession):
            jdbc_load.load(which, frame, conn_id, table, parts_of(table))
        else:
            loader = Loader(database.dsn(conn_id), table)
            frame.mapInArrow(loader, "part int, rows bigint").collect()
    except TwophaseError:
        raise
    except Exception as error:
        raise _explained(which, error) from error


def _explained(which: str, error: Exception) -> Exception:
    """Return the error that says what a failed load means; the same error if nobody knows."""
    text = str(error)
    if ours := spark_task_errors.heard(text):
        return BadValue(f"{which}: {ours}; correct it in the transform")
    if lacking := jdbc_load.lacks_driver(which, error):
        return lacking
    if missing := _NO_WHEEL.search(text):
        python = os.environ.get("PYSPARK_PYTHON") or sys.executable
        return ConfigError(
            f"{which}: {missing[1]} is lacking in {python} of an executor; install twophase[postgres] on all"
        )
    if _AWAY.search(text):
        return SinkUnavailable(f"{which}: the target database went away while rows were staged; nothing was committed")
    if said := _SAID.search(text):
        where = f" ({said[2]})" if said[2] else ""
        return BadValue(f"{which}: the target database refuses a value: {said[1]}{where}; correct it in the transform")
    return error


def net(table: TableName, columns: Sequence[str], sign: str) -> Composable:
    """Return the net rows that a changelog adds (`sign` is >) or retracts (<); its order does not matter."""
    from psycopg2 import sql

    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    counted = sql.SQL("sum(CASE WHEN {} IN {} THEN 1 ELSE -1 END)").format(sql.Identifier(CHANGE), sql.Literal(ADDED))
    return sql.SQL("SELECT {0}, {1} AS _times FROM {2} GROUP BY {0} HAVING {1} {3} 0").format(
        names, counted, table.sql, sql.SQL(sign)
    )


def has_changes(cursor: Any, table: TableName) -> bool:  # noqa: ANN401 - a cursor
    """Say whether the staged rows are a changelog."""
    return CHANGE in (database.columns_of(cursor, table) or {})


def staying() -> Composable:
    """Return the condition for the rows of an upsert changelog that are no deletions."""
    from psycopg2 import sql

    return sql.SQL("{} <> {}").format(sql.Identifier(CHANGE), sql.Literal(DELETE))


def changing(  # noqa: PLR0913 - what is staged, and where it goes
    cursor: Any,  # noqa: ANN401 - a cursor
    table: TableName,
    target: TableName,
    *,
    key: Sequence[str],
    columns: Sequence[str],
    mode: str,
) -> tuple[Composable, Composable]:
    """Return which rows of the target a staged output changes by key, and what they are afterwards."""
    from psycopg2 import sql

    signs = equals(cursor, target)
    same = sql.SQL(" AND ").join(
        sql.SQL("s.{0} {2} {1}.{0}").format(sql.Identifier(name), target.sql, signs.get(name, sql.SQL("=")))
        for name in key
    )
    now = sql.SQL("WHERE EXISTS (SELECT 1 FROM {} AS s WHERE {})").format(table.sql, same)
    then = table.sql
    if mode == "retract":
        then = sql.SQL("({}) AS left_over").format(net(table, columns, ">"))
    elif has_changes(cursor, table):
        then = sql.SQL("(SELECT * FROM {} WHERE {}) AS left_over").format(table.sql, staying())
    return now, then


def finish(  # noqa: PLR0913 - what is staged, and what becomes of it
    cursor: Any,  # noqa: ANN401 - a cursor
    which: str,
    table: TableName,
    columns: Columns,
    key: Sequence[str],
    *,
    planned: bool,
    retracts: bool = False,
) -> None:
    """Give the loaded columns their own types, and check that every key is there once, or is left once of a retract.

    `planned` asks for statistics, if queries over the rows have to be planned well: a merge, or reads of a partition.
    Rows that are only inserted are read once from end to end, and statistics would cost a tenth of the whole.
    """
    import psycopg2
    from psycopg2 import errors, sql

    changed = [
        sql.SQL("ALTER COLUMN {0} TYPE {1} USING {0}::{1}").format(sql.Identifier(name), sql.SQL(postgres))
        for name, (postgres, how) in columns.items()
        if how.staged
    ]
    try:
        if changed:
            cursor.execute(sql.SQL("ALTER TABLE {} {}").format(table.sql, sql.SQL(", ").join(changed)))
        if CHANGE in columns:
            _check_kinds(cursor, which, table)
        if CHANGE in columns and retracts:
            _check_changes(cursor, which, table, columns, key)
        elif key:
            _check_key(cursor, which, table, key)
        if planned:
            cursor.execute(sql.SQL("ANALYZE {}").format(table.sql))
    except errors.UndefinedFunction as error:
        msg = (
            f"{which}: {error.diag.message_primary}, and a retract compares whole rows; give the column of the target a"
            " type whose values can be compared: jsonb, or text"
        )
        raise ConfigError(msg) from error
    except (psycopg2.DataError, psycopg2.IntegrityError, psycopg2.InternalError, errors.ProgramLimitExceeded) as error:
        # Also a domain's constraint, or a function in it, and a value that is too long for the index by key.
        msg = f"{which}: the target database refuses a value: {database.one_line(error)}; correct it in the transform"
        raise BadValue(msg) from error


def _check_key(cursor: Any, which: str, table: TableName, key: Sequence[str]) -> None:  # noqa: ANN401 - a cursor
    from psycopg2 import errors, sql

    _check_nulls(cursor, which, table, key)
    names = sql.SQL(", ").join(map(sql.Identifier, key))
    cursor.execute("SAVEPOINT keyed")
    try:
        cursor.execute(sql.SQL("CREATE UNIQUE INDEX ON {} ({})").format(table.sql, names))
    except errors.UniqueViolation as error:
        cursor.execute("ROLLBACK TO SAVEPOINT keyed")
        twice = sql.SQL("SELECT {}, count(*) FROM {} GROUP BY {} HAVING count(*) > 1 LIMIT 1")
        cursor.execute(twice.format(names, table.sql, names))
        row = cursor.fetchone()
        msg = f"{which}: key {', '.join(key)}: {row[-1]} rows have {_shown(key, row)}; keep one row per key"
        raise BadValue(msg) from error


def _check_nulls(cursor: Any, which: str, table: TableName, key: Sequence[str]) -> None:  # noqa: ANN401 - a cursor
    from psycopg2 import sql

    nulls = sql.SQL(" OR ").join(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in key)
    cursor.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(table.sql, nulls))
    if count := cursor.fetchone()[0]:
        msg = f"{which}: key {', '.join(key)}: {count} rows have a null in it; filter them out, or choose another key"
        raise BadValue(msg)


def _shown(key: Sequence[str], row: Sequence[Any]) -> str:
    """Return the values of a key, cut to a length that an error can show."""
    return ", ".join(f"{name} {value!r}"[:100] for name, value in zip(key, row, strict=False))


def _check_kinds(cursor: Any, which: str, table: TableName) -> None:  # noqa: ANN401 - a cursor
    """Check that `_change` has known values only."""
    from psycopg2 import sql

    strange = sql.SQL("SELECT {0} FROM {1} WHERE {0} IS NULL OR {0} <> ALL(%s) LIMIT 1")
    cursor.execute(strange.format(sql.Identifier(CHANGE), table.sql), (list(KINDS),))
    if row := cursor.fetchone():
        msg = f"{which}: column {CHANGE}: expected {', '.join(KINDS)}, found {row[0]!r}; correct it in the transform"
        raise BadValue(msg)


def _check_changes(cursor: Any, which: str, table: TableName, columns: Columns, key: Sequence[str]) -> None:  # noqa: ANN401 - a cursor
    """Check that no key of a retract is null, and that at most one row of each key is left."""
    from psycopg2 import sql

    _check_nulls(cursor, which, table, key)
    names = sql.SQL(", ").join(map(sql.Identifier, key))
    left = net(table, [name for name in columns if name != CHANGE], ">")
    twice = sql.SQL("SELECT {0}, sum(_times) FROM ({1}) AS left_over GROUP BY {0} HAVING sum(_times) > 1 LIMIT 1")
    cursor.execute(twice.format(names, left))
    if row := cursor.fetchone():
        msg = f"{which}: key {', '.join(key)}: {row[-1]} rows are left of {_shown(key, row)}; retract all but one"
        raise BadValue(msg)


def look(cursor: Any, table: TableName) -> StagedParts | None:  # noqa: ANN401 - a cursor
    """Return the parts of a staging table; None if the table is not there."""
    from psycopg2 import sql

    cursor.execute("SELECT to_regclass(%s) IS NOT NULL AND to_regclass(%s) IS NOT NULL", _names(table))
    if not cursor.fetchone()[0]:
        return None
    cursor.execute(sql.SQL("SELECT part, rows FROM {} ORDER BY part").format(parts_of(table).sql))
    return StagedParts(tuple((part, rows) for part, rows in cursor.fetchall()))


def _names(table: TableName) -> tuple[str, str]:
    """Return both tables as to_regclass reads them; there are no quotes in their names."""
    return f'"{table.schema}"."{table.name}"', f'"{table.schema}"."{parts_of(table).name}"'


def drop(cursor: Any, table: TableName) -> None:  # noqa: ANN401 - a cursor
    """Drop a staging table and its table of parts, if they are there, and all that depends on them.

    Anybody who may use the schema can create a view on a table, which would keep it from being dropped.
    """
    from psycopg2 import sql

    cursor.execute(sql.SQL("DROP TABLE IF EXISTS {}, {} CASCADE").format(table.sql, parts_of(table).sql))


def equals(cursor: Any, table: TableName) -> dict[str, Composable]:  # noqa: ANN401 - a cursor
    """Return the equality operator of each column whose type is not PostgreSQL's own.

    Our sessions find only PostgreSQL's operators; these would compare a `citext` as a text.
    """
    from psycopg2 import sql

    cursor.execute(
        "SELECT a.attname, s.nspname, o.oprname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 JOIN pg_type t ON t.oid = a.atttypid"
        " JOIN pg_opclass p ON p.opcintype = COALESCE(NULLIF(t.typbasetype, 0), t.oid) AND p.opcdefault"
        " JOIN pg_am m ON m.oid = p.opcmethod AND m.amname = 'btree'"
        " JOIN pg_amop b ON b.amopfamily = p.opcfamily AND b.amopstrategy = 3"
        " AND b.amoplefttype = p.opcintype AND b.amoprighttype = p.opcintype"
        " JOIN pg_operator o ON o.oid = b.amopopr JOIN pg_namespace s ON s.oid = o.oprnamespace"
        " WHERE n.nspname = %s AND c.relname = %s AND s.nspname <> 'pg_catalog'",
        tuple(table),
    )
    found = cursor.fetchall()
    return {
        name: sql.SQL("OPERATOR({}.{})").format(sql.Identifier(schema), sql.SQL(sign)) for name, schema, sign in found
    }


def of_checkpoint(checkpoint_id: int) -> Composable:
    """Return the condition for the rows that carry a checkpoint's number."""
    from psycopg2 import sql

    return sql.SQL("WHERE {} = {}").format(sql.Identifier(CHECKPOINT), sql.Literal(checkpoint_id))


def schema_of(frame: DataFrame) -> Schema:
    """Return a DataFrame's columns as the record keeps them."""
    return tuple(Column(field.name, field.dataType.simpleString()) for field in frame.schema.fields)


# --- in the executors ------------------------------------------------------------------------------------------------


class Loader:
    """Loads one partition, in one transaction with its row in the table of parts; its repr shows no password."""

    def __init__(self, dsn: str, table: TableName) -> None:
        """Name the database and the staging table."""
        self._dsn = dsn
        self._table = table

    def __repr__(self) -> str:
        """Name the table only."""
        return f"Loader({self._table})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Load a partition; an empty one needs no row."""
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        part = context.partitionId() if context else 0
        first = next(batches, None)
        rows = 0 if first is None else self.load(part, first, batches)
        yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "rows": pa.array([rows], pa.int64())})

    def load(self, part: int, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> int:
        """Load one part, unless it is there; return its rows."""
        import itertools

        import pyarrow as pa
        from adbc_driver_postgresql import dbapi

        parts = parts_of(self._table)
        where = f'"{parts.schema}"."{parts.name}"'  # both names are ours: letters, digits and _
        reader = pa.RecordBatchReader.from_batches(first.schema, itertools.chain([first], rest))
        with dbapi.connect(self._dsn) as connection, connection.cursor() as cursor:
            rows = cursor.adbc_ingest(self._table.name, reader, mode="append", db_schema_name=self._table.schema)
            cursor.execute(
                f"INSERT INTO {where} VALUES ($1, $2) ON CONFLICT (part) DO NOTHING RETURNING rows",  # noqa: S608
                (part, rows),
            )
            if cursor.fetchone() is None:  # another run of this task was faster: roll back what this one loaded
                connection.rollback()
                cursor.execute(f"SELECT rows FROM {where} WHERE part = $1", (part,))  # noqa: S608
                found = cursor.fetchone()
                return int(found[0]) if found else 0
            connection.commit()
            return int(rows)
