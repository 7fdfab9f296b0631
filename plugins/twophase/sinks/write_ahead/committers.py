"""Who remembers which subtasks of a write-ahead sink were sent: Flink's CheckpointCommitter.

It is asked by the promoter alone, once per subtask, in this order, between `open` and `close`:

    lock ──▶ is_committed(subtask, checkpoint, revision) ──▶ rows are sent ──▶ commit(subtask, checkpoint, revision)

It lives outside the pipeline's own record, so that it may be kept close to the system that the rows go to. Its memory
is by membership: each subtask of each revision is remembered by itself, whatever was committed before or after it (R6).
What it cannot do is to commit in the same step as the rows arrive: `docs/how-to/write-ahead.md` says what follows.

The job id is the name of the pipeline and the operator id the name of the write: both outlive any process, so a restart
finds what was sent before it. A subtask below zero is none: it says which attempt has begun to send (`sending`).
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
    """A revision of which a committer remembers something."""

    checkpoint: int
    revision: int


class CheckpointCommitter(Declared):
    """Remembers what one sink of one pipeline has sent. Subclasses say where.

    Its arguments besides the two ids have to be JSON: they go into the record, and any process builds an equal one.
    """

    public_module = "twophase.committers"
    #: Whether it drops what the record says is over (`forget`); otherwise it can always tell.
    forgets = False

    def __init__(self, job_id: str = "", operator_id: str = "") -> None:
        """Be the memory of one job and operator; a declaration has neither, and `of` gives them."""
        self.job_id = job_id
        self.operator_id = operator_id

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one, besides the two ids; no secrets."""
        return {}

    def of(self, job_id: str, operator_id: str) -> Self:
        """Return one that is declared alike, for one job and operator."""
        return type(self)(job_id, operator_id, **self.config())

    def create_resource(self) -> None:
        """Create what must exist (a table, a folder); called before anything is recorded, and again each time."""

    def open(self) -> None:
        """Get ready to be asked. If the memory cannot be reached raise: "not committed" would be a wrong answer."""

    def close(self) -> None:
        """Give back what `open` took."""

    def __enter__(self) -> Self:
        """Open it."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def is_committed(self, subtask: int, checkpoint: int, revision: int) -> bool:
        """Say whether `commit` was called for this subtask and has ended well, in whatever process."""

    @abstractmethod
    def commit(self, subtask: int, checkpoint: int, revision: int) -> None:
        """Remember durably that this subtask was sent; a second time changes nothing."""

    def lock(self, patience: float) -> AbstractContextManager[None]:
        """Keep other promoters of this job and operator from sending; Busy names who holds it after `patience` seconds.

        This one is a lock file in the run folder: it keeps off processes of one machine. It ends with its process,
        however that dies, and not before: one that is stopped holds it.
        """
        name = f"{quote(self.job_id, safe='')}.{quote(self.operator_id, safe='')}"
        return locked(home() / "locks" / name, patience, self.which)

    def marks(self) -> Iterator[Mark]:
        """List the revisions of which it remembers something that `forget` can drop."""
        return iter(())

    def forget(self, mark: Mark) -> None:
        """Drop what it remembers of a revision: the record has it as ended, and its rows are gone."""

    @property
    def which(self) -> str:
        """Name it in an error."""
        return f"committers.{type(self).__name__} of {self.job_id}/{self.operator_id}"


def declared(committer: CheckpointCommitter | str | None) -> CheckpointCommitter:
    """Return the committer that a sink is declared with: one of these, by import path, or the default."""
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
    """A folder with one small file per job and subtask; each line of it is a checkpoint and its revision.

    Each commit writes the file anew, in one atomic and durable step. What the record has as ended, and whose rows were
    swept, is dropped: the file holds what is on its way, however long the history. The lock is one of this folder, so
    it keeps off promoters on other machines as far as the file system keeps locks for them.
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
        """See that the folder is there: without it nothing would seem to have been sent."""
        folder = data_path(self.path)
        if not folder.is_dir():
            msg = f"{self.which}: folder {folder} is not there; is it mounted?"
            raise SinkUnavailable(msg)
        disk.make_folders(folder, self._folder)

    def is_committed(self, subtask: int, checkpoint: int, revision: int) -> bool:
        """Look for the line; it counts once it is durable, whoever wrote it and died since (R2)."""
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
        """Lock a file in the folder; it ends with its process, however that dies."""
        return locked(self._folder / "lock", patience, self.which)

    def marks(self) -> Iterator[Mark]:
        """List what is in any of the files."""
        yield from sorted({mark for path in self._files() for mark in self._read(path)})

    def forget(self, mark: Mark) -> None:
        """Drop the lines of a revision; a file without lines goes, too, and what a killed commit left."""
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
        """Let one at a time read a file and write it anew."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


@contextmanager
def locked(path: Path, patience: float, which: str) -> Iterator[None]:
    """Hold a lock file, which says who does; Busy if another process still holds it after so many seconds."""
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
