"""Bring a database's record to the version of this code: under an advisory lock, in one transaction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from twophase.committer.tables import SCHEMA
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

#: One number for everybody who migrates this record ("twophase" in bytes, cut to 63 bits).
LOCK = int.from_bytes(b"twophase") & (2**63 - 1)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


def head() -> str:
    """Return the version that this code expects."""
    version = ScriptDirectory.from_config(_config()).get_current_head()
    if version is None:
        msg = "the installation has no migrations; install twophase again"
        raise ConfigError(msg)
    return version


def current(connection: Connection) -> str | None:
    """Return the version of the record in a database; None: there is none."""
    context = MigrationContext.configure(
        connection, opts={"version_table": "schema_version", "version_table_schema": SCHEMA}
    )
    return context.get_current_revision()


def check(connection: Connection) -> None:
    """Raise ConfigError unless the record in a database is of this code's version."""
    found = current(connection)
    if found == head():
        return
    _refuse_newer(found)
    msg = f"committer database: expected record version {head()}, found {found or 'none'}; run `twophase db upgrade`"
    raise ConfigError(msg)


def _refuse_newer(found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found is not None and found not in known:
        msg = f"committer database: its record {found} is newer than this code's {head()}; install a newer twophase"
        raise ConfigError(msg)


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Migrate, one process at a time; return the version before and after."""
    with engine.begin() as connection:
        before = current(connection)
        if before != head():
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            before = current(connection)  # another process may have done it meanwhile
            _refuse_newer(before)
        if before != head():
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return before, head()
