"""What the record keeps of a pipeline's state: which one a revision reads, and which checkpoints are stale.

`PostgresTransaction` in `record` inherits it; the rules are in `core.lineage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from psycopg2.extras import Json as AsJson

from twophase.committer.participant_rows import of_row
from twophase.committer.revision_rows import Revisions
from twophase.committer.statement import Statement
from twophase.core.checkpoint import Base, Json, Key, Participant
from twophase.core.ports import Lane, StandingBase

_HERE = "pipeline = :pipeline AND checkpoint_id = :checkpoint_id AND revision = :revision"
_BEGAN = Statement(
    "SELECT created_at FROM twophase.checkpoint WHERE pipeline = :pipeline AND checkpoint_id = :checkpoint_id"
)
#: The newest decided revision of the last decided checkpoint before this one, with its states.
_STANDING = Statement("""
    SELECT r.checkpoint_id, r.revision, r.state_swept_at IS NOT NULL AS swept,
        p.name, p.kind, p.attempt, p.vote, p.handle, p.manifest, p.reason
    FROM (SELECT * FROM twophase.revision WHERE pipeline = :pipeline AND checkpoint_id < :checkpoint_id
            AND commit_seq IS NOT NULL ORDER BY checkpoint_id DESC, revision DESC LIMIT 1) r
    LEFT JOIN twophase.participant p ON p.kind = 'state'
        AND (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision)""")
_BASE = Statement(f"SELECT base FROM twophase.revision WHERE {_HERE}")  # noqa: S608 - no user's text, here and below
_FIX = Statement(f"UPDATE twophase.revision SET base = :base WHERE {_HERE}")  # noqa: S608
_STATES = Statement(f"""
    SELECT name, kind, attempt, vote, handle, manifest, reason FROM twophase.participant
    WHERE {_HERE} AND kind = 'state'""")  # noqa: S608
_OLDEST = Statement("""
    SELECT min(checkpoint_id) FROM twophase.revision
    WHERE pipeline = :pipeline AND commit_seq IS NOT NULL AND base IS NOT NULL AND state_swept_at IS NULL""")
_LANE = Statement("""
    SELECT p.stale_from, b.id, b.selection FROM twophase.pipeline p
    LEFT JOIN twophase.backfill b ON b.pipeline = p.name AND b.ended_at IS NULL AND b.selection ? 'checkpoints'
    WHERE p.name = :pipeline ORDER BY b.created_at DESC LIMIT 1""")
_STALE = Statement("""
    UPDATE twophase.pipeline SET stale_from = (
        SELECT min(r.checkpoint_id) FROM twophase.revision r
        WHERE r.pipeline = :pipeline AND r.checkpoint_id > :checkpoint_id AND r.commit_seq IS NOT NULL)
    WHERE name = :pipeline""")
#: Derives the first stale checkpoint from all that is decided: one that was not computed from what stands before it.
_FIND_STALE = Statement("""
    WITH standing AS (
        SELECT DISTINCT ON (checkpoint_id) checkpoint_id, revision, base FROM twophase.revision
        WHERE pipeline = :pipeline AND commit_seq IS NOT NULL AND base IS NOT NULL
        ORDER BY checkpoint_id, revision DESC),
    followed AS (
        SELECT checkpoint_id, base,
            lag(checkpoint_id) OVER w AS checkpoint_before, lag(revision) OVER w AS revision_before
        FROM standing WINDOW w AS (ORDER BY checkpoint_id))
    UPDATE twophase.pipeline SET stale_from = (
        SELECT min(checkpoint_id) FROM followed WHERE checkpoint_before IS NOT NULL
          AND (CAST(base ->> 'checkpoint_id' AS bigint), CAST(base ->> 'revision' AS int))
            <> (checkpoint_before, revision_before))
    WHERE name = :pipeline RETURNING stale_from""")


class StateRows(Revisions):
    """The methods of a transaction that are about a pipeline's state."""

    def began(self, pipeline: str, checkpoint_id: int) -> datetime | None:
        """Return when a checkpoint first began."""
        found: datetime | None = _BEGAN(self.connection, pipeline=pipeline, checkpoint_id=checkpoint_id).scalar()
        return found

    def standing_base(self, pipeline: str, checkpoint_id: int) -> StandingBase:
        """Return the state that stands before a checkpoint."""
        rows = _STANDING(self.connection, pipeline=pipeline, checkpoint_id=checkpoint_id).all()
        if not rows:
            return StandingBase(Base())
        first = rows[0]
        found = [_participant(row._mapping) for row in rows if row.name is not None]
        attempts = {one.name: (one.standing or one).attempt for one in found}
        return StandingBase(Base(first.checkpoint_id, first.revision, attempts), first.swept)

    def base(self, key: Key) -> Base | None:
        """Return the state that a revision reads; None: its pipeline had no state when it began."""
        found = _BASE(self.connection, **key._asdict()).scalar()
        return Base(**found) if found else None

    def fix_base(self, key: Key, base: Base) -> None:
        """Record the state that a revision reads."""
        _FIX(self.connection, **key._asdict(), base=AsJson(base._asdict()))

    def states(self, pipeline: str, base: Base) -> Mapping[str, Json]:
        """Return the manifest of each state of a base."""
        key = Key(pipeline, base.checkpoint_id, base.revision)
        rows = [_participant(row._mapping) for row in _STATES(self.connection, **key._asdict())]
        return {one.name: (one.standing or one).manifest for one in rows}

    def oldest_state(self, pipeline: str) -> int | None:
        """Return the first checkpoint whose state is still kept; None: there is none."""
        found: int | None = _OLDEST(self.connection, pipeline=pipeline).scalar()
        return found

    def lane(self, pipeline: str) -> Lane:
        """Return who may go on in a pipeline with state."""
        row = _LANE(self.connection, pipeline=pipeline).one()
        return Lane(row.stale_from, row.id, row.selection["checkpoints"][0] if row.selection else None)

    def mark_stale(self, pipeline: str, checkpoint_id: int) -> None:
        """Record that every decided checkpoint after this one has to be replayed; none after it: nothing has to."""
        _STALE(self.connection, pipeline=pipeline, checkpoint_id=checkpoint_id)

    def find_stale(self, pipeline: str) -> int | None:
        """Derive from all that is decided which checkpoint is the first stale one, and record it; None: none is."""
        found: int | None = _FIND_STALE(self.connection, pipeline=pipeline).scalar()
        return found


def _participant(row: Mapping[Any, Any]) -> Participant:
    return of_row({name: row[name] for name in ("name", "kind", "attempt", "vote", "handle", "manifest", "reason")})
