"""A checkpoint into a Delta table, staged and promoted, beside Spark's own Delta writer in the same warm session."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.files import Sizes, generate, settle_down, transform
from benchmarks.harness import Figure, Findings, Measure, Stopwatch, interleave, medians, number, step
from benchmarks.place import Place
from twophase import Pipeline, sinks, sources
from twophase.core.coordinator import Coordinator
from twophase.core.settings import data_path
from twophase.running import InProcess, Runner
from twophase.sinks import disk
from twophase.sinks.lake import Lake
from twophase.staging import Staging

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark's runtime for Delta: the peer's.
RUNTIME = {
    "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    landing = data_path("landing/orders")
    with step(f"writing {sizes.files} Parquet files of {sizes.file_mb} MB"):
        for seed in range(sizes.files):
            generate(landing / f"{seed:02d}.parquet", sizes.file_mb * 1_000_000, seed)
    with step("starting Spark with Delta's runtime"):
        spark = place.spark(RUNTIME)
    dsn = place.database("delta")
    input_bytes = sum(path.stat().st_size for path in landing.iterdir())
    names = (f"orders_{turn}" for turn in count())
    found = interleave(
        {"ours": lambda: ours(spark, dsn, next(names)), "peer": lambda: peer(spark)}, rounds=sizes.rounds, tell=True
    )
    mine, theirs = found["ours"], found["peer"]
    return Findings(
        compared=f"a checkpoint ÷ format('delta'), {input_bytes / 1e6:,.0f} MB of input",
        figures=[Figure("from begin to committed", mine["whole"], theirs["whole"], goal=1.05)],
        profile={"ours": medians(mine), "peer": medians(theirs)},
        notes=[
            "the peer's output is not durable when its write ends, ours is",
            f"making it durable afterwards took the peer {number(theirs['sync afterwards'].median)} s",
        ],
    )


def ours(spark: SparkSession, dsn: str, name: str) -> Mapping[str, float]:
    """Take one checkpoint of a new pipeline through: to it every file is new."""
    pipeline = Pipeline(
        name,
        reads={"orders": sources.Files("landing/orders", format="parquet")},
        transform=transform,
        writes={"lake": sinks.Delta(f"lake/{name}")},
    )
    settle_down()
    with watch() as stopwatch:
        start = time.perf_counter()
        with Runner(pipeline, InProcess(spark, transform), dsn=dsn) as runner:
            done = runner.run()
        whole = time.perf_counter() - start
        parts = stopwatch.take()
    if done is None:
        msg = "expected a checkpoint, found no new input"
        raise RuntimeError(msg)
    shutil.rmtree(data_path(f"lake/{name}"))
    parts["Spark's write"] = parts.pop("stage") - parts["seal"]
    return {"whole": whole, **parts, "other": whole - sum(parts.values())}


def watch() -> Stopwatch:
    """Watch the parts of a checkpoint."""
    return Stopwatch(
        **{
            "begin": (Coordinator, "begin"),
            "stage": (InProcess, "__call__"),
            "seal": (Lake, "seal"),
            "check and vote": (Staging, "_vote"),
            "commit and promote": (Coordinator, "commit"),
        }
    )


def peer(spark: SparkSession) -> Mapping[str, float]:
    """Do the same job as a user does it without us; how long the disk still needs is told apart."""
    target = data_path("plain/orders")
    settle_down()
    start = time.perf_counter()
    transform(spark.read.parquet(str(data_path("landing/orders")))).write.format("delta").save(str(target))
    whole = time.perf_counter() - start
    start = time.perf_counter()
    for path, _ in disk.walk(target):
        disk.seal_file(target / path)
    durable = time.perf_counter() - start
    shutil.rmtree(target)
    return {"whole": whole, "sync afterwards": durable}


MEASURE = Measure(
    "delta",
    "What does exactly-once cost on top of Spark's own Delta writer, 1 GB of Parquet?",
    full=Sizes(files=8, file_mb=130, rounds=3),
    quick=Sizes(files=2, file_mb=25, rounds=3),
    tiny=Sizes(files=1, file_mb=1, rounds=1),
    run=run,
)
