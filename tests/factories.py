"""Landing folders, pipelines, a stager without Spark, and readers that did not write the table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from twophase import Pipeline, sinks, sources
from twophase.core.checkpoint import Json
from twophase.core.failpoints import hit
from twophase.core.manifest import Column
from twophase.core.settings import data_path
from twophase.sinks.base import Sink
from twophase.sinks.files import Files
from twophase.spark.plan import Plan

Row = dict[str, Any]


def land(name: str, rows: Iterable[Row], folder: str = "landing/words") -> Path:
    """Write one JSON file of rows into a landing folder, under its name only once it is whole."""
    path = data_path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"_{path.name}")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return new.rename(path)


def land_words(files: int = 1, rows: int = 10, start: int = 0) -> list[Row]:
    """Write files of numbered rows, each row in them once; return all rows."""
    made: list[Row] = []
    for number in range(start, start + files):
        batch = [{"id": number * rows + i, "word": f"w{i % 7}", "frequency": i} for i in range(rows)]
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


class PreStaged:
    """Stages without Spark: copies the fixed input with pyarrow, then seals it as after a Spark job.

    Everything but the Spark job itself is the shipped code, so hundreds of crashes fit in minutes.
    """

    def __init__(self, files: int = 2, schema: Sequence[Column] = SCHEMA) -> None:
        self.files = files
        self.schema = tuple(schema)

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        hit("submit.before")
        plan.write(folder / "plan.json")
        hit("submit.planned")
        rows = self.read(plan)
        staged = {}
        for name, write in plan.writes.items():
            if write["handle"] is None:
                continue
            sink = Sink.load(dict(write["sink"]))
            assert isinstance(sink, Files)
            hit("stage.before")
            stage_rows(sink, write["handle"], f"part-r{plan.revision}-a{plan.attempt}", rows, self.files)
            staged[name] = sink.seal(plan.key, plan.attempt, name, write["handle"], self.schema)
        hit("stage.after")
        return staged

    def read(self, plan: Plan) -> list[Row]:
        base = Path(plan.reads["words"]["source"]["path"])
        return [
            json.loads(line)
            for file in plan.fixed("words").files
            for line in (base / file.path).read_text().splitlines()
        ]


def stage_rows(sink: Files, handle: Json, prefix: str, rows: list[Row], files: int) -> None:
    """Write rows as a few Parquet files into an attempt's staging folder."""
    folder = Path(handle["table"] + ".twophase") / "staging" / handle["name"]
    folder.mkdir(parents=True)
    for number in range(files):
        table = pa.Table.from_pylist(rows[number::files] or rows[:0], schema=ARROW)
        pq.write_table(table, folder / f"{prefix}-{number:05d}.parquet")


ARROW = pa.schema([("id", pa.int64()), ("word", pa.string()), ("frequency", pa.int64())])


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
