"""Makes what Spark wrote into a staging folder durable, and writes its manifest. Called by sinks that stage files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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


def seal(
    place: StagingPaths,
    output: Output,
    written: Written,
    known: Mapping[str, FileFacts] | None = None,
    mark: Callable[[str], None] | None = None,
) -> Json:
    """Make the files in the staging folder durable, and write the manifest; return the manifest's summary.

    `known` is what the writers reported of their files, if they did. `mark` puts a marker with the manifest's digest
    into the folder. All names are made durable last and together: nothing of it counts before the vote, and a file
    system that has written its log for one folder has little left to do for the others.
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
            place.storage.create(place.manifest(attempt), content, name_durable=False)
        except FileExistsError as error:
            msg = (
                f"{output.which}: another attempt {attempt} left the manifest {place.manifest(attempt)}: the record is"
                " older than the table; run again"
            )
            raise ManifestMismatch(msg) from error
        hit("stage.manifest")
        summary = manifest.summary(disk.digest(content))
        if mark:
            mark(summary["digest"])
        make_durable(place, attempt)
    hit("stage.marked")
    return summary


def make_durable(place: StagingPaths, attempt: int) -> None:
    """Make durable the names of the manifest, of the staged files and of their folder.

    Whoever finds an attempt sealed calls it again: who sealed it may have died before this.
    """
    manifest, staged = Path(place.manifest(attempt)), Path(place.staged)
    place.storage.sync([], [manifest.parent, staged, staged.parent])


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
