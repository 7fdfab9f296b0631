"""The table of claims: which checkpoint has which place; `record` and `inputs` call it, `core.claims` says why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, select, text, update
from sqlalchemy.dialects.postgresql import Range
from sqlalchemy.dialects.postgresql import insert as upsert

from twophase.committer import tables as t
from twophase.core.claims import Claim, Claims, Holder

c, k = t.claim.c, t.checkpoint.c

#: The other checkpoint that has a claim on the same place and time; uses the index of the exclusion constraint.
_HOLDER = text(f"""
    SELECT c.checkpoint_id, k.slot, EXISTS (SELECT FROM twophase.revision r WHERE r.pipeline = c.pipeline
        AND r.checkpoint_id = c.checkpoint_id AND r.commit_seq IS NOT NULL) AS decided
    FROM (SELECT * FROM twophase.claim WHERE NOT shared AND span && CAST(:span AS tstzrange)
        AND {t.CLAIM_KEY} && int8range(hashtextextended(:key, 0), hashtextextended(:key, 0), '[]')) c
    JOIN twophase.checkpoint k ON (k.pipeline, k.checkpoint_id) = (c.pipeline, c.checkpoint_id)
    WHERE c.checkpoint_id <> :checkpoint_id ORDER BY c.checkpoint_id LIMIT 1""")  # noqa: S608 - no user's text


def claim(connection: Connection, pipeline: str, checkpoint_id: int, claims: Claims) -> Holder | None:
    """Give a checkpoint these places, under the pipeline's lock; return who has one of them already, or None."""
    for part, wanted in claims.items():
        row = _row(pipeline, checkpoint_id, part, wanted)
        if connection.execute(select(c.checkpoint_id).where(_same(row))).first() is not None:
            continue
        if not connection.execute(upsert(t.claim).values(row).on_conflict_do_nothing()).rowcount:
            key = f"{pipeline}/{part}/{wanted.place}"
            found = connection.execute(_HOLDER, {**row, "key": key, "span": _text(row["span"])}).first()
            if found is not None:
                return Holder(part, wanted, found.checkpoint_id, found.slot, found.decided)
    return None


def unclaimed(connection: Connection, pipeline: str) -> list[tuple[int, str]]:
    """Return the checkpoints with slots that began before claims were recorded; none once `claim_earlier` was called.

    Decided ones come first, so that they get their places before undecided ones of the same place.
    """
    done = select(t.pipeline.c.claimed).where(t.pipeline.c.name == pipeline)
    if connection.execute(done).scalar_one():
        return []
    slots = select(k.checkpoint_id, k.slot).where((k.pipeline == pipeline) & k.slot.is_not(None))
    rows = connection.execute(slots.where(k.released_at.is_(None)).order_by(_decided(k).desc(), k.checkpoint_id))
    return [(row.checkpoint_id, row.slot) for row in rows]


def claim_earlier(connection: Connection, pipeline: str, claims: Iterable[tuple[int, Claims]]) -> None:
    """Give checkpoints that began before claims were recorded their places, in this order.

    If two of them have decided revisions in one place, the second one shares it. A checkpoint without a decided
    revision gets only places that nobody has.
    """
    rows = [
        _row(pipeline, checkpoint_id, part, wanted) for checkpoint_id, parts in claims for part, wanted in parts.items()
    ]
    for shared in (False, True) if rows else ():
        connection.execute(upsert(t.claim).on_conflict_do_nothing(), [{**row, "shared": shared} for row in rows])
    connection.execute(delete(t.claim).where((c.pipeline == pipeline) & c.shared & ~_decided(c)))
    connection.execute(update(t.pipeline).where(t.pipeline.c.name == pipeline).values(claimed=True))


def free(connection: Connection, pipeline: str, checkpoint_id: int) -> None:
    """Delete the claims of a checkpoint."""
    connection.execute(delete(t.claim).where((c.pipeline == pipeline) & (c.checkpoint_id == checkpoint_id)))


def _decided(checkpoint: Any) -> ColumnElement[bool]:  # noqa: ANN401 - the columns of a table
    """Return a condition: the checkpoint has a decided revision."""
    r = t.revision.c
    mine = (r.pipeline == checkpoint.pipeline) & (r.checkpoint_id == checkpoint.checkpoint_id)
    return select(1).where(mine & r.commit_seq.is_not(None)).exists()


def _row(pipeline: str, checkpoint_id: int, part: str, wanted: Claim) -> dict[str, Any]:
    span = Range(wanted.start, wanted.end)  # without bounds: the whole place
    return {
        "pipeline": pipeline,
        "checkpoint_id": checkpoint_id,
        "part": part,
        "place": wanted.place,
        "span": span,
        "shared": False,
    }


def _same(row: dict[str, Any]) -> ColumnElement[bool]:
    return and_(*(c[name] == row[name] for name in ("pipeline", "checkpoint_id", "part", "place", "span")))


def _text(span: Range[Any]) -> str:
    """Return a range as PostgreSQL reads it."""
    return f"[{'' if span.lower is None else span.lower},{'' if span.upper is None else span.upper})"
