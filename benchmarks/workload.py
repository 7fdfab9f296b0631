"""Tiny pipelines: everything is the shipped code, only Spark's work is replaced by a few links to one Parquet file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Stopwatch, timed
from twophase import Pipeline, sinks, sources
from twophase.attempt import Staging
from twophase.core.checkpoint import Json, Output, Revision
from twophase.core.coordinator import Coordinator
from twophase.core.manifest import Column
from twophase.core.settings import data_path
from twophase.runner import Runner
from twophase.sinks.base import Sink
from twophase.sinks.files.sink import Files
from twophase.spark.plan import Plan

SCHEMA = (Column("id", "bigint"), Column("word", "string"))
#: Names that one file may have: file systems have a limit, ext4's is 65,000.
LINKS = 10_000


def pipeline(name: str, *, landing: str | None = None) -> Pipeline:
    """Declare a pipeline from a landing folder of JSON to a table of Parquet."""
    folder = landing or f"landing/{name}"
    data_path(folder).mkdir(parents=True, exist_ok=True)
    return Pipeline(
        name,
        reads={"words": sources.Files(folder, format="json", schema="id bigint, word string")},
        transform="benchmarks.workload:copy",
        writes={"lake": sinks.Files(f"lake/{name}")},
    )


def copy(words: object) -> object:
    """Return what was read."""
    return words


def land(name: str, number: int) -> None:
    """Put one file into a pipeline's landing folder, under its name only once it is whole."""
    folder = data_path(f"landing/{name}")
    new = folder / f"_{number}"
    new.write_text(json.dumps({"id": number, "word": "w"}) + "\n")
    new.rename(folder / f"new-{number:08d}.json")


class Linked:
    """Stages without Spark: as many names of one tiny Parquet file as asked for, then sealed as after a Spark job."""

    def __init__(self, files: int = 1) -> None:
        self.files = files

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:  # noqa: ARG002 - a Stager
        """Stage every write of a plan."""
        staged: dict[str, Json] = {}
        for name, write in plan.writes.items():
            sink = Sink.load(dict(write.sink))
            if not isinstance(sink, Files):
                raise TypeError
            staged[name] = stage(sink, plan.output(name), self.files).manifest
        return staged


def stage(sink: Files, output: Output, files: int) -> Output:
    """Fill an attempt's staging folder with tiny files, and seal it."""
    folder = Path(f"{output.handle['table']}.twophase", "staging", output.handle["name"])
    folder.mkdir(parents=True)
    link_files(folder, f"part-r{output.key.revision}-a{output.attempt}", files)
    return replace(output, manifest=sink.seal(output, SCHEMA))


def stage_bytes(sink: Files, output: Output, size: int) -> Output:
    """Fill an attempt's staging folder with some large files of random numbers, and seal it."""
    import numpy as np

    folder = Path(f"{output.handle['table']}.twophase", "staging", output.handle["name"])
    folder.mkdir(parents=True)
    parts, prefix = 16, f"part-r{output.key.revision}-a{output.attempt}"
    random = np.random.default_rng(1)
    for number in range(parts):
        ids = random.integers(0, 2**62, size // parts // 8)
        table = pa.table({"id": ids, "word": pa.DictionaryArray.from_arrays(np.zeros(len(ids), np.int8), ["w"])})
        pq.write_table(table, folder / f"{prefix}-{number:05d}.parquet", compression="none")
    return replace(output, manifest=sink.seal(output, SCHEMA))


def link_files(folder: Path, prefix: str, files: int) -> None:
    """Give one tiny Parquet file many names; a new one every so often."""
    table = pa.table({"id": pa.array([1], pa.int64()), "word": ["w"]})
    original = ""
    for number in range(files):
        path = f"{folder}/{prefix}-{number:06d}.parquet"
        if number % LINKS == 0:
            original = path
            pq.write_table(table, path)
        else:
            os.link(original, path)


class Checkpoints:
    """Runs one tiny checkpoint after the other, and says what the parts of each took."""

    def __init__(self, name: str, dsn: str, files: int = 1) -> None:
        self.name = name
        self.runner = Runner(pipeline(name), Linked(files), dsn=dsn)
        self._landed = 0

    def __call__(self) -> Mapping[str, float]:
        """Land one file and take it through."""
        self._landed += 1
        land(self.name, self._landed)
        with watch() as stopwatch:
            whole = timed(self.run)
            parts = stopwatch.take()
        parts["commit path"] = parts["check"] + parts["commit"]
        return parts | {"whole": whole}

    def run(self) -> Revision:
        """Take one checkpoint through; there must be one."""
        done = self.runner.run()
        if done is None:
            msg = f"pipeline {self.name}: expected a checkpoint, found no new input"
            raise RuntimeError(msg)
        return done

    def close(self) -> None:
        """Give the connections back."""
        self.runner.record.engine.dispose()


def watch() -> Stopwatch:
    """Watch the parts of a checkpoint: begin opens its attempt, and commit records the votes too."""
    return Stopwatch(
        begin=(Coordinator, "open"),
        seal=(Files, "seal"),
        check=(Staging, "_check"),
        promote=(Files, "promote"),
        commit=(Coordinator, "vote_and_commit"),
    )
