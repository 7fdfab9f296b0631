"""Queries for commands, pages and readers: listings, one checkpoint whole, what a table held at some time. Read only.

Every query has an index and pages by key, so a million checkpoints answer as fast as a thousand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, func, literal_column, select, text, tuple_

from twophase.committer import participant_rows, writes
from twophase.committer import tables as t
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import ConfigError
from twophase.core.states import LIVE, State

r = t.revision.c

#: The columns of a listing, under the record's own names.
COLUMNS = (
    "pipeline", "checkpoint_id", "revision", "state", "epoch", "kind", "slot", "commit_seq", "rows", "bytes",
    "created_at", "committed_at", "dag_id", "run_id", "error", "parked_reason",
    "hindrances", "sinks", "quarantine",
)  # fmt: skip

#: How many rows are read at a time where a whole history is read.
PAGE = 1000

#: What each sink of a revision got. Quarantines are apart (`aside`): they are named after the read of the bad records.
_SINKS = """
    (SELECT jsonb_object_agg(p.name, jsonb_build_object('rows', p.manifest -> 'rows', 'bytes', p.manifest -> 'bytes',
        'files', p.manifest -> 'files')) FROM twophase.participant p
     WHERE (p.pipeline, p.checkpoint_id, p.revision) = (revision.pipeline, revision.checkpoint_id, revision.revision)
       AND p.kind = 'sink' AND p.manifest ? 'rows'
       AND (p.name IN (SELECT k || '_quarantine' FROM jsonb_object_keys(checkpoint.inputs) k)) = {aside})"""

_ELSEWHERE: dict[str, ColumnElement[Any]] = {
    "slot": t.checkpoint.c.slot,
    "sinks": literal_column(_SINKS.format(aside="false")).label("sinks"),
    "quarantine": literal_column(_SINKS.format(aside="true")).label("quarantine"),
}

_LISTING = select(*(_ELSEWHERE[name] if name in _ELSEWHERE else r[name] for name in COLUMNS)).join(
    t.checkpoint, (t.checkpoint.c.pipeline == r.pipeline) & (t.checkpoint.c.checkpoint_id == r.checkpoint_id)
)


class Promoted(NamedTuple):
    """One committed revision in one sink."""

    output: Output
    #: When it was removed because its retention was over.
    swept_at: datetime | None
    #: When the retention of the state that it left was over.
    state_swept_at: datetime | None = None


#: Each pipeline with its last commit, and what each sink got from it.
_LAST = f"""
    SELECT lag.*, p.behind, last.rows AS last_rows, last.bytes AS last_bytes, last.sinks, last.quarantine
    FROM twophase.lag JOIN twophase.pipeline p ON p.name = lag.pipeline
    LEFT JOIN LATERAL (SELECT revision.rows, revision.bytes, {_SINKS.format(aside="false")} AS sinks,
            {_SINKS.format(aside="true")} AS quarantine
        FROM twophase.revision JOIN twophase.checkpoint USING (pipeline, checkpoint_id)
        WHERE revision.pipeline = lag.pipeline AND revision.commit_seq = lag.last_commit_seq) last ON true"""  # noqa: S608 - no user's text


def pipelines(connection: Connection) -> list[dict[str, Any]]:
    """List the pipelines: last commit, what each sink got from it, what is pending, failed, lacking, or behind."""
    holes = list(writes.holes(connection))
    return [
        {**row._mapping, "lacking": [str(hole) for hole in holes if hole.pipeline == row.pipeline]}
        for row in connection.execute(text(f"{_LAST} ORDER BY pipeline"))
    ]


#: How many checkpoints of each pipeline are stale; an index finds the few that are marked.
_STALE = """
    SELECT d.pipeline, count(*) AS stale FROM twophase.revision d
    WHERE d.outdated AND d.state = 'COMMITTED' AND d.pipeline = ANY(:wanted)
    GROUP BY d.pipeline"""


def overview(connection: Connection, wanted: Collection[str]) -> list[dict[str, Any]]:
    """List some pipelines: last commit, how many revisions are pending, parked and stale, and what a write lacks."""
    query = text(f"{_LAST} WHERE lag.pipeline = ANY(:wanted) ORDER BY pipeline")
    asked = {"wanted": list(wanted)}
    counted = {row.pipeline: row.stale for row in connection.execute(text(_STALE), asked)}
    holes = list(writes.holes(connection, wanted))
    return [
        {
            **row._mapping,
            "stale": counted.get(row.pipeline, 0),
            "lacking": [hole for hole in holes if hole.pipeline == row.pipeline],
        }
        for row in connection.execute(query, asked)
    ]


def dags(connection: Connection) -> dict[str, list[str]]:
    """Map every pipeline to the DAGs that run it."""
    found: dict[str, list[str]] = {name: [] for name in names(connection)}
    d = t.pipeline_dag.c
    for row in connection.execute(select(d.pipeline, d.dag_id).order_by(d.pipeline, d.dag_id)):
        found[row.pipeline].append(row.dag_id)
    return found


def dags_of(connection: Connection, pipeline: str) -> list[str]:
    """Return the DAGs that run a pipeline; none if it is not in the record."""
    d = t.pipeline_dag.c
    return list(connection.execute(select(d.dag_id).where(d.pipeline == pipeline).order_by(d.dag_id)).scalars())


def pipelines_of(connection: Connection, dag_id: str) -> list[str]:
    """Return the pipelines that a DAG runs."""
    d = t.pipeline_dag.c
    return list(connection.execute(select(d.pipeline).where(d.dag_id == dag_id).order_by(d.pipeline)).scalars())


def checkpoints(
    connection: Connection,
    pipeline: str,
    *,
    state: State | None = None,
    before: tuple[int, int] | int | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """List a pipeline's revisions, newest checkpoint first; for the next page pass the last one's ids as `before`."""
    _require(connection, pipeline)
    wanted = r.pipeline == pipeline
    if state is not None:
        wanted &= r.state == state
    if isinstance(before, tuple):
        wanted &= (tuple_(r.checkpoint_id, r.revision) < before) & (t.checkpoint.c.checkpoint_id <= before[0])
    elif before is not None:
        wanted &= (r.checkpoint_id < before) & (t.checkpoint.c.checkpoint_id < before)
    query = _LISTING.where(wanted).order_by(r.checkpoint_id.desc(), r.revision.desc()).limit(limit)
    return [dict(row._mapping) for row in connection.execute(query)]


def revisions(connection: Connection, pipeline: str, checkpoint_id: int, limit: int = 100) -> list[dict[str, Any]]:
    """List a checkpoint's revisions, newest first."""
    wanted = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id)
    query = _LISTING.where(wanted).order_by(r.revision.desc()).limit(limit)
    return [dict(row._mapping) for row in connection.execute(query)]


