"""What a folder holds that somebody else wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.core.manifest import Column, Schema, StagedFile
from twophase.sinks import disk
from twophase.sinks.layout import Marker, markers
from twophase.sinks.rows import count_rows
from twophase.sinks.storage import THREADS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twophase.core.checkpoint import Json

#: Where Spark's own writer leaves the schema as it knows it.
_SPARK = b"org.apache.spark.sql.parquet.row.metadata"
_ARROW = {
    "bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "float": "float",
    "double": "double", "string": "string", "large_string": "string", "binary": "binary", "date32[day]": "date",
}  # fmt: skip


class Described(NamedTuple):
    """What is in a folder."""

    files: tuple[StagedFile, ...]
    schema: Schema


class Foreign:
    """A folder that nobody of us made, held open: what is done to it is done to this one, wherever it is moved."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Hold an open folder."""
        self.path = path
        self._descriptor = descriptor

    def describe(self, format: str, options: Json) -> Described | None:  # noqa: A002 - Spark's own word for it
        """Describe what is there; None: its name stands for another folder by now."""
        try:
            files = describe(self.path, format, options)
            columns = schema(self.path, files, format)
            now = self.path.stat()
        except FileNotFoundError:
            return None
        held = os.fstat(self._descriptor)
        return Described(files, columns) if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino) else None

    def mark(self, marker: Marker) -> None:
        """Put a marker in; another's, of a description that was made before files came or went, may be recorded."""
        os.close(os.open(str(marker), os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=self._descriptor))
        os.fsync(self._descriptor)


@contextmanager
def foreign(path: Path) -> Iterator[Foreign | None]:
    """Hold a folder that is not ours yet; None: there is none, or it is one of our revisions."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    try:
        ours = any(marker.revision for marker in markers(descriptor))
        yield None if ours else Foreign(path, descriptor)
    finally:
        os.close(descriptor)


def describe(folder: Path, format: str, options: Json) -> tuple[StagedFile, ...]:  # noqa: A002 - Spark's own word
    """Describe every file below a folder, in order; what readers skip has no rows."""
    found = sorted((path, stat) for path, stat in disk.walk(folder) if Marker.parse(path) is None)

    def one(item: tuple[str, os.stat_result]) -> StagedFile:
        path, stat = item
        full = f"{folder}/{path}"
        rows = count_rows(full, format, options) if is_data(path) else 0
        return StagedFile(path, stat.st_size, stat.st_mtime_ns, rows, disk.digest_file(full))

    with ThreadPoolExecutor(THREADS) as pool:
        return tuple(pool.map(one, found))


def schema(folder: Path, files: Sequence[StagedFile], format: str) -> Schema:  # noqa: A002 - Spark's own word for it
    """Return the columns of the newest file; none for formats whose files do not say."""
    data = [file for file in files if is_data(file.path)]
    if format != "parquet" or not data:
        return ()
    newest = max(data, key=lambda file: file.mtime_ns)
    return columns(f"{folder}/{newest.path}")


def columns(file: Any) -> Schema:  # noqa: ANN401 - a path, or an open file
    """Return the columns of a Parquet file, as Spark knows them if it wrote it."""
    import pyarrow.parquet as pq

    found = pq.read_schema(file)
    spark = (found.metadata or {}).get(_SPARK)
    if spark is not None:
        return tuple(Column(field["name"], simple(field["type"])) for field in json.loads(spark)["fields"])
    return tuple(Column(field.name, _from_arrow(field.type)) for field in found)


def is_data(path: str) -> bool:
    """Say whether readers take a file for data."""
    return not any(part.startswith(("_", ".")) for part in path.split("/"))


def simple(kind: Any) -> str:  # noqa: ANN401 - Spark's JSON: a name, or an object
    """Write a type of Spark's JSON, which is Delta's too, as Spark's own short text."""
    if isinstance(kind, str):
        return {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}.get(kind, kind)
    match kind["type"]:
        case "array":
            return f"array<{simple(kind['elementType'])}>"
        case "map":
            return f"map<{simple(kind['keyType'])},{simple(kind['valueType'])}>"
        case "struct":
            parts = ",".join(f"{field['name']}:{simple(field['type'])}" for field in kind["fields"])
            return f"struct<{parts}>"
        case other:
            return str(other)


def _from_arrow(kind: Any) -> str:  # noqa: ANN401 - a pyarrow type
    """Write a type of Arrow's as Spark reads it from Parquet."""
    import pyarrow.types as is_

    if is_.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if is_.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None and kind.unit != "ns" else "timestamp"
    if is_.is_list(kind) or is_.is_large_list(kind):
        return f"array<{_from_arrow(kind.value_type)}>"
    if is_.is_map(kind):
        return f"map<{_from_arrow(kind.key_type)},{_from_arrow(kind.item_type)}>"
    if is_.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{_from_arrow(field.type)}' for field in kind)}>"
    return _ARROW.get(str(kind), str(kind))
