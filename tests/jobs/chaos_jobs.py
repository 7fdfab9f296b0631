"""Transforms that let a test catch Spark at work: they say where they run and wait until they are told to go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def copy(words: DataFrame) -> DataFrame:
    return words


def waits_in_driver(words: DataFrame) -> DataFrame:
    _wait(Path(os.environ["TWOPHASE_HOME"]))
    return words


def waits_in_executor(words: DataFrame) -> DataFrame:
    home = Path(os.environ["TWOPHASE_HOME"])
    wait = _wait

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wait(home)
        yield from batches

    return words.repartition(2).mapInArrow(each, words.schema)


def _wait(home: Path) -> None:
    """Leave a file named after this process and the JVM above it, then wait for a file named `go`."""
    java = next(parent.pid for parent in psutil.Process().parents() if "java" in parent.name())
    (home / f"at_work.{os.getpid()}.{java}").touch()
    while not (home / "go").exists():
        time.sleep(0.02)
