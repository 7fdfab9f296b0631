"""Reads the rows of committed checkpoints as a DataFrame: executors read them by ADBC. `Postgres.read` calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Output
from twophase.core.manifest import widest
from twophase.sinks.postgres import column_types, jdbc_load, jdbc_read, promotion
from twophase.sinks.postgres.column_types import Carried
from twophase.sinks.postgres.staging_table import CHECKPOINT
from twophase.storage import database, spark_paths
from twophase.storage.database import TableName, columns_of
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def frame(spark: SparkSession, conn_id: str, target: TableName, outputs: Sequence[Output]) -> DataFrame:
    """Return the rows of these revisions, with their checkpoint's number in the column `checkpoint`.

    If an executor lacks the ADBC wheel, Spark's JDBC reader reads them.
    """
    from pyspark.sql import functions

    schema = widest(output.manifest["schema"] for output in outputs)
    with database.transaction(conn_id) as cursor:
        there = columns_of(cursor, target) or {}
    columns = [column_types.carried(name, kind, there.get(name, "")) for name, kind in schema]
    if jdbc_load.is_needed(spark):
        return jdbc_read.frame(spark, conn_id, target, columns, outputs)
    wanted = [(*output.key, int(output.manifest["rows"])) for output in outputs]
    asked = "pipeline string, checkpoint bigint, revision int, rows bigint"
    numbers = spark.createDataFrame(wanted, asked).repartition(max(len(wanted), 1))
    read = spark_paths.ddl([*((column.name, column.spark) for column in columns), ("checkpoint", "bigint")])
    rows = numbers.mapInArrow(RowReader(database.dsn(conn_id), target, columns), read)
    found = [column_types.restored(column, functions.col(quoted(column.name))) for column in columns]
    return rows.select(*found, "checkpoint")


class RowReader:
    """Reads the rows of some checkpoints, in an executor; its repr shows no password."""

    def __init__(self, dsn: str, target: TableName, columns: Sequence[Carried]) -> None:
        """Name the database, the table and the columns."""
        self._dsn = dsn
        self._target = target
        self._columns = list(columns)

    def __repr__(self) -> str:
        """Name the table only."""
        return f"RowReader({self._target})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the checkpoints that the incoming rows name, each in one snapshot."""
        from adbc_driver_postgresql import dbapi

        for batch in batches:
            for row in batch.to_pylist():
                with dbapi.connect(self._dsn) as connection, connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                    self._check(cursor, row)
                    yield from self._read(cursor, row)

    def _check(self, cursor: Any, row: dict[str, Any]) -> None:  # noqa: ANN401 - a cursor
        """Check that the rows are still those of this revision."""
        markers = ".".join(map(_quoted, promotion.MARKERS))
        query = f"SELECT max(revision) FROM {markers} WHERE pipeline = $1 AND target = $2 AND checkpoint_id = $3"  # noqa: S608 - ours
        cursor.execute(query, (row["pipeline"], str(self._target), row["checkpoint"]))
        found = cursor.fetchone()[0]
        if found != row["revision"]:
            which = f"table {self._target}: checkpoint {row['checkpoint']}"
            msg = f"{which}: expected the rows of revision {row['revision']}, found those of {found}; read it again"
            raise RuntimeError(msg)

    def _read(self, cursor: Any, row: dict[str, Any]) -> Iterator[pa.RecordBatch]:  # noqa: ANN401 - a cursor
        import pyarrow as pa

        checkpoint_id, expected = row["checkpoint"], row["rows"]
        cells = ", ".join(f"CAST({_quoted(column.name)} AS {column.postgres})" for column in self._columns)
        target = ".".join(map(_quoted, self._target))
        query = f"SELECT {cells} FROM {target} WHERE {_quoted(CHECKPOINT)} = $1"  # noqa: S608 - quoted names
        cursor.execute(query, (checkpoint_id,))
        found = 0
        names = [*(column.name for column in self._columns), "checkpoint"]
        for batch in cursor.fetch_record_batch():
            found += batch.num_rows
            number = pa.array([checkpoint_id] * batch.num_rows, pa.int64())
            yield pa.RecordBatch.from_arrays([*batch.columns, number], names=names)
        if found != expected:
            msg = f"table {self._target}: checkpoint {checkpoint_id}: expected {expected} rows, found {found}"
            raise RuntimeError(msg)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
