"""The shipped protocol keeps the state of a pipeline right under random schedules, replays among them.

After every step each standing state, up to the first stale one, holds every row read so far exactly once.
"""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest

from support.model.memory_state import replay_with_state
from support.model.promises import Violation
from support.model.schedules import LEASE, TO_THE_END, Action, Limits, random_schedule
from twophase.core.lineage import Lineage

#: Staged output is not lost here: a lost state needs a person, which the tests of its rules show.
HELD = Limits(loses_staging=False, brings_back=False, restages=False, max_pending=2)


def schedule(seed: int) -> list[Action]:
    """Return the schedule of a seed, in which some processes replay instead of what they would do."""
    random = Random(seed)
    changed = ("backfill", "sweep", "failing")
    return [
        ("start", "replay", action[2])
        if action[0] == "start" and action[1] in changed and random.random() < 0.7
        else action
        for action in random_schedule(seed, HELD)
    ]


@pytest.mark.parametrize("block", range(4))
def test_any_schedule_keeps_every_row_in_the_state_once(block: int) -> None:
    """Whoever is killed, stopped or answered late, and whoever replays meanwhile."""
    for seed in range(block * 40, block * 40 + 40):
        replay_with_state(schedule(seed), HELD)


#: A run has staged on a state; then that state is replaced, by somebody who does not ask whether a run goes on.
TWO_HEADS: list[Action] = [
    ("start", "script", 0),
    ("go", 0, TO_THE_END),
    ("start", "script", 0),
    ("upto", 0, "commit.before"),
    ("start", "replay", 0),
    ("go", 1, TO_THE_END),
    ("go", 0, TO_THE_END),
    ("tick", LEASE + 1),
]


def test_two_heads_never_grow_from_one_state() -> None:
    """A replay waits for the regular run; without asking for that, the commit point still refuses the second head."""
    replay_with_state(TWO_HEADS, HELD)


def test_without_the_rules_the_model_sees_a_state_with_rows_missing_or_twice() -> None:
    """The promises of the model can fail: with no rule of a state in force, some schedule breaks them."""
    nothing = mock.Mock(return_value=None)
    with mock.patch.multiple(Lineage, check_regular=nothing, check_replay=nothing, decide=nothing):
        broken = 0
        for seed in range(60):
            try:
                replay_with_state(schedule(seed), HELD)
            except Violation:
                broken += 1

    assert broken
