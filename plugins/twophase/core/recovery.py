"""Finish what a crash left, from the record alone.

`decide` says what to do with one revision and does nothing; `recover` looks, asks `decide`, and acts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twophase.core.errors import Fenced, Parked, PromotionPending, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.forgotten import check_known
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

    why: str = "its run ended before the commit point"


@dataclass(frozen=True)
class Leave:
    """Touch nothing."""

    reason: str
    #: Whether it was tried, and something failed that has to be tried again.
    failed: bool = False


@dataclass(frozen=True)
class Park:
    """It was promoted as far as it can be; what is left needs a person."""

    reason: str


#: What is decided beforehand; that something had to be parked shows when it is tried.
Decision = RollForward | RollBack | Leave | Park


def decide(revision: Revision, *, run_ended: str | bool | None = None) -> Decision:
    """Say what becomes of a revision that nobody may be working on; `run_ended` may say how, None: nobody knows."""
    match revision.state:
        case State.COMMITTED | State.SUPERSEDED | State.ABORTED:
            return Leave(f"it is {revision.state.lower()}")
        case _ if revision.leased:
            return Leave(f"run {revision.run} works on it, its lease lasts {revision.lease_left:.1f} s")
        case State.COMMITTING:
            return RollForward()
        case State.ABORTING:
            return RollBack()
        case State.OPEN | State.PRECOMMITTED if run_ended:
            return RollBack(run_ended) if isinstance(run_ended, str) else RollBack()
        case State.OPEN | State.PRECOMMITTED:
            return Leave(f"it waits for run {revision.run}")


def recover(
    coordinator: Coordinator, *, decided_only: bool = False, aborting: Callable[[Revision], None] = lambda _: None
) -> list[tuple[Revision, Decision]]:
    """Take every unfinished revision of the pipeline as far as it can go without a person; say what was decided.

    With `decided_only` undecided ones are left to the caller, and leases do not matter: what is decided may be carried
    out by several at once. `aborting` is told of each that is about to be aborted.
    """
    hit("recover.before")
    check_known(coordinator)
    decisions: list[tuple[Revision, Decision]] = []
    for found in coordinator.transact(lambda tx: tx.unfinished(coordinator.pipeline)):
        revision = found
        if decided_only:
            if found.state in UNDECIDED:
                continue
            revision = replace(found, lease_left=None)
        ended = coordinator.run_ended(revision.run) if revision.state in UNDECIDED else None
        decision = decide(revision, run_ended=ended)
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
            case RollBack(why):
                coordinator.abort(revision, f"recovery: {why}", unleased=True)
            case Leave() | Park():
                pass
    except Parked as error:
        decision = _parked(coordinator, revision, error)
    except (Fenced, PromotionPending) as error:
        decision = Leave(str(error))
    except SinkUnavailable as error:
        decision = Leave(str(error), failed=True)
    _tell(revision, decision)
    return decision


def _parked(coordinator: Coordinator, revision: Revision, error: Parked) -> Decision:
    """Say that it is parked: now, or still; or that another one is which comes before it."""
    reason = coordinator.transact(lambda tx: tx.revision(revision.key)).parked_reason
    if reason is None:
        return Leave(str(error))
    return Leave(f"it is parked: {reason}") if reason == revision.parked_reason else Park(reason)


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
