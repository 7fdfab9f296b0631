"""Which finished files a folder holds, and what each looks like."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from twophase.core.checkpoint import InputFile
from twophase.core.errors import ConfigError
from twophase.storage.spark_paths import PATTERN

_UNFINISHED = (".tmp", "._COPYING_")
#: What is in `folder//name/name/` if a name is unfinished, or anything has a colon.
_ODD = ("/_", "/.", *(f"{end}/" for end in _UNFINISHED), ":")
#: How many names are asked about at once: so few that Python's search for garbage does not go through them.
_BATCH = 96


def finished(root: str, below: str, who: str) -> list[InputFile]:
    """List the finished files below a folder of the root (`""`, or a path that ends with `/`), in no order.

    FileNotFoundError: the folder is not there. A file or folder that goes away meanwhile is not listed.
    """
    return [InputFile(path, stat.st_size, stat.st_mtime_ns) for path, stat in _stats(entries(root, below, who))]


def entries(root: str, below: str, who: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the path of each finished file below a folder of the root, and how to look at it."""
    for batch in batches(root, below, who):
        yield from zip(*batch, strict=True)


def batches(root: str, below: str, who: str) -> Iterator[tuple[list[str], list[os.DirEntry[str]]]]:
    """Yield the same, many at a time.

    Nearly all names of a large folder are of plain finished files. Of a batch that is asked by a few searches in C, and
    only a batch with something else in it is gone through name by name.
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
    """Yield what is in a folder, many at a time.

    By the open folder a file is looked at by its name alone: the system need not go the whole path for each.
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
    """Look at each of those, but for what was removed since it was listed."""
    for path, entry in found:
        try:
            yield path, entry.stat()
        except FileNotFoundError:
            continue


def unfinished(name: str) -> bool:
    """Say whether a file or folder of this name is not looked at."""
    return name.startswith(("_", ".")) or name.endswith(_UNFINISHED)


def unreadable(folder: Path, who: str) -> ConfigError:
    """Return the error for a folder that this user may not list."""
    return ConfigError(f"{who}: may not list {folder}; give this user the right to read it")


def check_name(root: str, path: str, who: str) -> None:
    """Refuse a file that Spark could not be told of."""
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
