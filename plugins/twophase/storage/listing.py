"""Lists the finished files of a folder, with size and modification time. Called by sources of files and by sinks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from twophase.core.checkpoint import InputFile
from twophase.core.errors import ConfigError
from twophase.storage.spark_paths import PATTERN

_UNFINISHED = (".tmp", "._COPYING_")
#: A text `folder//name/name/` contains one of these if a name is unfinished, or anything has a colon.
_ODD = ("/_", "/.", *(f"{end}/" for end in _UNFINISHED), ":")
#: How many names are looked at together: so few that they do not trigger Python's garbage collection.
_BATCH = 96


def finished(root: str, below: str, who: str) -> list[InputFile]:
    """List the finished files below a folder of the root (`""`, or a path that ends with `/`), in no order.

    FileNotFoundError: the folder is not there. A file or folder that goes away meanwhile is not listed.
    """
    return [InputFile(path, stat.st_size, stat.st_mtime_ns) for path, stat in _stats(entries(root, below, who))]


def entries(root: str, below: str, who: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the path of each finished file below a folder of the root, with its directory entry."""
    for batch in batches(root, below, who):
        yield from zip(*batch, strict=True)


def batches(root: str, below: str, who: str) -> Iterator[tuple[list[str], list[os.DirEntry[str]]]]:
    """Yield the same as `entries`, in batches.

    Nearly all names in a large folder are those of plain finished files. A few text searches in C tell that of a whole
    batch; only a batch with something else in it is gone through name by name.
    """
    pending = [below]
    while pending:
        folder = pending.pop()
        try:
            for batch in _scan(f"{root}/{folder}"):
                names = [entry.name for entry in batch]
                if _plain(folder, names, batch):
                    yield [folder + name for name in names] if folder else names, batch
                    continue
                there = [entry for entry in batch if not unfinished(entry.name)]
                pending += [f"{folder}{entry.name}/" for entry in there if entry.is_dir(follow_symlinks=False)]
                files = [entry for entry in there if entry.is_file()]
                paths = [folder + entry.name for entry in files]
                for path in paths:
                    check_name(root, path, who)
                yield paths, files
        except PermissionError as error:
            raise unreadable(Path(root, folder), who) from error
        except FileNotFoundError:
            if folder == below:
                raise


def _scan(folder: str) -> Iterator[list[os.DirEntry[str]]]:
    """Yield the entries of a folder, in batches.

    The folder stays open, so that a stat of a file goes by its name alone: the system need not walk the whole path.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(opened) as found:
            while batch := list(islice(found, _BATCH)):
                yield batch
    finally:
        os.close(opened)


def _plain(folder: str, names: list[str], batch: list[os.DirEntry[str]]) -> bool:
    """Say whether all of these are finished files whose paths need no closer look."""
    text = f"{folder}/{'/'.join(names)}/"
    odd = any(part in text for part in _ODD)
    return not odd and text.isascii() and all(map(os.DirEntry.is_file, batch))


def _stats(found: Iterable[tuple[str, os.DirEntry[str]]]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the stat of each file, except those that were removed since they were listed."""
    for path, entry in found:
        try:
            yield path, entry.stat()
        except FileNotFoundError:
            continue


def unfinished(name: str) -> bool:
    """Say whether a file or folder of this name counts as unfinished, and is skipped."""
    return name.startswith(("_", ".")) or name.endswith(_UNFINISHED)


def unreadable(folder: Path, who: str) -> ConfigError:
    """Return the error for a folder that this user may not list."""
    return ConfigError(f"{who}: may not list {folder}; give this user the right to read it")


def check_name(root: str, path: str, who: str) -> None:
    """Raise ConfigError for a file whose path Spark cannot read."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        msg = f"{who}: file name {os.fsencode(path)!r} is not UTF-8; rename the file"
        raise ConfigError(msg) from error
    if ":" in path and (found := PATTERN.search(f"{root}/{path}")):
        both = f"both ':' and {found[0]!r}"
        msg = f"{who}: file {path}: Spark cannot read a path with {both}; rename the file"
        raise ConfigError(msg)


def is_data(path: str) -> bool:
    """Say whether readers take a file for data."""
    return not any(part.startswith(("_", ".")) for part in path.split("/"))
