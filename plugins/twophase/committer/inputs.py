"""The input part of a record's transaction: checkpoints, who owns which file, how far each source has been read.

`PostgresTransaction` in `record` inherits it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import psycopg2.extras
from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, text, tuple_, update

from twophase.committer import claims as slot_claims
from twophase.committer import participant_rows, queries
from twophase.committer import tables as t
from twophase.committer.revision_rows import Revisions
from twophase.committer.statement import Statement
from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Output, Position, looks
from twophase.core.claims import Claims, Holder
from twophase.core.errors import ConfigError, InputChanged, StoreUnavailable
from twophase.core.ports import CommittedRange, Move
from twophase.core.states import State

#: The columns of `input_file`, in the order in which `copy_files` writes them.
CLAIM = ("pipeline", "source", *InputFile._fields, "checkpoint_id", "revision")

#: How often to ask again for revisions that are superseded while they are read.
TRIES = 100

#: Up to so many files go with their checkpoint in one statement; more by COPY, which takes two thirds of the time.
FEW = 1000
_FILE = ("sources", "paths", "sizes", "times", "sums")
_NONE: dict[str, list[Any]] = {name: [] for name in _FILE}

_ADD = Statement("""
    WITH taken AS (UPDATE twophase.pipeline SET next_checkpoint_id = next_checkpoint_id + 1 WHERE name = :pipeline
        RETURNING next_checkpoint_id - 1 AS number),
    files AS (INSERT INTO twophase.input_file (pipeline, source, path, size, mtime_ns, xxh3, checkpoint_id)
        SELECT :pipeline, f.source, f.path, f.size, f.mtime_ns, f.xxh3, taken.number FROM taken, unnest(
            CAST(:sources AS text[]), CAST(:paths AS text[]), CAST(:sizes AS bigint[]), CAST(:times AS bigint[]),
            CAST(:sums AS text[])) AS f (source, path, size, mtime_ns, xxh3))
    INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, slot, inputs)
    SELECT :pipeline, number, :slot, :inputs FROM taken RETURNING checkpoint_id""")
_NEW_FILES = Statement("""
    SELECT n.path, n.size, n.mtime_ns, f.size AS old_size, f.mtime_ns AS old_mtime_ns, f.xxh3, f.checkpoint_id
    FROM unnest(CAST(:paths AS text[]), CAST(:sizes AS bigint[]), CAST(:mtimes AS bigint[]))
        AS n (path, size, mtime_ns)
    LEFT JOIN twophase.input_file f
        ON f.pipeline = :pipeline AND f.source = :source AND f.path = n.path AND f.gone_at IS NULL
        AND f.revision IS NULL
    WHERE (f.path IS NULL OR (f.size, f.mtime_ns) <> (n.size, n.mtime_ns)) AND NOT EXISTS (
        SELECT FROM twophase.input_file g WHERE g.pipeline = :pipeline AND g.source = :source
            AND g.gone_at >= CAST(:since AS timestamptz)
            AND (g.path, g.size, g.mtime_ns) = (n.path, n.size, n.mtime_ns))""")
_KEEP_FILES = Statement("""
    UPDATE twophase.input_file f SET mtime_ns = n.mtime_ns, xxh3 = n.xxh3
    FROM unnest(CAST(:paths AS text[]), CAST(:sizes AS bigint[]), CAST(:times AS bigint[]),
                CAST(:sums AS text[])) AS n (path, size, mtime_ns, xxh3)
    WHERE f.pipeline = :pipeline AND f.checkpoint_id = :checkpoint_id AND f.source = :source
      AND (f.path, f.size) = (n.path, n.size)
      AND (f.xxh3 = n.xxh3 OR (f.xxh3 IS NULL AND f.mtime_ns = n.mtime_ns))""")
_PIN = Statement("""
    INSERT INTO twophase.position AS p (pipeline, source, partition, off, mark)
    SELECT :pipeline, :source, n.partition, n.off, CAST(n.mark AS jsonb)
    FROM unnest(CAST(:partitions AS text[]), CAST(:offsets AS bigint[]), CAST(:marks AS text[]))
        AS n (partition, off, mark)
    ON CONFLICT ON CONSTRAINT position_pkey DO UPDATE SET mark = excluded.mark WHERE p.off = excluded.off""")
_ADVANCE = Statement("""
    INSERT INTO twophase.position AS p (pipeline, source, partition, off, mark)
    SELECT :pipeline, n.source, n.partition, n.after, CAST(n.mark AS jsonb)
    FROM unnest(CAST(:sources AS text[]), CAST(:partitions AS text[]), CAST(:starts AS bigint[]),
                CAST(:ends AS bigint[]), CAST(:marks AS text[])) AS n (source, partition, before, after, mark)
    ON CONFLICT ON CONSTRAINT position_pkey DO UPDATE SET off = excluded.off, mark = excluded.mark
    WHERE p.off = (SELECT m.before FROM unnest(CAST(:sources AS text[]), CAST(:partitions AS text[]),
        CAST(:starts AS bigint[])) AS m (source, partition, before)
        WHERE (m.source, m.partition) = (p.source, p.partition))
    RETURNING p.source, p.partition""")
_REMEMBER_FIRST = Statement("""
    INSERT INTO twophase.known_files (pipeline, source, newest, sums)
    SELECT :pipeline, :source, :newest, :sums WHERE NOT EXISTS (SELECT FROM twophase.input_file
        WHERE pipeline = :pipeline AND source = :source AND gone_at >= CAST(:since AS timestamptz))
    ON CONFLICT DO NOTHING""")
_REMEMBER = Statement("""
    UPDATE twophase.known_files SET newest = :newest, sums = :sums
    WHERE pipeline = :pipeline AND source = :source AND newest = :old_newest AND sums = :old_sums""")
_LAST_SCHEMAS = Statement("""
    SELECT n.sink, (
        SELECT p.manifest -> 'schema' FROM twophase.revision r JOIN twophase.participant p
            ON (p.pipeline, p.checkpoint_id, p.revision) = (r.pipeline, r.checkpoint_id, r.revision) AND p.name = n.sink
        WHERE r.pipeline = :pipeline AND r.commit_seq IS NOT NULL ORDER BY r.commit_seq DESC LIMIT 1) AS columns
    FROM unnest(CAST(:sinks AS text[])) AS n (sink)""")

r = t.revision.c


class Inputs(Revisions):
    """The methods of a transaction that are about input."""

    def __init__(self, connection: Connection, who: str) -> None:
        """Use a connection with an open transaction."""
        super().__init__(connection, who)
        #: The checkpoints that this transaction has added, each with its slot.
        self.added: dict[tuple[str, int], str | None] = {}
        #: Checkpoint → the summary of its fixed input, for those that were read; it never changes.
        self.summaries: dict[tuple[str, int], dict[str, Any]] = {}
        #: Of each checkpoint that was looked at, how many files are its own, per source.
        self.owned: dict[tuple[str, int], Mapping[str, int]] = {}

    def add_checkpoint(self, pipeline: str, slot: str | None, inputs: Mapping[str, Input]) -> int:
        """Add the next checkpoint with its fixed input, and make its input files its own; return its number."""
        files = [(source, *file) for source, fixed in inputs.items() for file in fixed.files]
        columns = dict(zip(_FILE, map(list, zip(*files, strict=True)), strict=True)) if 0 < len(files) <= FEW else _NONE
        summary = psycopg2.extras.Json({source: fixed.summary() for source, fixed in inputs.items()})
        added = _ADD(self.connection, pipeline=pipeline, slot=slot, inputs=summary, **columns)
        checkpoint_id: int = added.scalar_one()
        self.added[pipeline, checkpoint_id] = slot
        if len(files) > FEW:
            self.copy_files(Key(pipeline, checkpoint_id, 0), inputs, None)
        return checkpoint_id

    def slot(self, pipeline: str, checkpoint_id: int) -> str | None:
        """Return the slot of a checkpoint."""
        if (pipeline, checkpoint_id) in self.added:
            return self.added[pipeline, checkpoint_id]
        c = t.checkpoint.c
        query = select(c.slot).where((c.pipeline == pipeline) & (c.checkpoint_id == checkpoint_id))
        row = self.connection.execute(query).first()
        if row is None:
            msg = f"checkpoint {pipeline}/{checkpoint_id}: it is not in the record"
            raise ConfigError(msg)
        return row.slot  # type: ignore[no-any-return]

    def claim(self, pipeline: str, checkpoint_id: int, claims: Claims) -> Holder | None:
        """Give a checkpoint the places of its slot; return who has one of them already, or None."""
        return slot_claims.claim(self.connection, pipeline, checkpoint_id, claims)

    def unclaimed(self, pipeline: str) -> list[tuple[int, str]]:
        """Return the checkpoints with slots that began before claims were recorded."""
        return slot_claims.unclaimed(self.connection, pipeline)

    def claim_earlier(self, pipeline: str, claims: Iterable[tuple[int, Claims]]) -> None:
        """Give those checkpoints the places of their slots."""
        slot_claims.claim_earlier(self.connection, pipeline, claims)

    def fix_inputs(self, key: Key, inputs: Mapping[str, Input]) -> None:
        """Record what this revision alone reads: files of its interval, revisions of another pipeline."""
        mine = (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & (r.revision == key.revision)
        summary = {source: fixed.summary() | _counted(fixed) for source, fixed in inputs.items()}
        self.connection.execute(update(t.revision).where(mine).values(inputs=summary))
        self.copy_files(key, inputs, key.revision)
        rows = [
            {**key._asdict(), "source": source, **_upstream(output.key)}
            for source, fixed in inputs.items()
            for output in fixed.outputs
        ]
        if rows:
            self.connection.execute(insert(t.input_revision), rows)

    def copy_files(self, key: Key, inputs: Mapping[str, Input], revision: int | None) -> None:
        """Record files as the checkpoint's own (`revision` None), or as those of one revision alone."""
        files = io.StringIO()
        rows = csv.writer(files)
        for source, fixed in inputs.items():
            rows.writerows((key.pipeline, source, *file, key.checkpoint_id, revision) for file in fixed.files)
        files.seek(0)
        cursor: Any = self.connection.connection.cursor()  # COPY is fast: 100,000 files while the pipeline is locked
        cursor.copy_expert(f"COPY twophase.input_file ({', '.join(CLAIM)}) FROM STDIN (FORMAT csv)", files)
        cursor.close()

    def take_commit_seq(self, pipeline: str) -> int:
        """Take the next commit_seq from the locked pipeline row (R12)."""
        return self._take(pipeline, "next_commit_seq")

    def _take(self, pipeline: str, column: str) -> int:
        number = t.pipeline.c[column]
        took = update(t.pipeline).where(t.pipeline.c.name == pipeline).values({column: number + 1})
        taken: int = self.connection.execute(took.returning(number - 1)).scalar_one()
        return taken

    def inputs(self, key: Key) -> dict[str, Input]:
        """Return the fixed input of a revision, per source: the checkpoint's, and the input of this revision alone."""
        files = self._files(key)
        outputs = self._outputs(key)
        upstream = self._upstreams(key)
        own = self._own(key)
        return {
            source: replace(
                Input.of_summary(fixed),
                files=tuple(files.get(source, ())),
                outputs=tuple(outputs.get(source, ())),
                upstream=upstream.get(source),
                table=own.get(source, {}).get("table"),
            )
            for source, fixed in self._summary(key.pipeline, key.checkpoint_id).items()
        }

    def _files(self, key: Key) -> dict[str, list[InputFile]]:
        f = t.input_file.c
        query = select(f.source, f.path, f.size, f.mtime_ns, f.xxh3).where(
            (f.pipeline == key.pipeline)
            & (f.checkpoint_id == key.checkpoint_id)
            & (f.revision.is_(None) | (f.revision == key.revision))
        )
        files: dict[str, list[InputFile]] = {}
        for source, *file in self.connection.execute(query.order_by(f.source, f.mtime_ns, f.path)):
            files.setdefault(source, []).append(InputFile(*file))
        return files

    def _outputs(self, key: Key) -> dict[str, list[Output]]:
        """Return the outputs of other pipelines that this revision reads, per source, by their checkpoints."""
        i = t.input_revision.c
        query = select(i.source, i.upstream, i.upstream_checkpoint_id, i.upstream_revision).where(
            (i.pipeline == key.pipeline) & (i.checkpoint_id == key.checkpoint_id) & (i.revision == key.revision)
        )
        found: dict[str, list[Key]] = {}
        for source, *upstream in self.connection.execute(query.order_by(i.source, i.upstream_checkpoint_id)):
            found.setdefault(source, []).append(Key(*upstream))
        return {
            source: self._promoted(keys, self._declared(source, key.pipeline)["sink"]) for source, keys in found.items()
        }

    def _declared(self, source: str, pipeline: str) -> dict[str, Any]:
        query = select(t.pipeline.c.declaration["reads"][source]).where(t.pipeline.c.name == pipeline)
        found: dict[str, Any] = self.connection.execute(query).scalar_one()
        return found

    def _upstreams(self, key: Key) -> dict[str, Json]:
        """Return the declaration and schema of each other pipeline's sink that a revision reads, per source."""
        own = self._own(key)
        reads = {source: self._declared(source, key.pipeline) for source, fixed in own.items() if "revisions" in fixed}
        return {source: self._upstream(read["pipeline"], read["sink"]) for source, read in reads.items()}

    def _own(self, key: Key) -> dict[str, Any]:
        """Return the summary of the input of a revision alone, per source."""
        mine = (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & (r.revision == key.revision)
        found: dict[str, Any] = self.connection.execute(select(r.inputs).where(mine)).scalar() or {}
        return found

    def _upstream(self, pipeline: str, sink: str) -> Json:
        declared = self._declaration(pipeline, sink)
        return {"sink": declared, "schema": queries.last_schema(self.connection, pipeline, sink)}

    def _declaration(self, pipeline: str, sink: str) -> Json:
        """Return the declaration of a pipeline's sink."""
        query = select(t.pipeline.c.declaration["writes"][sink]).where(t.pipeline.c.name == pipeline)
        row = self.connection.execute(query).first()
        if row is None or row[0] is None:
            what = f"write {sink!r}" if row is not None else "it"
            msg = f"pipeline {pipeline!r}: {what} is not in the record; run that pipeline first, or correct the name"
            raise ConfigError(msg)
        found: Json = row[0]
        return found

    def _promoted(self, keys: Sequence[Key], sink: str) -> list[Output]:
        """Return what revisions put into a sink; a revision without that sink is left out."""
        p = t.participant.c
        query = select(p.pipeline, p.checkpoint_id, p.revision, *participant_rows.COLUMNS)
        mine = tuple_(p.pipeline, p.checkpoint_id, p.revision).in_([tuple(key) for key in keys])
        rows = self.connection.execute(query.where(mine & (p.name == sink)).order_by(p.checkpoint_id))
        return [participant_rows.output(Key(*row[:3]), row._mapping) for row in rows]

    def committed_range(
        self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None
    ) -> CommittedRange:
        """Return what a pipeline committed to a sink, up to the lowest commit_seq that is not COMMITTED yet.

        A checkpoint is in the range if its first commit to this sink is, even if it was replaced since. Returned is the
        output of its committed revision. That row is held until this transaction ends, so nobody sweeps the output
        before its reader is recorded.
        """
        upstream = self._upstream(pipeline, sink)
        if end is None:
            settled = text("""
                SELECT least(p.next_commit_seq, (SELECT min(commit_seq) FROM twophase.revision
                    WHERE pipeline = p.name AND state = 'COMMITTING'))
                FROM twophase.pipeline p WHERE p.name = :pipeline""")
            end = int(self.connection.execute(settled, {"pipeline": pipeline}).scalar_one())
        first = (
            select(r.checkpoint_id, r.commit_seq)
            .where((r.pipeline == pipeline) & (r.commit_seq >= start) & (r.commit_seq < end))
            .where(_has(r, sink) & ~_came_before(sink))
            .order_by(r.commit_seq)
            .limit(limit)
        )
        members = self.connection.execute(first).all()
        if limit is not None and len(members) == limit:
            end = members[-1].commit_seq + 1
        keys = self._standing(pipeline, {row.checkpoint_id for row in members})
        return CommittedRange(end, tuple(self._promoted(keys, sink)), upstream)

    def _standing(self, pipeline: str, checkpoints: set[int]) -> list[Key]:
        """Return the committed revision of each checkpoint, and hold its row.

        A query that waited for a row which was superseded meanwhile returns neither that row nor its successor; so the
        missing ones are asked for again.
        """
        found: dict[int, Key] = {}
        for _ in range(TRIES):
            missing = checkpoints - found.keys()
            if not missing:
                return list(found.values())
            query = select(r.checkpoint_id, r.revision).where(
                (r.pipeline == pipeline) & r.checkpoint_id.in_(missing) & (r.state == State.COMMITTED)
            )
            for row in self.connection.execute(query.with_for_update(read=True)):
                found[row.checkpoint_id] = Key(pipeline, row.checkpoint_id, row.revision)
        missed = ", ".join(str(number) for number in sorted(checkpoints - found.keys()))
        msg = f"pipeline {pipeline!r}: checkpoint {missed}: replaced again and again while it was to be read; run again"
        raise StoreUnavailable(msg)

    def _summary(self, pipeline: str, checkpoint_id: int) -> dict[str, Any]:
        """Return the summary of a checkpoint's fixed input, which never changes."""
        if (pipeline, checkpoint_id) not in self.summaries:
            c = t.checkpoint.c
            query = select(c.inputs).where((c.pipeline == pipeline) & (c.checkpoint_id == checkpoint_id))
            self.summaries[pipeline, checkpoint_id] = self.connection.execute(query).scalar_one()
        return self.summaries[pipeline, checkpoint_id]

    def ranges(self, pipeline: str, checkpoint_id: int) -> dict[str, Input]:
        """Return what a checkpoint reads by offsets, per source: its ranges and their marks."""
        summary = self._summary(pipeline, checkpoint_id)
        return {source: Input.of_summary(fixed) for source, fixed in summary.items()}

    def claims(self, pipeline: str, checkpoint_id: int) -> Mapping[str, tuple[int, int]]:
        """Count the input files of a checkpoint per source: how many were fixed at begin, and how many it owns now."""
        if (pipeline, checkpoint_id) not in self.owned:
            f = t.input_file.c
            mine = (f.pipeline == pipeline) & (f.checkpoint_id == checkpoint_id) & f.revision.is_(None)
            query = select(f.source, func.count()).where(mine).group_by(f.source)
            self.owned[pipeline, checkpoint_id] = {row[0]: row[1] for row in self.connection.execute(query)}
        owned = self.owned[pipeline, checkpoint_id]
        summary = self._summary(pipeline, checkpoint_id)
        return {source: (fixed["files"], owned.get(source, 0)) for source, fixed in summary.items() if "files" in fixed}

    def remember(
        self, pipeline: str, source: str, before: Known | None, after: Known, since: datetime | None = None
    ) -> None:
        """Replace what a source remembers, unless that changed meanwhile or names were freed `since` it looked.

        Freeing the name of a file deletes what is remembered; a source that looked before that must not restore it.
        """
        values = {"pipeline": pipeline, "source": source, **after._asdict()}
        if before is None:
            _REMEMBER_FIRST(self.connection, **values, since=since)
        else:
            _REMEMBER(self.connection, **values, old_newest=before.newest, old_sums=before.sums)

    def _forget(self, pipeline: str) -> None:
        """Delete what the sources of a pipeline remember, because names of files were freed."""
        self.connection.execute(delete(t.known_files).where(t.known_files.c.pipeline == pipeline))

    def new_files(
        self, pipeline: str, source: str, found: Sequence[InputFile], since: datetime | None = None
    ) -> list[InputFile]:
        """Return the files that no checkpoint owns; raise InputChanged if an owned one looks different now.

        It is one statement for any number of files; only new and changed ones come back. A file whose name was freed
        `since` the folder was listed is left out: it has left the folder. No file is read here, because the pipeline is
        locked. So the error names the changed files whose bytes may be the same, provided that no other changed.
        """
        paths, sizes, mtimes = ([file[column] for file in found] for column in range(3))
        values: dict[str, Any] = {"pipeline": pipeline, "source": source, "since": since}
        values |= {"paths": paths, "sizes": sizes, "mtimes": mtimes}
        rows = _NEW_FILES(self.connection, **values).all()
        _refuse_changed(pipeline, source, [row for row in rows if row.checkpoint_id is not None])
        return [InputFile(row.path, row.size, row.mtime_ns) for row in rows]

    def keep_files(self, pipeline: str, checkpoint_id: int, source: str, files: Sequence[InputFile]) -> None:
        """Record the checksums of fixed files, and the new times of those written again with the same bytes."""
        columns = dict(zip(("paths", "sizes", "times", "sums"), map(list, zip(*files, strict=True)), strict=True))
        values = {"pipeline": pipeline, "checkpoint_id": checkpoint_id, "source": source, **columns}
        if files:
            _KEEP_FILES(self.connection, **values)

    def unsettled(self, pipeline: str, source: str) -> list[tuple[int, list[InputFile]]]:
        """Return the files of COMMITTED checkpoints that are not settled yet, per checkpoint."""
        f = t.input_file.c
        committed = (
            select(1)
            .where((r.pipeline == f.pipeline) & (r.checkpoint_id == f.checkpoint_id) & (r.state == State.COMMITTED))
            .exists()
        )
        query = select(f.checkpoint_id, f.path, f.size, f.mtime_ns, f.xxh3).where(
            (f.pipeline == pipeline) & (f.source == source) & f.gone_at.is_(None) & f.revision.is_(None) & committed
        )
        found: dict[int, list[InputFile]] = {}
        for checkpoint_id, *file in self.connection.execute(query.order_by(f.checkpoint_id, f.path)):
            found.setdefault(checkpoint_id, []).append(InputFile(*file))
        return list(found.items())

    def settle(self, pipeline: str, source: str, checkpoint_id: int) -> None:
        """Free the names of a committed checkpoint's files."""
        f = t.input_file.c
        mine = (f.pipeline == pipeline) & (f.source == source) & (f.checkpoint_id == checkpoint_id)
        self.connection.execute(update(t.input_file).where(mine & f.gone_at.is_(None)).values(gone_at=func.now()))
        self._forget(pipeline)

    def position(self, pipeline: str, source: str) -> Mapping[str, int]:
        """Return the decided offset per partition."""
        p = t.position.c
        query = select(p.partition, p.off).where((p.pipeline == pipeline) & (p.source == source))
        return {row.partition: row.off for row in self.connection.execute(query)}

    def pin(self, pipeline: str, source: str, positions: Mapping[str, Position]) -> None:
        """Add positions that are not there; of those at the same offset, replace the mark."""
        values: dict[str, Any] = {"pipeline": pipeline, "source": source, "partitions": list(positions)}
        values |= {"offsets": [at.offset for at in positions.values()]}
        _PIN(self.connection, **values, marks=[_json(at.mark) for at in positions.values()])

    def reposition(self, pipeline: str, source: str, positions: Mapping[str, Position | None]) -> None:
        """Set positions to where a person wants them, whatever they were; None: forget the partition."""
        p = t.position.c
        mine = (p.pipeline == pipeline) & (p.source == source) & p.partition.in_(list(positions))
        self.connection.execute(delete(t.position).where(mine))
        kept = {name: at for name, at in positions.items() if at is not None}
        if kept:
            self.pin(pipeline, source, kept)

    def advance(self, pipeline: str, moves: Sequence[Move]) -> list[Move]:
        """Move each position from start to end, if it is at start (R4); return those that are not.

        The first range of a partition that is not pinned sets its position.
        """
        sources, partitions, starts, ends, marks = map(list, zip(*moves, strict=True))
        values = {"sources": sources, "partitions": partitions, "starts": starts, "ends": ends, "pipeline": pipeline}
        values |= {"marks": [_json(mark) for mark in marks]}
        moved = {(row.source, row.partition) for row in _ADVANCE(self.connection, **values)}
        return [move for move in moves if move[:2] not in moved]

    def last_schemas(self, pipeline: str, sinks: Sequence[str]) -> dict[str, list[list[str]] | None]:
        """Return the columns of what was last decided in each sink; None: nothing was."""
        rows = _LAST_SCHEMAS(self.connection, pipeline=pipeline, sinks=list(sinks))
        return {row.sink: row.columns for row in rows}

    def rows_before(self, key: Key, slot: str | None, sink: str) -> int | None:
        """Return the row count to compare a revision's with: of what it replaces, or else of the commit before it."""
        return queries.rows_before(self.connection, key, slot, sink)


def _refuse_changed(pipeline: str, source: str, rows: Sequence[Row[Any]]) -> None:
    """Raise InputChanged if there are changed files; it carries them all if each may still hold the same bytes.

    A file may, if its size is the same and its checksum is known.
    """
    said: dict[tuple[str, int], dict[InputFile, str]] = {}
    for row in rows:
        was = InputFile(row.path, row.old_size, row.old_mtime_ns, row.xxh3)
        said.setdefault((source, row.checkpoint_id), {})[was] = (
            f"checkpoint {pipeline}/{row.checkpoint_id}: source {source!r}: its file {row.path!r} has changed"
            f" since: expected {looks(row.old_size, row.old_mtime_ns)}, found {looks(row.size, row.mtime_ns)};"
            f" put the file back as it was, or bring new records under a new name"
        )
    others = [row for row in rows if row.xxh3 is None or row.size != row.old_size]
    for row in [*others, *rows][:1]:
        was = InputFile(row.path, row.old_size, row.old_mtime_ns, row.xxh3)
        raise InputChanged(said[source, row.checkpoint_id][was], None if others else said)


def _has(revision: Any, sink: str) -> ColumnElement[bool]:  # noqa: ANN401 - the columns of a revision
    """Return a condition: the revision has output in the sink."""
    p = t.participant.c
    mine = (p.pipeline == revision.pipeline) & (p.checkpoint_id == revision.checkpoint_id)
    return select(1).where(mine & (p.revision == revision.revision) & (p.name == sink)).exists()


def _came_before(sink: str) -> ColumnElement[bool]:
    """Return a condition: an earlier decided revision of the checkpoint has output in the sink, which was replaced."""
    earlier = t.revision.alias("earlier").c
    same = (earlier.pipeline == r.pipeline) & (earlier.checkpoint_id == r.checkpoint_id)
    return select(1).where(same & (earlier.commit_seq < r.commit_seq) & _has(earlier, sink)).exists()


def _json(mark: Json | None) -> str | None:
    return None if mark is None else json.dumps(mark)


def _counted(fixed: Input) -> dict[str, int]:
    return {"revisions": len(fixed.outputs)} if fixed.upstream is not None else {}


def _upstream(key: Key) -> dict[str, Any]:
    return {
        "upstream": key.pipeline,
        "upstream_checkpoint_id": key.checkpoint_id,
        "upstream_revision": key.revision,
    }
