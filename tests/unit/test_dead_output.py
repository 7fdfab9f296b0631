"""What is dead: every state, attempts before, at and after the one that counts."""

from __future__ import annotations

from itertools import product

import pytest

from twophase.core.checkpoint import Key, Revision
from twophase.core.dead_output import why_dead
from twophase.core.states import State

#: The record: attempt 2 was voted for, attempt 3 is the newest.
VOTED, EPOCH = 2, 3

ABORTED = "its revision was aborted"
REPLACED = "attempt 3 took its place"
NOT_VOTED = "attempt 2 was voted for"
COMMITTED = "attempt 2 was committed"

#: Why attempt 1 (old), 2 (voted for), 3 (the newest) or 4 (the record does not know it) is dead; None: it is not.
STAGED: dict[State, tuple[str | None, str | None, str | None, str | None]] = {
    State.OPEN:         (REPLACED,  REPLACED,  None,      None),
    State.PRECOMMITTED: (REPLACED,  REPLACED,  None,      None),
    State.COMMITTING:   (NOT_VOTED, None,      None,      None),
    State.COMMITTED:    (COMMITTED, COMMITTED, COMMITTED, COMMITTED),
    State.SUPERSEDED:   (COMMITTED, COMMITTED, COMMITTED, COMMITTED),
    State.ABORTING:     (ABORTED,   ABORTED,   ABORTED,   ABORTED),
    State.ABORTED:      (ABORTED,   ABORTED,   ABORTED,   ABORTED),
}  # fmt: skip

#: The same for manifests, which are read after the commit: the one that was committed stays.
MANIFESTS: dict[State, tuple[str | None, str | None, str | None, str | None]] = {
    State.OPEN:         (REPLACED,  REPLACED, None,      None),
    State.PRECOMMITTED: (REPLACED,  REPLACED, None,      None),
    State.COMMITTING:   (None,      None,     None,      None),
    State.COMMITTED:    (COMMITTED, None,     COMMITTED, None),
    State.SUPERSEDED:   (COMMITTED, None,     COMMITTED, None),
    State.ABORTING:     (ABORTED,   ABORTED,  ABORTED,   ABORTED),
    State.ABORTED:      (ABORTED,   ABORTED,  ABORTED,   ABORTED),
}  # fmt: skip


def ask(attempt: int, state: State, *, manifest: bool, copies: bool = True, voted: int | None = VOTED) -> str | None:
    return why_dead(attempt, Revision(Key("orders", 17, 1), state, EPOCH), voted, manifest=manifest, copies=copies)


@pytest.mark.parametrize("state", State)
def test_staged_output_is_dead_exactly_when_the_record_says_so(state: State) -> None:
    assert tuple(ask(attempt, state, manifest=False) for attempt in (1, 2, 3, 4)) == STAGED[state]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("state", State)
def test_a_manifest_is_dead_exactly_when_the_record_says_so(state: State, copies: bool) -> None:
    found = tuple(ask(attempt, state, manifest=True, copies=copies) for attempt in (1, 2, 3, 4))

    assert found == MANIFESTS[state]


@pytest.mark.parametrize("state", [State.COMMITTED, State.SUPERSEDED])
def test_a_sink_that_adopts_its_staged_output_keeps_what_was_committed_of_it(state: State) -> None:
    """Delta and Iceberg point at the staged files: nothing else holds the data. Other attempts are in no commit."""
    found = [ask(attempt, state, manifest=False, copies=False) for attempt in (1, 2, 3, 4)]

    assert found == [COMMITTED, None, COMMITTED, None]


def test_what_a_sink_that_adopts_was_ever_asked_to_take_in_is_alive_until_it_is_committed() -> None:
    """A promoter of an attempt that a restage took the place of may still let the table list its files (R10)."""
    found = tuple(ask(attempt, State.COMMITTING, manifest=False, copies=False) for attempt in (1, 2, 3, 4))

    assert found == (None, None, None, None)


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED, State.ABORTING, State.ABORTED])
def test_before_the_decision_it_does_not_matter_whether_a_sink_copies(state: State) -> None:
    found = tuple(ask(attempt, state, manifest=False, copies=False) for attempt in (1, 2, 3, 4))

    assert found == STAGED[state]


@pytest.mark.parametrize(("attempt", "manifest"), list(product((VOTED, EPOCH), (False, True))))
def test_what_was_voted_for_and_the_newest_attempt_survive_until_committed(attempt: int, manifest: bool) -> None:
    assert ask(attempt, State.COMMITTING, manifest=manifest) is None
