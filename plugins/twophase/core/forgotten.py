"""Does the record know all that its sinks hold? One that was restored from a backup does not.

A decision takes its `commit_seq` from the record, and every sink is told it before it shows anything. So one number per
sink answers: the record knows every decision below its next number, and a sink that was given that number or a higher
one holds what the record has forgotten. Running on would give numbers, checkpoints and input away a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from twophase.core.errors import RecordBehind
from twophase.core.isolation import alone

if TYPE_CHECKING:
    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Reach, Sink

log = logging.getLogger("twophase")


class Holdings(NamedTuple):
    """What the sinks of a pipeline say that they hold."""

    #: The highest commit_seq that each was given.
    newest: Mapping[str, int]
    #: Of those that tell no numbers: what they hold and the record lacks, in words.
    strange: Sequence[str]
    #: Why some could not be asked.
    silent: Sequence[str]

    def beyond(self, reach: Reach) -> str | None:
        """Say what of it is beyond the record's knowledge; None: nothing is."""
        numbers = [(name, seq) for name, seq in self.newest.items() if seq >= reach.next_commit_seq]
        strange = [*self.strange, *(f"sink {name!r} was given commit_seq {seq}" for name, seq in numbers)]
        return f"{', '.join(strange)}; the record knows up to {reach.next_commit_seq - 1}" if strange else None


def check_known(coordinator: Coordinator) -> None:
    """Raise RecordBehind if a sink holds what the record does not know; the pipeline says so from then on."""
    if why := ahead(coordinator):
        raise RecordBehind(_behind(coordinator, why))


def ahead(coordinator: Coordinator) -> str | None:
    """Say which sinks hold what the record does not know, and let the pipeline say it; None: there is none."""
    held = ask(coordinator)
    if held == Holdings({}, [], []):
        return None
    return _compare(coordinator, held, coordinator.transact(lambda tx: tx.reach(coordinator.pipeline)))


def check(coordinator: Coordinator, held: Holdings, reach: Reach) -> None:
    """Raise RecordBehind if what the sinks said is beyond what the record was asked for after them."""
    if why := _compare(coordinator, held, reach):
        raise RecordBehind(_behind(coordinator, why))


def ask(coordinator: Coordinator) -> Holdings:
    """Ask each sink what it holds; then the record is asked, so what is committed meanwhile is known to it.

    One that cannot be asked now is told of, for its silence says nothing: what was said of the sinks before is not
    taken back by it.
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


def _compare(coordinator: Coordinator, held: Holdings, reach: Reach) -> str | None:
    why = held.beyond(reach)
    if held.silent and why is None:
        return reach.behind
    if why != reach.behind:
        coordinator.transact(lambda tx: tx.say_behind(coordinator.pipeline, why))
    return why


def _behind(coordinator: Coordinator, why: str) -> str:
    return (
        f"pipeline {coordinator.pipeline!r}: its record is older than what its sinks hold: {why}; was it restored"
        f" from a backup? `twophase reconcile {coordinator.pipeline}` shows what is missing; nothing was changed"
    )


def _lacking(coordinator: Coordinator, sink: Sink) -> list[str]:
    """Return what a sink shows that is not decided in the record; of one that tells no numbers this is the only way."""
    held = list(sink.markers(coordinator.pipeline))
    missing = coordinator.transact(lambda tx: tx.lacks(coordinator.pipeline, held)) if held else []
    return [f"{checkpoint_id} r{revision}" for checkpoint_id, revision in missing]
