"""Escapes paths and column names for Spark's readers and SQL. Called by all that read or write through Spark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark takes a path with one of these for a glob pattern. Its option against that, `__globPaths__`, reads every file
#: once more for each such path, so they are escaped instead. Hadoop refuses a colon in an escaped path.
PATTERN = re.compile(r"[][{}*?\\]")
#: Above this number of paths Spark starts a job of up to 10,000 tasks to list them: three times slower on local files.
_LISTING_THRESHOLD = "spark.sql.sources.parallelPartitionDiscovery.threshold"


def literal(path: str) -> str:
    """Return a path, escaped so that Spark finds just the file of that name."""
    return "file://" + PATTERN.sub(r"\\\g<0>", path)


@contextmanager
def listed_in_the_driver(spark: SparkSession) -> Iterator[None]:
    """Let Spark list the paths in the driver, however many there are."""
    before = spark.conf.get(_LISTING_THRESHOLD)
    spark.conf.set(_LISTING_THRESHOLD, str(2**31 - 1))
    try:
        yield
    finally:
        if before is not None:
            spark.conf.set(_LISTING_THRESHOLD, before)


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def ddl(schema: Iterable[Iterable[str]]) -> str:
    """Return the columns of a manifest as DDL for Spark."""
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in schema)
