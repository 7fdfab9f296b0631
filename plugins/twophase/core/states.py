"""The states of a revision and the moves between them; the record and the coordinator go by this table.

    OPEN ⇄ PRECOMMITTED ──▶ COMMITTING ──▶ COMMITTED ──▶ SUPERSEDED
      └─────────┴─────────▶ ABORTING ────▶ ABORTED

A new attempt clears the votes and goes back to OPEN.
The update into COMMITTING is the commit point: before it recovery aborts (lease out, run ended),
after it recovery promotes.
Nothing else decides an outcome.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a revision stands."""

    #: An attempt may be running; not every participant has voted.
    OPEN = "OPEN"
    #: Every participant has durably voted yes for the current attempt; nothing is decided.
    PRECOMMITTED = "PRECOMMITTED"
    #: The commit point is passed: the outcome is decided, promotion is under way.
    COMMITTING = "COMMITTING"
    #: Every sink has promoted and its marker was read back.
    COMMITTED = "COMMITTED"
    #: A later revision of the same checkpoint took its place.
    SUPERSEDED = "SUPERSEDED"
    #: Decided not to commit: staged output is dead and being discarded.
    ABORTING = "ABORTING"
    #: Nothing of this revision is left; the input stays the checkpoint's.
    ABORTED = "ABORTED"


#: For each state, the states it may be entered from; `None`: the revision does not exist yet.
#: A state follows itself only with a new epoch: another attempt, or a restage after the decision.
ENTERED_FROM: dict[State, frozenset[State | None]] = {
    State.OPEN: frozenset({None, State.OPEN, State.PRECOMMITTED}),
    State.PRECOMMITTED: frozenset({State.OPEN}),
    State.COMMITTING: frozenset({State.PRECOMMITTED, State.COMMITTING}),
    State.COMMITTED: frozenset({State.COMMITTING}),
    State.SUPERSEDED: frozenset({State.COMMITTED}),
    State.ABORTING: frozenset({State.OPEN, State.PRECOMMITTED}),
    State.ABORTED: frozenset({State.ABORTING}),
}

#: Not decided yet: an attempt may be opened, an abort may win.
UNDECIDED = frozenset({State.OPEN, State.PRECOMMITTED})
#: At most one revision of a checkpoint is in one of these (R5).
LIVE = UNDECIDED | {State.COMMITTING}
#: The commit point is passed.
DECIDED = frozenset({State.COMMITTING, State.COMMITTED, State.SUPERSEDED})
#: Neither runs nor recovery have anything left to do; a replacement still moves COMMITTED to SUPERSEDED.
ENDED = frozenset({State.COMMITTED, State.SUPERSEDED, State.ABORTED})
