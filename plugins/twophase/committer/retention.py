"""What `sweep` may remove, and what it did: by the states and the clock of the record alone."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection, text

from twophase.core.checkpoint import Key, Revision
from twophase.core.retention import Retention
from twophase.core.states import ENDED, State

#: How many rows one statement deletes.
BATCH = 10_000

#: No live revision of another pipeline reads it: otherwise that one's next attempt would read it again.
_UNREAD = """NOT EXISTS (SELECT FROM twophase.input_revision i
    JOIN twophase.revision d ON (d.pipeline, d.checkpoint_id, d.revision) = (i.pipeline, i.checkpoint_id, i.revision)
    WHERE (i.upstream, i.upstream_checkpoint_id, i.upstream_revision) = (r.pipeline, r.checkpoint_id, r.revision)
      AND d.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING'))"""


class Expired(NamedTuple):
    """A superseded revision whose retention is over."""

    key: Key
    superseded_at: datetime


def expired(connection: Connection, pipeline: str, retention: Retention) -> list[Expired]:
    """List the superseded revisions whose retention is over."""
    query = text(f"""
        SELECT r.checkpoint_id, r.revision, r.superseded_at FROM twophase.revision r
        WHERE r.pipeline = :pipeline AND r.state = 'SUPERSEDED' AND r.swept_at IS NULL
          AND r.superseded_at <= now() - CAST(:age AS interval)
          AND (SELECT count(*) FROM twophase.revision n WHERE n.pipeline = r.pipeline
               AND n.checkpoint_id = r.checkpoint_id AND n.revision > r.revision
               AND n.state = 'SUPERSEDED' AND n.swept_at IS NULL) >= :keep_last
          AND {_UNREAD}
        ORDER BY r.checkpoint_id, r.revision""")  # noqa: S608 - no user's text
    values = {"pipeline": pipeline, "keep_last": retention.keep_last, "age": retention.superseded_for}
    rows = connection.execute(query, values)
    return [Expired(Key(pipeline, row.checkpoint_id, row.revision), row.superseded_at) for row in rows]


def mark_swept(connection: Connection, key: Key) -> bool:
    """Record that a superseded revision is swept, before its output is removed.

    False: it was swept already, or a live revision reads it by now.
    """
    statement = text(f"""
        UPDATE twophase.revision r SET swept_at = clock_timestamp(), leftovers = true
        WHERE r.pipeline = :pipeline AND r.checkpoint_id = :checkpoint_id AND r.revision = :revision
          AND r.state = 'SUPERSEDED' AND r.swept_at IS NULL AND {_UNREAD}""")  # noqa: S608 - no user's text
    return bool(connection.execute(statement, key._asdict()).rowcount)


def suspects(connection: Connection, pipeline: str) -> list[Revision]:
    """List the revisions whose attempts may have left something that no sweep has looked for yet.

    A revision that was promoted from its first attempt left nothing, so it is not among them.
    """
    query = text("""
        SELECT checkpoint_id, revision, state, epoch, swept_at IS NOT NULL AS swept FROM twophase.revision
        WHERE pipeline = :pipeline AND leftovers
          AND (epoch > 1 OR state IN ('ABORTING', 'ABORTED') OR swept_at IS NOT NULL)
        ORDER BY checkpoint_id, revision""")
    return [
        Revision(Key(pipeline, row.checkpoint_id, row.revision), State(row.state), row.epoch, swept=row.swept)
        for row in connection.execute(query, {"pipeline": pipeline})
    ]


def mark_clean(connection: Connection, revisions: Collection[Revision]) -> None:
    """Record that nothing is left of the attempts of ended revisions; one that changed meanwhile is not marked."""
    statement = text("""
        UPDATE twophase.revision r SET leftovers = false
        FROM unnest(CAST(:pipelines AS text[]), CAST(:checkpoints AS bigint[]), CAST(:revisions AS int[]),
                    CAST(:states AS text[]), CAST(:epochs AS int[]), CAST(:swept AS boolean[]))
            AS seen (pipeline, checkpoint_id, revision, state, epoch, swept)
        WHERE (r.pipeline, r.checkpoint_id, r.revision) = (seen.pipeline, seen.checkpoint_id, seen.revision)
          AND (r.state, r.epoch, r.swept_at IS NOT NULL) = (seen.state, seen.epoch, seen.swept)""")
    ended = [one for one in revisions if one.state in ENDED]
    values = {
        "pipelines": [one.key.pipeline for one in ended],
        "checkpoints": [one.checkpoint_id for one in ended],
        "revisions": [one.revision for one in ended],
        "states": [one.state.value for one in ended],
        "epochs": [one.epoch for one in ended],
        "swept": [one.swept for one in ended],
    }
    if ended:
        connection.execute(statement, values)


#: `now()` is one value per statement, so an index can be used.
_OLD_EVENTS = """SELECT e.id FROM twophase.event e
    JOIN twophase.revision r ON (r.pipeline, r.checkpoint_id, r.revision) = (e.pipeline, e.checkpoint_id, e.revision)
    WHERE e.pipeline = :pipeline AND e.at <= now() - CAST(:age AS interval)
      AND r.state IN ('COMMITTED', 'SUPERSEDED', 'ABORTED')"""


#: Slots that could not begin and were not tried again for a time; a later try adds them again.
_OLD_UNBEGUN = """SELECT u.slot FROM twophase.unbegun u
    WHERE u.pipeline = :pipeline AND u.at <= now() - CAST(:age AS interval)"""


def old_events(connection: Connection, pipeline: str, age: timedelta) -> int:
    """Count the events of ended revisions that are older than `age`."""
    return _count(connection, _OLD_EVENTS, pipeline, age)


def delete_events(connection: Connection, pipeline: str, age: timedelta) -> int:
    """Delete a batch of those; return how many. Rows that another sweep deletes just now are skipped."""
    some = f"{_OLD_EVENTS} ORDER BY e.at LIMIT {BATCH} FOR UPDATE OF e SKIP LOCKED"
    statement = text(f"DELETE FROM twophase.event WHERE id IN ({some})")  # noqa: S608 - no user's text
    return int(connection.execute(statement, {"pipeline": pipeline, "age": age}).rowcount)


def old_unbegun(connection: Connection, pipeline: str, age: timedelta) -> int:
    """Count the slots that could not begin and were last tried longer ago than `age`."""
    return _count(connection, _OLD_UNBEGUN, pipeline, age)


def delete_unbegun(connection: Connection, pipeline: str, age: timedelta) -> int:
    """Delete a batch of those; return how many. One that is being tried just now stays."""
    some = f"{_OLD_UNBEGUN} ORDER BY u.at LIMIT {BATCH} FOR UPDATE SKIP LOCKED"
    statement = text(f"DELETE FROM twophase.unbegun WHERE pipeline = :pipeline AND slot IN ({some})")  # noqa: S608 - no user's text
    return int(connection.execute(statement, {"pipeline": pipeline, "age": age}).rowcount)


def _count(connection: Connection, old: str, pipeline: str, age: timedelta) -> int:
    query = text(f"SELECT count(*) FROM ({old}) old")  # noqa: S608 - no user's text
    return int(connection.execute(query, {"pipeline": pipeline, "age": age}).scalar_one())
