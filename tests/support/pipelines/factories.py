"""Landing folders, pipelines, a stager without Spark, and readers that did not write the table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from twophase import Pipeline, sinks, sources
from twophase.core.checkpoint import Input, Json, Revision
from twophase.core.failpoints import hit
from twophase.core.manifest import Column
from twophase.core.ports import Opened
from twophase.core.settings import data_path
from twophase.runner import Runner, script
from twophase.sinks.base import Sink
from twophase.sinks.files.sink import Files
from twophase.sinks.kafka.sink import Kafka
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.write_ahead.sink import WriteAhead
from twophase.sources.base import Source
from twophase.sources.fixed_files import FixedFiles
from twophase.sources.kafka import Kafka as KafkaSource
from twophase.spark.plan import Plan
from twophase.storage.kafka_cluster import Place
from twophase.storage.kafka_reader import KafkaReader

Row = dict[str, Any]


def land(name: str, rows: Iterable[Row], folder: str = "landing/words") -> Path:
    """Write one JSON file of rows into a landing folder, under its name only once it is whole."""
    path = data_path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"_{path.name}")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return new.rename(path)


def numbered(file: int, rows: int = 10) -> list[Row]:
    """Return the rows of a file, which no other file has."""
    return [{"id": file * rows + i, "word": f"w{i % 7}", "frequency": i} for i in range(rows)]


def land_words(files: int = 1, rows: int = 10, start: int = 0) -> list[Row]:
    """Write files of numbered rows, each row in them once; return all rows."""
    made: list[Row] = []
    for number in range(start, start + files):
        batch = numbered(number, rows)
        land(f"{number:06d}.json", batch)
        made += batch
    return made


def words_pipeline(
    name: str = "words",
    *,
    transform: str | Callable[..., Any] = "word_count:copy",
    writes: Mapping[str, Sink] | None = None,
    **source: Any,
) -> Pipeline:
    """Declare a pipeline from a landing folder of JSON to one Parquet table, unless told otherwise."""
    data_path("landing/words").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        name,
        reads={"words": sources.Files("landing/words", format="json", **source)},
        transform=transform,
        writes=writes or {"lake": sinks.Files(f"lake/{name}")},
    )


SCHEMA = (Column("id", "bigint"), Column("word", "string"), Column("frequency", "bigint"))
BAD_SCHEMA = (Column("reason", "string"), Column("raw", "string"), Column("file", "string"), Column("line", "bigint"))


Change = Callable[[list[Row], Plan], list[Row]]


class PreStaged:
    """Stages without Spark: copies the fixed input with pyarrow, then seals it as after a Spark job.

    Everything but the Spark job itself is the shipped code, so hundreds of crashes fit in minutes. Lines that are no
    JSON go to the quarantine, if the plan has one.
    """

    def __init__(self, files: int = 2, schema: Sequence[Column] = SCHEMA, change: Change | None = None) -> None:
        self.files = files
        self.schema = tuple(schema)
        self.change = change

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        from support.sinks.staged_rows import Rows, prestage

        hit("submit.before")
        plan.write(folder / "plan.json")
        hit("submit.planned")
        rows, bad = self.read(plan)
        rows = self.change(rows, plan) if self.change else rows
        staged = {}
        for name, write in plan.staged.items():
            aside = write.quarantine is not None
            schema = BAD_SCHEMA if aside else self.schema
            hit("stage.before")
            found = Rows(bad if aside else rows, self.files, schema)
            staged[name] = prestage(Sink.load(dict(write.sink)), plan.output(name), found)
        hit("stage.after")
        return staged

    def read(self, plan: Plan) -> tuple[list[Row], list[Row]]:
        """Return the rows of every read, and what is none."""
        rows: list[Row] = []
        bad: list[Row] = []
        for name, read in plan.reads.items():
            source, fixed = Source.load(dict(read.source)), plan.fixed(name)
            if fixed.outputs:
                upstream = Sink.load(dict((fixed.upstream or {})["sink"]))
                for output in fixed.outputs:
                    for path in upstream.files(output):
                        rows += pq.ParquetFile(path).read().to_pylist()
            elif fixed.ranges:
                assert isinstance(source, KafkaSource)
                rows += [json.loads(value) for value in _records(source, fixed)]
            elif fixed.files:
                assert isinstance(source, FixedFiles)
                for path in source.paths(fixed):
                    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
                        try:
                            rows.append(json.loads(line))
                        except ValueError as error:
                            bad.append({"reason": str(error), "raw": line, "file": Path(path).name, "line": number})
        return rows, bad


def _records(source: KafkaSource, fixed: Input) -> Iterator[bytes]:
    """Yield the values of the committed records of fixed ranges."""
    with KafkaReader(source.cluster()) as reader:
        for name, (start, end) in fixed.ranges.items():
            topic, partition = Place.parse(name)
            for message in reader.between(topic, {partition: (start, end)}):
                yield message.value() or b""


_ARROW = {
    "int": pa.int32(), "bigint": pa.int64(), "double": pa.float64(), "string": pa.string(), "date": pa.date32(),
}  # fmt: skip


def stage_rows(  # noqa: PLR0917 - as a Spark job has them
    sink: Files | WriteAhead | Kafka,
    handle: Json,
    prefix: str,
    rows: list[Row],
    files: int,
    schema: Sequence[Column] | None = None,
) -> None:
    """Write rows as a few Parquet files into an attempt's staging folder."""
    folder = Path(handle["table"] + ".twophase") / "staging" / handle["name"]
    folder.mkdir(parents=True)
    columns = pa.schema([(name, _ARROW[kind]) for name, kind in schema or SCHEMA])
    for number in range(files):
        table = pa.Table.from_pylist(rows[number::files] or rows[:0], schema=columns)
        pq.write_table(table, folder / f"{prefix}-{number:05d}.parquet")


