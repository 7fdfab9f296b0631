"""What recovery does with a revision: every state, every lease, everything that can be observed."""

from __future__ import annotations

from itertools import product

import pytest

from twophase.core.checkpoint import Key, Revision, Run
from twophase.core.recovery import Decision, Leave, RollBack, RollForward, decide
from twophase.core.states import State

DECISIONS: dict[str, Decision] = {
    "forward": RollForward(),
    "back": RollBack(),
    "leased": Leave("run dag/run_1 works on it, its lease lasts 12.5 s"),
    "waits": Leave("it waits for run dag/run_1"),
    "committed": Leave("it is committed"),
    "superseded": Leave("it is superseded"),
    "aborted": Leave("it is aborted"),
}

LEASES: dict[str, float | None] = {"none": None, "active": 12.5, "run out": -0.5}

#: What becomes of a revision, by what is known of its run. Whether it is parked does not matter:
#: what a sink could not do is tried again.
BY_RUN: dict[tuple[State, str], dict[bool | None, str]] = {
    #                                    nobody knows       it ended          it goes on
    (State.OPEN, "none"):         {None: "waits",      True: "back",       False: "waits"},
    (State.OPEN, "active"):       {None: "leased",     True: "leased",     False: "leased"},
    (State.OPEN, "run out"):      {None: "waits",      True: "back",       False: "waits"},
    (State.PRECOMMITTED, "none"): {None: "waits",      True: "back",       False: "waits"},
    (State.PRECOMMITTED, "active"): {None: "leased",   True: "leased",     False: "leased"},
    (State.PRECOMMITTED, "run out"): {None: "waits",   True: "back",       False: "waits"},
    (State.COMMITTED, "none"):    {None: "committed",  True: "committed",  False: "committed"},
    (State.COMMITTED, "active"):  {None: "committed",  True: "committed",  False: "committed"},
    (State.COMMITTED, "run out"): {None: "committed",  True: "committed",  False: "committed"},
    (State.SUPERSEDED, "none"):   {None: "superseded", True: "superseded", False: "superseded"},
    (State.SUPERSEDED, "active"): {None: "superseded", True: "superseded", False: "superseded"},
    (State.SUPERSEDED, "run out"): {None: "superseded", True: "superseded", False: "superseded"},
    (State.COMMITTING, "none"):   {None: "forward",    True: "forward",    False: "forward"},
    (State.COMMITTING, "active"): {None: "leased",     True: "leased",     False: "leased"},
    (State.COMMITTING, "run out"): {None: "forward",   True: "forward",    False: "forward"},
    (State.ABORTING, "none"):     {None: "back",       True: "back",       False: "back"},
    (State.ABORTING, "active"):   {None: "leased",     True: "leased",     False: "leased"},
    (State.ABORTING, "run out"):  {None: "back",       True: "back",       False: "back"},
    (State.ABORTED, "none"):      {None: "aborted",    True: "aborted",    False: "aborted"},
    (State.ABORTED, "active"):    {None: "aborted",    True: "aborted",    False: "aborted"},
    (State.ABORTED, "run out"):   {None: "aborted",    True: "aborted",    False: "aborted"},
}  # fmt: skip


@pytest.mark.parametrize("parked", [False, True], ids=["not parked", "parked"])
@pytest.mark.parametrize("run_ended", [None, True, False], ids=["run unknown", "run ended", "run goes on"])
@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("state", State)
def test_decision(state: State, lease: str, run_ended: bool | None, parked: bool) -> None:
    revision = Revision(
        key=Key("orders", 17, 1),
        state=state,
        epoch=3,
        run=Run("dag", "run_1"),
        lease_left=LEASES[lease],
        parked_reason="an earlier reason" if parked else None,
    )

    decision = decide(revision, run_ended=run_ended)

    assert decision == DECISIONS[BY_RUN[state, lease][run_ended]]


def test_the_tables_hold_every_case() -> None:
    assert set(BY_RUN) == set(product(State, LEASES))
    assert all(set(row) == {None, True, False} for row in BY_RUN.values())


def test_a_lease_that_runs_out_this_instant_is_no_lease() -> None:
    revision = Revision(Key("orders", 17, 1), State.COMMITTING, epoch=1, lease_left=0.0)

    assert decide(revision) == RollForward()


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED])
def test_an_undecided_revision_is_never_promoted(state: State) -> None:
    for lease, ended in product(LEASES.values(), [None, True, False]):
        revision = Revision(Key("orders", 17, 1), state, epoch=1, lease_left=lease)

        assert isinstance(decide(revision, run_ended=ended), RollBack | Leave)


@pytest.mark.parametrize("parked", [None, "staged output is gone"])
def test_a_decided_revision_is_never_rolled_back(parked: str | None) -> None:
    for lease, ended in product(LEASES.values(), [None, True, False]):
        revision = Revision(Key("orders", 17, 1), State.COMMITTING, epoch=1, lease_left=lease, parked_reason=parked)

        assert not isinstance(decide(revision, run_ended=ended), RollBack)
