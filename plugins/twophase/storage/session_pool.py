"""The pool of PostgreSQL sessions of one process: a checkpoint uses the session of the one before.

`storage/database.py` and the committer of the write-ahead sink take their sessions from here. At most one session waits
for each connection. Whoever takes it has it alone; another thread that needs one meanwhile opens its own.

A session goes back only if nothing went wrong in it. Then it is rolled back and reset (`DISCARD ALL`), so that nothing
of its last user stays: settings, locks, temporary tables, the role, whatever a trigger of the target left behind. Its
settings are those that it was opened with, as of a new one. Before it is used again it has to answer. It is closed when
it was idle for a while, when it is old, when the connection leads elsewhere, and when the process ends. A child process
never uses or ends a session of its parent.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from psycopg2.extensions import connection as Session  # noqa: N812 - psycopg2's own name says nothing

#: Seconds after which an idle session is closed.
IDLE_SECONDS = 60.0
#: Seconds after which a session is closed though it is used, so that what an `ALTER ROLE` set meanwhile comes to hold.
MOST_SECONDS = 600.0
#: Seconds in which a session has to answer before it is used again; as long as a new one may take to open.
ANSWER_SECONDS = 10.0


class _Pooled(NamedTuple):
    """A session, with what it was opened by, when, and when it was used last."""

    session: Session
    dsn: str
    opened: float
    used: float


class SessionPool:
    """The sessions that wait for their next user, by connection."""

    def __init__(self) -> None:
        """Start without any."""
        self._lock = Lock()
        self._waiting: dict[str, _Pooled] = {}
        #: Those that are in use, by identity: they are to be recognised when they come back.
        self._taken: dict[int, _Pooled] = {}
        self._timer: Timer | None = None

    def take(self, name: str, dsn: str, connect: Callable[[], Session]) -> Session:
        """Return the session that waits for a connection, if the address is the same and it answers; else a new one."""
        with self._lock:
            found = self._waiting.pop(name, None)
        now = time.monotonic()
        if found and (found.dsn != dsn or _is_over(found, now) or not _answers(found.session)):
            close(found.session)
            found = None
        taken = found or _Pooled(connect(), dsn, now, now)
        with self._lock:
            self._taken[id(taken.session)] = taken
        return taken.session

    def give_back(self, name: str, session: Session, *, keep: bool) -> None:
        """Reset a session and let it wait for its next user; without `keep`, or if it does not answer, close it."""
        with self._lock:
            taken = self._taken.pop(id(session), None)
        if taken is None:  # it is that of a parent process, which still uses it
            return
        if not keep or not _reset(session):
            close(session)
            return
        with self._lock:
            before = self._waiting.pop(name, None)
            self._waiting[name] = taken._replace(used=time.monotonic())
            self._watch()
        if before:
            close(before.session)

    def close_idle(self) -> None:
        """Close the sessions that have waited for too long; look again later if some are left."""
        now = time.monotonic()
        with self._lock:
            over = [name for name, one in self._waiting.items() if _is_over(one, now)]
            closed = [self._waiting.pop(name) for name in over]
            self._timer = None
            self._watch()
        for one in closed:
            close(one.session)

    def close(self) -> None:
        """Close all sessions that wait."""
        with self._lock:
            closed = list(self._waiting.values())
            self._waiting.clear()
            if self._timer:
                self._timer.cancel()
                self._timer = None
        for one in closed:
            close(one.session)

    def forget(self) -> None:
        """Drop the sessions of the parent process: they are its own, so only this process's descriptors are closed.

        Called in a child after a fork, where no other thread is; the lock may be held by one that is not here. psycopg2
        does not end a session that another process has opened when nothing refers to it any more.
        """
        waiting = list(self._waiting.values())
        self._lock, self._waiting, self._taken, self._timer = Lock(), {}, {}, None
        for one in waiting:
            if not one.session.closed:
                os.close(one.session.fileno())

    def _watch(self) -> None:
        """Have idle sessions closed later; the lock is held."""
        if self._waiting and self._timer is None:
            self._timer = Timer(IDLE_SECONDS, self.close_idle)
            self._timer.daemon = True
            self._timer.start()


#: The pool of this process.
POOL = SessionPool()
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.forget)


def close(session: Session) -> None:
    """Close a session, whatever state it is in."""
    import psycopg2

    with suppress(psycopg2.Error):
        session.close()


def _is_over(one: _Pooled, now: float) -> bool:
    return now - one.used >= IDLE_SECONDS or now - one.opened >= MOST_SECONDS


def _reset(session: Session) -> bool:
    """Roll back and reset a session; False if that failed."""
    import psycopg2

    try:
        with _bounded(session):
            session.reset()
    except (psycopg2.Error, OSError):
        return False
    return True


def _answers(session: Session) -> bool:
    """Say whether a session is still there; give it the role of a new one, which old servers forget when they reset."""
    import psycopg2

    try:
        with _bounded(session), session.cursor() as cursor:
            session.autocommit = True
            cursor.execute("RESET ROLE")
            session.autocommit = False
    except (psycopg2.Error, OSError):
        return False
    return True


@contextmanager
def _bounded(session: Session) -> Iterator[None]:
    """End the session if the server has not answered in time: it may have vanished without a word."""

    def give_up() -> None:
        with suppress(OSError):  # it has just answered, or was closed
            line.shutdown(socket.SHUT_RDWR)

    with socket.socket(fileno=os.dup(session.fileno())) as line:
        timer = Timer(ANSWER_SECONDS, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
