"""A state kept by Spark, checkpoint by checkpoint, with an output written as Parquet."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from twophase import State
from twophase.spark.kept_state import KeptState
from twophase.state import run_files
from twophase.state.manifest import StateManifest
from twophase.state.reader import StateReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Transform = Callable[[KeptState], tuple[DataFrame, DataFrame]]

BEGIN = datetime(2026, 11, 18, tzinfo=UTC)


class SparkState:
    """Checkpoints of one state."""

    def __init__(self, spark: SparkSession, home: Path, declaration: State) -> None:
        self.spark, self.home, self.declaration = spark, home, declaration
        self.manifests = [StateManifest.empty(declaration)]
        #: How many jobs the last checkpoint took.
        self.jobs = 0

    def kept(self) -> KeptState:
        """Return what the transform of the next checkpoint is given."""
        number = len(self.manifests)
        return KeptState(
            self.spark, self.declaration, self.home, self.manifests[-1], name="counts",
            run_name=f"{number:08}.r1.a1.7c1e", timestamp=BEGIN + timedelta(hours=number),
        )  # fmt: skip

    def checkpoint(self, transform: Transform, *, writes: int = 1) -> list[tuple[Any, ...]]:
        """Stage a checkpoint and take its manifest for the state; return the rows of the output."""
        kept = self.kept()
        output, new_state = transform(kept)
        paths = [str(self.home / f"output-{uuid4().hex}") for _ in range(writes)]
        with counting_jobs(self.spark) as jobs, kept.staging(new_state, output, writes=writes) as staged:
            assert staged.output is not None
            for path in paths:
                staged.output.write.parquet(path)
            written = [sorted(map(tuple, self.spark.read.parquet(path).collect()), key=repr) for path in paths]
            self.manifests.append(staged.manifest(len(written[0])))
        self.jobs = jobs()
        assert all(rows == written[0] for rows in written)
        return written[0]

    def rows(self, number: int = -1) -> list[tuple[Any, ...]]:
        """Return the rows of the state, by the library."""
        batches = StateReader(self.home, self.manifests[number]).scan()
        return sorted((tuple(row.values()) for batch in batches for row in batch.to_pylist()), key=repr)

    def strays(self) -> set[str]:
        """Return the files that no manifest lists."""
        listed = {run.path for manifest in self.manifests for run in manifest.files()}
        return {path.name for path in run_files.folder(self.home).iterdir()} - listed


class counting_jobs:  # noqa: N801 - used like a function
    """Counts the jobs that Spark runs inside a `with`."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    def __enter__(self) -> Callable[[], int]:
        self._group = uuid4().hex
        self._context.setJobGroup(self._group, "counted")
        return lambda: len(self._context.statusTracker().getJobIdsForGroup(self._group))

    def __exit__(self, *_: object) -> None:
        self._context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]  # None removes it
