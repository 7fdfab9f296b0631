"""Receipts of decisions, in a table beside the markers. The promotion writes them, `twophase reconcile` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from twophase.core.checkpoint import Json
from twophase.core.hindrances import Hindrance, Refused
from twophase.sinks.postgres import history
from twophase.sinks.staged_files.receipts import conflict
from twophase.storage.database import TableName

#: The table of receipts; the transaction that makes the rows visible also inserts the receipt.
RECEIPTS = TableName(history.SCHEMA, "receipt")
_CREATE = """CREATE TABLE IF NOT EXISTS {} (pipeline text, target text, commit_seq bigint, epoch integer NOT NULL,
    receipt jsonb NOT NULL, PRIMARY KEY (pipeline, target, commit_seq))"""
#: The key of a receipt that is kept as an escaped text, in ASCII, which every encoding has.
_ESCAPED = "escaped"


def create(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Create the table, unless it is there; its schema is there already."""
    from psycopg2 import sql

    if not _is_there(cursor):
        cursor.execute("SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('twophase_sinks'))")
        cursor.execute(sql.SQL(_CREATE).format(RECEIPTS.sql))


def _is_there(cursor: Any) -> bool:  # noqa: ANN401 - a cursor
    cursor.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (str(RECEIPTS),))
    return bool(cursor.fetchone()[0])


def keep(cursor: Any, target: TableName, receipt: Json) -> None:  # noqa: ANN401 - a cursor
    """Insert a receipt; Refused if its number belongs to another decision. After a restage the later epoch stays."""
    from psycopg2 import sql

    if not receipt:  # the output was not given one
        return
    create(cursor)
    where = (receipt["pipeline"], str(target), receipt["commit_seq"])
    query = "SELECT receipt FROM {} WHERE pipeline = %s AND target = %s AND commit_seq = %s"
    cursor.execute(sql.SQL(query).format(RECEIPTS.sql), where)
    if (there := cursor.fetchone()) and (why := conflict(receipt, _read(there[0]))):
        raise Refused(why, Hindrance.FOREIGN)
    query = (
        "INSERT INTO {} AS r (pipeline, target, commit_seq, epoch, receipt) VALUES (%s, %s, %s, %s, %s)"
        " ON CONFLICT (pipeline, target, commit_seq)"
        " DO UPDATE SET epoch = excluded.epoch, receipt = excluded.receipt WHERE r.epoch < excluded.epoch"
    )
    cursor.execute(sql.SQL(query).format(RECEIPTS.sql), (*where, receipt["epoch"], _written(receipt)))


def _written(receipt: Json) -> str:
    """Return a receipt as JSON for a database of any encoding: a path may have letters that the encoding lacks."""
    text = json.dumps(dict(receipt))
    return text if "\\u" not in text else json.dumps({_ESCAPED: text})


def _read(kept: Json) -> Json:
    found: Json = json.loads(kept[_ESCAPED]) if _ESCAPED in kept else kept
    return found


def newest(cursor: Any, target: TableName, pipeline: str) -> int | None:  # noqa: ANN401 - a cursor
    """Return the highest commit_seq that has a receipt; None if there is none."""
    from psycopg2 import sql

    if not _is_there(cursor):
        return None
    query = "SELECT commit_seq FROM {} WHERE pipeline = %s AND target = %s ORDER BY commit_seq DESC LIMIT 1"
    cursor.execute(sql.SQL(query).format(RECEIPTS.sql), (pipeline, str(target)))
    found = cursor.fetchone()
    return found[0] if found else None


def since(cursor: Any, target: TableName, pipeline: str, seq: int) -> Iterator[Json]:  # noqa: ANN401 - a cursor
    """Yield the receipts from one commit_seq on, in order."""
    from psycopg2 import sql

    if _is_there(cursor):
        query = "SELECT receipt FROM {} WHERE pipeline = %s AND target = %s AND commit_seq >= %s ORDER BY commit_seq"
        cursor.execute(sql.SQL(query).format(RECEIPTS.sql), (pipeline, str(target), seq))
        yield from (_read(row[0]) for row in cursor.fetchall())


def marked(cursor: Any, markers: TableName, target: TableName, pipeline: str) -> Iterator[tuple[int, int]]:  # noqa: ANN401 - a cursor
    """Yield checkpoint and revision of every marker of a pipeline in a target."""
    from psycopg2 import sql

    cursor.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (str(markers),))
    if cursor.fetchone()[0]:
        query = "SELECT checkpoint_id, revision FROM {} WHERE pipeline = %s AND target = %s"
        cursor.execute(sql.SQL(query).format(markers.sql), (pipeline, str(target)))
        yield from cursor.fetchall()
