"""Reads listed files as one DataFrame, by Spark's own reader. Called by the files sink and the storages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from twophase.storage import spark_paths
from twophase.storage.partition_folders import partition_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, DataFrameReader, SparkSession


class RevisionFiles(NamedTuple):
    """One revision: its folder, its files, and the column values that the name of its folder in the table gives."""

    folder: Path | str
    files: list[str]
    given: Mapping[str, Any]


class Columns(NamedTuple):
    """The columns in the files, as DDL, and those that names of folders give, with their types."""

    written: str
    given: Mapping[str, str]

    @property
    def all(self) -> str:
        """Return all columns, as DDL."""
        return self.written + "".join(f", `{name}` {kind}" for name, kind in self.given.items())


def union(
    spark: SparkSession, reader: DataFrameReader, table: Path, parts: Sequence[RevisionFiles], columns: Columns
) -> DataFrame:
    """Read revisions in the table in one scan, and replaced ones from where they are kept.

    Files are listed one by one, and no two revisions share a file name. So if a revision is replaced while it is read,
    the read fails; it never gets rows of another revision.
    """
    frames = []
    with spark_paths.listed_in_the_driver(spark):
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


#: Helper columns: the URL of a row's file without its scheme, and whether that file was listed.
FILE = "_twophase_file"
_KNOWN = "_twophase_known"
#: The scheme of a file's URL; Spark writes it with one slash or three.
_SCHEME = "^file:/+"
#: Finds the checkpoint's number in a file's path, by the folder of its attempt.
_ATTEMPT = r"^.*/(\d{8,})\.r\d+\.a\d+\.[^/]+/"


def attempts(
    spark: SparkSession,
    reader: DataFrameReader,
    files: Sequence[str],
    schema: Sequence[Sequence[str]],
    folders: Sequence[str],
) -> DataFrame:
    """Read files in folders of attempts, with the number of the checkpoint in the column `checkpoint`."""
    from pyspark.sql import functions

    frame = listed(spark, reader, files, schema, given_by(folders))
    number = functions.regexp_extract(FILE, _ATTEMPT, 1).cast("bigint")
    return frame.withColumn("checkpoint", number).drop(FILE)


def checkpoint_of(path: str) -> int:
    """Return the checkpoint's number from the path of a file in a folder of an attempt."""
    return int(re.sub(f"{_ATTEMPT}.*$", r"\1", path))


def given_by(folders: Sequence[str]) -> dict[str, Callable[[str], str | None]]:
    """Return a function per column that reads its value from the partition folders in a path."""

    def value(at: int) -> Callable[[str], str | None]:
        return lambda path: partition_values(path, folders)[at]

    return {name: value(at) for at, name in enumerate(folders)}


def listed(
    spark: SparkSession,
    reader: DataFrameReader,
    files: Sequence[str],
    schema: Sequence[Sequence[str]],
    given: Mapping[str, Callable[[str], str | None]],
) -> DataFrame:
    """Read files in one scan, wherever they are; `given` columns get their value from the path of a file.

    Spark's own partition discovery would need all files in one tree. The DataFrame also has the file of each row, in
    the column FILE.
    """
    from pyspark.sql import functions

    if not files:
        return spark.createDataFrame([], f"{spark_paths.ddl(schema)}, {FILE} string")
    written = spark_paths.ddl((name, kind) for name, kind in schema if name not in given)
    with spark_paths.listed_in_the_driver(spark):
        found = (
            reader.schema(written)
            .option("recursiveFileLookup", value=True)
            .load([spark_paths.literal(file) for file in files])
        )
        frame = found.withColumn(FILE, functions.regexp_replace("_metadata.file_path", _SCHEME, "/"))
        if not given:
            return frame
        urls = [re.sub(_SCHEME, "/", url) for url in found.inputFiles()]
    rows = [(url, True, *(value(unquote(url)) for value in given.values())) for url in urls]
    names = [f"_twophase_{number}" for number, _ in enumerate(given)]
    known = spark.createDataFrame(
        rows, f"{FILE} string, {_KNOWN} boolean" + "".join(f", {name} string" for name in names)
    )
    kinds = dict((name, kind) for name, kind in schema)  # noqa: C402 - pairs come as lists, too
    copies = dict(zip(given, names, strict=True))
    columns = [
        functions.col(copies[name]).cast(kinds[name]).alias(name) if name in copies else functions.col(_quoted(name))
        for name, _ in schema
    ]
    # An inner join would silently lose rows if Spark named a file otherwise than in its own list; so raise an error.
    unknown = functions.raise_error(functions.concat(functions.lit("file not in the list: "), functions.col(FILE)))
    return (
        frame.join(functions.broadcast(known), FILE, "left")
        .where(functions.coalesce(functions.col(_KNOWN), unknown))
        .select(*columns, FILE)
    )


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _load(reader: DataFrameReader, base: Path | str, files: Sequence[str]) -> DataFrame:
    return reader.option("basePath", f"file://{base}").load([spark_paths.literal(path) for path in files])


def _with(frame: DataFrame, values: Mapping[str, Any], kinds: Mapping[str, str]) -> DataFrame:
    from pyspark.sql import functions

    for name, value in values.items():
        frame = frame.withColumn(name, functions.lit(value).cast(kinds[name]))
    return frame
