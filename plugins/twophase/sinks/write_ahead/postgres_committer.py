"""The committer that remembers in a PostgreSQL table what a write-ahead sink has sent: the default one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from twophase.core import connections
from twophase.core.errors import Busy, ConfigError, SinkUnavailable
from twophase.sinks.write_ahead.committers import CheckpointCommitter
from twophase.storage import database
from twophase.storage.session_pool import POOL

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Session  # noqa: N812 - psycopg2's own name says nothing

_TABLE_PARTS = 2
#: From this version on a server may end idle sessions; ours is idle while rows are sent.
_ENDS_IDLE_SESSIONS = 140_000


class Postgres(CheckpointCommitter):
    """A small table in the database of the connection `conn_id`, or in the committer database.

    Its rows are never deleted (R6). The lock is an advisory lock of the session that also commits: a process that loses
    the session loses the lock, and can neither ask nor commit any more.
    """

    def __init__(
        self,
        job_id: str = "",
        operator_id: str = "",
        *,
        conn_id: str | None = None,
        table: str = "twophase_write_ahead.committed",
    ) -> None:
        """Declare the table as `schema.name`; it is created if it is missing."""
        super().__init__(job_id, operator_id)
        self.conn_id = conn_id
        self.table = table
        self._session: Session | None = None
        #: Whether no statement of the session has failed.
        self._is_sound = False
        parts = table.split(".")
        if not all(parts) or len(parts) != _TABLE_PARTS:
            msg = f"committers.Postgres: table {table!r}: expected `schema.name`"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {"conn_id": self.conn_id, "table": self.table}

    def create_resource(self) -> None:
        """Create the table and its schema if they are missing; if both are there, no right to create is needed."""
        with self, self._explained() as cursor:
            schema, _ = self.table.split(".")
            cursor.execute("SELECT to_regclass(%s) IS NULL, to_regnamespace(quote_ident(%s)) IS NULL",
                           (self._quoted(), schema))  # fmt: skip
            table_missing, schema_missing = cursor.fetchone() or (True, True)
            if not table_missing:
                self._check_lasts(cursor)
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

    def _check_lasts(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Refuse a table that a crash of the server empties: all that it remembers would be sent again."""
        cursor.execute("SELECT relpersistence = 'p' FROM pg_class WHERE oid = to_regclass(%s)", (self._quoted(),))
        if not cursor.fetchone()[0]:
            msg = (
                f"committers.Postgres: table {self.table} is UNLOGGED, and a crash of the server empties it; expected a"
                f" logged one: ALTER TABLE {self._quoted()} SET LOGGED"
            )
            raise ConfigError(msg)

    def open(self) -> None:
        """Open a session of its own, outside any transaction: it is idle while rows are sent."""
        import psycopg2

        try:
            dsn = self._dsn()
            session = POOL.take(self._pooled_as, dsn, lambda: database.connect(dsn))
        except psycopg2.Error as error:
            raise self._in_words(error) from error
        session.autocommit = True
        self._session, self._is_sound = session, True
        try:
            with self._explained() as cursor:
                # So that another promoter can say who holds the lock.
                name = f"twophase write-ahead {socket.gethostname()}:{os.getpid()}"[: database.NAME_BYTES]
                cursor.execute("SELECT set_config('application_name', %s, false)", (name,))
                # Names without a schema are looked up among PostgreSQL's own only: nobody can put theirs in the way.
                cursor.execute("SET search_path = pg_catalog, pg_temp; SET row_security = off")
                # Without keepalives a machine that vanished would hold the lock for hours.
                cursor.execute("SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 5;"
                               " SET tcp_keepalives_count = 4")  # fmt: skip
                # What is committed has to survive a crash of the server, whatever its default is.
                cursor.execute("SELECT set_config('synchronous_commit', 'on', false)"
                               " WHERE current_setting('synchronous_commit') = 'off'")  # fmt: skip
                if session.server_version >= _ENDS_IDLE_SESSIONS:
                    cursor.execute("SET idle_session_timeout = 0")
        except BaseException:
            self._is_sound = False
            self.close()
            raise

    def close(self) -> None:
        """Give the session back, which ends the lock; end it after an error."""
        if self._session is not None:
            POOL.give_back(self._pooled_as, self._session, keep=self._is_sound)
            self._session = None

    @property
    def _pooled_as(self) -> str:
        """Return the name under which the session waits; it has not the settings of a sink's session."""
        return f"write-ahead {self.conn_id}"

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
        """Take the advisory lock of this job and operator; it ends with the session."""
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
        return connections.committer_dsn() if self.conn_id is None else database.dsn(self.conn_id)

    def _quoted(self) -> str:
        return ".".join('"{}"'.format(part.replace('"', '""')) for part in self.table.split("."))

    def _sql(self, statement: str) -> Any:  # noqa: ANN401 - psycopg2's
        from psycopg2 import sql

        schema, name = self.table.split(".")
        return sql.SQL(statement).format(table=sql.Identifier(schema, name), schema=sql.Identifier(schema))

    @contextmanager
    def _explained(self) -> Iterator[Any]:
        """Hand out a cursor; turn the database's errors into ours, in one line."""
        import psycopg2

        if self._session is None:
            msg = f"{self.which}: expected to be open; call open() first"
            raise RuntimeError(msg)
        try:
            with self._session.cursor() as cursor:
                yield cursor
        except psycopg2.Error as error:
            self._is_sound = False
            raise self._in_words(error) from error

    def _in_words(self, error: Exception) -> SinkUnavailable | ConfigError:
        """Return SinkUnavailable if the error may pass by itself, ConfigError if a person has to act."""
        said = f"{self.which}: table {self.table}: {database.one_line(error)}"
        if database.passes(error):
            return SinkUnavailable(said)
        return ConfigError(f"{said}; create it by hand, or grant what is missing")


#: Says who holds an advisory lock, given the text that its key is the hash of.
_HOLDER = """SELECT concat(a.application_name, ', session ', a.pid, ' since ',
        to_char(a.query_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), ' UTC')
    FROM (SELECT hashtextextended(%s, 0) AS key) k
    JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
        AND l.classid::bigint = ((k.key >> 32) & 4294967295) AND l.objid::bigint = (k.key & 4294967295)
    JOIN pg_stat_activity a ON a.pid = l.pid"""