def row_of(connection: Connection, key: Key) -> dict[str, Any]:
    """Return one revision with the columns of a listing."""
    return dict(connection.execute(_LISTING.where(_is(key))).one()._mapping)


def _is(key: Key) -> ColumnElement[bool]:
    return (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & (r.revision == key.revision)


def show(connection: Connection, pipeline: str, checkpoint_id: int, revision: int | None = None) -> dict[str, Any]:
    """Return one checkpoint whole: its newest revision (or the given one), inputs, participants, events."""
    _require(connection, pipeline)
    wanted = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id)
    if revision is not None:
        wanted &= r.revision == revision
    row = connection.execute(_LISTING.where(wanted).order_by(r.revision.desc()).limit(1)).first()
    if row is None:
        which = f"{pipeline}/{checkpoint_id}" + (f" r{revision}" if revision is not None else "")
        msg = f"checkpoint {which}: it is not in the record; `twophase checkpoints {pipeline}` lists what is"
        raise ConfigError(msg)
    found = dict(row._mapping)
    key = Key(pipeline, checkpoint_id, found["revision"])
    found["failed"] = connection.execute(select(r.failed).where(_is(key))).scalar_one()
    found["inputs"] = _inputs(connection, key)
    found["participants"] = _participants(connection, key)
    found["events"] = _events(connection, pipeline, checkpoint_id)
    found["lacking"] = writes.lacking(connection, pipeline, found)
    p = t.pipeline.c
    found["behind"] = connection.execute(select(p.behind).where(p.name == pipeline)).scalar()
    return found


