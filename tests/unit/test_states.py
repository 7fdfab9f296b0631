"""The life of a revision: the table of transitions is whole, and the sets drawn over it agree with it."""

from __future__ import annotations

import re

import pytest

from twophase.core import states
from twophase.core.states import DECIDED, ENDED, ENTERED_FROM, LIVE, UNDECIDED, State

#: What every state may become by another transition than a new attempt of itself.
LEADS_TO: dict[State, set[State]] = {
    State.OPEN: {State.PRECOMMITTED, State.ABORTING},
    State.PRECOMMITTED: {State.OPEN, State.COMMITTING, State.ABORTING},
    State.COMMITTING: {State.COMMITTED},
    State.COMMITTED: {State.SUPERSEDED},
    State.SUPERSEDED: set(),
    State.ABORTING: {State.ABORTED},
    State.ABORTED: set(),
}


def ways_out(state: State) -> set[State]:
    return {to for to, origins in ENTERED_FROM.items() if state in origins and to is not state}


def reachable(start: set[State]) -> set[State]:
    found = set(start)
    while more := {to for state in found for to in ways_out(state)} - found:
        found |= more
    return found


def test_every_state_says_where_it_is_entered_from() -> None:
    assert set(ENTERED_FROM) == set(State)
    assert all(ENTERED_FROM.values())


@pytest.mark.parametrize("state", State)
def test_every_state_leads_exactly_where_the_drawing_says(state: State) -> None:
    assert ways_out(state) == LEADS_TO[state]


def test_a_revision_begins_open_and_nowhere_else() -> None:
    assert [state for state, origins in ENTERED_FROM.items() if None in origins] == [State.OPEN]


def test_every_state_can_be_reached() -> None:
    assert reachable({State.OPEN}) == set(State)


def test_an_ended_revision_has_no_way_out_but_being_superseded() -> None:
    assert {state: ways_out(state) for state in ENDED if ways_out(state)} == {State.COMMITTED: {State.SUPERSEDED}}


def test_every_revision_can_end() -> None:
    assert all(reachable({state}) & ENDED for state in State)


def test_a_state_follows_itself_only_where_an_attempt_can_be_opened() -> None:
    assert {state for state, origins in ENTERED_FROM.items() if state in origins} == {State.OPEN, State.COMMITTING}


def test_what_is_decided_can_only_go_forward() -> None:
    assert reachable({State.COMMITTING}) == DECIDED


def test_what_is_aborted_is_never_decided() -> None:
    assert not reachable({State.ABORTING}) & DECIDED


def test_only_the_commit_point_leads_from_undecided_to_decided() -> None:
    crossings = {(state, to) for state in UNDECIDED for to in ways_out(state) if to in DECIDED}

    assert crossings == {(State.PRECOMMITTED, State.COMMITTING)}


def test_the_sets_over_the_states_agree() -> None:
    assert {state for state in State if reachable({state}) >= {State.COMMITTING, State.ABORTING}} == UNDECIDED
    assert UNDECIDED | {State.COMMITTING} == LIVE
    assert not UNDECIDED & DECIDED
    assert not LIVE & ENDED
    assert set(State) == LIVE | ENDED | {State.ABORTING}


def test_the_drawing_names_every_state() -> None:
    assert set(re.findall(r"[A-Z]{4,}", (states.__doc__ or "").partition("\n\nA new")[0])) == {s.value for s in State}


def test_a_state_is_spelt_as_its_name() -> None:
    assert all(state.value == state.name for state in State)
