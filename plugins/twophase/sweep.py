"""Sweep: remove what the record says is dead; `twophase sweep` and the sweep DAG call it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from twophase import run_folders
from twophase.core.checkpoint import Key
from twophase.core.dead_output import why_dead
from twophase.core.errors import SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.isolation import alone
from twophase.core.record_behind import check_known
from twophase.core.states import ENDED
from twophase.state_sweep import sweep_states
from twophase.storage import disk
from twophase.wiring import coordinator_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime, timedelta

    from sqlalchemy import Connection

    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline
    from twophase.sinks.base import Attempt, Sink

#: How many leftovers are looked up in the record at once.
BATCH = 500


class Removed(NamedTuple):
    """One thing that was removed, or would be, and why."""

    pipeline: str
    sink: str
    path: str
    why: str


def sweep(
    record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool = False, everything: bool = False
) -> Iterator[Removed]:
    """Remove what the record says is dead; yield each thing that is removed. May be killed anywhere and run again.

    It looks only where the record says that something may have been left since the last sweep. With `everything` it
    looks at all that the sinks hold, and so also finds what a writer left that outlived its run. If the record is older
    than its sinks it cannot say what is dead: then it raises RecordBehind.
    """
    from twophase.committer import retention

    check_known(coordinator_of(record, pipeline))
    expired = _expire(record, pipeline, dry_run=dry_run)
    with record.engine.connect() as connection:
        suspects = retention.suspects(connection, pipeline.name)
    epochs = {(one.checkpoint_id, one.revision): one.epoch for one in suspects}
    problems: list[str] = []
    for name, sink in pipeline.sinks.items():
        with alone(f"sink {name!r}", problems):
            if everything or expired or any(one.swept for one in suspects):
                yield from _sweep_superseded(record, pipeline.name, name, sink, expired, dry_run=dry_run)
            left = sink.attempts() if everything else sink.left_by(epochs)
            yield from _sweep_attempts(record, pipeline.name, name, sink, left, dry_run=dry_run)
    if not dry_run and not problems:
        with record.transaction() as tx:
            retention.mark_clean(tx.connection, suspects)
        hit("sweep.clean")
    for name, path, why in sweep_states(record, pipeline, dry_run=dry_run, everything=everything):
        yield Removed(pipeline.name, name, path, why)
    yield from _sweep_told(record, pipeline, dry_run=dry_run)
    yield from _sweep_runs(record, pipeline.name, dry_run=dry_run)
    if problems:
        msg = f"pipeline {pipeline.name!r}: not swept: {'; '.join(problems)}"
        raise SinkUnavailable(msg)


def _sweep_attempts(  # noqa: PLR0913 - whose, and which
    record: PostgresRecord, pipeline: str, name: str, sink: Sink, left: Iterator[Attempt], *, dry_run: bool
) -> Iterator[Removed]:
    """Remove what dead attempts left in one sink."""
    while batch := list(islice(left, BATCH)):
        for attempt, why in _dead(record, pipeline, name, sink, batch):
            if not dry_run:
                hit("sweep.before")
                sink.remove(attempt)
                hit("sweep.after")
            yield Removed(pipeline, name, attempt.path, why)


def _expire(record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool) -> dict[Key, datetime]:
    """Record which superseded revisions are swept, before their output is touched; return when they were replaced."""
    from twophase.committer import retention

    with record.engine.connect() as connection:
        found = retention.expired(connection, pipeline.name, pipeline.retention)
    for key, at in found if not dry_run else ():
        with record.transaction() as tx:
            if retention.mark_swept(tx.connection, key):
                tx.note(key, "swept", f"replaced at {at:%Y-%m-%d %H:%M} UTC, kept for {pipeline.retention.superseded}")
            hit("sweep.inside")
        hit("sweep.swept")
    return dict(found)


def _sweep_superseded(  # noqa: PLR0913 - whose, and which
    record: PostgresRecord, pipeline: str, name: str, sink: Sink, expired: Mapping[Key, datetime], *, dry_run: bool
) -> Iterator[Removed]:
    """Remove the output of superseded revisions that are recorded as swept."""
    from twophase.committer import revisions

    left = sink.superseded()
    while batch := list(islice(left, BATCH)):
        found = revisions.of_checkpoints(record.engine, pipeline, {old.checkpoint_id for old in batch})
        for old in batch:
            key = Key(pipeline, old.checkpoint_id, old.revision)
            if key not in found or not (found[key].swept or (dry_run and key in expired)):
                continue
            if not dry_run:
                sink.forget(old)
                hit("sweep.forgotten")
            yield Removed(pipeline, name, old.path, "a later revision took its place, its retention is over")


def _sweep_told(record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool) -> Iterator[Removed]:
    """Delete old rows of the record: events of ended revisions, and slots that could not begin."""
    from twophase.committer import retention

    kept = pipeline.retention.events
    ended = f"older than {kept}, and their revisions have ended"
    yield from _sweep_old(
        record, pipeline, retention.old_events if dry_run else retention.delete_events, "events", ended, dry_run=dry_run
    )
    yield from _sweep_old(
        record,
        pipeline,
        retention.old_unbegun if dry_run else retention.delete_unbegun,
        "slots that could not begin",
        f"not tried again for {kept}",
        dry_run=dry_run,
    )


def _sweep_old(  # noqa: PLR0913 - whose, and what
    record: PostgresRecord,
    pipeline: Pipeline,
    act: Callable[[Connection, str, timedelta], int],
    what: str,
    why: str,
    *,
    dry_run: bool,
) -> Iterator[Removed]:
    """Count what is too old (`dry_run`), or delete it in batches."""
    from twophase.committer import retention

    count = 0
    while True:
        with record.transaction() as tx:
            some = act(tx.connection, pipeline.name, pipeline.retention.events_for)
        count += some
        if dry_run or some < retention.BATCH:
            break
    if count:
        yield Removed(pipeline.name, "", f"{count} {what}", why)


def _dead(
    record: PostgresRecord, pipeline: str, name: str, sink: Sink, batch: list[Attempt]
) -> Iterator[tuple[Attempt, str]]:
    from twophase.committer import revisions

    checkpoints = {left.checkpoint_id for left in batch}
    found = revisions.of_checkpoints(record.engine, pipeline, checkpoints)
    voted = revisions.voted(record.engine, pipeline, name, checkpoints)
    for left in batch:
        key = Key(pipeline, left.checkpoint_id, left.revision)
        if key in found:
            why = why_dead(left.attempt, found[key], voted.get(key), manifest=left.manifest, copies=sink.copies)
            if why:
                yield left, why


def _sweep_runs(record: PostgresRecord, pipeline: str, *, dry_run: bool) -> Iterator[Removed]:
    """Remove the run folders (plan, result, log) of revisions that have ended."""
    from twophase.committer import revisions

    folders = list(run_folders.of(pipeline))
    found = revisions.of_checkpoints(record.engine, pipeline, {key.checkpoint_id for key, _ in folders})
    for key, folder in folders:
        revision = found.get(key)
        if revision is not None and revision.state in ENDED:
            if not dry_run:
                disk.remove_tree(folder)
            yield Removed(pipeline, "", str(folder), f"its revision is {revision.state.lower()}")
