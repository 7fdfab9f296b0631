"""Queries over revisions for sweep, verify, diff and hand-over. Read only."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import Connection, Engine, func, select

from twophase.committer import participant_rows
from twophase.committer.revision_rows import REVISION, r, to_revision
from twophase.committer.tables import participant
from twophase.core.checkpoint import Key, Output, Revision
from twophase.core.states import State

p = participant.c


def of_checkpoints(engine: Engine, pipeline: str, checkpoints: Collection[int]) -> Mapping[Key, Revision]:
    """Return every revision of some checkpoints, the newest of each first."""
    mine = (r.pipeline == pipeline) & r.checkpoint_id.in_(checkpoints)
    query = REVISION.where(mine).order_by(r.checkpoint_id, r.revision.desc())
    with engine.connect() as connection:
        return {found.key: found for found in map(to_revision, connection.execute(query))}


def newest(connection: Connection, pipeline: str) -> Key | None:
    """Return the newest revision of a pipeline; events about the pipeline as a whole are kept with it."""
    query = select(r.pipeline, r.checkpoint_id, r.revision).where(r.pipeline == pipeline)
    row = connection.execute(query.order_by(r.checkpoint_id.desc(), r.revision.desc()).limit(1)).first()
    return Key(*row) if row else None


def committed(engine: Engine, pipeline: str) -> int:
    """Count the checkpoints of a pipeline that are committed."""
    query = select(func.count()).where((r.pipeline == pipeline) & (r.state == State.COMMITTED))
    with engine.connect() as connection:
        return int(connection.execute(query).scalar_one())


def voted(engine: Engine, pipeline: str, sink: str, checkpoints: Collection[int]) -> Mapping[Key, int]:
    """Return each revision's attempt that counts in a sink; during a restage the old one does, until the vote (R10)."""
    standing = func.coalesce(participant_rows.STANDING, p.attempt).label("attempt")
    query = select(p.checkpoint_id, p.revision, standing).where(
        (p.pipeline == pipeline) & (p.name == sink) & p.checkpoint_id.in_(checkpoints)
    )
    with engine.connect() as connection:
        return {Key(pipeline, row.checkpoint_id, row.revision): row.attempt for row in connection.execute(query)}


def places(engine: Engine, pipeline: str, sink: str) -> list[Output]:
    """Return the outputs that may be visible in a sink: of revisions that are COMMITTING or COMMITTED."""
    join = (p.pipeline == r.pipeline) & (p.checkpoint_id == r.checkpoint_id) & (p.revision == r.revision)
    query = (
        select(r.checkpoint_id, r.revision, p.attempt, p.handle)
        .join(participant, join & (p.name == sink))
        .where((r.pipeline == pipeline) & r.state.in_([State.COMMITTING, State.COMMITTED]))
    )
    with engine.connect() as connection:
        rows = connection.execute(query).all()
    return [Output(Key(pipeline, *row[:2]), row.attempt, participant_rows.place(row.handle), sink=sink) for row in rows]
