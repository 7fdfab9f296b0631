"""Finish what a crash left, from the record alone.

`decide` says what to do with one revision and does nothing; `recover` looks, asks `decide`, and acts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twophase.core.errors import Fenced, Parked, PromotionPending, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.ports import Outcome
from twophase.core.states import UNDECIDED, State

if TYPE_CHECKING:
    from twophase.core.checkpoint import Revision
    from twophase.core.coordinator import Coordinator

log = logging.getLogger("twophase")


@dataclass(frozen=True)
class RollForward:
    """Promote it: the commit point is passed."""


@dataclass(frozen=True)
class RollBack:
    """Abort it and discard what it staged."""


@dataclass(frozen=True)
class Leave:
    """Touch nothing."""

    reason: str


@dataclass(frozen=True)
class Park:
    """Flag it for a person."""

    reason: str


Decision = RollForward | RollBack | Leave | Park


@dataclass(frozen=True)
class Observed:
    """What the record cannot know by itself: whether the run is over, and what the sinks say."""

    #: None: nobody could say.
    run_ended: bool | None = None
    #: Sinks whose staged output is gone and whose marker, read again, is not there; with the reason.
    lost: Mapping[str, str] = field(default_factory=dict)


def decide(revision: Revision, observed: Observed) -> Decision:  # noqa: PLR0911 - one return per row of the table
    """Say what becomes of a revision that nobody may be working on."""
    match revision.state:
        case State.COMMITTED | State.SUPERSEDED | State.ABORTED:
            return Leave(f"it is {revision.state.lower()}")
        case _ if revision.leased:
            return Leave(f"run {revision.run} works on it, its lease lasts {revision.lease_left:.1f} s")
        case State.COMMITTING if observed.lost:
            reason = "; ".join(f"{sink}: {why}" for sink, why in observed.lost.items())
            return Leave(f"it is parked: {reason}") if revision.parked_reason else Park(reason)
        case State.COMMITTING:
            return RollForward()
        case State.ABORTING:
            return RollBack()
        case State.OPEN | State.PRECOMMITTED if observed.run_ended:
            return RollBack()
        case State.OPEN | State.PRECOMMITTED:
            return Leave(f"it waits for run {revision.run}")


def observe(coordinator: Coordinator, revision: Revision) -> Observed:
    """Look at what the record cannot know; changes nothing."""
    if revision.state is not State.COMMITTING:
        return Observed(run_ended=coordinator.run_ended(revision.run))
    done = coordinator.transact(lambda tx: tx.committed(revision.key))
    lost = {}
    for participant in coordinator.transact(lambda tx: tx.participants(revision.key)):
        if participant.kind == "sink" and participant.name not in done:
            found = coordinator.find(revision, participant)
            if found.outcome is Outcome.FAILED:
                lost[participant.name] = found.reason or "no reason given"
    return Observed(lost=lost)


def recover(
    coordinator: Coordinator, *, decided_only: bool = False, aborting: Callable[[Revision], None] = lambda _: None
) -> list[tuple[Revision, Decision]]:
    """Take every unfinished revision of the pipeline as far as it can go without a person; say what was decided.

    With `decided_only` undecided ones are left to the caller, and leases do not matter: what is decided may be carried
    out by several at once. `aborting` is told of each that is about to be aborted.
    """
    hit("recover.before")
    decisions: list[tuple[Revision, Decision]] = []
    for found in coordinator.transact(lambda tx: tx.unfinished(coordinator.pipeline)):
        revision = found
        if decided_only:
            if found.state in UNDECIDED:
                continue
            revision = replace(found, lease_left=None)
        decision = decide(revision, observe(coordinator, revision))
        if isinstance(decision, RollBack):
            aborting(revision)
        decisions.append((revision, _execute(coordinator, revision, decision)))
    coordinator.settle()
    return decisions


def _execute(coordinator: Coordinator, revision: Revision, decision: Decision) -> Decision:
    """Act on a decision; what others did meanwhile, or a sink that is down or full, changes it to Leave."""
    try:
        match decision:
            case RollForward():
                coordinator.finish(revision.key)
            case RollBack() if revision.state is State.ABORTING:
                coordinator.finish_abort(revision)
            case RollBack():
                coordinator.abort(revision, "recovery: its run ended before the commit point", unleased=True)
            case Park(reason):
                coordinator.transact(lambda tx: tx.park(revision.key, reason))
            case Leave():
                pass
    except (Fenced, PromotionPending, Parked, SinkUnavailable, OSError) as error:
        decision = Leave(str(error))
    _tell(revision, decision)
    return decision


def _tell(revision: Revision, decision: Decision) -> None:
    match decision:
        case RollForward():
            log.info("%s: left by an earlier run after its commit point, promoted", revision.key)
        case RollBack():
            log.info("%s: left by an earlier run before its commit point, aborted", revision.key)
        case Park(reason):
            log.warning("%s: parked, it needs a person: %s", revision.key, reason)
        case Leave(reason):
            log.info("%s: left alone: %s", revision.key, reason)
