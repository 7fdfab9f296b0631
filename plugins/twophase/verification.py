"""Verify that each sink holds what the record says; `twophase verify` calls it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from twophase.core.isolation import alone
from twophase.core.record_behind import ahead
from twophase.wiring import coordinator_of

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline


class Difference(NamedTuple):
    """One way in which a sink does not hold what the record says."""

    pipeline: str
    checkpoint_id: int | None
    sink: str
    difference: str


@dataclass(frozen=True)
class Verified:
    """One committed checkpoint was compared with what a sink holds. It is falsy; a Difference is not."""

    sink: str

    def __bool__(self) -> Literal[False]:
        """Return False: this is no difference."""
        return False


def verify(record: PostgresRecord, pipeline: Pipeline) -> Iterator[Difference | Verified]:
    """Compare every committed checkpoint with what each sink holds; yield a Verified for each, and the differences."""
    from twophase.committer import queries, revisions

    if why := ahead(coordinator_of(record, pipeline)):
        yield Difference(pipeline.name, None, "", f"the record is older than its sinks: {why}")
    for name, sink in pipeline.sinks.items():
        problems: list[str] = []
        with alone("it cannot be verified", problems):
            if (owner := sink.owner()) not in {None, pipeline.name}:
                told = f"the table belongs to pipeline {owner!r}, so what is in it is that one's"
                yield Difference(pipeline.name, None, name, told)
            for promoted in queries.promoted(record.engine, pipeline.name, name):
                if promoted.state_swept_at is not None and name in pipeline.states:
                    continue  # its files go, or are gone
                for difference in sink.verify(promoted.output):
                    yield Difference(pipeline.name, promoted.output.key.checkpoint_id, name, difference)
                yield Verified(name)
            strangers = list(sink.strangers(revisions.places(record.engine, pipeline.name, name)))
            if strangers:  # something may have been promoted after the record was read: read it again
                strangers = list(sink.strangers(revisions.places(record.engine, pipeline.name, name)))
            yield from (Difference(pipeline.name, None, name, stranger) for stranger in strangers)
        yield from (Difference(pipeline.name, None, name, problem) for problem in problems)