def _inputs(connection: Connection, key: Key, limit: int = 1000) -> dict[str, Any]:
    """Return what a revision reads: the checkpoint's input, and the input of this revision alone."""
    c, f, i = t.checkpoint.c, t.input_file.c, t.input_revision.c
    mine = _is(key)
    join = (c.pipeline == r.pipeline) & (c.checkpoint_id == r.checkpoint_id)
    found = connection.execute(select(c.inputs, r.inputs).join_from(t.checkpoint, t.revision, join).where(mine)).one()
    inputs: dict[str, Any] = {source: dict(fixed) for source, fixed in {**found[0], **(found[1] or {})}.items()}
    files = select(f.source, f.path, f.size, f.mtime_ns, f.gone_at).where(
        (f.pipeline == key.pipeline)
        & (f.checkpoint_id == key.checkpoint_id)
        & (f.revision.is_(None) | (f.revision == key.revision))
    )
    for file in connection.execute(files.order_by(f.source, f.path).limit(limit)):
        described = {name: value for name, value in file._mapping.items() if name != "source"}
        inputs[file.source].setdefault("paths", []).append(described)
    upstream = select(i.source, i.upstream, i.upstream_checkpoint_id, i.upstream_revision).where(
        (i.pipeline == key.pipeline) & (i.checkpoint_id == key.checkpoint_id) & (i.revision == key.revision)
    )
    for row in connection.execute(upstream.order_by(i.source, i.upstream_checkpoint_id).limit(limit)):
        read = {
            "pipeline": row.upstream,
            "checkpoint_id": row.upstream_checkpoint_id,
            "revision": row.upstream_revision,
        }
        inputs[row.source].setdefault("read", []).append(read)
    for fixed in inputs.values():
        if "files" in fixed:
            fixed.setdefault("paths", [])
    return inputs


def _participants(connection: Connection, key: Key) -> list[dict[str, Any]]:
    p, c = t.participant.c, t.committed.c
    promoted = func.min(c.committed_at).label("promoted_at")
    join = t.participant.outerjoin(
        t.committed,
        (c.job_id == p.pipeline)
        & (c.operator_id == p.name)
        & (c.checkpoint_id == p.checkpoint_id)
        & (c.revision == p.revision),
    )
    columns = participant_rows.COLUMNS
    mine = (p.pipeline == key.pipeline) & (p.checkpoint_id == key.checkpoint_id) & (p.revision == key.revision)
    query = select(*columns, promoted).select_from(join).where(mine).group_by(*columns).order_by(p.name)
    return [dict(row._mapping) for row in connection.execute(query)]


def _events(connection: Connection, pipeline: str, checkpoint_id: int) -> list[dict[str, Any]]:
    e = t.event.c
    query = select(e.id, e.at, e.revision, e.epoch, e.who, e.action, e.from_state, e.to_state, e.why)
    mine = (e.pipeline == pipeline) & (e.checkpoint_id == checkpoint_id)
    return [dict(row._mapping) for row in connection.execute(query.where(mine).order_by(e.id))]


def _require(connection: Connection, pipeline: str) -> None:
    names = connection.execute(select(t.pipeline.c.name).where(t.pipeline.c.name == pipeline)).first()
    if names is None:
        msg = f"pipeline {pipeline!r}: it is not in the record; `twophase pipelines` lists what is"
        raise ConfigError(msg)


def declaration(connection: Connection, pipeline: str) -> dict[str, Any]:
    """Return the declaration of a pipeline, as the record keeps it."""
    _require(connection, pipeline)
    query = select(t.pipeline.c.declaration).where(t.pipeline.c.name == pipeline)
    found: dict[str, Any] = connection.execute(query).scalar_one()
    return found


def names(connection: Connection) -> list[str]:
    """Return the names of all pipelines."""
    return list(connection.execute(select(t.pipeline.c.name).order_by(t.pipeline.c.name)).scalars())


def unfinished(connection: Connection) -> list[str]:
    """Return the names of the pipelines that recovery has to look at."""
    waiting = select(r.pipeline).where(r.state.in_(LIVE | {State.ABORTING})).distinct().order_by(r.pipeline)
    return list(connection.execute(waiting).scalars())


