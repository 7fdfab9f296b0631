"""What recovery does with a revision: every state, every lease, everything that can be observed."""

from __future__ import annotations

from itertools import product

import pytest

from twophase.core.checkpoint import Key, Revision, Run
from twophase.core.recovery import Decision, Leave, Observed, Park, RollBack, RollForward, decide
from twophase.core.states import State

WHY = "staged output is gone"

DECISIONS: dict[str, Decision] = {
    "forward": RollForward(),
    "back": RollBack(),
    "park": Park(f"lake: {WHY}"),
    "parked": Leave(f"it is parked: lake: {WHY}"),
    "leased": Leave("run dag/run_1 works on it, its lease lasts 12.5 s"),
    "waits": Leave("it waits for run dag/run_1"),
    "committed": Leave("it is committed"),
    "superseded": Leave("it is superseded"),
    "aborted": Leave("it is aborted"),
}

LEASES: dict[str, float | None] = {"none": None, "active": 12.5, "run out": -0.5}

#: What becomes of a revision, by what is known of its run. What its sinks say does not matter.
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
    (State.ABORTING, "none"):     {None: "back",       True: "back",       False: "back"},
    (State.ABORTING, "active"):   {None: "leased",     True: "leased",     False: "leased"},
    (State.ABORTING, "run out"):  {None: "back",       True: "back",       False: "back"},
    (State.ABORTED, "none"):      {None: "aborted",    True: "aborted",    False: "aborted"},
    (State.ABORTED, "active"):    {None: "aborted",    True: "aborted",    False: "aborted"},
    (State.ABORTED, "run out"):   {None: "aborted",    True: "aborted",    False: "aborted"},
}  # fmt: skip

#: What becomes of a decided revision, by (a sink lost its staged output, it is parked). Its run does not matter.
BY_SINKS: dict[str, dict[tuple[bool, bool], str]] = {
    #           all there, not parked      all there, parked          lost, not parked          lost, parked
    "none":    {(False, False): "forward", (False, True): "forward", (True, False): "park",   (True, True): "parked"},
    "active":  {(False, False): "leased",  (False, True): "leased",  (True, False): "leased", (True, True): "leased"},
    "run out": {(False, False): "forward", (False, True): "forward", (True, False): "park",   (True, True): "parked"},
}  # fmt: skip


def expected(state: State, lease: str, run_ended: bool | None, lost: bool, parked: bool) -> Decision:
    if state is State.COMMITTING:
        return DECISIONS[BY_SINKS[lease][lost, parked]]
    return DECISIONS[BY_RUN[state, lease][run_ended]]


@pytest.mark.parametrize("parked", [False, True], ids=["not parked", "parked"])
@pytest.mark.parametrize("lost", [False, True], ids=["all there", "lost"])
@pytest.mark.parametrize("run_ended", [None, True, False], ids=["run unknown", "run ended", "run goes on"])
@pytest.mark.parametrize("lease", LEASES)
@pytest.mark.parametrize("state", State)
def test_decision(state: State, lease: str, run_ended: bool | None, lost: bool, parked: bool) -> None:
    revision = Revision(
        key=Key("orders", 17, 1),
        state=state,
        epoch=3,
        run=Run("dag", "run_1"),
        lease_left=LEASES[lease],
        parked_reason="an earlier reason" if parked else None,
    )

    decision = decide(revision, Observed(run_ended=run_ended, lost={"lake": WHY} if lost else {}))

    assert decision == expected(state, lease, run_ended, lost, parked)


def test_the_tables_hold_every_case() -> None:
    undecided_by_run = set(product(set(State) - {State.COMMITTING}, LEASES))

    assert set(BY_RUN) == undecided_by_run
    assert all(set(row) == {None, True, False} for row in BY_RUN.values())
    assert set(BY_SINKS) == set(LEASES)
    assert all(set(row) == set(product([False, True], repeat=2)) for row in BY_SINKS.values())


def test_a_lease_that_runs_out_this_instant_is_no_lease() -> None:
    revision = Revision(Key("orders", 17, 1), State.COMMITTING, epoch=1, lease_left=0.0)

    assert decide(revision, Observed()) == RollForward()


def test_every_lost_sink_is_in_the_reason_to_park() -> None:
    revision = Revision(Key("orders", 17, 1), State.COMMITTING, epoch=1)

    decision = decide(revision, Observed(lost={"lake": "gone", "dwh": "altered"}))

    assert decision == Park("lake: gone; dwh: altered")


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED])
def test_an_undecided_revision_is_never_promoted_or_parked(state: State) -> None:
    for lease, ended, lost in product(LEASES.values(), [None, True, False], [{}, {"lake": WHY}]):
        revision = Revision(Key("orders", 17, 1), state, epoch=1, lease_left=lease)

        assert isinstance(decide(revision, Observed(ended, lost)), RollBack | Leave)


@pytest.mark.parametrize("parked", [None, WHY])
def test_a_decided_revision_is_never_rolled_back(parked: str | None) -> None:
    for lease, ended, lost in product(LEASES.values(), [None, True, False], [{}, {"lake": WHY}]):
        revision = Revision(Key("orders", 17, 1), State.COMMITTING, epoch=1, lease_left=lease, parked_reason=parked)

        assert not isinstance(decide(revision, Observed(ended, lost)), RollBack)
