"""Files that several local processes share: replaced at once and durably; and a lock that ends with its holder."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.core.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How the name of a file begins while it is written; one that stays was left by a killed process.
TEMPORARY = ".writing-{}-"
_POLL = 0.05


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[int]:
    """Hold a lock file, whose folder is made first, and yield its descriptor; wait for it at most `seconds`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        msg = f"cannot write {path} ({error.strerror}); set TWOPHASE_HOME to a folder of your own"
        raise ConfigError(msg) from error
    try:
        give_to_folder_owner(path)
        deadline = time.monotonic() + seconds
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                msg = f"another process has held {path} for {seconds:.0f} s; try again, or end that process"
                raise StoreUnavailable(msg)
            time.sleep(_POLL)
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock file, which need not exist."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file durably and at once, owned like its folder: nobody ever reads half of it."""
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY.format(path.name), dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    give_to_folder_owner(Path(temporary))
    Path(temporary).rename(path)
    sync_folder(path.parent)


def lines(path: Path) -> list[str]:
    """Return the lines of a small file; none when it is not there."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        msg = (
            f"{path}: it belongs to another account, which has to be the one that asks; "
            "or set TWOPHASE_HOME to a folder of your own"
        )
        raise ConfigError(msg) from error


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_to_folder_owner(path: Path) -> None:
    """Give a file that root wrote to the owner of its folder, who may be a plain user."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
