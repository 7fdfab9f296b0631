"""One checkpoint from Parquet into a Kafka topic, exactly once, beside Spark sending the same rows undecided."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Figure, Findings, Measure, Stopwatch, Turn, interleave, medians, step
from benchmarks.kafka_broker import KafkaPlace, declared, rows_sent, serving
from benchmarks.place import Place
from twophase import Pipeline, sources
from twophase.core.coordinator import Coordinator
from twophase.core.settings import data_path
from twophase.local.kafka import connector
from twophase.runner import InProcess, Runner
from twophase.sinks.kafka.sink import Kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: A record of 100 bytes, all of it random letters.
KEY, VALUE = 10, 90
PARTITIONS = 2
_GROUP = 500_000
#: Offsets that the end of a transaction takes in each partition.
_CONTROL = PARTITIONS


@dataclass(frozen=True)
class Sizes:
    """How many records are sent, from how many files, and how often."""

    records: int
    files: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    with step(f"writing {sizes.records:,} records as Parquet"):
        for seed in range(sizes.files):
            generate(data_path(f"landing/records/{seed:02d}.parquet"), sizes.records // sizes.files, seed)
    with serving(place) as kafka:
        with step("starting Spark"):
            spark = place.spark({"spark.jars": ",".join(map(str, connector()))})
        dsn = place.database("kafka")
        runs = partial(Runner, stager=InProcess(spark, _same), dsn=dsn)
        names = (f"sent_{turn}" for turn in count())
        sides: dict[str, Turn] = {
            "exactly once": lambda: ours(kafka, sizes, runs, next(names), "exactly_once"),
            "at least once": lambda: ours(kafka, sizes, runs, next(names), "at_least_once"),
            "Spark's writer": partial(plain, kafka, spark, sizes),
        }
        found = interleave(sides, rounds=sizes.rounds, tell=True)
    once, least, writer = found.values()
    return Findings(
        compared=f"a checkpoint of {sizes.records:,} records of 100 bytes, exactly once ÷ what is named",
        figures=[
            Figure("at least once, by the same sink", once["whole"], least["whole"], goal=1.5),
            Figure("Spark's Kafka writer as it comes", once["whole"], writer["whole"], goal=1.0),
            Figure("CPU: at least once, by the same sink", once["CPU"], least["CPU"]),
            Figure("CPU: Spark's Kafka writer as it comes", once["CPU"], writer["CPU"]),
        ],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=[
            "exactly once stages Parquet, makes it durable, checks and decides before it sends; the others only send",
            "at least once has batches of 1 MB and lingers for 20 ms; Spark's writer as it comes does not",
            "CPU is that of this process, Spark's Java and the broker",
        ],
    )


def ours(
    kafka: KafkaPlace, sizes: Sizes, runs: Callable[[Pipeline], Runner], name: str, delivery: str
) -> Mapping[str, float]:
    """Take one checkpoint of a new pipeline through, from opening the record to COMMITTED."""
    topic = kafka.make_topic(PARTITIONS)
    pipeline = Pipeline(
        name,
        reads={"records": sources.Files("landing/records", format="parquet")},
        transform=_same,
        writes={"topic": declared(topic, delivery=delivery)},
    )

    def run_one() -> None:
        with runs(pipeline) as runner:
            if runner.run() is None:
                msg = "expected a checkpoint, found no new input"
                raise RuntimeError(msg)

    os.sync()
    with Stopwatch(
        stage=(InProcess, "__call__"),
        check=(Kafka, "check"),
        commit=(Coordinator, "vote_and_commit"),
        promote=(Kafka, "promote"),
    ) as stopwatch:
        taken = kafka.taken(run_one)
        parts = stopwatch.take()
    rows_sent(kafka, topic, PARTITIONS, sizes.records, _CONTROL)
    kafka.delete_topic(topic)
    return {**taken, **parts}


def plain(kafka: KafkaPlace, spark: SparkSession, sizes: Sizes) -> Mapping[str, float]:
    """Send the same rows as a user does it without us."""
    topic = kafka.make_topic(PARTITIONS)
    os.sync()
    frame = spark.read.parquet(str(data_path("landing/records")))
    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", kafka.broker.address())
    taken = kafka.taken(writer.option("topic", topic).save)
    rows_sent(kafka, topic, PARTITIONS, sizes.records, 0)
    kafka.delete_topic(topic)
    return taken


def _same(records: DataFrame) -> DataFrame:
    return records


def generate(path: Path, records: int, seed: int) -> None:
    """Write records of random letters to a Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    with pq.ParquetWriter(path, _records(random, 1).schema) as writer:
        for first in range(0, records, _GROUP):
            writer.write_table(_records(random, min(_GROUP, records - first)))


def _records(random: np.random.Generator, rows: int) -> pa.Table:
    return pa.table({"key": _letters(random, rows, KEY), "value": _letters(random, rows, VALUE)})


def _letters(random: np.random.Generator, rows: int, length: int) -> pa.Array:
    letters = pa.py_buffer(random.bytes(rows * length // 2).hex().encode())
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * length, length, dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), rows, [None, offsets, letters])


MEASURE = Measure(
    "kafka-send",
    "What does exactly-once cost on top of Spark's own way of sending 5M records to Kafka?",
    full=Sizes(records=5_000_000, files=4, rounds=3),
    quick=Sizes(records=500_000, files=2, rounds=3),
    tiny=Sizes(records=1000, files=1, rounds=1),
    run=run,
)
