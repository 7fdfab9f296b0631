"""Reads committed rows by Spark's own JDBC reader, if executors lack the ADBC wheel. `row_read.frame` calls it.

Each checkpoint is one partition, and so one statement: its rows, its marker and its count are of one moment. The
statement itself fails unless marker and count are what the record says. So whatever Spark does with the frame, a
partition that is not as expected gives no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twophase.core.checkpoint import Output
from twophase.sinks.postgres import column_types, jdbc_load, promotion, staging_table
from twophase.sinks.postgres.column_types import Carried
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable
    from pyspark.sql import Column, DataFrame, SparkSession

#: How many rows the server sends at a time.
_FETCHED = 10_000
_MICROSECONDS = "CAST(EXTRACT(EPOCH FROM {}) * 1000000 AS bigint)"
#: PostgreSQL's type → what is read instead: times as numbers, since the reader would use Java's time zone.
_READ = {
    "date": "({} - DATE '1970-01-01')",
    "timestamp with time zone": _MICROSECONDS,
    "timestamp without time zone": _MICROSECONDS,
}
#: Spark's type → how it is made of that number or text again; types that are not named are cast.
_RESTORED = {
    "date": "date_from_unix_date(int({}))",
    "timestamp": "timestamp_micros(bigint({}))",
    "timestamp_ntz": "timestamp_ntz'1970-01-01 00:00:00' + make_dt_interval(0, 0, 0,"
    " cast(cast({} AS decimal(20, 0)) / 1000000 AS decimal(18, 6)))",
}
_HEX = "encode({}, 'hex')"
#: An array as JSON of its elements' texts; NULL for NULL.
_ARRAY = """CASE WHEN {0} IS NOT NULL THEN CAST(COALESCE(
    (SELECT json_agg(CAST({1} AS text) ORDER BY number) FROM unnest({0}) WITH ORDINALITY AS elements(value, number)),
    '[]') AS text) END"""
#: What is read: the rows, and one extra row (`there` is false), so that the check runs even if there is no row.
_SELECT = "(SELECT {}, true AS there FROM {} UNION ALL SELECT {}, false) AS committed"
#: The condition for the checkpoint's rows; raises an error if they are not as expected. The text of the error is made
#: of values that were found: a constant text would be cast, and fail, when the statement is planned.
_CHECK = """((there AND checkpoint = {checkpoint}) OR NOT there) AND (SELECT CASE
    WHEN found.revision IS DISTINCT FROM {revision} THEN CAST(concat({which}, {expected}, {revision},
        ', found those of ', found.revision, '; read it again') AS boolean)
    WHEN found.rows <> {rows} THEN CAST(concat({which}, 'expected ', {rows}, ' rows, found ', found.rows) AS boolean)
    ELSE true END FROM (SELECT
        (SELECT max(revision) FROM {markers}
            WHERE pipeline = {pipeline} AND target = {name} AND checkpoint_id = {checkpoint}) AS revision,
        (SELECT count(*) FROM {target} {mine}) AS rows) AS found)"""


def frame(
    spark: SparkSession, conn_id: str, target: TableName, columns: Sequence[Carried], outputs: Sequence[Output]
) -> DataFrame:
    """Return the rows of these revisions, with their checkpoint's number in the column `checkpoint`."""
    from psycopg2 import sql

    which = f"table {target}"
    cells = [sql.SQL("{} AS {}").format(_read(column), sql.Identifier(f"c{n}")) for n, column in enumerate(columns)]
    number = sql.SQL("{} AS checkpoint").format(sql.Identifier(staging_table.CHECKPOINT))
    listed = map(sql.SQL(", ").join, ([*cells, number], [sql.NULL] * (len(cells) + 1)))
    select = sql.SQL(_SELECT).format(next(listed), target.sql, next(listed))
    with database.transaction(conn_id) as cursor:
        table = select.as_string(cursor)
        checks = [check(target, output).as_string(cursor) for output in outputs]
    # A filter that Spark pushes down could keep the server from running the check.
    options = {**jdbc_load.options(which, conn_id), "fetchsize": str(_FETCHED), "pushDownPredicate": "false"}
    try:
        rows = spark.read.jdbc(options.pop("url"), table, predicates=checks, properties=options)
    except Exception as error:
        raise jdbc_load.lacks_driver(which, error) or error from error
    return rows.where("there").select(*(_restored(f"c{n}", column) for n, column in enumerate(columns)), "checkpoint")


def check(target: TableName, output: Output) -> Composable:
    """Return the condition for the rows of a revision; it raises an error unless exactly these are there."""
    from psycopg2 import sql

    values = {
        "checkpoint": output.key.checkpoint_id,
        "revision": output.key.revision,
        "rows": int(output.manifest["rows"]),
        "pipeline": output.key.pipeline,
        "name": str(target),
        "which": f"table {target}: checkpoint {output.key.checkpoint_id}: ",
        "expected": "expected the rows of revision ",
    }
    literals = {name: sql.Literal(value) for name, value in values.items()}
    mine = staging_table.of_checkpoint(output.key.checkpoint_id)
    return sql.SQL(_CHECK).format(markers=promotion.MARKERS.sql, target=target.sql, mine=mine, **literals)


def _read(column: Carried) -> Composable:
    """Return the SQL expression that reads a column."""
    from psycopg2 import sql

    cast = sql.SQL("CAST({} AS {})").format(sql.Identifier(column.name), sql.SQL(column.postgres))
    if not column.postgres.endswith("[]"):
        return sql.SQL(_READ.get(column.postgres, "{}")).format(cast)
    of = column.postgres.removesuffix("[]")
    element = sql.SQL(_HEX if of == "bytea" else _READ.get(of, "{}")).format(sql.SQL("value"))
    return sql.SQL(_ARRAY).format(cast, element)


def _restored(name: str, column: Carried) -> Column:
    """Return a column with its own name and type again."""
    from pyspark.sql import functions

    if column.postgres.endswith("[]"):
        element = column.kind.removeprefix("array<").removesuffix(">")
        made = "unhex(x)" if element == "binary" else _RESTORED.get(element, f"cast({{}} AS {element})").format("x")
        array = f"transform(from_json({name}, 'array<string>'), x -> {made})"
        return functions.expr(array).alias(column.name)
    if column.kind in _RESTORED:
        return functions.expr(_RESTORED[column.kind].format(name)).alias(column.name)
    return column_types.restored(column, functions.col(name).cast(column.spark))
