"""The part of the record that is about input: checkpoints, who owns which file, how far each source has been read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert

from twophase.committer import tables as t
from twophase.core.checkpoint import Input, InputFile
from twophase.core.errors import InputChanged
from twophase.core.states import State

#: The columns of a claim, as `add_checkpoint` copies them.
CLAIM = ("pipeline", "source", *InputFile._fields, "checkpoint_id")

r = t.revision.c


class Inputs:
    """Rows about input within one transaction."""

    connection: Connection

    def add_checkpoint(self, pipeline: str, slot: str | None, inputs: Mapping[str, Input]) -> int:
        """Add the next checkpoint, its fixed input and its claims; return its number."""
        checkpoint_id = self._take(pipeline, "next_checkpoint_id")
        summary = {source: fixed.summary() for source, fixed in inputs.items()}
        self.connection.execute(
            insert(t.checkpoint).values(pipeline=pipeline, checkpoint_id=checkpoint_id, slot=slot, inputs=summary)
        )
        claims = io.StringIO()
        rows = csv.writer(claims)
        for source, fixed in inputs.items():
            rows.writerows((pipeline, source, *file, checkpoint_id) for file in fixed.files)
        claims.seek(0)
        cursor: Any = self.connection.connection.cursor()  # psycopg2's: 100,000 claims while the pipeline is locked
        cursor.copy_expert(f"COPY twophase.input_file ({', '.join(CLAIM)}) FROM STDIN (FORMAT csv)", claims)
        cursor.close()
        return checkpoint_id

    def take_commit_seq(self, pipeline: str) -> int:
        """Take the next commit_seq from the locked pipeline row (R12)."""
        return self._take(pipeline, "next_commit_seq")

    def _take(self, pipeline: str, column: str) -> int:
        number = t.pipeline.c[column]
        took = update(t.pipeline).where(t.pipeline.c.name == pipeline).values({column: number + 1})
        taken: int = self.connection.execute(took.returning(number - 1)).scalar_one()
        return taken

    def inputs(self, pipeline: str, checkpoint_id: int) -> dict[str, Input]:
        """Return the fixed input of a checkpoint, per source."""
        f = t.input_file.c
        query = select(f.source, f.path, f.size, f.mtime_ns).where(
            (f.pipeline == pipeline) & (f.checkpoint_id == checkpoint_id)
        )
        files: dict[str, list[InputFile]] = {}
        for source, *file in self.connection.execute(query.order_by(f.source, f.mtime_ns, f.path)):
            files.setdefault(source, []).append(InputFile(*file))
        ranges = self.ranges(pipeline, checkpoint_id)
        return {
            source: Input(files=tuple(files.get(source, ())), ranges=ranges.get(source, {}))
            for source in self._summary(pipeline, checkpoint_id)
        }

    def _summary(self, pipeline: str, checkpoint_id: int) -> dict[str, Any]:
        c = t.checkpoint.c
        query = select(c.inputs).where((c.pipeline == pipeline) & (c.checkpoint_id == checkpoint_id))
        found: dict[str, Any] = self.connection.execute(query).scalar_one()
        return found

    def ranges(self, pipeline: str, checkpoint_id: int) -> Mapping[str, Mapping[str, tuple[int, int]]]:
        """Return the fixed offset ranges of a checkpoint: source → partition → [start, end)."""
        return {
            source: {partition: (start, end) for partition, (start, end) in fixed.get("ranges", {}).items()}
            for source, fixed in self._summary(pipeline, checkpoint_id).items()
        }

    def claims(self, pipeline: str, checkpoint_id: int) -> Mapping[str, tuple[int, int]]:
        """Count the input files of a checkpoint, per source: how many were fixed at begin, how many are its own now."""
        f = t.input_file.c
        query = select(f.source, func.count()).where((f.pipeline == pipeline) & (f.checkpoint_id == checkpoint_id))
        owned = {row[0]: row[1] for row in self.connection.execute(query.group_by(f.source))}
        summary = self._summary(pipeline, checkpoint_id)
        return {source: (fixed["files"], owned.get(source, 0)) for source, fixed in summary.items() if "files" in fixed}

    def new_files(self, pipeline: str, source: str, found: Sequence[InputFile]) -> list[InputFile]:
        """Return those that no checkpoint owns; a known path that looks different now raises InputChanged.

        One statement whatever the folder holds: only what is new or changed comes back.
        """
        query = text("""
            SELECT n.path, n.size, n.mtime_ns, f.size AS old_size, f.mtime_ns AS old_mtime_ns, f.checkpoint_id
            FROM unnest(CAST(:paths AS text[]), CAST(:sizes AS bigint[]), CAST(:mtimes AS bigint[]))
                AS n (path, size, mtime_ns)
            LEFT JOIN twophase.input_file f
                ON f.pipeline = :pipeline AND f.source = :source AND f.path = n.path AND f.gone_at IS NULL
            WHERE f.path IS NULL OR (f.size, f.mtime_ns) <> (n.size, n.mtime_ns)""")
        paths, sizes, mtimes = ([file[column] for file in found] for column in range(3))
        values = {"pipeline": pipeline, "source": source, "paths": paths, "sizes": sizes, "mtimes": mtimes}
        new = []
        for row in self.connection.execute(query, values):
            if row.checkpoint_id is not None:
                msg = (
                    f"source {source!r}: file {row.path!r} belongs to checkpoint {pipeline}/{row.checkpoint_id} and has"
                    f" changed since: expected {row.old_size} bytes of {row.old_mtime_ns}, found {row.size} bytes of"
                    f" {row.mtime_ns}; put the file back, or bring new records under a new name"
                )
                raise InputChanged(msg)
            new.append(InputFile(row.path, row.size, row.mtime_ns))
        return new

    def unsettled(self, pipeline: str, source: str) -> list[tuple[int, list[InputFile]]]:
        """Return files of COMMITTED checkpoints whose names are still taken, per checkpoint."""
        f = t.input_file.c
        committed = (
            select(1)
            .where((r.pipeline == f.pipeline) & (r.checkpoint_id == f.checkpoint_id) & (r.state == State.COMMITTED))
            .exists()
        )
        query = select(f.checkpoint_id, f.path, f.size, f.mtime_ns).where(
            (f.pipeline == pipeline) & (f.source == source) & f.gone_at.is_(None) & committed
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

    def position(self, pipeline: str, source: str) -> Mapping[str, int]:
        """Return the decided offset per partition."""
        p = t.position.c
        query = select(p.partition, p.off).where((p.pipeline == pipeline) & (p.source == source))
        return {row.partition: row.off for row in self.connection.execute(query)}

    def advance(self, pipeline: str, source: str, partition: str, start: int, end: int) -> bool:
        """Move a position from start to end, if it is at start (R4); a partition's first range sets it."""
        p = t.position.c
        moved = self.connection.execute(
            upsert(t.position)
            .values(pipeline=pipeline, source=source, partition=partition, off=end)
            .on_conflict_do_update(constraint="position_pkey", set_={"off": end}, where=p.off == start)
        )
        return bool(moved.rowcount)
