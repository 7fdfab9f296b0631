"""Which finished files a folder holds, and what each looks like."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from twophase.core.checkpoint import InputFile
from twophase.core.errors import ConfigError
from twophase.sinks.paths import PATTERN

_UNFINISHED = (".tmp", "._COPYING_")


def finished(root: str, below: str, who: str) -> list[InputFile]:
    """List the finished files below a folder of the root (`""`, or a path that ends with `/`), in no order.

    FileNotFoundError: the folder is not there. A file or folder that goes away meanwhile is not listed.
    """
    return [InputFile(path, stat.st_size, stat.st_mtime_ns) for path, stat in _stats(entries(root, below, who))]


def entries(root: str, below: str, who: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the path of each finished file below a folder of the root, and how to look at it."""
    pending = [below]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(f"{root}/{folder}") as found:
                for entry in found:
                    name = entry.name
                    if name[0] in "_." or name.endswith(_UNFINISHED):
                        continue
                    path = folder + name
                    if not entry.is_file():
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(f"{path}/")
                        continue
                    if not path.isascii() or ":" in path:
                        check_name(root, path, who)
                    yield path, entry
        except PermissionError as error:
            raise unreadable(Path(root, folder), who) from error
        except FileNotFoundError:
            if folder == below:
                raise


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
