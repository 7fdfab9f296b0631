"""Migrate a record to the version of this code, in one transaction under an advisory lock.

Opening a record and `twophase db upgrade` call it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import text

from twophase.committer.tables import SCHEMA
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection, Engine

#: All migrations in order; the last one is the version of the record that this code expects.
VERSIONS = tuple(f"{number:04d}" for number in range(1, 17))
HEAD = VERSIONS[-1]

#: The advisory lock of every process that migrates this record ("twophase" in bytes, cut to 63 bits).
LOCK = int.from_bytes(b"twophase") & (2**63 - 1)


def current(connection: Connection) -> str | None:
    """Return the version of the record in a database; None: there is none."""
    # not to_regclass: it answers from the session's cache, which may be older than the table
    there = text("""SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'twophase' AND c.relname = 'schema_version'""")
    if connection.execute(there).first() is None:
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM twophase.schema_version")).scalar()
    return found


def check(connection: Connection) -> None:
    """Raise ConfigError unless the record in a database has the version of this code."""
    found = current(connection)
    if found == HEAD:
        return
    _refuse_newer(found)
    msg = f"committer database: expected record version {HEAD}, found {found or 'none'}; run `twophase db upgrade`"
    raise ConfigError(msg)


def _refuse_newer(found: str | None) -> None:
    if found is not None and found not in VERSIONS:
        msg = f"committer database: its record {found} is newer than this code's {HEAD}; install a newer twophase"
        raise ConfigError(msg)


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Migrate, one process at a time; return the version before and after."""
    with engine.begin() as connection:
        before = current(connection)
        if before != HEAD:
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            before = current(connection)  # another process may have migrated it meanwhile
            _refuse_newer(before)
        if before is None:
            _refuse_other_encodings(connection)
        if before != HEAD:
            from alembic import command

            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
            config = alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        return before, HEAD


def _refuse_other_encodings(connection: Connection) -> None:
    """Refuse a database that is not in UTF8: it could not keep every path or reason."""
    found = connection.execute(text("SELECT current_setting('server_encoding')")).scalar_one()
    if found != "UTF8":
        msg = f"committer database: expected the encoding UTF8, found {found}; make one with ENCODING 'UTF8'"
        raise ConfigError(msg)


def alembic_config() -> Config:
    """Return Alembic's configuration: where the migrations are."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
