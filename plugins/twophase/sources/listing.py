"""Which finished files a folder holds, and what each looks like."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from twophase.core.checkpoint import InputFile
from twophase.core.errors import ConfigError
from twophase.sinks.paths import PATTERN


def finished(root: str, below: str, who: str) -> list[InputFile]:
    """List the finished files below a folder of the root (`""`, or a path that ends with `/`), in no order.

    FileNotFoundError: the folder is not there. A file or folder that goes away meanwhile is not listed.
    """
    found: list[InputFile] = []
    pending = [below]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(f"{root}/{folder}") as entries:
                pending.extend(_look_at(entries, root, folder, found, who))
        except PermissionError as error:
            raise unreadable(Path(root, folder), who) from error
        except FileNotFoundError:
            if folder == below:
                raise
    return found


def _look_at(
    entries: Iterator[os.DirEntry[str]], root: str, below: str, found: list[InputFile], who: str
) -> Iterator[str]:
    """Add one folder's files to those found; yield the folders in it."""
    for entry in entries:
        name = entry.name
        if unfinished(name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield f"{below}{name}/"
            continue
        try:
            if not entry.is_file():
                continue
            stat = entry.stat()
        except FileNotFoundError:  # removed since it was listed
            continue
        path = below + name
        if ":" in path or not path.isascii():
            check_name(root, path, who)
        found.append(InputFile(path, stat.st_size, stat.st_mtime_ns))


def unfinished(name: str) -> bool:
    """Say whether a file or folder of this name is not looked at."""
    return name.startswith(("_", ".")) or name.endswith((".tmp", "._COPYING_"))


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


def words(size: int, mtime_ns: int) -> str:
    """Say what a file looks like."""
    return f"{size} bytes modified at {mtime_ns / 1e9:.6f}"
