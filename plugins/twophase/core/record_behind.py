"""Check that the record knows every decision that its sinks hold; runs, recovery and sweeps call it before they act.

A record that was restored from a backup has forgotten some. Each decision takes its `commit_seq` from the record, and
each sink is given it before it shows anything. The record knows every decision below its next number. So a sink that
was given that number or a higher one holds something that the record has forgotten. To run on would give the same
numbers, checkpoints and input out a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from twophase.core.errors import RecordBehind
from twophase.core.isolation import alone

if TYPE_CHECKING:
    from twophase.core.parts import Parts
    from twophase.core.ports import Reach, Sink

log = logging.getLogger("twophase")


class Holdings(NamedTuple):
    """What the sinks of a pipeline hold, by their own account."""

    #: The highest commit_seq that each sink was given.
    newest: Mapping[str, int]
    #: What sinks that keep no numbers hold and the record does not know, in words.
    strange: Sequence[str]
    #: Why some sinks could not be asked.
    silent: Sequence[str]

    def beyond(self, reach: Reach) -> str | None:
        """Say what the sinks hold that the record does not know; None: nothing."""
        numbers = [(name, seq) for name, seq in self.newest.items() if seq >= reach.next_commit_seq]
        strange = [*self.strange, *(f"sink {name!r} was given commit_seq {seq}" for name, seq in numbers)]
        return f"{', '.join(strange)}; the record knows up to {reach.next_commit_seq - 1}" if strange else None


def check_known(coordinator: Parts) -> None:
    """Raise RecordBehind if a sink holds what the record does not know, and note that at the pipeline."""
    if why := ahead(coordinator):
        raise RecordBehind(_behind(coordinator, why))


def ahead(coordinator: Parts) -> str | None:
    """Say which sinks hold what the record does not know, and note it at the pipeline; None: no sink does."""
    held = ask(coordinator)
    if held == Holdings({}, [], []):
        return None
    return _compare(coordinator, held, coordinator.transact(lambda tx: tx.reach(coordinator.pipeline)))


def check(coordinator: Parts, held: Holdings, reach: Reach) -> None:
    """Raise RecordBehind if `held` goes beyond `reach`, which was read from the record after the sinks were asked."""
    if why := _compare(coordinator, held, reach):
        raise RecordBehind(_behind(coordinator, why))


def ask(coordinator: Parts) -> Holdings:
    """Ask each sink what it holds.

    Read the record afterwards, so that it knows what is committed meanwhile. A sink that cannot be asked is logged; an
    earlier finding about the sinks is kept then, because silence proves nothing.
    """
    newest, strange, silent = dict[str, int](), list[str](), list[str]()
    for name, sink in coordinator.sinks.items():
        with alone(f"sink {name!r}", silent):
            found = sink.newest(coordinator.pipeline)
            if found is None:
                strange += [f"sink {name!r} holds checkpoint {one}" for one in _lacking(coordinator, sink)[:1]]
            else:
                newest[name] = found
    for problem in silent:
        log.warning("pipeline %r: not asked whether it holds what the record lacks: %s", coordinator.pipeline, problem)
    return Holdings(newest, strange, silent)


def _compare(coordinator: Parts, held: Holdings, reach: Reach) -> str | None:
    why = held.beyond(reach)
    if held.silent and why is None:
        return reach.behind
    if why != reach.behind:
        coordinator.transact(lambda tx: tx.say_behind(coordinator.pipeline, why))
    return why


def _behind(coordinator: Parts, why: str) -> str:
    return (
        f"pipeline {coordinator.pipeline!r}: its record is older than what its sinks hold: {why}; was it restored"
        f" from a backup? `twophase reconcile {coordinator.pipeline}` shows what is missing; nothing was changed"
    )


def _lacking(coordinator: Parts, sink: Sink) -> list[str]:
    """Return the revisions that a sink shows and the record has not decided, for a sink that keeps no numbers."""
    held = list(sink.markers(coordinator.pipeline))
    missing = coordinator.transact(lambda tx: tx.lacks(coordinator.pipeline, held)) if held else []
    return [f"{checkpoint_id} r{revision}" for checkpoint_id, revision in missing]
