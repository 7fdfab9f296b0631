"""Two checkpoints of a state, a task of each fails after it wrote its runs; run by a test in a Spark that tries again.

`python state_retries.py HOME OUTPUT`: OUTPUT is `same` (the sink's job writes the runs) or `other` (a job of its own).
It prints what the state is in the end, how many files nobody lists, and how often a task failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from support.states.spark_state import SparkState
from twophase import State

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

ROWS = 400


def fails_once(home: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give all rows on, then fail in partition 0, the first time; by then the runs are written."""
    from pyspark import TaskContext

    yield from batches
    context = TaskContext.get()
    if context is not None and context.partitionId() == 0 and context.attemptNumber() == 0:
        (Path(home) / f"failed-{context.taskAttemptId()}").touch()
        msg = "this task fails once"
        raise RuntimeError(msg)


def checkpoint(spark: SparkSession, state: SparkState, add: int, *, same: bool) -> None:
    from pyspark.sql import DataFrame, functions

    home = str(state.home)
    kept = state.kept()
    counts = spark.range(ROWS).repartition(2).select(functions.col("id").alias("k"), functions.lit(add).alias("more"))
    total = functions.coalesce("n", functions.lit(0)) + functions.col("more")
    new_state = kept.lookup(counts).select("k", total.cast("bigint").alias("n"))
    output: DataFrame = new_state if same else new_state.select("n")
    with kept.staging(new_state, output) as staged:
        assert staged.output is not None
        failing = staged.output.mapInArrow(lambda batches: fails_once(home, batches), staged.output.schema)
        failing.write.parquet(str(state.home / f"output-{add}"))
        state.manifests.append(staged.manifest(ROWS if same else None))


def main(home: str, output: str) -> None:
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", value=False)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", 2)
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    state = SparkState(spark, Path(home), State(["k"], "k bigint, n bigint"))
    for add in (1, 2):
        checkpoint(spark, state, add, same=output == "same")
    found = {
        "rows": state.rows(),
        "strays": len(state.strays()),
        "failed": len(list(Path(home).glob("failed-*"))),
        "written": [spark.read.parquet(str(state.home / f"output-{add}")).count() for add in (1, 2)],
    }
    spark.stop()
    print(json.dumps(found))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
