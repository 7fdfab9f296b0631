"""Keep the promise over time: sweep what is dead, verify what is committed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from twophase.core.checkpoint import Key
from twophase.core.coordinator import Coordinator
from twophase.core.dead_output import why_dead
from twophase.core.errors import SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.forgotten import ahead, check_known
from twophase.core.isolation import alone
from twophase.core.settings import home
from twophase.core.states import ENDED
from twophase.storage import disk

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


def sweep(
    record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool = False, everything: bool = False
) -> Iterator[Removed]:
    """Remove what the record says is dead; yield each thing as it goes. May be killed anywhere and run again.

    It looks where the record knows that something may have been left since the last sweep. With `everything` all that
    the sinks hold is looked at: what a writer that outlived its run has left since is found, too. A record older than
    its sinks cannot say what is dead: RecordBehind.
    """
    from twophase.committer import retention

    check_known(Coordinator(record, pipeline.name, sources=pipeline.reads, sinks=pipeline.sinks))
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
    """Record which superseded revisions go, before anything of them is touched; return when they were replaced."""
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
    """Delete what the record tells of long ago: events of ended revisions, and what could not begin."""
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
    """Count what is too old, or delete it some at a time."""
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

    folder = home() / "runs" / pipeline
    matches = [match for name, _ in disk.entries(folder) if (match := _RUN.fullmatch(name))]
    found = revisions.of_checkpoints(record.engine, pipeline, {int(match[1]) for match in matches})
    for match in matches:
        revision = found.get(Key(pipeline, int(match[1]), int(match[2])))
        if revision is not None and revision.state in ENDED:
            if not dry_run:
                disk.remove_tree(folder / match[0])
            yield Removed(pipeline, "", str(folder / match[0]), f"its revision is {revision.state.lower()}")


_RUN = re.compile(r"(\d{8,})\.r(\d+)\.a\d+\..+")


def run_folder(key: Key, attempt: int, token: str) -> Path:
    """Return the folder of one attempt's plan, result and log."""
    return home() / "runs" / key.pipeline / f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}"


@dataclass(frozen=True)
class Verified:
    """One committed checkpoint was compared with what a sink holds; it is no difference, so it is false."""

    sink: str

    def __bool__(self) -> Literal[False]:
        """Tell it from a difference."""
        return False


def verify(record: PostgresRecord, pipeline: Pipeline) -> Iterator[Difference | Verified]:
    """Compare every committed checkpoint with what each sink holds; yield each difference, and what was compared."""
    from twophase.committer import queries, revisions

    if why := ahead(Coordinator(record, pipeline.name, sources=pipeline.reads, sinks=pipeline.sinks)):
        yield Difference(pipeline.name, None, "", f"the record is older than its sinks: {why}")
    for name, sink in pipeline.sinks.items():
        problems: list[str] = []
        with alone("it cannot be verified", problems):
            if (owner := sink.owner()) not in {None, pipeline.name}:
                told = f"the table belongs to pipeline {owner!r}, so what is in it is that one's"
                yield Difference(pipeline.name, None, name, told)
            for promoted in queries.promoted(record.engine, pipeline.name, name):
                for difference in sink.verify(promoted.output):
                    yield Difference(pipeline.name, promoted.output.key.checkpoint_id, name, difference)
                yield Verified(name)
            strangers = list(sink.strangers(revisions.places(record.engine, pipeline.name, name)))
            if strangers:  # something may have been promoted between the two looks: ask the record again
                strangers = list(sink.strangers(revisions.places(record.engine, pipeline.name, name)))
            yield from (Difference(pipeline.name, None, name, stranger) for stranger in strangers)
        yield from (Difference(pipeline.name, None, name, problem) for problem in problems)
