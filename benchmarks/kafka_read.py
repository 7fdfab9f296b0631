"""A checkpoint that reads Kafka beside Spark's own read of the same offsets, and what begin asks of many partitions."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.harness import Figure, Findings, Measure, Stopwatch, Turn, interleave, medians, step
from benchmarks.kafka_broker import CONN_ID, KafkaPlace, serving
from benchmarks.place import Place
from benchmarks.workload import Linked
from twophase import Pipeline, sinks, sources
from twophase.core.coordinator import Coordinator
from twophase.core.settings import data_path
from twophase.local.kafka import connector
from twophase.runner import InProcess, Runner
from twophase.sinks.files.sink import Files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4
VALUE = b"v" * 90
#: What ours asks of Spark's reader beside the range: nothing that was aborted, and the headers.
_ALIKE = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}


@dataclass(frozen=True)
class Records:
    """How many records are read, and how often."""

    records: int
    rounds: int


@dataclass(frozen=True)
class Partitions:
    """How many partitions a topic has, and how often a checkpoint begins."""

    partitions: int
    rounds: int


def produce(kafka: KafkaPlace, topic: str, records: int, partitions: int) -> None:
    """Send records of 100 bytes, to each partition as many."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.broker.address(), "linger.ms": 20, "log_level": 0})
    for number in range(records):
        while True:
            try:
                producer.produce(topic, VALUE, f"{number:010d}", number % partitions)
                break
            except BufferError:
                producer.poll(0.05)
    if producer.flush(600):
        msg = f"topic {topic}: not everything was sent"
        raise RuntimeError(msg)


# --- a checkpoint that reads -----------------------------------------------------------------------------------------


def run(place: Place, sizes: Records) -> Findings:
    """Measure a checkpoint."""
    with serving(place) as kafka:
        topic = kafka.make_topic(PARTITIONS)
        with step(f"sending {sizes.records:,} records"):
            produce(kafka, topic, sizes.records, PARTITIONS)
        with step("starting Spark"):
            spark = place.spark({"spark.jars": ",".join(map(str, connector()))})
        runs = partial(Runner, stager=InProcess(spark, _values), dsn=place.database("kafka"))
        names = (f"read_{turn}" for turn in count())
        sides: dict[str, Turn] = {
            "ours": lambda: ours(kafka, topic, runs, next(names)),
            "peer": partial(plain, kafka, topic, spark, {}),
            "alike": partial(plain, kafka, topic, spark, _ALIKE),
        }
        found = interleave(sides, rounds=sizes.rounds, tell=True)
    mine, theirs, alike = found.values()
    return Findings(
        compared=f"a checkpoint of {sizes.records:,} records of Kafka into Parquet ÷ Spark's own read and write",
        figures=[
            Figure("from begin to committed", mine["whole"], theirs["whole"], goal=1.05),
            Figure("the same ÷ the peer with headers, committed records only", mine["whole"], alike["whole"]),
            Figure("Spark's part of it", mine["Spark's job"], theirs["whole"]),
            Figure("CPU", mine["CPU"], theirs["CPU"]),
        ],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=[
            "ours refuses values that are no UTF-8, and makes its Parquet durable, with a checksum; the peer does not",
            "CPU is that of this process, Spark's Java and the broker",
        ],
    )


def ours(kafka: KafkaPlace, topic: str, runs: Callable[[Pipeline], Runner], name: str) -> Mapping[str, float]:
    """Take one checkpoint of a new pipeline through: to it every record is new."""
    pipeline = Pipeline(
        name,
        reads={"records": sources.Kafka(topic, conn_id=CONN_ID, start="earliest")},
        transform=_values,
        writes={"lake": sinks.Files(f"lake/{name}")},
    )

    def run_one() -> None:
        with runs(pipeline) as runner:
            if runner.run() is None:
                msg = "expected a checkpoint, found no new input"
                raise RuntimeError(msg)

    os.sync()
    with Stopwatch(
        begin=(Coordinator, "open"),
        stage=(InProcess, "__call__"),
        seal=(Files, "seal"),
        commit=(Coordinator, "vote_and_commit"),
    ) as stopwatch:
        taken = kafka.taken(run_one)
        parts = stopwatch.take()
    shutil.rmtree(data_path("lake"))
    parts["Spark's job"] = parts.pop("stage") - parts["seal"]
    return {**taken, **parts}


