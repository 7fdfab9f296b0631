"""Open the record: find the committer database, connect, and check the record's version; runs and commands call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twophase.local import postgres
from twophase.local.committer_database import resolve

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord


def open_record(dsn: str | None = None, *, may_start: bool = False, who: str | None = None) -> PostgresRecord:
    """Return the record.

    Who may start the embedded server may also create a record where there is none, and brings it back if it dies.
    An older record in somebody's own database is only upgraded by `twophase db upgrade`.
    """
    from twophase.committer.record import PostgresRecord

    committer = resolve(dsn, may_start=may_start)
    restart = postgres.ensure if committer.embedded and may_start else None
    return PostgresRecord.open(
        committer.dsn,
        who=who,
        origin=committer.origin,
        restart=restart,
        create=may_start,
        upgrade=committer.embedded,
    )
