"""Compare a revision with the one that it replaces or would replace; `twophase diff` calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twophase.comparison import Comparison, compare
from twophase.core.checkpoint import Key, Output, Revision
from twophase.core.errors import ConfigError, Swept
from twophase.core.states import UNDECIDED, State
from twophase.sinks.base import Sink

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline
    from twophase.row_queries.base import RowSet


@dataclass(frozen=True)
class Diff:
    """How one sink's rows of a new revision differ from those of an old one."""

    sink: str
    new: Key
    #: None: there is no old revision, every row is new.
    old: Key | None
    comparison: Comparison


def diff(  # noqa: PLR0913 - what a person asks for
    record: PostgresRecord,
    pipeline: Pipeline,
    checkpoint_id: int,
    *,
    revision: int | None = None,
    against: int | None = None,
    sinks: Sequence[str] = (),
    key: Sequence[str] = (),
    samples: int = 0,
) -> Iterator[Diff]:
    """Compare the newest revision of a checkpoint with the committed one, or with the one that it replaced.

    `revision` and `against` name other ones. Aborted revisions are not compared unless they are named.
    """
    unknown = [name for name in sinks if name not in pipeline.writes]
    if unknown:
        msg = f"pipeline {pipeline.name!r}: no write {unknown[0]!r}, expected {', '.join(pipeline.writes)}"
        raise ConfigError(msg)
    new, old = _which(record, pipeline.name, checkpoint_id, revision, against)
    for name in sinks or pipeline.writes:
        sink = pipeline.writes[name]
        with ExitStack() as stack:
            if changing := _changing(record, sink, name, new):
                before, after = map(stack.enter_context, changing)
            else:
                after = stack.enter_context(_relation(record, sink, name, new))
                before = stack.enter_context(_relation(record, sink, name, old) if old else after.nothing())
            yield Diff(name, new.key, old.key if old else None, compare(before, after, key, samples))


def _which(
    record: PostgresRecord, pipeline: str, checkpoint_id: int, revision: int | None, against: int | None
) -> tuple[Revision, Revision | None]:
    """Return the new and the old revision to compare."""
    from twophase.committer import revisions

    mine = revisions.of_checkpoints(record.engine, pipeline, [checkpoint_id])
    found = {key.revision: one for key, one in mine.items()}
    for number in (revision, against):
        if number is not None and number not in found:
            msg = f"checkpoint {pipeline}/{checkpoint_id} r{number}: it is not in the record"
            raise ConfigError(msg)
    dead = {State.ABORTING, State.ABORTED}
    standing = [one for one in found.values() if one.state not in dead]
    if not standing:
        msg = f"checkpoint {pipeline}/{checkpoint_id}: it has no revision that could be compared"
        raise ConfigError(msg)
    new = found[revision] if revision is not None else standing[0]
    if against is not None:
        return new, found[against]
    live = [one for one in standing if one.state is State.COMMITTED and one.revision != new.revision]
    before = [one for one in standing if one.state is State.SUPERSEDED and one.revision < new.revision]
    return new, next(iter([*live, *before]), None)


def _changing(record: PostgresRecord, sink: Sink, name: str, revision: Revision) -> tuple[RowSet, RowSet] | None:
    """Return the rows before and after that an undecided revision would change in a sink that writes by key.

    None: the sink does not, or the revision is decided.
    """
    if revision.state not in UNDECIDED:
        return None
    return sink.changing(_output(record, name, revision))


@contextmanager
def _relation(record: PostgresRecord, sink: Sink, name: str, revision: Revision) -> Iterator[RowSet]:
    output = _output(record, name, revision)
    staged = revision.state in UNDECIDED or (revision.state is State.COMMITTING and not sink.stands(output))
    with sink.staged(output) if staged else sink.committed(output) as relation:
        yield relation


def _output(record: PostgresRecord, name: str, revision: Revision) -> Output:
    if revision.swept:
        msg = f"checkpoint {revision.key}: it was replaced and its retention is over; it cannot be compared any more"
        raise Swept(msg)
    with record.transaction() as tx:
        found = {participant.name: participant for participant in tx.participants(revision.key)}
    if name not in found or not found[name].vote:
        msg = f"checkpoint {revision.key}: nothing is staged for {name!r} that was voted for"
        raise ConfigError(msg)
    return found[name].output(revision)
