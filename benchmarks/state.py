"""A stateful word count beside Structured Streaming's, and what a state costs as it grows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.harness import Figure, Findings, Measure, Series, Turn, interleave, medians, number, step
from benchmarks.place import Place
from benchmarks.state_words import DECLARATION, ROW_BYTES, batch_file, cold_look_up, filled, library_run
from twophase.spark.kept_state import KeptState, whole_state
from twophase.state.manifest import StateManifest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Structured Streaming at its best: as many partitions as cores, RocksDB, changes instead of snapshots; it looks for
#: new files less often, so that it takes nothing from the other side.
SETTINGS = {
    "spark.sql.shuffle.partitions": str(os.cpu_count()),
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.pollingDelay": "500ms",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.driver.memory": "4g",
}
NOW = datetime(2026, 11, 18, tzinfo=UTC)


@dataclass(frozen=True)
class Sizes:
    """How many keys are kept and touched, how many batches there are with Spark, and without."""

    keys: int
    many_keys: int
    touched: int
    rounds: int
    batches: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    with step(f"two states of {sizes.keys:,} keys, and one of {sizes.many_keys:,}"):
        few, other, many = (
            Kept(place.home / f"state-{name}", keys)
            for name, keys in (("few", sizes.keys), ("other", sizes.keys), ("many", sizes.many_keys))
        )
    with step("starting Spark"):
        spark = place.spark(SETTINGS)
    landing, files = place.home / "landing", count(1)
    with step(f"a stream with {sizes.keys:,} keys"):
        stream = Stream(spark, place.home, landing, sizes.keys)
    ours: dict[str, Callable[[Path], Mapping[str, float]]] = {
        "one job": partial(few.batch, spark, _same),
        "two frames": partial(other.batch, spark, _of_two_frames),
        "many keys": partial(many.batch, spark, _same),
    }
    sides: dict[str, Turn] = {
        name: partial(_turn, side, place.home / "batches", sizes, files) for name, side in ours.items()
    }
    sides["peer"] = partial(_turn, stream.batch, landing, sizes, files)
    with step("batches"):
        found = interleave(sides, rounds=sizes.rounds, warmup=max(2, sizes.rounds // 3), tell=True)
    stream.query.stop()
    scans = _scans(spark, place, many, sizes)
    with step(f"{sizes.batches:,} batches without Spark"):
        home = place.home / "library"
        library = library_run(home, filled(home, sizes.keys), sizes.batches, sizes.touched)
    early, late = (Series(tuple(library.looked_up[part])) for part in (slice(25, 75), slice(-50, None)))
    touched = sizes.touched * ROW_BYTES
    base = [(rows, seconds) for rows, seconds, whole in library.merges if whole]
    every = [seconds / rows * 1e6 for rows, seconds in base] or [0.0]
    mine, two, grown, peer = (found[name] for name in ("one job", "two frames", "many keys", "peer"))
    return Findings(
        compared=(
            f"a batch of {sizes.touched:,} words ÷ Structured Streaming's count on RocksDB with its changelog,"
            f" {sizes.keys:,} keys"
        ),
        figures=[
            Figure("output is the new state: one job", mine["whole"], peer["whole"], goal=0.6),
            Figure("the same, CPU of the process tree", mine["CPU"], peer["CPU"]),
            Figure("(output, new_state) of two frames", two["whole"], peer["whole"], goal=1.0),
            Figure("the same, CPU of the process tree", two["CPU"], peer["CPU"]),
            Figure(f"{sizes.many_keys:,} keys kept ÷ {sizes.keys:,}", grown["whole"], mine["whole"], goal=1.3),
            Figure("the same, CPU of the process tree", grown["CPU"], mine["CPU"]),
            Figure("bytes written ÷ those touched", _one(library.own_bytes / sizes.batches), _one(touched), 1.5, "B"),
            Figure("the same with merging", _one(library.all_bytes / sizes.batches), _one(touched), 6.0, "B"),
            Figure("CPU of a merge into the base, per million rows", _one(median(every)), goal=0.15),
            Figure(f"look-up, batch {sizes.batches:,} ÷ batch 50", late, early, goal=1.3),
            Figure("most runs looked into", _one(max(library.runs)), goal=48, unit=""),
            Figure("look-up with an empty page cache", _one(cold_look_up(many.home, many.state, sizes.touched))),
            Figure(f"reading all {sizes.many_keys:,} keys ÷ from Parquet", *scans, goal=1.5),
        ],
        profile={name: medians(parts) for name, parts in found.items()},
        notes=[
            "ours is read, counted, looked up, its run and its output made durable or written; without the record",
            "the peer's time is the one that it gives itself (triggerExecution), without its wait for new files",
            _largest(base),
        ],
    )


def _largest(merges: Sequence[tuple[int, float]]) -> str:
    rows, seconds = max(merges, default=(0, 0.0))
    return f"the largest merge had {rows:,} rows, and took {number(seconds)} s of CPU"


def _one(value: float) -> Series:
    return Series((float(value),))


def _turn(
    side: Callable[[Path], Mapping[str, float]], folder: Path, sizes: Sizes, files: count[int]
) -> Mapping[str, float]:
    seed = next(files)
    before = cpu_seconds()
    parts = side(batch_file(folder / f"{seed:06}.parquet", sizes.keys, sizes.touched, seed))
    return {**parts, "CPU": cpu_seconds() - before}


def cpu_seconds() -> float:
    """Return the CPU that this process, Spark and its workers have taken."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True)) if process.is_running()]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))