def plain(kafka: KafkaPlace, topic: str, spark: SparkSession, more: Mapping[str, str]) -> Mapping[str, float]:
    """Read the same offsets as a user does it without us, who has asked for the ends before."""
    ends = kafka.ends(topic, PARTITIONS)
    os.sync()
    options = {
        "kafka.bootstrap.servers": kafka.broker.address(),
        "assign": json.dumps({topic: sorted(ends)}),
        "startingOffsets": json.dumps({topic: dict.fromkeys(map(str, ends), 0)}),
        "endingOffsets": json.dumps({topic: {str(number): end for number, end in ends.items()}}),
        **more,
    }
    target = data_path("plain/records")

    def write() -> None:
        frame = spark.read.format("kafka").options(**options).load()
        frame.selectExpr("CAST(value AS STRING) AS value").write.parquet(str(target))

    taken = kafka.taken(write)
    shutil.rmtree(target)
    return taken


def _values(records: DataFrame) -> DataFrame:
    return records.select("value")


MEASURE = Measure(
    "kafka-read",
    "What does a checkpoint cost on top of Spark's own read of the same offsets of Kafka?",
    full=Records(records=5_000_000, rounds=5),
    quick=Records(records=500_000, rounds=3),
    tiny=Records(records=1000, rounds=1),
    run=run,
)


# --- begin with many partitions --------------------------------------------------------------------------------------


def run_begin(place: Place, sizes: Partitions) -> Findings:
    """Measure begin."""
    with serving(place) as kafka:
        with step(f"creating {sizes.partitions} partitions"):
            topic = kafka.make_topic(sizes.partitions)
        pipeline = Pipeline(
            "begin",
            reads={"records": sources.Kafka(topic, conn_id=CONN_ID, start="earliest")},
            transform=_values,
            writes={"lake": sinks.Files("lake/begin")},
        )
        with Runner(pipeline, Linked(), dsn=place.database("kafka")) as runner:
            sides = {
                "ours": partial(begin, kafka, topic, sizes.partitions, runner),
                "peer": partial(ask, kafka, topic, sizes.partitions),
            }
            found = interleave(sides, rounds=sizes.rounds, warmup=2)
    mine, theirs = found.values()
    return Findings(
        compared=f"{sizes.partitions} partitions ÷ one metadata and one list_offsets call of a new client",
        figures=[
            Figure("begin, its transaction in the record included", mine["begin"], theirs["asked"], goal=1.5),
            Figure("what it asks of the broker", mine["discover"], theirs["asked"]),
        ],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=["each partition has a new record; begin also asks where each begins, and writes a range for each"],
    )


def begin(kafka: KafkaPlace, topic: str, partitions: int, runner: Runner) -> Mapping[str, float]:
    """Send a record to each partition, take a checkpoint through, and tell how long its begin took."""
    produce(kafka, topic, partitions, partitions)
    with Stopwatch(begin=(Coordinator, "open"), discover=(sources.Kafka, "discover")) as stopwatch:
        if runner.run() is None:
            msg = "expected a checkpoint, found no new input"
            raise RuntimeError(msg)
        return stopwatch.take()


def ask(kafka: KafkaPlace, topic: str, partitions: int) -> Mapping[str, float]:
    """Ask what nobody can do without: the topic's partitions, and where they end."""
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    start = time.perf_counter()
    admin = AdminClient({"bootstrap.servers": kafka.broker.address(), "log_level": 0})
    numbers = admin.list_topics(topic, timeout=30).topics[topic].partitions
    wanted = {TopicPartition(topic, number): OffsetSpec.latest() for number in numbers}
    found = admin.list_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED)
    ends = [one.result(30).offset for one in found.values()]
    asked = time.perf_counter() - start
    if len(ends) != partitions:
        msg = f"expected {partitions} partitions, found {len(ends)}"
        raise RuntimeError(msg)
    return {"asked": asked}


BEGIN = Measure(
    "kafka-begin",
    "What does begin cost with 200 partitions, beside the two questions that nobody can do without?",
    full=Partitions(partitions=200, rounds=30),
    quick=Partitions(partitions=200, rounds=10),
    tiny=Partitions(partitions=4, rounds=1),
    run=run_begin,
)
