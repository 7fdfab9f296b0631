"""What recovery does with an unfinished revision: the coordinator asks `decide`, a pure function, and acts on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twophase.core.states import State

if TYPE_CHECKING:
    from twophase.core.checkpoint import Revision

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
    #: Whether recovery tried it and a sink failed, so that it has to be tried again.
    failed: bool = False


@dataclass(frozen=True)
class Park:
    """Promoted as far as it can be; the rest needs a person."""

    reason: str


#: `decide` returns the first three; `Park` only shows when the promotion is tried.
Decision = RollForward | RollBack | Leave | Park


def decide(revision: Revision, *, run_ended: str | bool | None = None) -> Decision:
    """Say what recovery does with a revision.

    `run_ended` says whether its run is over, as a text also how; None: that is unknown.
    """
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


def tell(revision: Revision, decision: Decision) -> None:
    """Log what recovery did with a revision."""
    match decision:
        case RollForward():
            log.info("%s: left by an earlier run after its commit point, promoted", revision.key)
        case RollBack():
            log.info("%s: left by an earlier run before its commit point, aborted", revision.key)
        case Park(reason):
            log.warning("%s: parked, it needs a person: %s", revision.key, reason)
        case Leave(reason):
            log.info("%s: left alone: %s", revision.key, reason)