def _same(kept: KeptState, counts: DataFrame) -> tuple[DataFrame, DataFrame]:
    from pyspark.sql import functions

    total = functions.coalesce("n", functions.lit(0)) + functions.col("count")
    new_state = kept.lookup(counts).select("word", total.alias("n"))
    return new_state, new_state


def _of_two_frames(kept: KeptState, counts: DataFrame) -> tuple[DataFrame, DataFrame]:
    new_state, _ = _same(kept, counts)
    return new_state.selectExpr("word", "n", "n > 1 AS seen"), new_state


class Kept:
    """A state of ours, batch after batch."""

    def __init__(self, home: Path, keys: int) -> None:
        self.home = home
        self.state: StateManifest = filled(home, keys)
        self._number = count(1)

    def batch(
        self, spark: SparkSession, transform: Callable[[KeptState, DataFrame], Any], file: Path
    ) -> Mapping[str, float]:
        """Take one file through."""
        made, output = next(self._number), self.home / "output"
        start = time.perf_counter()
        kept = KeptState(
            spark, DECLARATION, self.home, self.state, name="words", run_name=f"{made:08}.r1.a1.bench", timestamp=NOW
        )
        frame, new_state = transform(kept, spark.read.schema("word string").parquet(str(file)).groupBy("word").count())
        with kept.staging(new_state, frame) as staged:
            planned = time.perf_counter()
            if staged.output is not None:
                staged.output.write.parquet(str(output))
            written = time.perf_counter()
            self.state = staged.manifest()
        done = time.perf_counter()
        shutil.rmtree(output)
        return {"whole": done - start, "plan": planned - start, "write": written - planned, "merge": done - written}


class Stream:
    """Structured Streaming's count over a landing folder; each batch writes its changed counts as Parquet."""

    def __init__(self, spark: SparkSession, home: Path, landing: Path, keys: int) -> None:
        batch_file(landing / "000000.parquet", keys, keys, 0)
        output = str(home / "stream-output")

        def write(frame: DataFrame, _number: int) -> None:
            frame.write.mode("overwrite").parquet(output)

        words = spark.readStream.schema("word string").option("maxFilesPerTrigger", 1).parquet(str(landing))
        counts = words.groupBy("word").count().writeStream.outputMode("update").foreachBatch(write)
        self.query: StreamingQuery = counts.option("checkpointLocation", str(home / "stream")).start()
        self.query.processAllAvailable()

    def batch(self, file: Path) -> Mapping[str, float]:
        """Let one file through, which has just come."""
        self.query.processAllAvailable()
        last = next(one for one in reversed(self.query.recentProgress) if one["numInputRows"])
        assert file.is_file()
        return {"whole": last["durationMs"]["triggerExecution"] / 1000}


def _scans(spark: SparkSession, place: Place, many: Kept, sizes: Sizes) -> tuple[Series, Series]:
    """Return how long Spark takes to read all rows of a state, and from Parquet."""
    parquet = str(place.home / "rows")
    with step("the same rows as Parquet"):
        whole_state(spark, many.home, many.state).write.parquet(parquet)

    def read(frame: Callable[[], DataFrame]) -> Mapping[str, float]:
        start = time.perf_counter()
        frame().write.format("noop").mode("overwrite").save()
        return {"whole": time.perf_counter() - start}

    sides: dict[str, Turn] = {
        "state": lambda: read(lambda: whole_state(spark, many.home, many.state)),
        "parquet": lambda: read(lambda: spark.read.parquet(parquet)),
    }
    found = interleave(sides, rounds=max(2, sizes.rounds // 4), tell=True)
    return found["state"]["whole"], found["parquet"]["whole"]


MEASURE = Measure(
    name="state",
    question="What does a stateful count cost beside Structured Streaming's, and as the state grows?",
    full=Sizes(keys=1_000_000, many_keys=10_000_000, touched=10_000, rounds=25, batches=2_000),
    quick=Sizes(keys=100_000, many_keys=1_000_000, touched=10_000, rounds=6, batches=200),
    tiny=Sizes(keys=2_000, many_keys=5_000, touched=500, rounds=2, batches=80),
    run=run,
)
