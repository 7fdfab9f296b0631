"""Makes what Spark wrote into a staging folder durable, and writes its manifest. Called by sinks that stage files."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from twophase.core.checkpoint import Json, Output
from twophase.core.errors import ManifestMismatch, NoSpace
from twophase.core.failpoints import hit
from twophase.core.manifest import Manifest, Schema
from twophase.storage import disk
from twophase.storage.base import FileFacts, Storage, Target, Where


class StagingPaths(Protocol):
    """The paths of one attempt's staged output and of its manifest."""

    storage: Storage

    @property
    def side(self) -> Where:
        """Return the folder that holds both the staged files and the manifest."""
        ...

    @property
    def staged(self) -> Where:
        """Return the folder of the staged files."""
        ...

    def manifest(self, attempt: int) -> Where:
        """Return where an attempt's manifest is."""
        ...


class Written(NamedTuple):
    """What Spark wrote, and how to read it."""

    schema: Schema
    format: str
    options: Json
    #: See `Manifest.folder`.
    folder: str | None = None


def prefix(output: Output) -> str:
    """Return the prefix of the names of an attempt's files (R17)."""
    return f"part-r{output.key.revision}-a{output.attempt}"


def seal(place: StagingPaths, output: Output, written: Written, known: Mapping[str, FileFacts] | None = None) -> Json:
    """Make the files in the staging folder durable, and write the manifest; return the manifest's summary.

    `known` is what the writers reported of their files, if they did.
    """
    attempt = output.attempt
    hit("stage.written")
    with explained(place, output):
        target = Target(place.staged, prefix(output), written.format, written.options)
        files = tuple(place.storage.seal(target, known))
        manifest = Manifest(output.key, output.sink, attempt, written.schema, files, written.folder)
        hit("stage.durable")
        content = manifest.dumps()
        try:
            place.storage.create(place.manifest(attempt), content)
        except FileExistsError as error:
            msg = (
                f"{output.which}: another attempt {attempt} left the manifest {place.manifest(attempt)}: the record is"
                " older than the table; run again"
            )
            raise ManifestMismatch(msg) from error
    hit("stage.manifest")
    return manifest.summary(disk.digest(content))


@contextmanager
def explained(place: StagingPaths, output: Output) -> Iterator[None]:
    """Raise NoSpace where the operating system says that the storage is full."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            msg = f"{output.which}: no space left for {place.side}; nothing was committed"
            raise NoSpace(msg) from error
        raise


def expect_output(place: StagingPaths, output: Output) -> None:
    """Raise ManifestMismatch if a job of the user's own wrote nothing to the staging folder."""
    if not place.storage.has(place.staged):
        msg = (
            f"{output.which}: the job ended well and wrote nothing to {place.staged}; pass it"
            f" {{{{ staging('{output.sink}') }}}} as its output path"
        )
        raise ManifestMismatch(msg)
