"""Counts the rows of a finished file: Parquet by its footer, JSON and CSV by reading. Called when files are sealed."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Mapping
from typing import IO, Any, cast

FORMATS = ("parquet", "json", "csv")
#: The compressions of text files that we can read; Parquet compresses inside the file.
COMPRESSIONS = ("none", "uncompressed", "gzip")

_CHUNK = 1 << 20


def count_rows(path: str, format: str, options: Mapping[str, Any]) -> int:  # noqa: A002 - Spark's own word for it
    """Count the rows of one file that Spark has written."""
    if format == "parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    opened = gzip.open if path.endswith(".gz") else open
    with cast("IO[bytes]", opened(path, "rb")) as file:
        return _json_rows(file) if format == "json" else _csv_rows(file, options)


def _json_rows(file: IO[bytes]) -> int:
    """Count lines: Spark writes one object per line, and no line breaks inside."""
    rows = 0
    while chunk := file.read(_CHUNK):
        rows += chunk.count(b"\n")
    return rows


def _csv_rows(file: IO[bytes], options: Mapping[str, Any]) -> int:
    """Count rows with a CSV parser, since a value may hold line breaks; Spark escapes quotes with a backslash."""
    with io.TextIOWrapper(file, encoding=str(options.get("encoding", "utf-8")), newline="") as text:
        reader = csv.reader(
            text,
            delimiter=str(options.get("sep", options.get("delimiter", ","))),
            quotechar=str(options.get("quote", '"')),
            escapechar=str(options.get("escape", "\\")),
            doublequote=False,
        )
        rows = sum(1 for _ in reader)
    header = str(options.get("header", True)).lower() == "true"
    return max(rows - 1, 0) if header else rows
