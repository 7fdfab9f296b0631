"""Checkpoint committers: they remember which subtasks of a write-ahead sink were sent. Flink has the same class.

`delivery.py` calls it to send rows. Between `open` and `close` it takes the lock once, then for each subtask:

    lock ──▶ is_committed(subtask, checkpoint, revision) ──▶ rows are sent ──▶ commit(subtask, checkpoint, revision)

A committer is not part of the record, so it may be kept close to the system that the rows go to. It remembers each
subtask of each revision by itself, whatever was committed before or after it (R6). It cannot commit in the same atomic
step in which the rows arrive: `docs/how-to/write-ahead.md` says what follows from that.

The job id is the name of the pipeline and the operator id the name of the write. Neither changes with a restart, so a
new process finds what was sent before it. A subtask number below zero is no subtask: it says which attempt has begun to
send (`delivery.py`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from twophase.core.declared import Declared, import_path
from twophase.core.errors import Busy, ConfigError, SinkUnavailable
from twophase.core.settings import data_path, home
from twophase.storage import disk

#: Seconds between two looks at a lock file that another process holds.
_POLL = 0.05


class Mark(NamedTuple):
    """A revision that a committer remembers something of."""

    checkpoint: int
    revision: int


class CheckpointCommitter(Declared):
    """Remembers what one sink of one pipeline has sent. Subclasses say where.

    Its arguments besides the two ids have to be JSON: they go into the record, and any process builds an equal
    committer from them.
    """

    public_module = "twophase.committers"
    #: Whether `forget` drops revisions that the record has as ended; False: it remembers all for ever.
    forgets = False

    def __init__(self, job_id: str = "", operator_id: str = "") -> None:
        """Serve one job and operator; a declaration names neither, `of` fills them in."""
        self.job_id = job_id
        self.operator_id = operator_id

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal committer, besides the two ids; no secrets."""
        return {}

    def of(self, job_id: str, operator_id: str) -> Self:
        """Return a committer with the same arguments, for one job and operator."""
        return type(self)(job_id, operator_id, **self.config())

    def create_resource(self) -> None:
        """Create what must exist (a table, a folder); called whenever the sink is prepared, so it is repeatable."""

    def open(self) -> None:
        """Connect; raise if the memory cannot be reached, since "not committed" would be a wrong answer."""

    def close(self) -> None:
        """Release what `open` acquired."""

    def __enter__(self) -> Self:
        """Open it."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def is_committed(self, subtask: int, checkpoint: int, revision: int) -> bool:
        """Say whether `commit` has succeeded for this subtask, in any process."""

    @abstractmethod
    def commit(self, subtask: int, checkpoint: int, revision: int) -> None:
        """Remember durably that this subtask was sent; a second call changes nothing."""

    def lock(self, patience: float) -> AbstractContextManager[None]:
        """Keep other promoters of this job and operator from sending; Busy names who holds it after `patience` seconds.

        This default is a lock file below `TWOPHASE_HOME`, which works between processes of one machine. The lock ends
        when its process ends, however it dies. A process that is merely stopped still holds it.
        """
        name = f"{quote(self.job_id, safe='')}.{quote(self.operator_id, safe='')}"
        return locked(home() / "locks" / name, patience, self.which)

    def marks(self) -> Iterator[Mark]:
        """List the revisions that `forget` can drop."""
        return iter(())

    def forget(self, mark: Mark) -> None:
        """Drop a revision: the record has it as ended, and its staged rows are gone."""

    @property
    def which(self) -> str:
        """Return how errors name this committer."""
        return f"committers.{type(self).__name__} of {self.job_id}/{self.operator_id}"


def declared(committer: CheckpointCommitter | str | None) -> CheckpointCommitter:
    """Return the committer of a declaration: an instance, `module:Class`, or None for the default."""
    if committer is None:
        from twophase.sinks.write_ahead.postgres_committer import Postgres

        return Postgres()
    if isinstance(committer, str):
        found = import_path(committer)
        if not (isinstance(found, type) and issubclass(found, CheckpointCommitter)):
            msg = f"committer {committer!r}: expected a subclass of twophase.committers.CheckpointCommitter"
            raise ConfigError(msg)
        return found()
    if isinstance(committer, CheckpointCommitter):
        return committer
    msg = f"committer {committer!r}: expected one of twophase.committers, or `module:Class`"
    raise ConfigError(msg)


class File(CheckpointCommitter):
    """A folder with one small file per job, operator and subtask; each line of it is a checkpoint and its revision.

    Each commit writes the file anew, in one atomic and durable step. A revision is dropped once the record has it as
    ended and its rows are swept, so the files stay small. The lock is a file in this folder. It works between machines
    if the file system shares locks between them.
    """

    forgets = True

    def __init__(self, job_id: str = "", operator_id: str = "", *, path: str = "committers") -> None:
        """Declare the folder; a relative path is below the data folder of `TWOPHASE_HOME`."""
        super().__init__(job_id, operator_id)
        self.path = str(path)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {"path": str(data_path(self.path))}

    @property
    def _folder(self) -> Path:
        return data_path(self.path) / quote(self.job_id, safe="") / quote(self.operator_id, safe="")

    def create_resource(self) -> None:
        """Create the folder."""
        folder = data_path(self.path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            disk.fsync_folder(folder.parent)
        except OSError as error:
            msg = f"committers.File: folder {folder} cannot be made: {error.strerror}"
            raise ConfigError(msg) from error

    def open(self) -> None:
        """Check that the folder is there: without it nothing would seem to have been sent."""
        folder = data_path(self.path)
        if not folder.is_dir():
            msg = f"{self.which}: folder {folder} is not there; is it mounted?"
            raise SinkUnavailable(msg)
        disk.make_folders(folder, self._folder)

    def is_committed(self, subtask: int, checkpoint: int, revision: int) -> bool:
        """Look for the line; make it durable before it counts, since its writer may have died before that (R2)."""
        found = Mark(checkpoint, revision) in self._read(self._file(subtask))
        if found:
            disk.fsync_folder(self._folder)
        return found

    def commit(self, subtask: int, checkpoint: int, revision: int) -> None:
        """Add the line."""
        with self._rewriting():
            path = self._file(subtask)
            known = self._read(path)
            if Mark(checkpoint, revision) not in known:
                self._write(path, known | {Mark(checkpoint, revision)})

    def lock(self, patience: float) -> AbstractContextManager[None]:
        """Lock a file in the folder; the lock ends when its process ends, however it dies."""
        return locked(self._folder / "lock", patience, self.which)

    def marks(self) -> Iterator[Mark]:
        """List the revisions in any of the files."""
        yield from sorted({mark for path in self._files() for mark in self._read(path)})

    def forget(self, mark: Mark) -> None:
        """Drop the lines of a revision; remove files that have no line left, and what a killed commit left."""
        with self._rewriting():
            for left in self._folder.glob(".subtask.*"):
                left.unlink()
            for path in self._files():
                known = self._read(path)
                if mark in known:
                    self._write(path, known - {mark})

    def _file(self, subtask: int) -> Path:
        return self._folder / f"subtask.{subtask}"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("subtask.*"))

    def _read(self, path: Path) -> set[Mark]:
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            return set()
        try:
            return {Mark(*map(int, line.split())) for line in lines}
        except (ValueError, TypeError):
            msg = f"{self.which}: file {path} holds something else than lines of checkpoint and revision"
            raise SinkUnavailable(msg) from None

    def _write(self, path: Path, marks: set[Mark]) -> None:
        if not marks:
            path.unlink()
            disk.fsync_folder(path.parent)
            return
        disk.replace(path, "".join(f"{mark.checkpoint} {mark.revision}\n" for mark in sorted(marks)).encode())

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        """Lock the folder, so that one process at a time reads a file and writes it anew."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


@contextmanager
def locked(path: Path, patience: float, which: str) -> Iterator[None]:
    """Hold a lock file that names its holder; Busy if another process still holds it after `patience` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        end = time.monotonic() + patience
        pause = threading.Event()
        while not _try_lock(file.fileno()):
            if time.monotonic() >= end:
                file.seek(0)
                msg = f"{which}: another promoter is sending: {file.read().strip() or 'it has not said who it is'}"
                raise Busy(msg)
            pause.wait(_POLL)
        file.truncate(0)
        file.write(f"{socket.gethostname()}:{os.getpid()}\n")
        file.flush()
        yield  # closing the file gives the lock back


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
