"""Decided revisions of a table as one DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.sinks import paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, DataFrameReader, SparkSession


class Part(NamedTuple):
    """One revision: where it lies, its files, and what the name of its folder in the table says of its rows."""

    folder: Path | str
    files: list[str]
    given: Mapping[str, Any]


class Columns(NamedTuple):
    """What the files have, and what the names of folders give, with their types."""

    written: str
    given: Mapping[str, str]

    @property
    def all(self) -> str:
        """Return all of them."""
        return self.written + "".join(f", `{name}` {kind}" for name, kind in self.given.items())


def union(
    spark: SparkSession, reader: DataFrameReader, table: Path, parts: Sequence[Part], columns: Columns
) -> DataFrame:
    """Read what stands in the table in one scan, and what was replaced since from where it was put.

    Files are named one by one, and their names are a revision's own: if one is replaced while it is read, the read
    fails; it never gets rows of another revision.
    """
    frames = []
    with paths.listed_in_the_driver(spark):
        standing: list[str] = []
        for part in parts:
            if Path(part.folder).is_relative_to(table):
                standing += part.files
            elif part.files:
                old = _load(reader.schema(columns.written), part.folder, part.files)
                frames.append(_with(old, part.given, columns.given))
        if standing:
            frames.append(_load(reader.schema(columns.all), table, standing))
    if not frames:
        return spark.createDataFrame([], columns.all)
    first, *rest = frames
    for frame in rest:
        first = first.unionByName(frame)
    return first


#: The folder of an attempt in a file's path: its checkpoint's number.
_ATTEMPT = r"^.*/(\d{8,})\.r\d+\.a\d+\.[^/]+/"


def attempts(
    spark: SparkSession, reader: DataFrameReader, parts: Sequence[Part], columns: Columns, *, partitioned: bool
) -> DataFrame:
    """Read revisions that lie in the folders of their attempts, with the number of the checkpoint as `checkpoint`.

    One scan, unless the names of folders say what the files do not: then one for each revision.
    """
    from pyspark.sql import functions

    files = [path for part in parts for path in part.files]
    if not files:
        return spark.createDataFrame([], columns.all)
    with paths.listed_in_the_driver(spark):
        if not partitioned:
            frame = (
                reader.schema(columns.written)
                .option("recursiveFileLookup", value=True)
                .load(list(map(paths.literal, files)))
            )
            number = functions.regexp_extract("_metadata.file_path", _ATTEMPT, 1).cast("bigint")
            return frame.withColumn("checkpoint", number)
        first, *rest = (
            _with(_load(reader.schema(columns.written), part.folder, part.files), part.given, columns.given)
            for part in parts
            if part.files
        )
    for frame in rest:
        first = first.unionByName(frame)
    return first


def _load(reader: DataFrameReader, base: Path | str, files: Sequence[str]) -> DataFrame:
    return reader.option("basePath", f"file://{base}").load([paths.literal(path) for path in files])


def _with(frame: DataFrame, values: Mapping[str, Any], kinds: Mapping[str, str]) -> DataFrame:
    from pyspark.sql import functions

    for name, value in values.items():
        frame = frame.withColumn(name, functions.lit(value).cast(kinds[name]))
    return frame
