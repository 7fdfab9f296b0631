"""Backfills under way: what was asked for, and who does it. What is done is in the revisions themselves."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from twophase.committer import tables as t
from twophase.core.checkpoint import Json

b, c, r = t.backfill.c, t.checkpoint.c, t.revision.c


class Backfill(NamedTuple):
    """One backfill that has not ended."""

    id: str
    created_at: datetime
    #: Whether it was under way already.
    goes_on: bool


def start(connection: Connection, pipeline: str, selection: Json, who: str, why: str | None) -> Backfill:
    """Start a backfill, or go on with the same one if it has not ended."""
    new = f"backfill-{secrets.token_hex(4)}"
    row = {"id": new, "pipeline": pipeline, "selection": selection, "who": who, "why": why}
    same = (b.pipeline == pipeline) & (b.selection == selection) & b.ended_at.is_(None)
    while True:  # the one that stands in the way may end before it is looked at
        connection.execute(upsert(t.backfill).values(row).on_conflict_do_nothing())
        found = connection.execute(select(b.id, b.created_at).where(same)).first()
        if found is not None:
            return Backfill(found.id, found.created_at, found.id != new)


def end(connection: Connection, which: str) -> None:
    """End a backfill; the next one of the same selection does everything anew."""
    connection.execute(update(t.backfill).where((b.id == which) & b.ended_at.is_(None)).values(ended_at=func.now()))


def give_up(connection: Connection, pipeline: str, selection: Json) -> None:
    """End whatever backfill of this selection is under way."""
    same = (b.pipeline == pipeline) & (b.selection == selection) & b.ended_at.is_(None)
    connection.execute(update(t.backfill).where(same).values(ended_at=func.now()))


def checkpoints(connection: Connection, pipeline: str, first: int, last: int) -> list[tuple[int, str | None]]:
    """Return the checkpoints of a range, each with its slot; released ones are none any more."""
    query = (
        select(c.checkpoint_id, c.slot)
        .where((c.pipeline == pipeline) & c.checkpoint_id.between(first, last) & c.released_at.is_(None))
        .order_by(c.checkpoint_id)
    )
    return [(row.checkpoint_id, row.slot) for row in connection.execute(query)]


def has_come_to(connection: Connection, pipeline: str, checkpoint_id: int, run_id: str) -> bool:
    """Say whether a run's backfill takes a range of checkpoints in order through the latest, and this one is next.

    The latest is what was decided when the backfill began: what is decided since came after a replay had begun.
    """
    which = run_id.rpartition(".")[0]
    asked = connection.execute(select(b.selection, b.created_at).where((b.id == which) & (b.pipeline == pipeline)))
    found = asked.first()
    if found is None or "checkpoints" not in found.selection:
        return False
    first, last = found.selection["checkpoints"]
    decided = (r.pipeline == pipeline) & r.commit_seq.is_not(None)
    missed = select(r.checkpoint_id).where(decided & (r.checkpoint_id > last) & (r.decided_at < found.created_at))
    earlier = decided & r.checkpoint_id.between(first, checkpoint_id - 1)
    done = select(r.checkpoint_id).where(earlier & r.run_id.startswith(f"{which}.", autoescape=True))
    undone = select(r.checkpoint_id).where(earlier & r.checkpoint_id.not_in(done))
    return first <= checkpoint_id <= last and not any(
        connection.execute(query.limit(1)).first() for query in (missed, undone)
    )


def latest(connection: Connection, pipeline: str) -> int:
    """Return the last checkpoint that is decided."""
    query = select(func.max(r.checkpoint_id)).where((r.pipeline == pipeline) & r.commit_seq.is_not(None))
    return connection.execute(query).scalar() or 0


def last_slot(connection: Connection, pipeline: str) -> str | None:
    """Return the slot of the newest checkpoint that has one."""
    query = select(c.slot).where((c.pipeline == pipeline) & c.slot.is_not(None)).order_by(c.checkpoint_id.desc())
    found: str | None = connection.execute(query.limit(1)).scalar()
    return found


def reads(connection: Connection) -> dict[str, set[str]]:
    """Return which pipelines read which others' commits."""
    rows = connection.execute(select(t.pipeline.c.name, t.pipeline.c.declaration["reads"]))
    return {
        name: {read["pipeline"] for read in declared.values() if "pipeline" in read and "sink" in read}
        for name, declared in rows
    }
