"""Restart strategies: whether a run that failed is started again, and after how long; `twophase run --restart` asks.

They are Flink's: a fixed delay, one that grows, a failure rate, none. The count is over the life of one `twophase run`,
as Flink's is over the life of a job. Under Airflow a task's retries take this place, and they count per checkpoint.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from twophase.core.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_EXPECTED = "fixed:3,10s, exponential:1s,60s, rate:3/5m,10s or none"


class Restart(ABC):
    """One strategy."""

    @abstractmethod
    def pause(self, failures: Sequence[float], committed: float | None) -> float | None:
        """Return the seconds to wait before the next try; None: give up.

        `failures` are the moments of all failures so far, in seconds, the last one being now. `committed` is when this
        run last committed a checkpoint.
        """


@dataclass(frozen=True)
class Never(Restart):
    """Gives up at the first failure."""

    def pause(self, failures: Sequence[float], committed: float | None) -> float | None:  # noqa: ARG002 - see the base
        """Return None."""
        return None


@dataclass(frozen=True)
class FixedDelay(Restart):
    """Starts again a number of times, each after the same delay."""

    attempts: int
    delay: float

    def pause(self, failures: Sequence[float], committed: float | None) -> float | None:  # noqa: ARG002 - see the base
        """Return the delay, unless all restarts are used up."""
        return self.delay if len(failures) <= self.attempts else None


@dataclass(frozen=True)
class Exponential(Restart):
    """Starts again for ever, after a delay that doubles with each failure in a row; a commit ends the row."""

    first: float
    longest: float

    def pause(self, failures: Sequence[float], committed: float | None) -> float | None:
        """Return the delay after so many failures since the last commit."""
        row = sum(committed is None or at > committed for at in failures)
        return min(self.longest, self.first * 2.0 ** min(row - 1, 63))


@dataclass(frozen=True)
class FailureRate(Restart):
    """Starts again after a delay, unless there were more than so many failures within some time."""

    failures: int
    within: float
    delay: float

    def pause(self, failures: Sequence[float], committed: float | None) -> float | None:  # noqa: ARG002 - see the base
        """Return the delay, unless failures come too fast."""
        recent = sum(at > failures[-1] - self.within for at in failures)
        return self.delay if recent <= self.failures else None


def parse(text: str) -> Restart:
    """Read a strategy: `fixed:3,10s`, `exponential:1s,60s`, `rate:3/5m,10s`, `none`."""
    kind, _, rest = text.strip().partition(":")
    if (kind, rest) == ("none", ""):
        return Never()
    if kind == "fixed" and (match := re.fullmatch(r"(\d+),(\w+)", rest)):
        return FixedDelay(int(match[1]), _seconds(match[2], text))
    if kind == "exponential" and (match := re.fullmatch(r"(\w+),(\w+)", rest)):
        first, longest = _seconds(match[1], text), _seconds(match[2], text)
        if 0 < first <= longest:
            return Exponential(first, longest)
    if kind == "rate" and (match := re.fullmatch(r"(\d+)/(\w+),(\w+)", rest)):
        return FailureRate(int(match[1]), _seconds(match[2], text), _seconds(match[3], text))
    raise _unreadable(text)


def _seconds(text: str, whole: str) -> float:
    match = re.fullmatch(r"(\d+)([smh])", text)
    if not match:
        raise _unreadable(whole)
    return float(int(match[1]) * _SECONDS[match[2]])


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"restart {text!r}: expected {_EXPECTED}")
