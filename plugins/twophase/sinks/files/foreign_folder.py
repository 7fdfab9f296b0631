"""Describes a folder that we did not write: one to adopt, or the output of a user's own job. For the files sink."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from twophase.core.manifest import Schema, StagedFile
from twophase.formats import parquet_schema
from twophase.sinks.staged_files.layout import Marker, markers
from twophase.storage import disk, listing
from twophase.storage.base import THREADS
from twophase.storage.row_counts import count_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twophase.core.checkpoint import Json


class Described(NamedTuple):
    """The files and the columns that a folder holds."""

    files: tuple[StagedFile, ...]
    schema: Schema


class Foreign:
    """A folder that we did not make, held open, so that marking it hits this very folder even if it was moved."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Keep the path and the descriptor of an open folder."""
        self.path = path
        self._descriptor = descriptor

    def describe(self, format: str, options: Json) -> Described | None:  # noqa: A002 - Spark's own word for it
        """Describe the files in it; None if the path leads to another folder by now."""
        try:
            files = describe(self.path, format, options)
            columns = schema(self.path, files, format)
            now = self.path.stat()
        except FileNotFoundError:
            return None
        held = os.fstat(self._descriptor)
        return Described(files, columns) if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino) else None

    def mark(self, marker: Marker) -> None:
        """Put a marker in; one of an earlier description may be there too, and either may be the recorded one."""
        os.close(os.open(str(marker), os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=self._descriptor))
        os.fsync(self._descriptor)


@contextmanager
def foreign(path: Path) -> Iterator[Foreign | None]:
    """Hold a folder open that is not ours yet; None if there is none, or if it holds one of our revisions."""
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
    """Describe every file below a folder, in order; a file that readers skip counts as having no rows."""
    found = sorted((path, stat) for path, stat in disk.walk(folder) if Marker.parse(path) is None)

    def one(item: tuple[str, os.stat_result]) -> StagedFile:
        path, stat = item
        full = f"{folder}/{path}"
        rows = count_rows(full, format, options) if listing.is_data(path) else 0
        return StagedFile(path, stat.st_size, stat.st_mtime_ns, rows, disk.digest_file(full))

    with ThreadPoolExecutor(THREADS) as pool:
        return tuple(pool.map(one, found))


def schema(folder: Path, files: Sequence[StagedFile], format: str) -> Schema:  # noqa: A002 - Spark's own word for it
    """Return the columns of the newest Parquet file; none for other formats, whose files do not say."""
    data = [file for file in files if listing.is_data(file.path)]
    if format != "parquet" or not data:
        return ()
    newest = max(data, key=lambda file: file.mtime_ns)
    return parquet_schema.columns(f"{folder}/{newest.path}")
