"""Each rule of the protocol is needed: without it, a known schedule breaks a promise that it keeps with it."""

from __future__ import annotations

import pytest

from support.model.mutations import MUTATIONS, SCHEDULES, SEARCH, Mutation, search
from support.model.schedules import replay

each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


@each
def test_without_the_rule_a_promise_is_broken(mutation: Mutation) -> None:
    """A schedule catches the mutation: the recorded one, or another nearby if the code has more steps by now."""
    caught = mutation.caught_by(SCHEDULES[mutation.name]) or search(mutation, range(SEARCH))

    assert caught, (
        f"{mutation.rule}: no schedule catches it any more; look for one with `python -m support.model.mutations`"
    )


@each
def test_with_the_rule_the_same_schedule_keeps_every_promise(mutation: Mutation) -> None:
    """The shipped code comes through the schedule that broke the mutated one."""
    replay(mutation.schedule(SCHEDULES[mutation.name]), mutation.limits)


def test_every_mutation_has_a_schedule() -> None:
    """A mutation without a schedule would be searched for in every run."""
    assert {mutation.name for mutation in MUTATIONS} == SCHEDULES.keys()