def promoted(engine: Engine, pipeline: str, sink: str, as_of: datetime | int | None = None) -> Iterator[Promoted]:
    """Yield what a sink holds, or held at a time or a commit_seq: one revision per checkpoint, in commit order.

    It reads page by page; no transaction is open while the caller works on a page.
    """
    p = t.participant.c
    join = (p.pipeline == r.pipeline) & (p.checkpoint_id == r.checkpoint_id) & (p.revision == r.revision)
    query = (
        select(r.checkpoint_id, r.revision, r.commit_seq, r.swept_at, r.state_swept_at, *participant_rows.COLUMNS)
        .join(t.participant, join & (p.name == sink))
        .where((r.pipeline == pipeline) & r.commit_seq.is_not(None))
        .order_by(r.commit_seq)
        .limit(PAGE)
    )
    if as_of is None:
        query = query.where(r.state == State.COMMITTED)
    elif isinstance(as_of, datetime):
        query = query.where((r.committed_at <= as_of) & (r.superseded_at.is_(None) | (r.superseded_at > as_of)))
    else:
        later = t.revision.alias("later").c
        replaced = (
            select(1)
            .where((later.pipeline == r.pipeline) & (later.checkpoint_id == r.checkpoint_id))
            .where((later.commit_seq > r.commit_seq) & (later.commit_seq <= as_of) & later.committed_at.is_not(None))
            .exists()
        )
        query = query.where((r.commit_seq <= as_of) & r.committed_at.is_not(None) & ~replaced)
    last = 0
    while True:
        with engine.connect() as connection:
            page = connection.execute(query.where(r.commit_seq > last)).all()
        for row in page:
            key = Key(pipeline, row.checkpoint_id, row.revision)
            yield Promoted(participant_rows.output(key, row._mapping, row.commit_seq), row.swept_at, row.state_swept_at)
        if len(page) < PAGE:
            return
        last = page[-1].commit_seq


def last_schema(connection: Connection, pipeline: str, sink: str) -> list[list[str]] | None:
    """Return the schema of the last decided revision in a sink, or None."""
    p = t.participant.c
    join = (p.pipeline == r.pipeline) & (p.checkpoint_id == r.checkpoint_id) & (p.revision == r.revision)
    query = (
        select(p.manifest["schema"])
        .join_from(t.revision, t.participant, join & (p.name == sink))
        .where((r.pipeline == pipeline) & r.commit_seq.is_not(None))
        .order_by(r.commit_seq.desc())
        .limit(1)
    )
    found: list[list[str]] | None = connection.execute(query).scalar()
    return found


def rows_before(connection: Connection, key: Key, slot: str | None, sink: str) -> int | None:
    """Return the row count to compare a revision's with: of what it replaces, or else of the commit before it."""
    p = t.participant.c
    join = (p.pipeline == r.pipeline) & (p.checkpoint_id == r.checkpoint_id) & (p.revision == r.revision)
    query = (
        select(p.manifest["rows"])
        .join_from(t.revision, t.participant, join & (p.name == sink))
        .where((r.pipeline == key.pipeline) & (r.state == State.COMMITTED))
        .limit(1)
    )
    live: int | None = connection.execute(query.where(r.checkpoint_id == key.checkpoint_id)).scalar()
    if live is not None:
        return live
    if slot is None:
        before = query.where(r.commit_seq.is_not(None)).order_by(r.commit_seq.desc())
    else:
        c = t.checkpoint.c
        slots = (c.pipeline == r.pipeline) & (c.checkpoint_id == r.checkpoint_id) & (c.slot < slot)
        before = query.join(t.checkpoint, slots).order_by(c.slot.desc())
    found: int | None = connection.execute(before).scalar()
    return found


def stale(
    connection: Connection, pipeline: str | None = None, checkpoint_id: int | None = None
) -> list[dict[str, Any]]:
    """List the stale checkpoints: committed, and made from revisions that were replaced since."""
    return _view(connection, "stale", "pipeline, checkpoint_id, upstream_checkpoint_id", pipeline, checkpoint_id)


def pending(
    connection: Connection, pipeline: str | None = None, checkpoint_id: int | None = None
) -> list[dict[str, Any]]:
    """List the revisions that have not ended, parked ones first."""
    order = "parked_reason IS NULL, pipeline, checkpoint_id, revision"
    return _view(connection, "pending", order, pipeline, checkpoint_id)


def unbegun(connection: Connection, pipeline: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
    """List the slots that a run could not begin, the newest first: it failed, or waits for its input."""
    query = select(t.unbegun).order_by(t.unbegun.c.at.desc()).limit(limit)
    if pipeline is not None:
        query = query.where(t.unbegun.c.pipeline == pipeline)
    return [dict(row._mapping) for row in connection.execute(query)]


def _view(
    connection: Connection, view: str, order: str, pipeline: str | None, checkpoint_id: int | None
) -> list[dict[str, Any]]:
    """Read a view: all of it, one pipeline's part, or one checkpoint's."""
    if pipeline is not None:
        _require(connection, pipeline)
    wanted = {"pipeline": pipeline, "checkpoint_id": checkpoint_id}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = :{name}" for name in wanted) or "true"
    query = text(f"SELECT * FROM twophase.{view} WHERE {where} ORDER BY {order}")  # noqa: S608 - no user's text
    return [dict(row._mapping) for row in connection.execute(query, wanted)]
