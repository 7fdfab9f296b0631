"""What retention takes away, by the record's own clock and state alone."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection, text

from twophase.core.checkpoint import Key
from twophase.core.retention import Retention

#: How many events go at once.
BATCH = 10_000

#: Whatever somebody live reads stays: its next attempt reads the same.
_UNREAD = """NOT EXISTS (SELECT FROM twophase.input_revision i
    JOIN twophase.revision d ON (d.pipeline, d.checkpoint_id, d.revision) = (i.pipeline, i.checkpoint_id, i.revision)
    WHERE (i.upstream, i.upstream_checkpoint_id, i.upstream_revision) = (r.pipeline, r.checkpoint_id, r.revision)
      AND d.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING'))"""


class Expired(NamedTuple):
    """A superseded revision whose output need not be kept any longer."""

    key: Key
    superseded_at: datetime


def expired(connection: Connection, pipeline: str, retention: Retention) -> list[Expired]:
    """List the superseded revisions whose retention is over."""
    query = text(f"""
        SELECT r.checkpoint_id, r.revision, r.superseded_at
        FROM (SELECT *, row_number() OVER (PARTITION BY checkpoint_id ORDER BY revision DESC) AS newest
              FROM twophase.revision
              WHERE pipeline = :pipeline AND state = 'SUPERSEDED' AND swept_at IS NULL) r
        WHERE r.newest > :keep_last AND r.superseded_at <= clock_timestamp() - CAST(:age AS interval) AND {_UNREAD}
        ORDER BY r.checkpoint_id, r.revision""")  # noqa: S608 - no user's text
    values = {"pipeline": pipeline, "keep_last": retention.keep_last, "age": retention.superseded_for}
    rows = connection.execute(query, values)
    return [Expired(Key(pipeline, row.checkpoint_id, row.revision), row.superseded_at) for row in rows]


def mark_swept(connection: Connection, key: Key) -> bool:
    """Record that a superseded revision's output goes; False: it has gone already, or somebody began to read it."""
    statement = text(f"""
        UPDATE twophase.revision r SET swept_at = clock_timestamp()
        WHERE r.pipeline = :pipeline AND r.checkpoint_id = :checkpoint_id AND r.revision = :revision
          AND r.state = 'SUPERSEDED' AND r.swept_at IS NULL AND {_UNREAD}""")  # noqa: S608 - no user's text
    return bool(connection.execute(statement, key._asdict()).rowcount)


_OLD_EVENTS = """SELECT e.id FROM twophase.event e
    JOIN twophase.revision r ON (r.pipeline, r.checkpoint_id, r.revision) = (e.pipeline, e.checkpoint_id, e.revision)
    WHERE e.pipeline = :pipeline AND e.at <= clock_timestamp() - CAST(:age AS interval)
      AND r.state IN ('COMMITTED', 'SUPERSEDED', 'ABORTED')"""


def old_events(connection: Connection, pipeline: str, age: timedelta) -> int:
    """Count the events of ended revisions that are older than an age."""
    query = text(f"SELECT count(*) FROM ({_OLD_EVENTS}) old")  # noqa: S608 - no user's text
    return int(connection.execute(query, {"pipeline": pipeline, "age": age}).scalar_one())


def delete_events(connection: Connection, pipeline: str, age: timedelta) -> int:
    """Delete some of those; return how many."""
    statement = text(f"DELETE FROM twophase.event WHERE id IN ({_OLD_EVENTS} ORDER BY e.at LIMIT {BATCH})")  # noqa: S608 - no user's text
    return int(connection.execute(statement, {"pipeline": pipeline, "age": age}).rowcount)
