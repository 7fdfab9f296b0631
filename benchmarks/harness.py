"""What every measure shares: sides that take turns, a stopwatch inside the shipped code, and figures with goals."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Generic, Self, TypeVar
from unittest import mock

from benchmarks.place import Place

Sizes = TypeVar("Sizes")

#: One turn of one side: what it took, by part, in seconds.
Turn = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Series:
    """The same thing, measured some times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return number(self.values[0])
        return f"{number(self.median)} ({number(min(self.values))} - {number(max(self.values))})"


def number(value: float) -> str:
    """Write a figure with three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Figure:
    """One line of the report: ours beside the peer's, and the goal of their ratio; without a peer, of ours itself."""

    what: str
    ours: Series
    peer: Series | None = None
    goal: float | None = None
    unit: str = "s"

    @property
    def ratio(self) -> float | None:
        return self.ours.median / self.peer.median if self.peer else None

    @property
    def reached(self) -> bool | None:
        """Say whether the goal is reached; None: there is none."""
        if self.goal is None:
            return None
        return (self.ours.median if self.ratio is None else self.ratio) <= self.goal


@dataclass
class Findings:
    """What a measure found: its figures, where the time went (seconds, medians), and what else is worth a line."""

    #: What stands over what in each ratio.
    compared: str
    figures: list[Figure]
    profile: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    #: What could not be measured, and why; the rest is kept.
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Measure(Generic[Sizes]):
    """One measure: what it answers, how large it is, how it is taken."""

    name: str
    question: str
    full: Sizes
    quick: Sizes
    #: Only to see that the measure still runs; its figures mean nothing.
    tiny: Sizes
    run: Callable[[Place, Sizes], Findings]


def say(text: str) -> None:
    """Tell whoever waits what is going on."""
    print(f"  {text}", file=sys.stderr, flush=True)


def interleave(
    sides: Mapping[str, Turn], *, rounds: int, warmup: int = 1, tell: bool = False
) -> dict[str, dict[str, Series]]:
    """Let the sides take turns, first one ahead and then the other; drop the first rounds; return side → part → series.

    Whatever else the machine does falls on all sides alike.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for turn in range(rounds + warmup):
        order = list(sides)[:: 1 if turn % 2 == 0 else -1]
        for name in order:
            parts = sides[name]()
            if tell:
                what = f"round {turn - warmup + 1} of {rounds}" if turn >= warmup else "warm-up"
                say(f"{what}: {name} {', '.join(f'{part} {number(value)} s' for part, value in parts.items())}")
            if turn >= warmup:
                for part, seconds in parts.items():
                    found[name].setdefault(part, []).append(seconds)
    return {name: {part: Series(tuple(values)) for part, values in parts.items()} for name, parts in found.items()}


def medians(parts: Mapping[str, Series], names: Sequence[str] = ()) -> dict[str, float]:
    """Return the median of each part, or of those named."""
    return {name: parts[name].median for name in names or parts if name in parts}


def timed(action: Callable[[], object]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Stopwatch:
    """Adds up what chosen functions take, in whatever thread they run; they are the shipped ones, wrapped.

    `Stopwatch(seal=(Files, "seal"))`: an owner (a class or a module) and a name in it.
    """

    def __init__(self, **watched: tuple[Any, str]) -> None:
        self._watched = watched
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for part, (owner, name) in self._watched.items():
            self._stack.enter_context(mock.patch.object(owner, name, self._wrapped(part, getattr(owner, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._add(part, time.perf_counter() - start)

        return wrapper

    def _add(self, part: str, seconds: float) -> None:
        with self._lock:
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return what was added up since the last time; a part that was not called has 0."""
        with self._lock:
            taken = {part: self._seconds.get(part, 0.0) for part in self._watched}
            self._seconds = {}
        return taken


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is being prepared and how long it took."""
    start = time.perf_counter()
    say(f"{what} …")
    yield
    say(f"{what}: {time.perf_counter() - start:.1f} s")
