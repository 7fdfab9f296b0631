"""Durable and atomic steps on a POSIX file system: fsync, create, rename, exchange, remove. For sinks and sources."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 20
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
#: On Linux with a C library that has it; elsewhere a plain rename is used, which refuses a folder that is not empty.
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None


def fsync_folder(path: Path | str) -> None:
    """Make the entries of a folder durable: only then is a rename or a new file durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def fsync_file(path: Path | str) -> None:
    """Make a file that somebody else wrote durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def seal_file(path: Path | str) -> str:
    """Make a file durable and return its checksum (xxh3, 64 bits), in one pass."""
    return _digest(path, durable=True)


def digest_file(path: Path | str) -> str:
    """Return a file's checksum (xxh3, 64 bits)."""
    return _digest(path, durable=False)


def _digest(path: Path | str, *, durable: bool) -> str:
    import xxhash

    state = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - 100,000 files: a Path for each costs
        while chunk := file.read(CHUNK):
            state.update(chunk)
        if durable:
            os.fsync(file.fileno())
    return state.hexdigest()


def digest(content: bytes) -> str:
    """Return the checksum (xxh3, 64 bits) of some bytes."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(content)


def create(path: Path, content: bytes, *, name_durable: bool = True) -> None:
    """Create a file, whole and durable, under a name that must not exist; the same content there already is fine.

    Without `name_durable` the caller has to make its name durable.
    """
    if not path.parent.is_dir():
        make_folders(next(folder for folder in path.parents if folder.is_dir()), path.parent)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, path)
        except FileExistsError:
            if path.read_bytes() != content:
                raise
    finally:
        new.unlink(missing_ok=True)
    if name_durable:
        fsync_folder(path.parent)


def replace(path: Path, content: bytes) -> None:
    """Write a file in one atomic step, whole and durable, whether or not one of its name is there."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    fsync_folder(path.parent)


def rename_new(source: Path, target: Path) -> None:
    """Rename a folder onto a name that must not exist, in one atomic step; FileExistsError if it does."""
    if not _rename_with(_RENAME_NOREPLACE, source, target):
        _rename_plain(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one atomic step; False if this file system cannot: then nothing was changed."""
    return _rename_with(_RENAME_EXCHANGE, one, other)


def can_exchange(folder: Path) -> bool:
    """Say whether two folders below this one can be exchanged in one step; tries it with empty ones."""
    one, other = (folder / f".{uuid.uuid4().hex}" for _ in range(2))
    one.mkdir()
    try:
        other.mkdir()
        try:
            return exchange(one, other)
        finally:
            other.rmdir()
    finally:
        one.rmdir()


def _rename_with(flag: int, source: Path, target: Path) -> bool:
    """Rename with a flag of Linux' renameat2; False if the system or the file system does not know it."""
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


def _rename_plain(source: Path, target: Path) -> None:
    """Rename a folder without flags; POSIX itself refuses to replace a folder that is not empty: FileExistsError."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def make_folders(top: Path, folder: Path) -> None:
    """Create a folder and those above it, down from `top`, each durable in its own parent."""
    for path in reversed([folder, *folder.parents]):
        if path != top and path.is_relative_to(top) and not path.is_dir():
            path.mkdir(exist_ok=True)
            fsync_folder(path.parent)


def walk(folder: Path | str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file below a folder, as a path relative to it with its stat."""
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(os.path.join(folder, below) if below else folder) as entries:  # noqa: PTH118 - see digest
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                else:
                    yield path, entry.stat(follow_symlinks=False)


def identity(path: Path | str) -> tuple[int, int] | None:
    """Return a file's size and modification time; None if it is not there."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - 100,000 files: a Path for each costs
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_size, stat.st_mtime_ns


def entries(folder: Path) -> list[tuple[str, str]]:
    """Return the names in a folder, with their paths; none if the folder does not exist."""
    try:
        with os.scandir(folder) as found:
            return [(entry.name, entry.path) for entry in found]
    except FileNotFoundError:
        return []


def prune(folder: Path | str) -> None:
    """Remove the empty folders below a folder, and make that durable."""
    for path in reversed(list(folders(folder))):
        if path != str(folder) and not os.listdir(path):  # noqa: PTH208 - one look, no Path for each entry
            os.rmdir(path)  # noqa: PTH106 - likewise
        else:
            fsync_folder(path)


def folders(folder: Path | str) -> Iterator[str]:
    """Yield a folder and every folder below it."""
    for path, _, _ in os.walk(folder):
        yield path


def remove(path: Path, graveyard: Path, name: str | None = None) -> None:
    """Remove a file or a folder that others may still write into: rename it out of their reach first.

    Another sweeper may remove the same: it is no error if something is gone.
    """
    dead = graveyard / f"{name or path.name}.{uuid.uuid4().hex}.dead"
    try:
        path.rename(dead)
    except FileNotFoundError:
        return
    if dead.is_dir():
        remove_tree(dead)
    else:
        dead.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Remove a folder and all that is in it; it is no error if somebody else removes parts of it meanwhile."""

    def unless_gone(_function: object, _path: str, info: tuple[object, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    shutil.rmtree(folder, onerror=unless_gone)
