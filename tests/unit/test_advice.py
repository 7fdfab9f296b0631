"""What to do next is said in one place, and never throws away what somebody may go on with."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from twophase.core.checkpoint import Key, Run
from twophase.core.hindrances import Hindrance
from twophase.core.next_step import APPROVAL, Standing, advise, is_left
from twophase.core.states import UNDECIDED, State

OPEN = Standing(Key("orders", 17, 1), State.OPEN, Run("orders", "manual__1"))


def every_standing() -> list[Standing]:
    """Return each state with each that could be known of its run, its lease and its votes."""
    known = product(State, (True, False), (True, False, None), ((), ("lake",), (APPROVAL,)), (True, False))
    return [
        replace(
            OPEN,
            state=state,
            leased=leased,
            run_ended=ended,
            awaits=awaits,
            parked=parked,
            failed=state == State.ABORTED,
        )
        for state, leased, ended, awaits, parked in known
        if not parked or state is State.COMMITTING
    ]


@pytest.mark.parametrize("found", every_standing(), ids=str)
def test_an_abort_is_advised_only_once_the_run_is_known_to_have_ended(found: Standing) -> None:
    """Following it would throw away what was staged, with an approval under way or in a run that only waits."""
    advice = advise(found)

    if advice and "twophase abort" in str(advice):
        assert found.state is State.OPEN
        assert found.run_ended
        assert not found.leased


@pytest.mark.parametrize("found", every_standing(), ids=str)
def test_everything_that_has_not_ended_has_advice(found: Standing) -> None:
    over = found.state in {State.COMMITTED, State.SUPERSEDED}

    assert (advise(found) is None) == (over and not found.leased)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (replace(OPEN, leased=True), "Run orders/manual__1 works on it."),
        (replace(OPEN, run_ended=False), "It waits for run orders/manual__1, which goes on with it."),
        (
            replace(OPEN, awaits=(APPROVAL,)),
            "A person is asked to approve it: answer in Airflow, in run orders/manual__1.",
        ),
        (
            replace(OPEN, awaits=(APPROVAL,), run_ended=True),
            (
                "Its run has ended. The next run takes its input again; to end it now,"
                " `twophase abort orders 17 --reason …`"
            ),
        ),
        (
            replace(OPEN, state=State.PRECOMMITTED, run_ended=True),
            (
                "Everybody voted yes, and its run has ended. Recovery would abort it; to commit it,"
                " `twophase commit orders 17 --reason …`"
            ),
        ),
        (
            replace(OPEN, state=State.COMMITTING),
            "It is decided. The next run promotes it, and so does `twophase recover orders`",
        ),
        (
            replace(OPEN, state=State.ABORTED, failed=True),
            (
                "The next run takes its input again. To free the input for a later checkpoint,"
                " `twophase release orders 17 --reason …`"
            ),
        ),
        (
            replace(OPEN, state=State.COMMITTED, stale=True),
            "What it was made from was replaced since. To make it again, `twophase backfill orders --checkpoints 17`",
        ),
    ],
)
def test_what_is_advised(found: Standing, said: str) -> None:
    assert str(advise(found)) == said


@pytest.mark.parametrize("state", [State.ABORTED, State.COMMITTED, State.SUPERSEDED])
def test_nothing_is_advised_of_what_is_over(state: State) -> None:
    """An aborted replacement, or one that was taken again, has no input to free: release would refuse."""
    assert advise(replace(OPEN, state=state)) is None


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("kind", Hindrance)
def test_a_parked_revision_is_told_its_ways_out_once(kind: Hindrance, leased: bool) -> None:
    """Also right after it was parked, when the lease of the run that did so has not run out yet."""
    advice = advise(replace(OPEN, state=State.COMMITTING, parked=True, leased=leased, hindrances={"lake": kind}))

    assert advice
    assert advice.command
    assert str(advice).count(advice.command) == 1


def test_every_undecided_standing_names_its_run_or_says_that_it_has_ended() -> None:
    for found in every_standing():
        if found.state in UNDECIDED:
            said = str(advise(found))
            assert ("run has ended" in said) or ("orders/manual__1" in said)


@pytest.mark.parametrize("found", every_standing(), ids=str)
def test_what_counts_as_left_is_what_the_advice_calls_so(found: Standing) -> None:
    """The list of pipelines counts by the same rule, and does not call such a pipeline fine."""
    assert is_left(found) == ("its run has ended" in str(advise(found)).lower())
