"""`PostgresRecord`, the record of the protocol in PostgreSQL: the coordinator and its steps call its transactions.

The rules are in `core.steps`. A transaction says each primitive of `core.ports` in SQL: `revision_rows` reads
revisions, `moves` changes them, `participants` and `inputs` keep what belongs to them.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg2
from sqlalchemy import Connection, Engine, Text, create_engine, delete, func, literal, make_url, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, InternalError, OperationalError

from twophase.committer import receipts, registry
from twophase.committer import tables as t
from twophase.committer import upgrade as versions
from twophase.committer.moves import Moves
from twophase.committer.state_rows import StateRows
from twophase.committer.statement import LOST
from twophase.core.checkpoint import Json, Participant, Revision, Run
from twophase.core.errors import IllegalTransition, StoreUnavailable, Unreachable

#: Waiting for a lock is not a failure, but it must end. A stopped process must not hold a row for ever (R18).
#: With this search_path a name without a schema is PostgreSQL's own, whatever others have created elsewhere.
SESSION = (
    "-c lock_timeout=20s -c idle_in_transaction_session_timeout=10s -c timezone=UTC"
    " -c search_path=pg_catalog,pg_temp -c row_security=off"
)


def connect(dsn: str, *, restart: Callable[[], str] | None = None) -> Engine:
    """Return an engine for a committer database; `restart` brings an embedded one back and says where it is now."""
    arguments = {"connect_timeout": 10, "application_name": "twophase", "options": SESSION, "tcp_user_timeout": 30_000}

    def creator() -> Any:  # noqa: ANN401 - psycopg2's connection
        try:
            return _durable(psycopg2.connect(_libpq(dsn), **arguments))
        except psycopg2.ProgrammingError:  # its text would show the DSN
            msg = "the DSN cannot be read; expected postgresql://user:password@host:port/database"
            raise psycopg2.OperationalError(msg) from None
        except psycopg2.OperationalError:
            if restart is None:
                raise
            return _durable(psycopg2.connect(_libpq(restart()), **arguments))

    return create_engine("postgresql+psycopg2://", creator=creator, pool_size=4, max_overflow=36)


def _durable(session: Any) -> Any:  # noqa: ANN401 - psycopg2's connection
    """Make commits durable in this session, also if the database has synchronous_commit off."""
    with session, session.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    return session


def _libpq(dsn: str) -> str:
    return make_url(dsn).set(drivername="postgresql").render_as_string(hide_password=False)


def whoami() -> str:
    """Return who acts, for the events: `user@host:pid`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


class PostgresRecord:
    """The record of every pipeline in one committer database."""

    def __init__(self, engine: Engine, *, who: str | None = None) -> None:
        """Use an engine from `connect`; `who` is named in the events."""
        self.engine = engine
        self.who = who or whoami()

    @classmethod
    def open(  # noqa: PLR0913 - where it is, who acts, and what may be made
        cls,
        dsn: str,
        *,
        who: str | None = None,
        origin: str = "TWOPHASE_DSN",
        restart: Callable[[], str] | None = None,
        create: bool = False,
        upgrade: bool = False,
    ) -> PostgresRecord:
        """Connect, and check that the record has the version of this code; create or migrate it only if told to.

        `origin` is the setting that named the database, for the error if it does not answer.
        """
        engine = connect(dsn, restart=restart)
        try:
            with engine.connect() as connection:
                found = versions.current(connection)
            if (create and found is None) or (upgrade and found is not None):
                versions.upgrade(engine)
            with engine.connect() as connection:
                versions.check(connection)
        except (OperationalError, UnicodeDecodeError) as error:
            where = make_url(dsn).set(query={}).render_as_string(hide_password=True)
            reason = str(error.orig if isinstance(error, OperationalError) else error).strip().splitlines()[0]
            msg = f"committer database {where}: {reason}; check {origin} and the server"
            raise Unreachable(msg) from None
        return cls(engine, who=who)

    @contextmanager
    def transaction(self, *, reads: bool = False) -> Iterator[PostgresTransaction]:
        """Open one transaction; raise StoreUnavailable if the server went away, also if only its reply was lost.

        With `reads` the server is asked without BEGIN and COMMIT: two answers less to wait for.
        """
        try:
            with self._reading() if reads else self.engine.begin() as connection:
                yield PostgresTransaction(connection, self.who)
        except (IntegrityError, InternalError) as error:
            raise IllegalTransition(_one_line(error)) from error
        except (OperationalError, InterfaceError) as error:
            raise StoreUnavailable(_one_line(error)) from error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise StoreUnavailable(_one_line(error)) from error
            raise

    def _reading(self) -> Connection:
        """Return a connection whose statements are transactions by themselves."""
        return self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def _one_line(error: DBAPIError) -> str:
    """Return the server's own words, without statement and parameters."""
    lines = str(error.orig).strip().splitlines() or [type(error).__name__]
    lost = getattr(error.orig, "pgcode", None) == LOST
    remedy = "; a pooler in between has to hand out whole sessions (pgbouncer: pool_mode = session)" if lost else ""
    return f"committer database: {lines[0]}{remedy}"


