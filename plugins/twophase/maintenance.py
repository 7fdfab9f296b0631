"""Keep the promise over time: sweep what is dead, verify what is committed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from twophase.core.checkpoint import Key
from twophase.core.failpoints import hit
from twophase.core.settings import home
from twophase.core.states import ENDED
from twophase.core.sweeping import why_dead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twophase.committer.record import PostgresRecord
    from twophase.core.checkpoint import Revision
    from twophase.pipeline import Pipeline
    from twophase.sinks.base import Attempt, Sink

#: How many leftovers are looked up in the record at once.
BATCH = 500


class Swept(NamedTuple):
    """One thing that was removed, or would be, and why."""

    pipeline: str
    sink: str
    path: str
    why: str


class Difference(NamedTuple):
    """One way in which a sink does not hold what the record says."""

    pipeline: str
    checkpoint_id: int | None
    sink: str
    difference: str


def load(record: PostgresRecord, name: str) -> Pipeline:
    """Build a pipeline from the record alone."""
    from twophase.committer import queries
    from twophase.pipeline import Pipeline

    with record.engine.connect() as connection:
        return Pipeline.from_declaration(name, queries.declaration(connection, name))


def sweep(record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool = False) -> Iterator[Swept]:
    """Remove what the record says is dead; yield each thing as it goes. May be killed anywhere and run again."""
    for name, sink in pipeline.writes.items():
        left = sink.attempts()
        while batch := list(islice(left, BATCH)):
            for attempt, why in _dead(record, pipeline.name, name, sink, batch):
                if not dry_run:
                    hit("sweep.before")
                    sink.remove(attempt)
                    hit("sweep.after")
                yield Swept(pipeline.name, name, attempt.path, why)
    yield from _sweep_runs(record, pipeline.name, dry_run=dry_run)


def _dead(
    record: PostgresRecord, pipeline: str, name: str, sink: Sink, batch: list[Attempt]
) -> Iterator[tuple[Attempt, str]]:
    found = _revisions(record, pipeline, {left.checkpoint_id for left in batch})
    voted = _voted(record, pipeline, name, {left.checkpoint_id for left in batch})
    for left in batch:
        key = Key(pipeline, left.checkpoint_id, left.revision)
        if key in found:
            why = why_dead(left.attempt, found[key], voted.get(key), manifest=left.manifest, copies=sink.copies)
            if why:
                yield left, why


def _revisions(record: PostgresRecord, pipeline: str, checkpoints: set[int]) -> Mapping[Key, Revision]:
    from twophase.committer.record import REVISION, r, to_revision

    query = REVISION.where((r.pipeline == pipeline) & r.checkpoint_id.in_(checkpoints))
    with record.engine.connect() as connection:
        return {found.key: found for found in map(to_revision, connection.execute(query))}


def _voted(record: PostgresRecord, pipeline: str, sink: str, checkpoints: set[int]) -> Mapping[Key, int]:
    from sqlalchemy import select

    from twophase.committer.tables import participant

    p = participant.c
    query = select(p.checkpoint_id, p.revision, p.attempt).where(
        (p.pipeline == pipeline) & (p.name == sink) & p.checkpoint_id.in_(checkpoints)
    )
    with record.engine.connect() as connection:
        return {Key(pipeline, row.checkpoint_id, row.revision): row.attempt for row in connection.execute(query)}


def _sweep_runs(record: PostgresRecord, pipeline: str, *, dry_run: bool) -> Iterator[Swept]:
    """Remove the run folders (plan, result, log) of revisions that have ended."""
    folder = home() / "runs" / pipeline
    matches = [m for path in (folder.iterdir() if folder.is_dir() else ()) if (m := _RUN.fullmatch(path.name))]
    found = _revisions(record, pipeline, {int(match[1]) for match in matches})
    for match in matches:
        revision = found.get(Key(pipeline, int(match[1]), int(match[2])))
        if revision is not None and revision.state in ENDED:
            if not dry_run:
                shutil.rmtree(folder / match[0])
            yield Swept(pipeline, "", str(folder / match[0]), f"its revision is {revision.state.lower()}")


_RUN = re.compile(r"(\d{8,})\.r(\d+)\.a\d+\..+")


def run_folder(key: Key, attempt: int, token: str) -> Path:
    """Return the folder of one attempt's plan, result and log."""
    return home() / "runs" / key.pipeline / f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}"


def verify(record: PostgresRecord, pipeline: Pipeline) -> Iterator[Difference | None]:
    """Compare every committed checkpoint with what each sink holds; yield each difference, and None per checkpoint."""
    from twophase.committer import queries

    for name, sink in pipeline.writes.items():
        for promoted in queries.promoted(record.engine, pipeline.name, name):
            for difference in sink.verify(promoted.key, promoted.attempt, promoted.manifest):
                yield Difference(pipeline.name, promoted.key.checkpoint_id, name, difference)
            yield None
        strangers = list(sink.strangers(_decided(record, pipeline.name)))
        if strangers:  # something may have been promoted between the two looks: ask the record again
            strangers = list(sink.strangers(_decided(record, pipeline.name)))
        yield from (Difference(pipeline.name, None, name, stranger) for stranger in strangers)


def _decided(record: PostgresRecord, pipeline: str) -> list[int]:
    from sqlalchemy import select

    from twophase.committer.record import r

    query = select(r.checkpoint_id).where((r.pipeline == pipeline) & r.commit_seq.is_not(None))
    with record.engine.connect() as connection:
        return list(connection.execute(query).scalars())
