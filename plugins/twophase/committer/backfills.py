"""Backfills in the record: what was asked for, and by whom; `backfill` starts and ends them.

How far a backfill has come is not kept here: the revisions that it made say it.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from twophase.committer import tables as t
from twophase.core.checkpoint import Json
from twophase.core.errors import ConfigError

b, c, r = t.backfill.c, t.checkpoint.c, t.revision.c


class BackfillRow(NamedTuple):
    """One backfill that has not ended."""

    id: str
    created_at: datetime
    #: Whether an earlier call started it.
    goes_on: bool


def start(connection: Connection, pipeline: str, selection: Json, who: str, why: str | None) -> BackfillRow:
    """Start a backfill, or return the unended one of the same selection."""
    new = f"backfill-{secrets.token_hex(4)}"
    row = {"id": new, "pipeline": pipeline, "selection": selection, "who": who, "why": why}
    same = (b.pipeline == pipeline) & (b.selection == selection) & b.ended_at.is_(None)
    while True:  # the one that caused the conflict may end before it is read
        connection.execute(upsert(t.backfill).values(row).on_conflict_do_nothing())
        found = connection.execute(select(b.id, b.created_at).where(same)).first()
        if found is not None:
            return BackfillRow(found.id, found.created_at, found.id != new)


def end(connection: Connection, which: str) -> None:
    """End a backfill; the next one of the same selection starts from the beginning."""
    connection.execute(update(t.backfill).where((b.id == which) & b.ended_at.is_(None)).values(ended_at=func.now()))


def give_up(connection: Connection, pipeline: str, selection: Json) -> None:
    """End the backfill of this selection that is under way, if there is one."""
    same = (b.pipeline == pipeline) & (b.selection == selection) & b.ended_at.is_(None)
    connection.execute(update(t.backfill).where(same).values(ended_at=func.now()))


def take_lane(connection: Connection, pipeline: str, selection: Json) -> None:
    """Let a replay of a pipeline with state hold its lane; refuse if another holds it from an earlier checkpoint on.

    One that starts at the same checkpoint or earlier makes up for what the other has begun, and ends that one (R20).
    """
    first = selection["checkpoints"][0]
    under_way = (b.pipeline == pipeline) & b.ended_at.is_(None) & b.selection.has_key("checkpoints")
    for row in connection.execute(select(b.id, b.selection).where(under_way & (b.selection != selection))):
        other = row.selection["checkpoints"][0]
        if other < first:
            msg = (
                f"pipeline {pipeline!r}: replay {row.id} from checkpoint {other} on is under way; go on with"
                f" `twophase backfill {pipeline} --checkpoints {other}..latest`"
            )
            raise ConfigError(msg)
        end(connection, row.id)


def lay_down(connection: Connection, pipeline: str) -> list[str]:
    """End the backfills of a pipeline that are under way, and return them.

    Refused once a replay of its state has passed a commit point: only a replay to the end makes up for that.
    """
    stale = connection.execute(select(t.pipeline.c.stale_from).where(t.pipeline.c.name == pipeline)).scalar()
    if stale is not None:
        msg = (
            f"pipeline {pipeline!r}: its replay has replaced states that later checkpoints were computed from, so it"
            f" has to go on: `twophase backfill {pipeline} --checkpoints {stale}..latest`"
        )
        raise ConfigError(msg)
    mine = (b.pipeline == pipeline) & b.ended_at.is_(None)
    ended = connection.execute(update(t.backfill).where(mine).values(ended_at=func.now()).returning(b.id))
    return sorted(ended.scalars())


def checkpoints(connection: Connection, pipeline: str, first: int, last: int) -> list[tuple[int, str | None]]:
    """Return the checkpoints of a range, each with its slot, without released ones."""
    query = (
        select(c.checkpoint_id, c.slot)
        .where((c.pipeline == pipeline) & c.checkpoint_id.between(first, last) & c.released_at.is_(None))
        .order_by(c.checkpoint_id)
    )
    return [(row.checkpoint_id, row.slot) for row in connection.execute(query)]


def has_come_to(connection: Connection, pipeline: str, checkpoint_id: int, which: str) -> bool:
    """Return True if a backfill goes through the latest checkpoint, and has reached this one.

    The latest is the last one that was decided when the backfill began; those decided since do not count. It has
    reached this one when it has decided a revision of every earlier checkpoint in its range.
    """
    asked = connection.execute(select(b.selection, b.created_at).where((b.id == which) & (b.pipeline == pipeline)))
    found = asked.first()
    if found is None or "checkpoints" not in found.selection:
        return False
    first, last = found.selection["checkpoints"]
    decided = (r.pipeline == pipeline) & r.commit_seq.is_not(None)
    missed = select(r.checkpoint_id).where(decided & (r.checkpoint_id > last) & (r.decided_at < found.created_at))
    earlier = decided & r.checkpoint_id.between(first, checkpoint_id - 1)
    done = select(r.checkpoint_id).where(earlier & (r.backfill == which))
    undone = select(r.checkpoint_id).where(earlier & r.checkpoint_id.not_in(done))
    return first <= checkpoint_id <= last and not any(
        connection.execute(query.limit(1)).first() for query in (missed, undone)
    )


def latest(connection: Connection, pipeline: str) -> int:
    """Return the number of the last checkpoint with a decided revision; 0: there is none."""
    query = select(func.max(r.checkpoint_id)).where((r.pipeline == pipeline) & r.commit_seq.is_not(None))
    return connection.execute(query).scalar() or 0


def last_slot(connection: Connection, pipeline: str) -> str | None:
    """Return the slot of the newest checkpoint that has one."""
    query = select(c.slot).where((c.pipeline == pipeline) & c.slot.is_not(None)).order_by(c.checkpoint_id.desc())
    found: str | None = connection.execute(query.limit(1)).scalar()
    return found


def reads(connection: Connection) -> dict[str, set[str]]:
    """Return, for each pipeline, the pipelines whose commits it reads."""
    rows = connection.execute(select(t.pipeline.c.name, t.pipeline.c.declaration["reads"]))
    return {
        name: {read["pipeline"] for read in declared.values() if "pipeline" in read and "sink" in read}
        for name, declared in rows
    }