class PostgresTransaction(Moves, StateRows):
    """The record within one transaction; `core.ports.Transaction` says what each method promises."""

    def register(
        self, pipeline: str, declaration: Json, outputs: Mapping[str, str], changes: Callable[[Json, bool], list[str]]
    ) -> None:
        """Put a pipeline's declaration and the locations of its outputs in the record."""
        registry.register(self.connection, pipeline, declaration, outputs, changes)

    def link(self, pipeline: str, dag_id: str) -> None:
        """Note that a DAG runs a pipeline."""
        registry.link(self.connection, pipeline, dag_id)

    def begun(self, pipeline: str, slot: str | None) -> None:
        """Delete the note that a slot could not begin; the pipeline must be locked."""
        u = t.unbegun.c
        if self._unbegun:
            self.connection.execute(delete(t.unbegun).where((u.pipeline == pipeline) & u.slot.in_({"", slot or ""})))

    def not_begun(self, pipeline: str, slot: str | None, run: Run | None, why: str, *, failed: bool) -> None:
        """Note why a run could not begin: it failed, or waits for its input. No-op if the pipeline is not recorded."""
        u = t.unbegun.c
        known = select(
            t.pipeline.c.name, literal(slot or ""), literal(why), literal(int(failed)), literal(self.who),
            literal(run and run.dag_id, Text), literal(run and run.run_id, Text),
        ).where(t.pipeline.c.name == pipeline)  # fmt: skip
        columns = ["pipeline", "slot", "why", "failures", "who", "dag_id", "run_id"]
        new = upsert(t.unbegun).from_select(columns, known)
        again: dict[str, Any] = {name: new.excluded[name] for name in ("why", "who", "dag_id", "run_id")}
        again |= {"at": func.clock_timestamp(), "failures": u.failures + 1 if failed else 0}
        self.connection.execute(new.on_conflict_do_update(constraint="unbegun_pkey", set_=again))

    # --- a record that is older than its sinks -----------------------------------------------------------------------

    def receipt(self, revision: Revision, participants: Sequence[Participant]) -> Json:
        """Return all that the record knows of a decided revision; its sinks keep it."""
        found = receipts.receipt(self.connection, revision, participants)
        which = (revision.key.pipeline, revision.checkpoint_id)
        self.summaries[which] = found["inputs"]
        self.owned[which] = Counter(source for source, *_ in found["files"])
        return found

    def lacks(self, pipeline: str, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of the held checkpoints and revisions that are not decided in the record."""
        return receipts.lacks(self.connection, pipeline, held)

    def say_behind(self, pipeline: str, why: str | None) -> None:
        """Note at the pipeline that a sink holds what the record does not know; None: remove the note."""
        self.connection.execute(update(t.pipeline).where(t.pipeline.c.name == pipeline).values(behind=why))
