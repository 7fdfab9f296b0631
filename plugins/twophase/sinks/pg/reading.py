"""Appended rows as a DataFrame: each checkpoint is read by an executor, through Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Output
from twophase.sinks import paths
from twophase.sinks.pg import database
from twophase.sinks.pg.database import Table
from twophase.sinks.pg.staging import CHECKPOINT

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def frame(spark: SparkSession, conn_id: str, target: Table, outputs: Sequence[Output]) -> DataFrame:
    """Return the rows of these revisions, with their checkpoint's number in the column `checkpoint`."""
    schema = max((output.manifest["schema"] for output in outputs), key=len)
    wanted = [(output.key.checkpoint_id, int(output.manifest["rows"])) for output in outputs]
    numbers = spark.createDataFrame(wanted, "checkpoint bigint, rows bigint").repartition(max(len(wanted), 1))
    reader = Reader(database.dsn(conn_id), target, [name for name, _ in schema])
    ddl = f"{paths.ddl(schema)}, checkpoint bigint"
    return numbers.mapInArrow(reader, ddl)


class Reader:
    """Reads the rows of some checkpoints; its text shows no password."""

    def __init__(self, dsn: str, target: Table, columns: Sequence[str]) -> None:
        """Name the database, the table and the columns."""
        self._dsn = dsn
        self._target = target
        self._columns = list(columns)

    def __repr__(self) -> str:
        """Name the table only."""
        return f"Reader({self._target})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the checkpoints that the rows name."""
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(self._dsn) as connection, connection.cursor() as cursor:
            for batch in batches:
                for row in batch.to_pylist():
                    yield from self._read(cursor, row["checkpoint"], row["rows"])

    def _read(self, cursor: Any, checkpoint_id: int, expected: int) -> Iterator[pa.RecordBatch]:  # noqa: ANN401 - a cursor
        import pyarrow as pa

        names = ", ".join(_quoted(name) for name in self._columns)
        target = ".".join(map(_quoted, self._target))
        query = f"SELECT {names} FROM {target} WHERE {_quoted(CHECKPOINT)} = $1"  # noqa: S608 - quoted names
        cursor.execute(query, (checkpoint_id,))
        found = 0
        for batch in cursor.fetch_record_batch():
            found += batch.num_rows
            number = pa.array([checkpoint_id] * batch.num_rows, pa.int64())
            yield pa.RecordBatch.from_arrays([*batch.columns, number], names=[*self._columns, "checkpoint"])
        if found != expected:
            msg = f"table {self._target}: checkpoint {checkpoint_id}: expected {expected} rows, found {found}"
            raise RuntimeError(msg)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
