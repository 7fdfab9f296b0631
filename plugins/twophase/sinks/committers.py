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
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import quote

from twophase.core import connections
from twophase.core.declared import Declared, import_path
from twophase.core.errors import Busy, ConfigError, SinkUnavailable
from twophase.core.settings import data_path, home
from twophase.sinks import disk

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Session  # noqa: N812 - psycopg2's own name says nothing

#: Seconds between two looks at a lock file that another process holds.
_POLL = 0.05
_CONNECT_SECONDS = 10
_TABLE_PARTS = 2
#: From this version on a server may end sessions that are idle: ours is, while rows are sent.
_ENDS_IDLE_SESSIONS = 140_000


class Mark(NamedTuple):
    """A revision of which a committer remembers something."""

    checkpoint: int
    revision: int


class CheckpointCommitter(Declared):
    """Remembers what one sink of one pipeline has sent. Subclasses say where.

    Its arguments besides the two ids have to be JSON: they go into the record, and any process builds an equal one.
    """

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


class Postgres(CheckpointCommitter):
    """A small table in a PostgreSQL database: that of the connection `conn_id`, or the committer database.

    Its rows are never deleted (R6). The lock is the database's own (an advisory one) and belongs to the session that
    also commits: whoever has lost the session has lost the lock, and can neither ask nor commit any more.
    """

    def __init__(
        self,
        job_id: str = "",
        operator_id: str = "",
        *,
        conn_id: str | None = None,
        table: str = "twophase_write_ahead.committed",
    ) -> None:
        """Declare where it is kept; `table` is `schema.name`, created when it is not there."""
        super().__init__(job_id, operator_id)
        self.conn_id = conn_id
        self.table = table
        self._session: Session | None = None
        parts = table.split(".")
        if not all(parts) or len(parts) != _TABLE_PARTS:
            msg = f"committers.Postgres: table {table!r}: expected `schema.name`"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {"conn_id": self.conn_id, "table": self.table}

    def create_resource(self) -> None:
        """Create the table, and its schema, unless they are there: then no right to create anything is needed."""
        with self, self._explained() as cursor:
            schema, _ = self.table.split(".")
            cursor.execute("SELECT to_regclass(%s) IS NULL, to_regnamespace(quote_ident(%s)) IS NULL",
                           (self._quoted(), schema))  # fmt: skip
            table_missing, schema_missing = cursor.fetchone() or (True, True)
            if not table_missing:
                return
            cursor.execute("BEGIN")
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"create {self.table}",))
            if schema_missing:
                cursor.execute(self._sql("CREATE SCHEMA IF NOT EXISTS {schema}"))
            cursor.execute(
                self._sql("""CREATE TABLE IF NOT EXISTS {table} (
                    job_id text, operator_id text, subtask_id integer, checkpoint_id bigint, revision integer,
                    committed_at timestamptz NOT NULL DEFAULT now(),
                    PRIMARY KEY (job_id, operator_id, checkpoint_id, revision, subtask_id))""")
            )
            cursor.execute("COMMIT")

    def open(self) -> None:
        """Open a session of its own, outside any transaction: it is idle while rows are sent."""
        import psycopg2

        try:
            session = psycopg2.connect(
                self._dsn(),
                connect_timeout=_CONNECT_SECONDS,
                application_name=f"twophase write-ahead {socket.gethostname()}:{os.getpid()}"[:63],
            )
        except psycopg2.Error as error:
            raise self._in_words(error) from error
        session.autocommit = True
        self._session = session
        try:
            with self._explained() as cursor:
                # A machine that vanished must not hold the lock for the hours that a server waits by itself.
                cursor.execute("SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5;"
                               " SET tcp_keepalives_count = 4")  # fmt: skip
                if session.server_version >= _ENDS_IDLE_SESSIONS:
                    cursor.execute("SET idle_session_timeout = 0")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session, and with it the lock."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def is_committed(self, subtask: int, checkpoint: int, revision: int) -> bool:
        """Look for the row."""
        with self._explained() as cursor:
            cursor.execute(
                self._sql("""SELECT FROM {table} WHERE job_id = %s AND operator_id = %s AND subtask_id = %s
                    AND checkpoint_id = %s AND revision = %s"""),
                (self.job_id, self.operator_id, subtask, checkpoint, revision),
            )
            return cursor.fetchone() is not None

    def commit(self, subtask: int, checkpoint: int, revision: int) -> None:
        """Insert the row, in the session that holds the lock."""
        with self._explained() as cursor:
            cursor.execute(
                self._sql("""INSERT INTO {table} (job_id, operator_id, subtask_id, checkpoint_id, revision)
                    VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"""),
                (self.job_id, self.operator_id, subtask, checkpoint, revision),
            )

    @contextmanager
    def lock(self, patience: float) -> Iterator[None]:
        """Take the database's lock for this job and operator; it ends with the session, wherever the holder is."""
        import psycopg2.errors

        key = f"twophase write-ahead {self.job_id}/{self.operator_id}"
        with self._explained() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, false)", (f"{max(int(patience * 1000), 1)}ms",))
            try:
                cursor.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", (key,))
            except psycopg2.errors.LockNotAvailable:
                cursor.execute(_HOLDER, (key,))
                holder = next(iter(cursor.fetchone() or ()), "a session that has just ended")
                msg = f"{self.which}: another promoter is sending: {holder}"
                raise Busy(msg) from None
        try:
            yield
        finally:
            # A session that is gone has given it back already.
            with suppress(SinkUnavailable), self._explained() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", (key,))

    def _dsn(self) -> str:
        if self.conn_id is None:
            from twophase.local.resolver import resolve

            return resolve().dsn.replace("postgresql+psycopg2://", "postgresql://", 1)
        found = connections.required(self.conn_id)
        if found.conn_type != "postgres":
            msg = f"connection {self.conn_id}: expected type postgres, found {found.conn_type or 'none'!r}"
            raise ConfigError(msg)
        return found.url("postgresql")

    def _quoted(self) -> str:
        return ".".join('"{}"'.format(part.replace('"', '""')) for part in self.table.split("."))

    def _sql(self, statement: str) -> Any:  # noqa: ANN401 - psycopg2's
        from psycopg2 import sql

        schema, name = self.table.split(".")
        return sql.SQL(statement).format(table=sql.Identifier(schema, name), schema=sql.Identifier(schema))

    @contextmanager
    def _explained(self) -> Iterator[Any]:
        """Hand out a cursor; what the database has against it is an error of ours, in one line."""
        import psycopg2

        if self._session is None:
            msg = f"{self.which}: expected to be open; call open() first"
            raise RuntimeError(msg)
        try:
            with self._session.cursor() as cursor:
                yield cursor
        except psycopg2.Error as error:
            raise self._in_words(error) from error

    def _in_words(self, error: Exception) -> SinkUnavailable | ConfigError:
        """Say what the database has against it: it is away, or a person has to do something."""
        import psycopg2

        said = f"{self.which}: table {self.table}: {' '.join(str(error).split()) or type(error).__name__}"
        if isinstance(error, psycopg2.OperationalError | psycopg2.InterfaceError):
            return SinkUnavailable(said)
        return ConfigError(f"{said}; create it by hand, or grant what is missing")


#: Who holds an advisory lock, by the text that it was made of.
_HOLDER = """SELECT concat(a.application_name, ', session ', a.pid, ' since ',
        to_char(a.query_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), ' UTC')
    FROM (SELECT hashtextextended(%s, 0) AS key) k
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
        AND l.classid::bigint = ((k.key >> 32) & 4294967295) AND l.objid::bigint = (k.key & 4294967295)
    JOIN pg_stat_activity a ON a.pid = l.pid"""


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
