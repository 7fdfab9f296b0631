"""A checkpoint into a Delta table, staged and promoted, beside Spark's own Delta writer in the same warm session."""

from __future__ import annotations

from functools import partial

from benchmarks.files import TIMES, Format, Sizes, run
from benchmarks.harness import Measure
from twophase import sinks

#: Spark's runtime for Delta: the peer's.
RUNTIME = {
    "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
FORMAT = Format(
    sinks.Delta,
    lambda writer, path: writer.format("delta").save(path),
    "format('delta')",
    goal=1.05,
    conf=RUNTIME,
    alike={
        "TIMESTAMP_MICROS": TIMES,
        # ours takes them from the footers, which have them anyway; Delta's writer computes them row by row once more
        "TIMESTAMP_MICROS and no statistics in its log": {**TIMES, "spark.databricks.delta.stats.collect": "false"},
    },
)

MEASURE = Measure(
    "delta",
    "What does exactly-once cost on top of Spark's own Delta writer, 1 GB of Parquet?",
    full=Sizes(files=8, file_mb=130, rounds=3),
    quick=Sizes(files=2, file_mb=25, rounds=3),
    tiny=Sizes(files=1, file_mb=1, rounds=1),
    run=partial(run, form=FORMAT),
)