def write_attempt(  # noqa: PLR0917 - as a Spark job has them
    sink: LogTableSink, folder: Path, content: list[Row], schema: Sequence[Column], prefix: str, files: int
) -> None:
    """Write rows as a Spark job would into the staging folder of a Delta or Iceberg table: some files per partition."""
    folder.mkdir(parents=True)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in content:
        groups.setdefault(tuple(row[name] for name in sink.partition_by), []).append(row)
    if not content and not sink.partition_by:
        groups = {(): []}
    kept = [column for column in schema if column.name not in sink._in_folders]
    arrow = pa.schema([(column.name, _ARROW[column.type]) for column in kept])
    for values, group in groups.items():
        below = folder.joinpath(*(f"{n}={v}" for n, v in zip(sink.partition_by, values, strict=True)))
        below.mkdir(parents=True, exist_ok=True)
        for number in range(files):
            table = pa.Table.from_pylist(
                [{c.name: row.get(c.name) for c in kept} for row in group[number::files]], arrow
            )
            pq.write_table(table, below / f"{prefix}-{number:05d}.parquet")


def visible(table: str) -> list[Row]:
    """Read a table's folder with DuckDB, which wrote none of it."""
    pattern = f"{data_path(table)}/**/*.parquet"
    if not list(data_path(table).glob("**/*.parquet")):
        return []
    with duckdb.connect() as connection:
        found = connection.execute("SELECT * FROM read_parquet(?, hive_partitioning = false)", [pattern])
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def counted(rows: Iterable[Row]) -> Counter[tuple[tuple[str, Any], ...]]:
    """Count equal rows: a lost one has 0, a doubled one 2."""
    return Counter(tuple(sorted(row.items())) for row in rows)


def voted(runner: Runner, slot: str | None = None, *, replaces: int | None = None) -> Revision:
    """Bring the next checkpoint, a slot's or a replacement to its votes and no further, as a stage task does."""
    taken = runner.coordinator.open(script(), slot=slot, checkpoint_id=replaces)
    assert taken is not None
    attempt = taken.revision if isinstance(taken, Opened) else runner.coordinator.attempt(taken)
    runner._stage_and_vote(attempt)
    return attempt
