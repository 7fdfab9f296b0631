"""Many more schedules of the protocol than `make test` has time for."""

from __future__ import annotations

import pytest

from support.model.schedules import LEASE, TO_THE_END, Action, Limits, random_schedule, replay

#: As in tests/unit/test_protocol_model.py.
HELD = Limits()
#: Where two folders cannot change places in one step.
RENAMED = Limits(exchanges=False)
#: A committed checkpoint, and one that takes its place, just past its commit point.
REPLACING: list[Action] = [
    ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "commit.after"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_thousands_of_schedules_keep_every_promise(block: int) -> None:
    """Whoever is killed, stopped or answered late, each record is visible once and nothing is left over."""
    for seed in range(100_000 + block * 500, 100_000 + block * 500 + 500):
        replay(random_schedule(seed, HELD), HELD)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_thousands_of_schedules_without_an_exchange_keep_every_promise_but_one(block: int) -> None:
    """Readers may see a gap, and nothing else changes."""
    for seed in range(200_000 + block * 500, 200_000 + block * 500 + 500):
        replay(random_schedule(seed, RENAMED), RENAMED)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [HELD, RENAMED], ids=["exchange", "two renames"])
@pytest.mark.parametrize("block", range(8))
def test_two_promoters_of_a_replacement_stopped_at_any_pair_of_steps_replace_once(block: int, limits: Limits) -> None:
    """Each of the two may also die where it was stopped."""
    for steps in range(block, 48, 8):
        for other in range(48):
            second: list[Action] = [("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, other)]
            for ends in ([("go", 0, TO_THE_END)] * 2, [("kill", 0), ("go", 0, TO_THE_END)], [("kill", 1)]):
                replay([*REPLACING, ("go", 0, steps), *second, *ends], limits)
