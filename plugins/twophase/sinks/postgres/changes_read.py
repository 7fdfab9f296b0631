"""Reads what checkpoints changed by key, as a changelog from history and target. `Postgres.read_changes` calls it.

An entry of the history is the row that a checkpoint found. What it made of the row is what the next entry of the key
found, or, if there is none, what the target has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twophase.changelog import AFTER, BEFORE, CHANGE, CHECKPOINT, DELETE, INSERT
from twophase.core.checkpoint import Output
from twophase.core.errors import ConfigError
from twophase.core.manifest import widest
from twophase.sinks.postgres import column_types, history, jdbc_load, staging_table
from twophase.sinks.postgres.changes import THERE, Changes, listed
from twophase.sinks.postgres.column_types import Carried
from twophase.sinks.postgres.history import ORDER
from twophase.sinks.postgres.row_read import RowReader
from twophase.storage import database, spark_paths
from twophase.storage.database import TableName
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg2.sql import Composable
    from pyspark.sql import DataFrame, SparkSession

#: The entries of a checkpoint (`e`), each with the next one of its key (`n`) and the row of the target (`t`).
_FOUND = """SELECT {key}, {before}, {after}, e.{there} AS {was}, coalesce(n.{there}, t.{first} IS NOT NULL) AS {stays}
    FROM {history} AS e
    LEFT JOIN (SELECT DISTINCT ON ({keys}) * FROM {history} WHERE {order} > {at}
        ORDER BY {keys}, {order}) AS n ON {next}
    LEFT JOIN {target} AS t ON {same} WHERE e.{order} = {at}"""
_CHANGES = """WITH found AS ({found})
    SELECT {before}, CASE WHEN {stays} THEN {updated} ELSE {deleted} END FROM found WHERE {was}
    UNION ALL SELECT {after}, CASE WHEN {was} THEN {now} ELSE {inserted} END FROM found WHERE {stays}"""


def frame(
    spark: SparkSession, conn_id: str, target: TableName, key: Sequence[str], outputs: Sequence[Output]
) -> DataFrame:
    """Return what these revisions changed; ConfigError if executors lack the ADBC wheel."""
    from pyspark.sql import functions

    if jdbc_load.is_needed(spark):
        msg = f"table {target}: changes are read by ADBC, which an executor lacks; install twophase[postgres] on all"
        raise ConfigError(msg)
    schema = [column for column in widest(output.manifest["schema"] for output in outputs) if column[0] != CHANGE]
    with database.transaction(conn_id) as cursor:
        there = database.columns_of(cursor, target) or {}
        columns = [column_types.carried(name, kind, there.get(name, "")) for name, kind in schema]
        wanted = [(*output.key, _query(cursor, target, key, columns, output)) for output in outputs]
    asked = "pipeline string, checkpoint bigint, revision int, query string"
    numbers = spark.createDataFrame(wanted, asked).repartition(max(len(wanted), 1))
    kinds = [*((column.name, column.spark) for column in columns), (CHANGE, "string"), (CHECKPOINT, "bigint")]
    rows = numbers.mapInArrow(ChangeReader(database.dsn(conn_id), target, columns), spark_paths.ddl(kinds))
    found = [column_types.restored(column, functions.col(quoted(column.name))) for column in columns]
    return rows.select(*found, CHANGE, CHECKPOINT)


def _query(cursor: Any, target: TableName, key: Sequence[str], columns: Sequence[Carried], output: Output) -> str:  # noqa: ANN401 - a cursor
    """Return the query for what one revision changed."""
    from psycopg2 import sql

    kept = history.history_of(output.key.pipeline, target)
    changes = Changes(target, target, tuple(key), {}, equals=staging_table.equals(cursor, target))
    names = {column.name: (sql.Identifier(f"b{n}"), sql.Identifier(f"a{n}")) for n, column in enumerate(columns)}
    others = [name for name in names if name not in key]

    def either(name: str) -> Composable:
        return sql.SQL("CASE WHEN n.{order} IS NULL THEN t.{0} ELSE n.{0} END AS {1}").format(
            sql.Identifier(name), names[name][1], order=sql.Identifier(ORDER)
        )

    def cells(side: int) -> Composable:
        return sql.SQL(", ").join(
            sql.SQL("CAST({} AS {})").format(
                sql.Identifier(column.name) if column.name in key else names[column.name][side],
                sql.SQL(column.postgres),
            )
            for column in columns
        )

    ours = {"there": THERE, "order": ORDER, "was": "_was", "stays": "_stays", "first": key[0]}
    identifiers = {name: sql.Identifier(value) for name, value in ours.items()}
    found = sql.SQL(_FOUND).format(
        key=sql.SQL(", ").join(sql.Identifier("e", name) for name in key),
        keys=listed(key),
        before=_several(sql.SQL("{} AS {}").format(sql.Identifier("e", name), names[name][0]) for name in others),
        after=_several(map(either, others)),
        history=kept.sql,
        target=target.sql,
        at=sql.Literal(output.handle["order"]),
        next=changes.same("n", "e"),
        same=changes.same("t", "e"),
        **identifiers,
    )
    kinds = {"updated": BEFORE, "deleted": DELETE, "now": AFTER, "inserted": INSERT}
    literals = {name: sql.Literal(value) for name, value in kinds.items()}
    whole = sql.SQL(_CHANGES).format(found=found, before=cells(0), after=cells(1), **identifiers, **literals)
    text: str = whole.as_string(cursor)
    return text


def _several(parts: Any) -> Composable:  # noqa: ANN401 - an iterable of SQL
    """Return parts of a list; NULL if there are none, since the list goes on after them."""
    from psycopg2 import sql

    found = list(parts)
    return sql.SQL(", ").join(found) if found else sql.NULL


class ChangeReader(RowReader):
    """Reads what some checkpoints changed, in an executor."""

    def _read(self, cursor: Any, row: dict[str, Any]) -> Iterator[pa.RecordBatch]:  # noqa: ANN401 - a cursor
        import pyarrow as pa

        names = [*(column.name for column in self._columns), CHANGE, CHECKPOINT]
        cursor.execute(row["query"])
        for batch in cursor.fetch_record_batch():
            number = pa.array([row["checkpoint"]] * batch.num_rows, pa.int64())
            yield pa.RecordBatch.from_arrays([*batch.columns, number], names=names)
