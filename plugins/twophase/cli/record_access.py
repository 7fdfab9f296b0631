"""Open the record for the length of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from twophase.core.errors import StoreUnavailable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from twophase.committer.record import PostgresRecord


@contextmanager
def opened(*, may_start: bool = False) -> Iterator[PostgresRecord]:
    """Open the record; if the server goes away meanwhile, the error is one line."""
    from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

    from twophase.local.record_access import open_record

    record = open_record(may_start=may_start)
    try:
        yield record
    except DBAPIError as error:
        if not (error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)):
            raise
        lines = str(error.orig).strip().splitlines() or [type(error).__name__]
        msg = f"committer database: {lines[0]}"
        raise StoreUnavailable(msg) from None
    finally:
        record.engine.dispose()


@contextmanager
def connected() -> Iterator[Connection]:
    """Open the record to read in it."""
    with opened() as record, record.engine.connect() as connection:
        yield connection
