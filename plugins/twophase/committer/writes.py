"""Since which checkpoint each write of a pipeline takes part, and which committed checkpoints it lacks.

`registry` notes it; commands and pages show it. A write that is added, or moved to another place, holds what is
committed from then on. It lacks what was committed before until a backfill runs that again. A write that is dropped
keeps what it has, and gets nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, insert, select, text, update

from twophase.committer import tables as t

w = t.write.c

#: How many stretches of lacking checkpoints are named at most.
NAMED = 10
#: How many lacking checkpoints are looked for at most: a page must not read a long history.
MOST = 1000

#: The committed checkpoints that a write lacks: it took no part in them, or it did in another place. Revision 0 does
#: not count: an adopted folder is no output of the pipeline.
_LACKING = """
    FROM twophase.revision r WHERE r.pipeline = :pipeline AND r.state = 'COMMITTED' AND r.revision > 0
        AND r.checkpoint_id < :since AND (r.commit_seq < :since_seq OR NOT EXISTS (
            SELECT FROM twophase.participant p WHERE (p.pipeline, p.checkpoint_id, p.revision, p.name)
                = (r.pipeline, r.checkpoint_id, r.revision, :name)))"""
_STRETCHES = text(f"""
    SELECT min(checkpoint_id) AS first, max(checkpoint_id) AS last, count(*) AS missing FROM (
        SELECT r.checkpoint_id, r.checkpoint_id - row_number() OVER (ORDER BY r.checkpoint_id) AS stretch
        {_LACKING} ORDER BY r.checkpoint_id LIMIT {MOST}) lacking GROUP BY stretch ORDER BY 1""")  # noqa: S608 - no user's text


class Hole(NamedTuple):
    """The committed checkpoints that one write lacks."""

    pipeline: str
    name: str
    #: The first checkpoint since it was added or moved.
    since: int
    #: The lacking stretches, like `1..3` or `7`; if there are many, the first ones and `…`.
    stretches: tuple[str, ...]

    @property
    def checkpoints(self) -> str:
        """Name the lacking checkpoints."""
        one = len(self.stretches) == 1 and ".." not in self.stretches[0]
        return f"checkpoint{'' if one else 's'} {','.join(self.stretches)}"

    @property
    def command(self) -> str:
        """Return the backfill command that fills the first stretch, and nothing else."""
        return f"twophase backfill {self.pipeline} --checkpoints {self.stretches[0]}"

    def __str__(self) -> str:
        """Say which checkpoints it lacks, and when it was added or moved."""
        return f"{self.name}: {self.checkpoints} not there, added or moved at {self.since}; a backfill fills it"


class Dropped(NamedTuple):
    """A write that is not declared any more."""

    name: str
    #: The last checkpoint before it was dropped.
    until: int

    def __str__(self) -> str:
        """Say up to which checkpoint it was written."""
        return f"{self.name}: not declared any more, nothing goes there after checkpoint {self.until}"


def declare(connection: Connection, pipeline: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Note which writes were added, moved or dropped, comparing their places; the caller holds the pipeline's row."""
    p = t.pipeline.c
    at = connection.execute(select(p.next_checkpoint_id, p.next_commit_seq).where(p.name == pipeline)).one()
    now = {"since": at.next_checkpoint_id, "since_seq": at.next_commit_seq, "until": None}
    known = {row.name: row for row in connection.execute(select(t.write).where(w.pipeline == pipeline))}
    for name, place in new.items():
        here = (w.pipeline == pipeline) & (w.name == name)
        if name not in known:
            connection.execute(insert(t.write).values(pipeline=pipeline, name=name, **now))
        elif known[name].until is not None or old.get(name, place) != place:
            connection.execute(update(t.write).where(here).values(now))
    for name in known.keys() - new.keys():
        gone = update(t.write).where((w.pipeline == pipeline) & (w.name == name) & w.until.is_(None))
        connection.execute(gone.values(until=at.next_checkpoint_id - 1))


def holes(connection: Connection, wanted: Collection[str] | None = None) -> Iterator[Hole]:
    """Yield what the writes of some pipelines, or of all, lack; writes that were there from the start cost nothing."""
    late = select(t.write).where(w.until.is_(None) & (w.since > 1)).order_by(w.pipeline, w.name)
    if wanted is not None:
        late = late.where(w.pipeline.in_(wanted))
    for row in connection.execute(late).all():
        found = connection.execute(_STRETCHES, dict(row._mapping)).all()
        if found:
            named = [str(one.first) if one.first == one.last else f"{one.first}..{one.last}" for one in found[:NAMED]]
            whole = len(found) <= NAMED and sum(one.missing for one in found) < MOST
            yield Hole(row.pipeline, row.name, row.since, (*named, *(() if whole else ("…",))))


def dropped(connection: Connection, pipeline: str) -> list[Dropped]:
    """Return the writes that are not declared any more and that took part in some checkpoint."""
    gone = select(w.name, w.until).where((w.pipeline == pipeline) & (w.until >= w.since))
    return [Dropped(row.name, row.until) for row in connection.execute(gone.order_by(w.name))]


def settle(connection: Connection, pipeline: str) -> None:
    """Note which writes lack nothing any more, so that `holes` need not look again."""
    lacking = {hole.name for hole in holes(connection, [pipeline])}
    whole = (w.pipeline == pipeline) & w.until.is_(None) & (w.since > 1) & w.name.not_in(lacking)
    connection.execute(update(t.write).where(whole).values(since=1, since_seq=1))


def lacking(connection: Connection, pipeline: str, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the writes that lack one committed revision; `checkpoint` is as `queries.show` returns it."""
    if checkpoint["commit_seq"] is None or not checkpoint["revision"]:
        return []
    there = {participant["name"] for participant in checkpoint["participants"]}
    late = (w.pipeline == pipeline) & w.until.is_(None) & (w.since > checkpoint["checkpoint_id"])
    rows = connection.execute(select(w.name, w.since, w.since_seq).where(late).order_by(w.name))
    return [row.name for row in rows if row.name not in there or checkpoint["commit_seq"] < row.since_seq]
