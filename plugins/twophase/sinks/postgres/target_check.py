"""Checks the arguments of the PostgreSQL sink, and its target, before rows are staged. The sink calls it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.sinks import modes
from twophase.sinks.postgres import catalog, rights, slot_rows
from twophase.sinks.postgres.catalog import CatalogColumn
from twophase.sinks.postgres.promotion import Mode
from twophase.sinks.postgres.staging_table import CHECKPOINT
from twophase.storage import database
from twophase.storage.database import TableName

BY_KEY = ("upsert", "retract")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]*")
#: The most partitions that a target may have: PostgreSQL plans over all of them (docs/how-to/postgres.md).
MOST_PARTITIONS = 1000


def check_declared(which: str, conn_id: str, mode: Mode, slot_column: str | None, staging_schema: str) -> None:
    """Raise ConfigError unless the arguments of a sink fit together."""
    by_key = mode.name in BY_KEY
    if not conn_id:
        msg = f"{which}: conn_id is missing; name the Airflow connection of the database"
        raise ConfigError(msg)
    modes.check_declared(which, "Postgres", mode.name)
    if bool(mode.key) != by_key:
        found = f"mode {mode.name!r} with{'' if mode.key else 'out'} a key"
        msg = f"{which}: {found}; {' and '.join(BY_KEY)} need key=[…], and nothing else has one"
        raise ConfigError(msg)
    if mode.attach and mode.name != "append":
        msg = f"{which}: attach=True with mode {mode.name!r}; only what is appended can be a partition"
        raise ConfigError(msg)
    if mode.history is not None and (mode.history < 0 or not by_key):
        msg = f"{which}: history={mode.history}; expected 0, 1, 2 … with mode {' or '.join(BY_KEY)}"
        raise ConfigError(msg)
    if slot_column is not None and mode.name != "replace":
        msg = f"{which}: slot_column={slot_column!r} with mode {mode.name!r}; only what is replaced has one"
        raise ConfigError(msg)
    if not _SCHEMA.fullmatch(staging_schema):
        msg = f"{which}: staging_schema {staging_schema!r}: expected small letters, digits and _"
        raise ConfigError(msg)


def asked_of(cursor: Any, target: TableName) -> list[CatalogColumn]:  # noqa: ANN401 - a cursor
    """Return the columns of a target, with what each demands; none if the target does not exist yet."""
    found = catalog.kind_of(cursor, target)
    return [] if found is None else catalog.columns_of(cursor, found.oid)


def domains_of(cursor: Any, target: TableName) -> dict[str, str]:  # noqa: ANN401 - a cursor
    """Return the base type of each column that has a domain."""
    return {column.name: column.base for column in asked_of(cursor, target) if column.base}


def check_columns(which: str, asked: Iterable[CatalogColumn], written: Collection[str], mode: Mode) -> None:
    """Raise ConfigError if the output has a column that the target fills by itself, or lacks one that it needs.

    By key the row may be there already and have the column: then `acceptance.py` finds out, once rows are staged.
    """
    for column in asked:
        if column.name in written:
            if column.filled:
                msg = f"{which}: column {column.name!r} of the target is {column.filled}; drop it from the output"
                raise ConfigError(msg)
        elif column.not_null and not column.has_default and not mode.key:
            msg = (
                f"{which}: column {column.name!r} of the target is NOT NULL without a default, and the output lacks it;"
                " add it in the transform, or give it a default"
            )
            raise ConfigError(msg)
        elif column.identity and mode.attach:
            msg = (
                f"{which}: attach=True: column {column.name!r} of the target is an identity, which is not filled in"
                " what is attached; add it in the transform, or drop it from the target"
            )
            raise ConfigError(msg)


@dataclass(frozen=True)
class TargetCheck:
    """Checks the target of a sink; `which` names the sink in errors."""

    which: str
    target: TableName
    mode: Mode
    slot_column: str | None
    #: Whether the pipeline goes by slots.
    by_slots: bool

    def check_writable(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Raise SinkUnavailable if the database is read-only: a standby may become the primary in a moment."""
        cursor.execute("SELECT current_setting('transaction_read_only')::boolean, pg_is_in_recovery()")
        read_only, in_recovery = cursor.fetchone()
        if read_only:
            found = "a standby; name the primary" if in_recovery else "default_transaction_read_only = on; turn it off"
            msg = f"{self.which}: expected a database that can be written to, found {found}"
            raise SinkUnavailable(msg)

    def check(self, cursor: Any, slot: str | None) -> None:  # noqa: ANN401 - a cursor
        """Raise ConfigError unless the target has the columns and indexes that promotion needs, or will be created."""
        found = catalog.kind_of(cursor, self.target)
        if found is None:
            self._check_absent()
            return
        for kind in (found, *(catalog.partitions_of(cursor, found.oid) if found.partitioned else ())):
            if kind.objection:
                msg = f"{self.which}: {kind.objection}"
                raise ConfigError(msg)
        columns = database.columns_of(cursor, self.target) or {}
        self._check_row_security(cursor)
        if self.slot_column is not None:
            slot_rows.check_column(cursor, self.which, self.slot_column, columns.get(self.slot_column), slot)
        if self._marked(columns) and columns.get(CHECKPOINT) != "bigint":
            instead = columns.get(CHECKPOINT, "none")
            wanted = f"expected a column {CHECKPOINT} bigint"
            msg = f"{self.which}: {wanted}, found {instead}; add it, rows say by it whose they are"
            raise ConfigError(msg)
        if missing := [name for name in self.mode.key if name not in columns]:
            msg = f"{self.which}: key {missing[0]!r} is no column of it, expected one of {', '.join(columns)}"
            raise ConfigError(msg)
        if self.mode.key and not catalog.has_unique_key(cursor, found.oid, self.mode.key):
            key = ", ".join(self.mode.key)
            msg = (
                f"{self.which}: no primary key or unique index on just {key} that is valid, not deferrable and over all"
                " rows; make one, an upsert goes by it"
            )
            raise ConfigError(msg)
        if self.mode.attach:
            self._check_partitions(cursor)

    def _check_row_security(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Refuse a target whose row security applies to us: policies hide rows, and run code of their authors."""
        cursor.execute(
            "SELECT current_user FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s AND row_security_active(c.oid)",
            tuple(self.target),
        )
        if row := cursor.fetchone():
            msg = f"{self.which}: its row security applies to {row[0]}, who promotes; ALTER ROLE {row[0]} BYPASSRLS"
            raise ConfigError(msg)

    def _marked(self, columns: dict[str, str]) -> bool:
        """Say whether rows carry their checkpoint's number."""
        if self.slot_column is not None:
            return CHECKPOINT in columns
        return self.mode.name == "append" or (self.mode.name == "replace" and self.by_slots)

    def _check_absent(self) -> None:
        """Raise ConfigError unless the table will be created, in a schema that is not the server's own."""
        if not self.mode.create:
            msg = f"{self.which}: the table is not there; make it, or declare create=True"
            raise ConfigError(msg)
        if self.target.schema.startswith("pg_") or self.target.schema == "information_schema":
            msg = f"{self.which}: schema {self.target.schema!r} is the server's own; expected one of yours"
            raise ConfigError(msg)

    def _check_partitions(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        cursor.execute(
            "SELECT pg_get_partkeydef(c.oid), (SELECT count(*) FROM pg_inherits WHERE inhparent = c.oid)"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s",
            tuple(self.target),
        )
        by, count = cursor.fetchone()
        which = f"{self.which}: attach=True"
        if by != f"LIST ({CHECKPOINT})":
            msg = f"{which}: expected a table partitioned by LIST ({CHECKPOINT}), found {by or 'none'}"
            raise ConfigError(msg)
        if count >= MOST_PARTITIONS:
            msg = f"{which}: it has {count} partitions, at most {MOST_PARTITIONS} may be; merge old ones"
            raise ConfigError(msg)

    def create_schema(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Create the schema of a target that the first promotion creates: then it would be too late to be refused."""
        if self.mode.create and (problem := rights.create_schema(cursor, self.target)):
            msg = f"{self.which}: {problem}"
            raise ConfigError(msg)

    def check_rights(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Raise ConfigError unless the promoting account has all rights that a promotion needs."""
        for problem in rights.lacking(cursor, self.target, self.mode):
            msg = f"{self.which}: {problem}"
            raise ConfigError(msg)
