"""One checkpoint from Parquet to Parquet, beside Spark's own write of the same job in the same session."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Figure, Findings, Measure, Stopwatch, Turn, interleave, medians, number, step
from benchmarks.place import Place
from twophase import Pipeline, sinks, sources
from twophase.attempt import Staging
from twophase.core.coordinator import Coordinator
from twophase.core.settings import data_path
from twophase.runner import InProcess, Runner
from twophase.sinks.base import Sink
from twophase.storage import base, disk
from twophase.storage.base import configured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

#: About what one row takes in the file.
ROW_BYTES = 58
WORDS = 1000
#: Times in 8 bytes, as table formats have them; Spark's own default is INT96.
TIMES = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
GROUP = 500_000


@dataclass(frozen=True)
class Sizes:
    """How much is read, and how often."""

    files: int
    file_mb: int
    rounds: int


def transform(orders: DataFrame) -> DataFrame:
    """Do what a small pipeline does: keep most rows, compute a column."""
    return orders.where("quantity > 0").selectExpr("*", "amount * quantity AS total")


@dataclass(frozen=True)
class Format:
    """What is written: by a sink, and by Spark as a user does it without us."""

    sink: Callable[[str], Sink]
    write: Callable[[DataFrameWriter, str], None]
    #: How the peer's call is named in the report.
    called: str
    goal: float
    #: What the session needs for the peer.
    conf: Mapping[str, str] = field(default_factory=dict)
    #: The peer again, made to do as ours does in what is named: settings of the session in its turn.
    alike: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    goal_alike: float = 1.05


def run(place: Place, sizes: Sizes, *, form: Format) -> Findings:
    """Measure."""
    landing = data_path("landing/orders")
    with step(f"writing {sizes.files} Parquet files of {sizes.file_mb} MB"):
        for seed in range(sizes.files):
            generate(landing / f"{seed:02d}.parquet", sizes.file_mb * 1_000_000, seed)
    with step("starting Spark"):
        spark = place.spark(form.conf)
    dsn = place.database("lake")
    input_bytes = sum(path.stat().st_size for path in landing.iterdir())
    names = (f"orders_{turn}" for turn in count())
    written: dict[str, str] = {}
    sides: dict[str, Turn] = {
        "ours": lambda: ours(spark, dsn, form, next(names), written),
        "peer": lambda: peer(spark, form, {}, written, "peer"),
        **{name: partial(peer, spark, form, conf, written, name) for name, conf in form.alike.items()},
    }
    found = interleave(sides, rounds=sizes.rounds, tell=True)
    mine, theirs = found["ours"], found["peer"]
    parts = ("open", "begin", "Spark's write", "seal", "check and vote", "commit and promote", "other")
    threads = ("seal: fsync and checksum", "seal: footers")
    return Findings(
        compared=f"a checkpoint ÷ {form.called}, {input_bytes / 1e6:,.0f} MB of input",
        figures=[
            Figure("from begin to committed", mine["whole"], theirs["whole"], goal=form.goal),
            *(
                Figure(f"the same ÷ the peer with {name}", mine["whole"], found[name]["whole"], goal=form.goal_alike)
                for name in form.alike
            ),
            Figure("Spark's part of it", mine["Spark's write"], theirs["whole"]),
        ],
        profile={
            "ours": medians(mine, parts),
            f"ours, inside seal, over {base.THREADS} threads": medians(mine, threads),
            **{name: medians(found[name]) for name in ("peer", *form.alike)},
        },
        notes=[
            *(f"{name} wrote {what}" for name, what in written.items()),
            "the peer's output is not durable when its write ends, ours is",
            f"making it durable afterwards took the peer {number(theirs['sync afterwards'].median)} s",
        ],
    )


def ours(spark: SparkSession, dsn: str, form: Format, name: str, written: dict[str, str]) -> Mapping[str, float]:
    """Take one checkpoint of a new pipeline through: to it every file is new."""
    sink = form.sink(f"lake/{name}")
    pipeline = Pipeline(
        name,
        reads={"orders": sources.Files("landing/orders", format="parquet")},
        transform=transform,
        writes={"lake": sink},
    )
    settle_down()
    with watch(type(sink)) as stopwatch:
        start = time.perf_counter()
        with Runner(pipeline, InProcess(spark, transform), dsn=dsn) as runner:
            opened = time.perf_counter() - start
            done = runner.run()
        whole = time.perf_counter() - start
        parts = stopwatch.take()
    if done is None:
        msg = "expected a checkpoint, found no new input"
        raise RuntimeError(msg)
    written["ours"] = described(data_path(f"lake/{name}"))
    shutil.rmtree(data_path("lake"))
    parts["Spark's write"] = parts.pop("stage") - parts["seal"]
    inside = {part: parts.pop(part) for part in ("seal: fsync and checksum", "seal: footers")}
    return {"whole": whole, "open": opened, **parts, "other": whole - opened - sum(parts.values()), **inside}


def watch(sink: type[Sink]) -> Stopwatch:
    """Watch the parts of a checkpoint."""
    return Stopwatch(
        **{
            "begin": (Coordinator, "open"),
            "stage": (InProcess, "__call__"),
            "seal": (sink, "seal"),
            "seal: fsync and checksum": (disk, "seal_file"),
            "seal: footers": (base, "count_rows"),
            "check": (Staging, "_check"),
            "vote, commit and promote": (Coordinator, "vote_and_commit"),
        }
    )


def peer(
    spark: SparkSession, form: Format, conf: Mapping[str, str], written: dict[str, str], name: str
) -> Mapping[str, float]:
    """Do the same job as a user does it without us; how long the disk still needs is told apart."""
    target = data_path("plain/orders")
    settle_down()
    with configured(spark, conf):
        start = time.perf_counter()
        form.write(transform(spark.read.parquet(str(data_path("landing/orders")))).write, str(target))
        whole = time.perf_counter() - start
    written[name] = described(target)
    start = time.perf_counter()
    for path, _ in disk.walk(target):
        disk.seal_file(target / path)
    durable = time.perf_counter() - start
    shutil.rmtree(target)
    return {"whole": whole, "sync afterwards": durable}


def described(folder: Path) -> str:
    """Say what was written: how many files of which size, how times are kept, the codec, statistics in the footer."""
    files = [path for path in folder.rglob("*.parquet") if "_delta_log" not in path.parts]
    footer = pq.read_metadata(files[0])
    chunks = [footer.row_group(0).column(number) for number in range(footer.num_columns)]
    times = next(chunk for chunk in chunks if chunk.path_in_schema == "at")
    with_statistics = sum(chunk.is_stats_set for chunk in chunks)
    size = sum(path.stat().st_size for path in files) / 1e6
    return (
        f"{len(files)} files of {size:,.0f} MB, times as {times.physical_type}, {times.compression},"
        f" statistics of {with_statistics} of {len(chunks)} columns"
    )


def settle_down() -> None:
    """Let the disk finish what came before, so that it is charged to nobody."""
    os.sync()


def generate(path: Path, size: int, seed: int) -> None:
    """Write a Parquet file of about this size that does not compress away: most of it is random."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    words = np.array([f"word-{number}" for number in range(WORDS)])
    rows = max(size // ROW_BYTES, 1)
    new = path.with_name(f"_{path.name}")
    with pq.ParquetWriter(new, _orders(random, words, 0, 1).schema) as writer:
        for first, some in _groups(rows):
            writer.write_table(_orders(random, words, seed * rows + first, some))
    new.rename(path)


def _groups(rows: int) -> Iterator[tuple[int, int]]:
    for first in range(0, rows, GROUP):
        yield first, min(GROUP, rows - first)


def _orders(random: np.random.Generator, words: np.ndarray, first: int, rows: int) -> pa.Table:
    """Make some orders: a number, a customer, a reference of 32 letters, an amount, a quantity, a word, a time."""
    letters = pa.py_buffer(random.bytes(rows * 16).hex().encode())
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * 32, 32, dtype=np.int32))
    return pa.table(
        {
            "id": pa.array(np.arange(first, first + rows)),
            "customer": pa.array(random.integers(0, 10_000_000, rows)),
            "reference": pa.Array.from_buffers(pa.string(), rows, [None, offsets, letters]),
            "amount": pa.array(random.random(rows) * 1000),
            "quantity": pa.array(random.integers(0, 100, rows, dtype=np.int32)),
            "word": pa.array(words[random.integers(0, len(words), rows)]),
            "at": pa.array(
                1_700_000_000_000_000 + np.cumsum(random.integers(0, 1000, rows)), pa.timestamp("us", "UTC")
            ),
        }
    )


MEASURE = Measure(
    "files",
    "What does exactly-once cost on top of Spark's own write of 1 GB of Parquet?",
    full=Sizes(files=8, file_mb=130, rounds=3),
    quick=Sizes(files=2, file_mb=25, rounds=3),
    tiny=Sizes(files=1, file_mb=1, rounds=1),
    run=partial(
        run,
        form=Format(
            sinks.Files,
            lambda writer, path: writer.parquet(path),
            "df.write.parquet",
            goal=1.10,
            alike={"TIMESTAMP_MICROS": TIMES},
        ),
    ),
)
