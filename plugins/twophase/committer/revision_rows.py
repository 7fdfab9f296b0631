"""The rows of revisions, as the record's transactions read and hold them; `moves` changes them.

`REVISION` and `to_revision` are for the queries of this package that are not asked at every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from twophase.committer import backfills
from twophase.committer import tables as t
from twophase.committer.statement import Statement
from twophase.core.checkpoint import Key, Known, Participant, Position, Revision, Run
from twophase.core.errors import ConfigError
from twophase.core.ports import Look, Outlook, Reach
from twophase.core.states import DECIDED, LIVE, State

r = t.revision.c

#: A revision with its slot, and its lease on the database's clock, the only clock in a decision.
REVISION = select(
    t.revision,
    t.checkpoint.c.slot,
    func.extract("epoch", r.lease_until - func.clock_timestamp()).label("lease_left"),
).join(t.checkpoint, (t.checkpoint.c.pipeline == r.pipeline) & (t.checkpoint.c.checkpoint_id == r.checkpoint_id))

#: The columns of a row `r` that `to_revision` needs besides the slot, for statements.
COLUMNS = (
    "r.pipeline, r.checkpoint_id, r.revision, r.state, r.epoch, r.kind, r.dag_id, r.run_id, r.backfill,"
    " r.parked_reason, r.hindrances, r.commit_seq, r.rows, r.bytes, r.error, r.created_at, r.committed_at, r.swept_at,"
    " r.acknowledged_at, r.job, extract(epoch FROM r.lease_until - clock_timestamp()) AS lease_left"
)
#: A condition: the row `r` is this revision's.
HERE = "r.pipeline = :pipeline AND r.checkpoint_id = :checkpoint_id AND r.revision = :revision"

_ROWS = "twophase.revision r JOIN twophase.checkpoint k USING (pipeline, checkpoint_id)"
_READ = f"SELECT {COLUMNS}, k.slot FROM {_ROWS}"  # noqa: S608 - no user's text, here and below


def states(some: Collection[State | None]) -> str:
    """Return states as a list in SQL."""
    quoted = sorted(f"'{state}'" for state in some if state is not None)
    return f"({', '.join(quoted)})"


_UNFINISHED = f"state IN {states(LIVE | {State.ABORTING})}"
#: The checkpoint whose revisions count: the slot's, or the last one without a slot.
_LAST = {
    True: "(SELECT c.checkpoint_id FROM twophase.checkpoint c WHERE c.pipeline = :pipeline AND c.slot = :slot"
    " ORDER BY c.checkpoint_id DESC LIMIT 1)",
    False: "(SELECT c.checkpoint_id FROM twophase.checkpoint c WHERE c.pipeline = :pipeline AND c.slot IS NULL"
    " AND CAST(:slot AS text) IS NULL ORDER BY c.checkpoint_id DESC LIMIT 1)",
}


def _newest(with_slot: bool) -> str:  # noqa: FBT001 - the key of _LAST
    return f"r.pipeline = :pipeline AND r.checkpoint_id = {_LAST[with_slot]} AND k.released_at IS NULL"


_OF_ONE = Statement(f"{_READ} WHERE {HERE}")
_HOLD = Statement(f"{_READ} WHERE {HERE} FOR UPDATE OF r")
_OF_PIPELINE = Statement(f"{_READ} WHERE r.pipeline = :pipeline AND r.{_UNFINISHED}")
_NEWEST = {with_slot: Statement(f"{_READ} WHERE {_newest(with_slot)}") for with_slot in (True, False)}
_OF_CHECKPOINT = {
    some: Statement(f"{_READ} WHERE r.pipeline = :pipeline AND r.checkpoint_id = :checkpoint_id AND r.state IN {some}")
    for some in map(states, ({State.COMMITTED}, LIVE))
}
_UNBEGUN = "EXISTS (SELECT FROM twophase.unbegun u WHERE u.pipeline = p.name) AS unbegun"
_LOCK = Statement(
    f"SELECT p.next_commit_seq, p.behind, {_UNBEGUN}"  # noqa: S608
    " FROM twophase.pipeline p WHERE p.name = :pipeline FOR UPDATE OF p"
)
#: Holds two rows, the pipeline's first; as nothing else is read, both are as they are after a wait.
_LOCK_AND_HOLD = Statement(
    f"SELECT p.next_commit_seq, p.behind, {_UNBEGUN}, {COLUMNS}, k.slot"  # noqa: S608
    f" FROM twophase.pipeline p JOIN ({_ROWS}) ON r.pipeline = p.name WHERE {HERE} FOR UPDATE OF p, r"
)
#: Each arm can use its index.
_OUTLOOK = {
    with_slot: Statement(f"""
        SELECT clock_timestamp() AS at, p.next_commit_seq, p.behind, found.*, (
            SELECT json_agg(json_build_array(f.source, f.newest, encode(f.sums, 'hex')))
            FROM twophase.known_files f WHERE f.pipeline = p.name) AS known, (
            SELECT json_agg(json_build_array(o.source, o.partition, o.off, o.mark))
            FROM twophase.position o WHERE o.pipeline = p.name) AS positions
        FROM twophase.pipeline p LEFT JOIN (
            SELECT 0 AS arm, {COLUMNS}, k.slot FROM {_ROWS} WHERE r.pipeline = :pipeline AND r.{_UNFINISHED}
            UNION ALL
            SELECT 1 AS arm, {COLUMNS}, k.slot FROM {_ROWS} WHERE {_newest(with_slot)}) found ON true
        WHERE p.name = :pipeline""")  # noqa: S608
    for with_slot in (True, False)
}


def is_this(key: Key) -> ColumnElement[bool]:
    """Return a condition: this revision's row."""
    return (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & (r.revision == key.revision)


def to_revision(row: Any) -> Revision:  # noqa: ANN401 - a row, whatever else is in it
    """Build a Revision from a row of `REVISION`."""
    return Revision(
        key=Key(row.pipeline, row.checkpoint_id, row.revision),
        state=State(row.state),
        epoch=row.epoch,
        kind=row.kind,
        slot=row.slot,
        run=Run(row.dag_id, row.run_id) if row.run_id else None,
        backfill=row.backfill,
        lease_left=None if row.lease_left is None else float(row.lease_left),
        parked_reason=row.parked_reason,
        hindrances=row.hindrances or {},
        commit_seq=row.commit_seq,
        rows=row.rows,
        bytes=row.bytes,
        error=row.error,
        created_at=row.created_at,
        committed_at=row.committed_at,
        swept=row.swept_at is not None,
        acknowledged=row.acknowledged_at is not None,
        job=row.job,
    )


def _order(revision: Revision) -> tuple[float, Key]:
    """Return a sort key: decided revisions first, by commit_seq."""
    return (math.inf if revision.commit_seq is None else revision.commit_seq), revision.key


def _standing(revision: Revision) -> tuple[bool, int]:
    """Return a sort key; the highest revision counts for its checkpoint: decided ones before others, then by number.

    An adopted revision 0 is not a decided one here: the slot's input was not read for it.
    """
    return revision.state in DECIDED and revision.revision > 0, revision.revision


class Revisions:
    """The methods of a transaction that read and hold revisions."""

    def __init__(self, connection: Connection, who: str) -> None:
        """Use a connection with an open transaction; `who` is named in the events."""
        self.connection = connection
        self.who = who
        #: The revisions whose rows this transaction holds. Nobody else can change them, so they are not read again.
        self._held: dict[Key, Revision] = {}
        #: Their participants, which only who holds the revision's row changes.
        self._votes: dict[Key, list[Participant]] = {}
        #: Whether the locked pipeline has slots that could not begin; mostly not, and then `begun` has nothing to do.
        self._unbegun = False

    def lock(self, pipeline: str, holding: Key | None = None) -> Reach:
        """Hold the pipeline's row until the end, and then a revision's; return which decisions the record knows."""
        if holding is None:
            found = _LOCK(self.connection, pipeline=pipeline).first()
        else:
            found = _LOCK_AND_HOLD(self.connection, **holding._asdict()).first()
        if found is None:
            which = f"pipeline {pipeline!r}" if holding is None else f"checkpoint {holding}"
            msg = f"{which}: it is not in the record"
            raise ConfigError(msg)
        if holding is not None:
            self._held[holding] = to_revision(found)
        self._unbegun = found.unbegun
        return Reach(found.next_commit_seq, found.behind)

    def newest(self, pipeline: str, slot: str | None) -> Revision | None:
        """Return the revision that counts for the slot's checkpoint, or for the last one without a slot."""
        rows = _NEWEST[slot is not None](self.connection, pipeline=pipeline, slot=slot)
        return max(map(to_revision, rows), key=_standing, default=None)

    def outlook(self, pipeline: str, slot: str | None) -> Outlook:
        """Return what a run reads from the record before it begins."""
        rows = _OUTLOOK[slot is not None](self.connection, pipeline=pipeline, slot=slot).all()
        if not rows:
            msg = f"pipeline {pipeline!r}: it is not in the record"
            raise ConfigError(msg)
        found = [(row.arm, to_revision(row)) for row in rows if row.arm is not None]
        known = {source: Known(newest, bytes.fromhex(sums)) for source, newest, sums in rows[0].known or ()}
        unfinished = sorted((one for arm, one in found if arm == 0), key=_order)
        newest = max((one for arm, one in found if arm == 1), key=_standing, default=None)
        positions: dict[str, dict[str, Position]] = {}
        for source, partition, offset, mark in rows[0].positions or ():
            positions.setdefault(source, {})[partition] = Position(offset, mark)
        reach = Reach(rows[0].next_commit_seq, rows[0].behind)
        return Outlook(Look(rows[0].at, known, positions), reach, unfinished, newest)

    def revision(self, key: Key) -> Revision:
        """Return one revision."""
        return self._held.get(key) or self._one(key, _OF_ONE)

    def hold(self, key: Key) -> Revision:
        """Return one revision and hold its row until the end."""
        if key not in self._held:
            self._held[key] = self._one(key, _HOLD)
        return self._held[key]

    def _changed(self, key: Key) -> None:
        """Forget the copy of a revision that this transaction changes, so that it is read again."""
        self._held.pop(key, None)

    def _one(self, key: Key, query: Statement) -> Revision:
        row = query(self.connection, **key._asdict()).first()
        if row is None:
            msg = f"checkpoint {key}: it is not in the record"
            raise ConfigError(msg)
        return to_revision(row)

    def unfinished(self, pipeline: str) -> list[Revision]:
        """Return the revisions that are live or ABORTING, the decided ones first, by commit_seq."""
        return sorted(map(to_revision, _OF_PIPELINE(self.connection, pipeline=pipeline)), key=_order)

    def committed_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the COMMITTED revision of a checkpoint, or None."""
        return self._of_checkpoint(pipeline, checkpoint_id, {State.COMMITTED})

    def live_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the live revision of a checkpoint."""
        return self._of_checkpoint(pipeline, checkpoint_id, LIVE)

    def _of_checkpoint(self, pipeline: str, checkpoint_id: int, some: Collection[State]) -> Revision | None:
        query = _OF_CHECKPOINT[states(some)]
        row = query(self.connection, pipeline=pipeline, checkpoint_id=checkpoint_id).first()
        return to_revision(row) if row else None

    def newest_of(self, pipeline: str, checkpoint_id: int) -> Revision:
        """Return the revision of a checkpoint with the highest number."""
        mine = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id)
        row = self.connection.execute(REVISION.where(mine).order_by(r.revision.desc()).limit(1)).first()
        if row is None:
            msg = f"checkpoint {pipeline}/{checkpoint_id}: it is not in the record"
            raise ConfigError(msg)
        return to_revision(row)

    def newest_of_run(self, pipeline: str, run: Run, checkpoint_id: int | None) -> Revision | None:
        """Return the newest revision that an Airflow run worked on, of one checkpoint or of any."""
        mine = (r.dag_id == run.dag_id) & (r.run_id == run.run_id) & (r.pipeline == pipeline)
        if checkpoint_id is not None:
            mine &= r.checkpoint_id == checkpoint_id
        newest = REVISION.where(mine).order_by(r.checkpoint_id.desc(), r.revision.desc()).limit(1)
        row = self.connection.execute(newest).first()
        return to_revision(row) if row else None

    def is_latest(self, pipeline: str, checkpoint_id: int) -> bool:
        """Return True if no checkpoint with a higher number has a decided revision."""
        later = (r.pipeline == pipeline) & (r.checkpoint_id > checkpoint_id) & r.commit_seq.is_not(None)
        return self.connection.execute(select(r.commit_seq).where(later).limit(1)).first() is None

    def is_replayed(self, pipeline: str, checkpoint_id: int, backfill: str) -> bool:
        """Return True if a backfill goes through the latest checkpoint, and has reached this one."""
        return backfills.has_come_to(self.connection, pipeline, checkpoint_id, backfill)

    def decided_in(self, pipeline: str, checkpoint_id: int, backfill: str) -> Revision | None:
        """Return the newest decided revision of a checkpoint that a backfill made, or None."""
        mine = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id) & r.commit_seq.is_not(None)
        row = self.connection.execute(
            REVISION.where(mine & (r.backfill == backfill)).order_by(r.revision.desc()).limit(1)
        ).first()
        return to_revision(row) if row else None

    def reach(self, pipeline: str) -> Reach:
        """Return which decisions of a pipeline the record knows."""
        p = t.pipeline.c
        row = self.connection.execute(select(p.next_commit_seq, p.behind).where(p.name == pipeline)).first()
        return Reach(row.next_commit_seq, row.behind) if row else Reach(1, None)
