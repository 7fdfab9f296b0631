"""What Spark wrote into a staging folder, made durable and described by a manifest."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from twophase.core.checkpoint import Json, Key
from twophase.core.errors import ManifestMismatch, NoSpace
from twophase.core.failpoints import hit
from twophase.core.manifest import Manifest, Schema, StagedFile
from twophase.sinks import disk
from twophase.sinks.manifests import THREADS
from twophase.sinks.rows import count_rows

if TYPE_CHECKING:
    from pathlib import Path


class Staging(Protocol):
    """Where one attempt's output is staged, and its manifest goes."""

    key: Key
    side: Path
    staged: Path

    def manifest(self, attempt: int) -> Path:
        """Return where an attempt's manifest is."""
        ...


class Written(NamedTuple):
    """What was written, and how it is read."""

    attempt: int
    sink: str
    schema: Schema
    format: str
    options: Json
    #: See `Manifest.folder`.
    folder: str | None = None


def writer_options(key: Key, attempt: int) -> dict[str, Any]:
    """Return what makes Spark's writer name files for their attempt, and leave out those of failed tasks."""
    return {
        "mapreduce.output.basename": f"part-r{key.revision}-a{attempt}",
        "mapreduce.fileoutputcommitter.algorithm.version": 1,
        "mapreduce.fileoutputcommitter.marksuccessfuljobs": False,
    }


def seal(place: Staging, written: Written) -> Json:
    """Make what lies in the staging folder durable, and keep its manifest; return the manifest's summary."""
    key, attempt = place.key, written.attempt
    hit("stage.written")
    with explained(place, written.sink):
        _name_files(place.staged, f"part-r{key.revision}-a{attempt}-")
        files = tuple(_seal_files(place.staged, written))
        manifest = Manifest(key, written.sink, attempt, written.schema, files, written.folder)
        hit("stage.durable")
        content = manifest.dumps()
        try:
            disk.create(place.manifest(attempt), content)
        except FileExistsError as error:
            msg = (
                f"checkpoint {key}: sink {written.sink!r}: another attempt {attempt} left the manifest"
                f" {place.manifest(attempt)}: the record is older than the table; run again"
            )
            raise ManifestMismatch(msg) from error
    hit("stage.manifest")
    return manifest.summary(disk.digest(content))


@contextmanager
def explained(place: Staging, sink: str) -> Iterator[None]:
    """Say in words that the storage is full."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            msg = f"checkpoint {place.key}: sink {sink!r}: no space left for {place.side}; nothing was committed"
            raise NoSpace(msg) from error
        raise


def expect_output(place: Staging, sink: str) -> None:
    """Raise ManifestMismatch if a job of the user's own wrote nothing to the staging folder."""
    if not place.staged.is_dir():
        msg = (
            f"checkpoint {place.key}: sink {sink!r}: the job ended well and wrote nothing to {place.staged}; pass it"
            f" {{{{ staging('{sink}') }}}} as its output path"
        )
        raise ManifestMismatch(msg)


def _name_files(folder: Path, prefix: str) -> None:
    """Remove what is not data, and put revision and attempt into the names that lack them.

    Then a reader across an exchange of two revisions fails instead of mixing them (R17). Spark 4 writes the names
    so; 3.5 cannot.
    """
    strays = False
    for path, _ in list(disk.walk(folder)):
        below, _, name = path.rpartition("/")
        if any(part.startswith(("_", ".")) for part in path.split("/")):
            (folder / path).unlink()
            strays = True
        elif not name.startswith(prefix):
            (folder / path).rename(folder / below / f"{prefix}{name.removeprefix('part-')}")
    if strays:
        disk.prune(folder)


def _seal_files(folder: Path, written: Written) -> list[StagedFile]:
    """Make every file durable, and describe it."""
    found = sorted(disk.walk(folder))

    def describe(item: tuple[str, os.stat_result]) -> StagedFile:
        path, stat = item
        full = f"{folder}/{path}"
        checksum = disk.seal_file(full)
        rows = count_rows(full, written.format, written.options)
        return StagedFile(path, stat.st_size, stat.st_mtime_ns, rows, checksum)

    with ThreadPoolExecutor(THREADS) as pool:
        files = list(pool.map(describe, found))
        list(pool.map(disk.fsync_folder, list(disk.folders(folder))))
    disk.fsync_folder(folder.parent)
    return files
