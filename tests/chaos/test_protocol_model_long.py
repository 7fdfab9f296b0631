"""Many more schedules of the protocol than `make test` has time for."""

from __future__ import annotations

import pytest

from model import Limits, random_schedule, replay

#: As in tests/unit/test_protocol_model.py.
HELD = Limits()


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_thousands_of_schedules_keep_every_promise(block: int) -> None:
    """Whoever is killed, stopped or answered late, each record is visible once and nothing is left over."""
    for seed in range(100_000 + block * 500, 100_000 + block * 500 + 500):
        replay(random_schedule(seed, HELD), HELD)
