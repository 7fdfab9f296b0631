"""Loads a staging table by Spark's own JDBC writer, if executors lack the ADBC wheel. `staging_table.load` calls it.

The writer has one transaction per task. So a task that Spark runs twice, or whose COMMIT was not acknowledged, is in
the table twice. Therefore each row is loaded with the number of its partition, and `xmin` says which transaction
inserted it. Of several runs of a partition one is kept. Then the column with the number is dropped under a lock: a run
that is still under way, or comes later, does not find the column and fails.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from twophase.core import connections
from twophase.core.errors import ConfigError
from twophase.storage import database
from twophase.storage.database import TableName
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

#: The column with the number of a row's partition, while rows are loaded.
PART = "_twophase_part"
DRIVER = "org.postgresql.Driver"
_NO_DRIVER = re.compile(rf"ClassNotFoundException: {re.escape(DRIVER)}")
#: How many tasks look for the wheel: a few on each executor of a small cluster.
_PROBES = 8
#: libpq's name of an option → the JDBC driver's; other options have the same name in both.
_OPTIONS = {"connect_timeout": "connectTimeout", "application_name": "ApplicationName"}


#: Whether executors lack the wheel, by application and by the Python that they run.
_answers: dict[tuple[str, str], bool] = {}


def is_needed(spark: SparkSession) -> bool:
    """Ask the executors, once, whether one of them lacks the wheel; their Python may be another than the driver's."""
    from pyspark.sql import functions

    context = spark.sparkContext
    which = (str(context.applicationId), str(context.pythonExec))
    if which not in _answers:

        def lacks(_: int) -> bool:
            """Say whether this Python cannot load by ADBC; a local function, since executors may lack twophase, too."""
            from importlib.util import find_spec

            return any(find_spec(name) is None for name in ("adbc_driver_postgresql", "pyarrow", "twophase"))

        lacking = functions.udf(lacks, "boolean", useArrow=False)
        asked = spark.range(0, _PROBES, 1, _PROBES).select(lacking("id").alias("lacking"))
        _answers[which] = any(row.lacking for row in asked.collect())
    return _answers[which]


def load(which: str, frame: DataFrame, conn_id: str, table: TableName, parts: TableName) -> None:
    """Let the executors load every partition, then keep one run of each."""
    from psycopg2 import sql
    from pyspark.sql import functions

    if wrong := next((name for name in frame.columns if '"' in name), None):
        msg = f"{which}: column {wrong!r}: the JDBC writer cannot write a name with a quote in it; rename it"
        raise ConfigError(msg)
    with database.transaction(conn_id) as cursor:
        cursor.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {} integer").format(table.sql, sql.Identifier(PART)))
    columns = [_written(functions.col(quoted(field.name)), field.dataType, field.name) for field in frame.schema.fields]
    numbered = frame.select(*columns, functions.spark_partition_id().alias(PART))
    more = {
        "dbtable": f'"{table.schema}"."{table.name}"',  # both names are ours: letters, digits and _
        "reWriteBatchedInserts": "true",
        "stringtype": "unspecified",  # lets the server read a text as its column's type
    }
    numbered.write.format("jdbc").options(**options(which, conn_id), **more).mode("append").save()
    with database.transaction(conn_id) as cursor:
        settle(cursor, table, parts)


def settle(cursor: Any, table: TableName, parts: TableName) -> None:  # noqa: ANN401 - a cursor
    """Keep one run of each partition, count its rows, and make every later run fail."""
    from psycopg2 import sql

    part = sql.Identifier(PART)
    cursor.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(table.sql))
    runs = sql.SQL("SELECT {0}, xmin::text, count(*) FROM {1} GROUP BY 1, 2 ORDER BY 1, 2")
    cursor.execute(runs.format(part, table.sql))
    kept: dict[int, int] = {}
    for number, run, rows in cursor.fetchall():
        if number in kept:
            again = sql.SQL("DELETE FROM {} WHERE {} = %s AND xmin::text = %s").format(table.sql, part)
            cursor.execute(again, (number, run))
        else:
            kept[number] = rows
    for number, rows in kept.items():
        cursor.execute(sql.SQL("INSERT INTO {} VALUES (%s, %s)").format(parts.sql), (number, rows))
    cursor.execute(sql.SQL("ALTER TABLE {} DROP COLUMN {}").format(table.sql, part))


def options(which: str, conn_id: str) -> dict[str, str]:
    """Return the options by which Spark reaches a database; Spark hides the password and the URL in what it prints."""
    found = connections.required(conn_id)
    host = found.host or "localhost"
    if host.startswith("/"):
        msg = f"{which}: connection {conn_id}: the JDBC driver knows no sockets of files; give a host, or the wheel"
        raise ConfigError(msg)
    place = f"[{host}]" if ":" in host else host
    extra = {
        _OPTIONS.get(name, name): str(value)
        for name, value in found.extra.items()
        if isinstance(value, str | int | float)
    }
    return {
        **extra,
        "options": database.options(found.extra),
        "url": f"jdbc:postgresql://{place}:{found.port or 5432}/{found.schema or ''}",
        "driver": DRIVER,
        "user": found.login or "",
        "password": found.password or "",
    }


def lacks_driver(which: str, error: Exception) -> ConfigError | None:
    """Return the error that says that Spark lacks the JDBC driver, if that is the cause; else None."""
    if not _NO_DRIVER.search(str(error)):
        return None
    return ConfigError(
        f"{which}: the executors lack the ADBC wheel, and Spark PostgreSQL's JDBC driver; install"
        " twophase[postgres] where Spark runs, or add org.postgresql:postgresql to spark.jars.packages"
    )


# --- values ----------------------------------------------------------------------------------------------------------


def _written(column: Column, kind: DataType, name: str) -> Column:
    """Return a column for the writer: times and arrays as texts, since it would read times in Java's time zone."""
    from pyspark.sql import types

    texts = types.DateType | types.TimestampType | types.TimestampNTZType | types.ArrayType
    return _text(column, kind).alias(name) if isinstance(kind, texts) else column


def _text(column: Column, kind: DataType) -> Column:
    """Return a value as text that PostgreSQL reads alike in any session's time zone."""
    from pyspark.sql import functions, types

    if isinstance(kind, types.ArrayType):
        return _array(column, kind.elementType)
    if isinstance(kind, types.TimestampType):
        seconds = functions.unix_micros(column).cast("decimal(20,0)") / functions.lit(1_000_000).cast("decimal(7,0)")
        zero = functions.lit(0)
        since = functions.make_dt_interval(zero, zero, zero, seconds.cast("decimal(18,6)"))
        at = functions.expr("timestamp_ntz'1970-01-01 00:00:00'") + since
        return functions.concat(at.cast("string"), functions.lit("+00"))
    if isinstance(kind, types.BinaryType):
        return functions.concat(functions.lit("\\x"), functions.hex(column))
    return column.cast("string")


def _array(column: Column, kind: DataType) -> Column:
    """Return an array as text for PostgreSQL: each element in quotes, except NULL."""
    from pyspark.sql import functions

    def element(value: Column) -> Column:
        escaped = functions.regexp_replace(_text(value, kind), r'(["\\])', r"\\$1")
        quoted = functions.concat(functions.lit('"'), escaped, functions.lit('"'))
        return functions.when(value.isNull(), functions.lit("NULL")).otherwise(quoted)

    joined = functions.array_join(functions.transform(column, element), ",")
    return functions.concat(functions.lit("{"), joined, functions.lit("}"))
