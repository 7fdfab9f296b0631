"""Does the record know all that its sinks hold? One that was restored from a backup does not.

A decision takes its `commit_seq` from the record, and every sink is told it before it shows anything. So one number per
sink answers: the record knows every decision below its next number, and a sink that was given that number or a higher
one holds what the record has forgotten. Running on would give numbers, checkpoints and input away a second time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from twophase.core.errors import RecordBehind
from twophase.core.isolation import alone

if TYPE_CHECKING:
    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Sink

log = logging.getLogger("twophase")


def check_known(coordinator: Coordinator) -> None:
    """Raise RecordBehind if a sink holds what the record does not know; the pipeline says so from then on."""
    why = ahead(coordinator)
    if why:
        msg = (
            f"pipeline {coordinator.pipeline!r}: its record is older than what its sinks hold: {why}; was it restored"
            f" from a backup? `twophase reconcile {coordinator.pipeline}` shows what is missing; nothing was changed"
        )
        raise RecordBehind(msg)


def ahead(coordinator: Coordinator) -> str | None:
    """Say which sinks hold what the record does not know, and let the pipeline say it; None: there is none.

    Each sink is asked first, then the record: what is committed meanwhile is known to it. One that cannot be asked now
    is told of, for its silence says nothing: what was said of the sinks before is not taken back by it.
    """
    pipeline, transact = coordinator.pipeline, coordinator.transact
    newest: dict[str, int] = {}
    strange: list[str] = []
    silent: list[str] = []
    for name, sink in coordinator.sinks.items():
        with alone(f"sink {name!r}", silent):
            found = sink.newest(pipeline)
            if found is None:
                strange += [f"sink {name!r} holds checkpoint {one}" for one in _lacking(coordinator, sink)[:1]]
            else:
                newest[name] = found
    for problem in silent:
        log.warning("pipeline %r: not asked whether it holds what the record lacks: %s", pipeline, problem)
    if not newest and not strange and not silent:
        return None
    known = transact(lambda tx: tx.reach(pipeline))
    strange += [
        f"sink {name!r} was given commit_seq {seq}" for name, seq in newest.items() if seq >= known.next_commit_seq
    ]
    why = f"{', '.join(strange)}; the record knows up to {known.next_commit_seq - 1}" if strange else None
    if silent and why is None:
        return known.behind
    if why != known.behind:
        transact(lambda tx: tx.say_behind(pipeline, why))
    return why


def _lacking(coordinator: Coordinator, sink: Sink) -> list[str]:
    """Return what a sink shows that is not decided in the record; of one that tells no numbers this is the only way."""
    held = list(sink.markers(coordinator.pipeline))
    missing = coordinator.transact(lambda tx: tx.lacks(coordinator.pipeline, held)) if held else []
    return [f"{checkpoint_id} r{revision}" for checkpoint_id, revision in missing]
