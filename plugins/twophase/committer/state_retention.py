"""Which states a sweep may forget, and which of their files are dead; `state_sweep` calls it (S3).

A state is its manifest. First the manifests whose retention is over are marked, under the pipeline's lock, so that no
revision begins from one. Then the files that only marked manifests list are removed, and then the lists themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection, text

from twophase.core.checkpoint import Json, Key

#: How many of the last checkpoints keep their states however old they are.
KEEP = 10

#: Read by a revision that is live, and so by its next attempt.
_UNREAD = """NOT EXISTS (SELECT FROM twophase.revision d WHERE d.pipeline = r.pipeline
    AND d.state IN ('OPEN', 'PRECOMMITTED', 'COMMITTING')
    AND CAST(d.base ->> 'checkpoint_id' AS bigint) = r.checkpoint_id)"""
#: Before what a replay that is under way, or one that has to come, starts from.
_UNREPLAYED = """r.checkpoint_id < least(
    (SELECT p.stale_from - 1 FROM twophase.pipeline p WHERE p.name = r.pipeline),
    (SELECT min(CAST(b.selection -> 'checkpoints' ->> 0 AS bigint)) - 1 FROM twophase.backfill b
        WHERE b.pipeline = r.pipeline AND b.ended_at IS NULL AND b.selection ? 'checkpoints'),
    (SELECT min(k.checkpoint_id) FROM (SELECT DISTINCT o.checkpoint_id FROM twophase.revision o
        WHERE o.pipeline = r.pipeline AND o.commit_seq IS NOT NULL
        ORDER BY o.checkpoint_id DESC LIMIT :keep) k))"""
_EXPIRED = f"""
    SELECT r.checkpoint_id, r.revision FROM twophase.revision r
    WHERE r.pipeline = :pipeline AND r.base IS NOT NULL AND r.state IN ('COMMITTED', 'SUPERSEDED')
      AND r.state_swept_at IS NULL AND r.decided_at <= now() - CAST(:age AS interval)
      AND {_UNREAD} AND {_UNREPLAYED}
    ORDER BY r.checkpoint_id, r.revision LIMIT {{limit}}"""  # noqa: S608 - no user's text, here and below
#: How many states one transaction marks, or forgets.
BATCH = 1000


class SweptState(NamedTuple):
    """A state whose retention is over and whose files may still be there."""

    key: Key
    name: str
    manifest: Json


def expired(connection: Connection, pipeline: str, age: timedelta) -> list[Key]:
    """List some of the revisions whose states are too old to be kept."""
    values = {"pipeline": pipeline, "age": age, "keep": KEEP}
    rows = connection.execute(text(_EXPIRED.format(limit=BATCH)), values)
    return [Key(pipeline, *row) for row in rows]


def mark(connection: Connection, keys: Sequence[Key]) -> None:
    """Record that the retention of these states is over; the pipeline is locked."""
    statement = text("""
        UPDATE twophase.revision SET state_swept_at = clock_timestamp(), state_left = true
        WHERE pipeline = :pipeline AND checkpoint_id = :checkpoint_id AND revision = :revision""")
    if keys:
        connection.execute(statement, [key._asdict() for key in keys])


def swept(connection: Connection, pipeline: str) -> list[SweptState]:
    """List states whose retention is over and that no sweep has removed yet."""
    query = text(f"""
        SELECT r.checkpoint_id, r.revision, p.name, p.manifest FROM twophase.revision r
        JOIN twophase.participant p ON p.kind = 'state'
            AND (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
        WHERE r.pipeline = :pipeline AND r.state_left ORDER BY r.checkpoint_id, r.revision LIMIT {BATCH}""")  # noqa: S608
    rows = connection.execute(query, {"pipeline": pipeline})
    return [SweptState(Key(pipeline, *row[:2]), row.name, row.manifest) for row in rows]


def kept(connection: Connection, pipeline: str, paths: Sequence[str]) -> set[str]:
    """Return those of the files that a state lists which is kept, or that may still be decided."""
    query = text("""
        SELECT DISTINCT run ->> 'path' FROM twophase.revision r
        JOIN twophase.participant p ON p.kind = 'state'
            AND (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
        CROSS JOIN LATERAL jsonb_array_elements(
            coalesce(p.manifest -> 'runs', '[]') || coalesce(p.manifest -> 'own', '[]')
            || coalesce(p.handle -> 'standing' -> 'manifest' -> 'runs', '[]')) AS run
        WHERE r.pipeline = :pipeline AND r.state_swept_at IS NULL AND r.state NOT IN ('ABORTING', 'ABORTED')
          AND run ->> 'path' = ANY (:paths)""")
    return set(connection.execute(query, {"pipeline": pipeline, "paths": list(paths)}).scalars())


def forget(connection: Connection, states: Sequence[SweptState]) -> None:
    """Remove the lists of files from states whose files are gone; what else their manifests say stays."""
    lists = text("""
        UPDATE twophase.participant SET manifest = manifest - 'runs' - 'own'
        WHERE pipeline = :pipeline AND checkpoint_id = :checkpoint_id AND revision = :revision AND name = :name""")
    left = text("""
        UPDATE twophase.revision SET state_left = false
        WHERE pipeline = :pipeline AND checkpoint_id = :checkpoint_id AND revision = :revision""")
    if states:
        connection.execute(lists, [{**one.key._asdict(), "name": one.name} for one in states])
        connection.execute(left, [key._asdict() for key in {one.key for one in states}])


def unlisted(connection: Connection, pipeline: str, name: str, keys: Sequence[Key]) -> Iterator[tuple[Key, set[str]]]:
    """Yield, for decided revisions among these, the files that their state lists; the others are nobody's."""
    query = text("""
        SELECT r.checkpoint_id, r.revision, p.manifest FROM twophase.revision r
        JOIN twophase.participant p ON p.name = :name
            AND (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
        WHERE r.pipeline = :pipeline AND r.state IN ('COMMITTED', 'SUPERSEDED')
          AND r.checkpoint_id = ANY (:checkpoints)""")
    wanted = {"pipeline": pipeline, "name": name, "checkpoints": [key.checkpoint_id for key in keys]}
    for row in connection.execute(query, wanted):
        lists = (*row.manifest.get("runs", ()), *row.manifest.get("own", ()))
        yield Key(pipeline, row.checkpoint_id, row.revision), {run["path"] for run in lists}


def kept_states(connection: Connection, pipeline: str, name: str) -> Iterator[tuple[int, Json]]:
    """Yield the kept states that stand, one per checkpoint, oldest first: its number and the manifest."""
    query = text("""
        SELECT DISTINCT ON (r.checkpoint_id) r.checkpoint_id, p.manifest FROM twophase.revision r
        JOIN twophase.participant p ON p.name = :name
            AND (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)
        WHERE r.pipeline = :pipeline AND r.commit_seq IS NOT NULL AND r.base IS NOT NULL AND r.state_swept_at IS NULL
        ORDER BY r.checkpoint_id, r.revision DESC""")
    for row in connection.execute(query, {"pipeline": pipeline, "name": name}):
        yield row.checkpoint_id, row.manifest
