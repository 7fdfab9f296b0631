"""Decide which committer database is used; opening the record, the commands and the pages ask here.

The first of these that is given:

1. the argument `dsn`;
2. `TWOPHASE_DSN`;
3. the Airflow connection `twophase_committer`: inside Airflow as Airflow finds it (secrets backend, environment, its
   own database), elsewhere from `AIRFLOW_CONN_TWOPHASE_COMMITTER`, or as the Airflow that is configured here finds it;
4. the embedded PostgreSQL: started only if the caller may start it, otherwise used if it is running.

Inside Airflow the embedded one is neither started nor used: which database holds the record must not depend on the
machine that a task happens to run on, nor differ between the tasks and the pages that show their commits.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twophase.core import connections
from twophase.core.errors import ConfigError
from twophase.local import existing_airflow, postgres

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

CONNECTION = "twophase_committer"
VARIABLE = "TWOPHASE_DSN"
DRIVER = "postgresql+psycopg2"

_SCHEMES = ("postgres", "postgresql", DRIVER)
_EXPECTED = "expected postgresql://user:password@host:port/database"
_TASK_RUNNER = "airflow.sdk.execution_time.task_runner"


@dataclass(frozen=True)
class Committer:
    """The committer database: where it is, and which setting named it. Its text shows no password."""

    dsn: str = field(repr=False)
    origin: str
    embedded: bool = False

    def __repr__(self) -> str:
        """Show the address without the password and without the options, which may hold one too."""
        from sqlalchemy.engine import make_url

        place = make_url(self.dsn).set(query={}).render_as_string(hide_password=True)
        return f"Committer({place!r}, origin={self.origin!r}, embedded={self.embedded})"


def resolve(dsn: str | None = None, *, may_start: bool = False) -> Committer:
    """Return the committer database by the precedence above; raise ConfigError if it is missing or unreadable."""
    if dsn is not None:
        return Committer(_normal(dsn, "argument dsn"), "argument")
    if declared := os.environ.get(VARIABLE, "").strip():
        return Committer(_normal(declared, VARIABLE), VARIABLE)
    found = _committer()
    if found is not None:
        return Committer(_of_connection(found), f"connection {CONNECTION}")
    if inside_airflow():
        msg = (
            f"committer database: expected the Airflow connection {CONNECTION} or {VARIABLE}, found neither; "
            "define one of them (the embedded postgres is not used inside Airflow)"
        )
        raise ConfigError(msg)
    embedded = postgres.ensure() if may_start else postgres.running()
    if embedded is None:
        msg = (
            f"committer database: none given by {VARIABLE} or the connection {CONNECTION}, looked for in"
            f" {where(CONNECTION)}, and the embedded one is not running; run twophase up, or set {VARIABLE}"
        )
        raise ConfigError(msg)
    return Committer(embedded, "embedded", embedded=True)


def inside_airflow() -> bool:
    """Return True if this process belongs to Airflow, or was started by a task.

    A task has its supervisor from its first moment on, and exports its context before it executes, which its children
    inherit; the servers (api-server, scheduler, dag-processor, triggerer) mark themselves.
    """
    if "AIRFLOW_CTX_DAG_ID" in os.environ or "_AIRFLOW_PROCESS_CONTEXT" in os.environ:
        return True
    return getattr(sys.modules.get(_TASK_RUNNER), "SUPERVISOR_COMMS", None) is not None


def find(conn_id: str) -> connections.Connection | None:
    """Return a connection: inside Airflow as it finds it; elsewhere of the environment, or of the Airflow there."""
    if inside_airflow():
        return _from_airflow(conn_id)
    found = connections.connection(conn_id)
    if found is not None or (airflow := existing_airflow.there()) is None or _is_asleep(airflow):
        return found
    return existing_airflow.connection(airflow, conn_id)


def _committer() -> connections.Connection | None:
    """Return the connection to the committer database; the local Airflow has it from us, and is not asked for it."""
    airflow = None if inside_airflow() else existing_airflow.there()
    return connections.connection(CONNECTION) if airflow and airflow.local else find(CONNECTION)


def _is_asleep(airflow: existing_airflow.Existing) -> bool:
    """Return True if an Airflow's connections are in the embedded PostgreSQL, and that is not running."""
    return airflow.local and postgres.running() is None


def where(conn_id: str) -> str:
    """Say where `find` looks for a connection."""
    if inside_airflow():
        return "Airflow's secrets backends, environment and database"
    airflow = existing_airflow.there()
    if airflow is None:
        return f"{connections.variable(conn_id)} (there is no Airflow here that keeps connections)"
    if _is_asleep(airflow):
        return f"{connections.variable(conn_id)} ({airflow} is not running)"
    return f"{connections.variable(conn_id)} and {existing_airflow.looked(airflow, conn_id)}"


def _committer_dsn() -> str:
    """Return how libpq reaches the committer database."""
    return resolve().dsn.replace(f"{DRIVER}://", "postgresql://", 1)


# Whoever opens the record finds connections so; a Spark job, which does not, by its environment.
connections.lookup = find
connections.where = where
connections.committer_dsn = _committer_dsn


def _from_airflow(conn_id: str) -> connections.Connection | None:
    """Return the connection as Airflow finds it; where a task's child has no Airflow, as the environment has it."""
    try:
        from airflow.exceptions import AirflowNotFoundException  # type: ignore[attr-defined]  # 3.1 has it only there
        from airflow.sdk import BaseHook
    except ImportError:
        return connections.connection(conn_id)
    try:
        found = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return None
    return connections.Connection(
        conn_id=conn_id,
        conn_type=found.conn_type or "",
        host=found.host,
        port=found.port,
        login=found.login,
        password=found.password,
        schema=found.schema,
        extra=found.extra_dejson,
    )


def _of_connection(found: connections.Connection) -> str:
    """Return the DSN of a connection, which has to be one to Postgres."""
    if found.conn_type not in {"postgres", DRIVER}:
        msg = f"connection {CONNECTION}: expected type postgres, found {found.conn_type or 'none'!r}"
        raise ConfigError(msg)
    return _normal(found.url(DRIVER), f"connection {CONNECTION}")


def _normal(dsn: str, origin: str) -> str:
    """Return the DSN with the one driver that is used; no error shows any part of it that could be a password."""
    url = _parsed(dsn, origin)
    if url.drivername not in _SCHEMES:
        msg = f"{origin}: {_EXPECTED}, found the scheme {url.drivername!r}"
        raise ConfigError(msg)
    taken = [url.database or "", *(part for item in url.query.items() for part in item)]
    if dsn.count("@") > 1 or any("@" in part for part in taken):
        # What follows the first would be taken for a host or a database, and shown as one.
        msg = f"{origin}: {_EXPECTED}, found more than one @; write the one in the password as %40, and / as %2F"
        raise ConfigError(msg)
    return url.set(drivername=DRIVER).render_as_string(hide_password=False)


def _parsed(dsn: str, origin: str) -> URL:
    """Parse a DSN; hide the parser's own error, which may quote it."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(dsn)
    except (ArgumentError, ValueError):
        msg = f"{origin}: {_EXPECTED}, found a text that cannot be read as one"
        raise ConfigError(msg) from None
