"""Compares a folder with its manifest: called before the vote, by promoters, and by `twophase verify`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from twophase.core.checkpoint import Key
from twophase.core.errors import ManifestMismatch
from twophase.core.manifest import Manifest, StagedFile
from twophase.sinks.staged_files.layout import Marker
from twophase.storage import disk
from twophase.storage.base import DISK, THREADS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from twophase.storage.base import Stat, Storage, Where


class Keeper(Protocol):
    """What `load` needs of a revision: where its manifests are."""

    key: Key
    storage: Storage

    def manifest(self, attempt: int) -> Where:
        """Return where an attempt's manifest is."""
        ...


def load(place: Keeper, attempt: int, digest: str) -> Manifest:
    """Load a manifest; ManifestMismatch if it is gone or has another digest."""
    path = place.manifest(attempt)
    try:
        content = place.storage.read(path)
    except FileNotFoundError:
        msg = f"checkpoint {place.key}: manifest {path} is gone"
        raise ManifestMismatch(msg) from None
    if disk.digest(content) != digest:
        msg = f"checkpoint {place.key}: manifest {path}: expected checksum {digest}, found {disk.digest(content)}"
        raise ManifestMismatch(msg)
    return Manifest.loads(content)


def check(folder: Where, manifest: Manifest, storage: Storage = DISK) -> list[str]:
    """Raise ManifestMismatch unless a folder holds every file of its manifest; return the files that it holds besides.

    Size and modification time are compared. Only a file whose time changed is read, and must still have its checksum.
    """
    found = dict(storage.walk(folder))
    for file in manifest.files:
        stat = found.pop(file.path, None)
        problem = None
        if stat is None:
            problem = "is missing"
        elif stat.st_size != file.size:
            problem = f"was altered: expected {file.size} bytes, found {stat.st_size}"
        elif stat.st_mtime_ns != file.mtime_ns and (now := storage.digest_file(f"{folder}/{file.path}")) != file.xxh3:
            problem = f"was altered: expected checksum {file.xxh3}, found {now}"
        if problem:
            msg = f"checkpoint {manifest.key}: staged file {folder}/{file.path} {problem}; stage it again"
            raise ManifestMismatch(msg)
    return [path for path in found if Marker.parse(path) is None]


def differences(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Compare a folder with its manifest, byte by byte; yield each difference in words."""
    found = {path: stat for path, stat in disk.walk(folder) if Marker.parse(path) is None}
    yield from _damages(folder, manifest, found, DISK)
    for stranger in found.keys() - {file.path for file in manifest.files}:
        yield f"{folder}/{stranger} is not in the manifest"


def damages(folder: Where, manifest: Manifest, storage: Storage) -> Iterator[str]:
    """Compare the files of a manifest with those in the folder, byte by byte; other files there do not matter."""
    found = dict(storage.walk(folder)) if storage.has(folder) else {}
    yield from _damages(folder, manifest, found, storage)


def _damages(folder: Where, manifest: Manifest, found: Mapping[str, Stat], storage: Storage) -> Iterator[str]:
    def compare(file: StagedFile) -> str | None:
        path = f"{folder}/{file.path}"
        stat = found.get(file.path)
        if stat is None:
            return f"{path} is missing"
        if stat.st_size != file.size:
            return f"{path}: expected {file.size} bytes, found {stat.st_size}"
        checksum = storage.digest_file(path)
        return None if checksum == file.xxh3 else f"{path}: expected checksum {file.xxh3}, found {checksum}"

    with ThreadPoolExecutor(THREADS) as pool:
        yield from filter(None, pool.map(compare, manifest.files))
