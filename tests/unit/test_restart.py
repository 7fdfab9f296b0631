"""Each restart strategy waits and gives up as it says."""

from __future__ import annotations

import pytest

from twophase.cli.run import Tries
from twophase.core.checkpoint import Revision
from twophase.core.errors import AttemptFailed, ConfigError
from twophase.restart import parse


def pauses(strategy: str, failures: list[float], commits: dict[int, float] | None = None) -> list[float | None]:
    """Return the pause after each failure, given when the run committed something before it."""
    restart, committed, found = parse(strategy), None, list[float | None]()
    for number in range(len(failures)):
        committed = (commits or {}).get(number, committed)
        found.append(restart.pause(failures[: number + 1], committed))
    return found


@pytest.mark.parametrize(
    ("strategy", "failures", "commits", "expected"),
    [
        ("none", [0], {}, [None]),
        ("fixed:1,10s", [0, 20], {}, [10, None]),
        ("fixed:3,1m", [0, 1, 2, 3], {}, [60, 60, 60, None]),
        ("fixed:2,1s", [0, 100, 200], {2: 150}, [1, 1, None]),  # over the life of the run, whatever it committed
        ("exponential:1s,10s", [0, 1, 2, 3, 4, 5], {}, [1, 2, 4, 8, 10, 10]),
        ("exponential:1s,60s", [0, 1, 50], {2: 40}, [1, 2, 1]),  # a commit ends the row
        ("rate:2/1m,5s", [0, 10, 20], {}, [5, 5, None]),
        ("rate:2/1m,5s", [0, 10, 61, 200], {}, [5, 5, 5, 5]),  # the first is too long ago to count
    ],
)
def test_a_strategy_waits_and_gives_up_as_it_says(
    strategy: str, failures: list[float], commits: dict[int, float], expected: list[float | None]
) -> None:
    assert pauses(strategy, failures, commits) == expected


@pytest.mark.parametrize(
    "wrong",
    ["", "fixed", "fixed:3", "fixed:3,10", "fixed:x,1s", "rate:3,10s", "exponential:60s,1s", "none:1", "hourly"],
)
def test_a_strategy_that_cannot_be_read_is_refused_with_what_can(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"expected fixed:3,10s, exponential:1s,60s, rate:3/5m,10s or none"):
        parse(wrong)


def test_the_last_failure_is_raised_when_the_strategy_gives_up() -> None:
    """The failures before it are tried again; what then succeeds is returned."""
    outcomes: list[Revision | Exception | None] = [
        AttemptFailed("one"),
        None,
        AttemptFailed("two"),
        AttemptFailed("three"),
    ]

    def run() -> Revision | None:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    tries = Tries(parse("fixed:2,0s"))

    assert tries.until_done(run) is None
    with pytest.raises(AttemptFailed, match="three"):
        tries.until_done(run)
