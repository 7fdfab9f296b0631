"""Which cases of a matrix of crashes are run; the modules that have one call it.

A matrix crosses, for instance, failpoints, ways to die, kinds of sinks and what a process is about. Many of its cases
run the same code as others. `make test` runs the few that are usual, `make chaos` as many more as it takes until every
combination occurs that is asked for, `make chaos EVERY=1` all of them (docs/decisions/0019-matrices-of-crashes.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import combinations
from typing import Any

import pytest

Case = tuple[Any, ...]


def covering(
    cases: Collection[Case], combined: Callable[[Case], Iterable[Hashable]], usual: Collection[Case] = ()
) -> set[Case]:
    """Return the usual cases, and others until each combination occurs that occurs in any case.

    They are taken in an order that has nothing to do with the dimensions and is the same in every run, so that the
    values of a dimension take turns. A new value is in as soon as there are cases with it.
    """
    taken, met = set(usual), {one for case in usual for one in combined(case)}
    for case in sorted(cases, key=_shuffled):
        if not met.issuperset(combined(case)):
            taken.add(case)
            met.update(combined(case))
    return taken


def pairs(case: Case) -> Iterable[Hashable]:
    """Return each pair of values of a case."""
    return combinations(enumerate(case), 2)


def marks(case: Case, taken: Collection[Case], usual: Collection[Case]) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a case: none if it is usual."""
    if case in usual:
        return ()
    return (pytest.mark.slow,) if case in taken else (pytest.mark.slow, pytest.mark.repeated)


def _shuffled(case: Case) -> bytes:
    return hashlib.sha256(repr(case).encode()).digest()
