"""A run or a sweep that was stopped while something is replaced, and wakes after others went on: it touches nothing.

A run is stopped before its commit point, and another takes over what it had begun. A sweep is stopped anywhere, and
others sweep and replace meanwhile: it removes nothing but what it had found dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.crashes import replacement_promises, replacements, scenarios
from support.crashes.replacement_ways import WAYS, Way
from support.faults.processes import start, stopped_at_end
from twophase.committer.record import PostgresRecord
from twophase.storage import disk

pytestmark = pytest.mark.chaos

BY_NAME = {way.name: way for way in WAYS}
#: No attempt was open when it stopped: it begins again, and finds what there is left to do.
NOT_OPENED = {"begin.before", "begin.inside", "adopt.before", "adopt.after", "attempt.before"}
#: The votes are recorded with the decision: whoever comes promotes that very attempt, and it finds it committed.
VOTED = {"vote.after"}
#: Where it goes on until it is told that it has lost.
ITS_OWN = ("staging", "manifests")
#: What `make test` meets: nothing staged, at work in its own place, a row locked, everything voted for.
FEW = {
    "replacement": ("attempt.after", "stage.written", "vote.inside", "commit.before"),
    "adopted": ("adopt.before", "adopt.after", "stage.marked"),
    "hop": ("stage.before",),
}


@pytest.fixture(autouse=True)
def _short_lease(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_LEASE", "0.3")
    monkeypatch.setattr(disk, "_renameat2", disk._renameat2)  # what a test does about it is undone at its end


def _before_the_commit_point() -> Iterator[Any]:
    for name, few in FEW.items():
        way = BY_NAME[name]
        for point in way.points[: way.points.index("commit.after")]:
            marks = [] if point in few else [pytest.mark.slow]
            yield pytest.param(way, point, id=f"{name}-{point}", marks=marks)


@pytest.mark.parametrize(("way", "failpoint"), list(_before_the_commit_point()))
def test_a_run_that_wakes_after_another_took_its_revision_over_touches_nothing(
    way: Way, failpoint: str, record: PostgresRecord, home: Path
) -> None:
    way.prepare(1)
    zombie = start(scenarios.impatiently, way.go, 1, log=home / "zombie.log", failpoints=f"{failpoint}=stop")
    with stopped_at_end(zombie):
        assert zombie.until_stopped(), f"{failpoint} was not reached:\n{zombie.said}"
        other = start(scenarios.impatiently, way.go, 1, log=home / "other.log")
        assert other.wait() == 0, other.said
        before = replacement_promises.everything(but=ITS_OWN)
        stands = replacement_promises.Recorded(record).decided

        zombie.wake()
        code = zombie.wait()

    replacement_promises.check_never_wrong(record)
    # Before a slot is staged for the first time, its place is looked at: so its attempt is opened later than it begins.
    not_opened = NOT_OPENED | ({"begin.after"} if way.name == "adopted" else set())
    if failpoint in not_opened and way.anew:  # it asks for a replacement, and that is a new one
        assert code == 0, zombie.said
        assert replacement_promises.Recorded(record).decided == stands + 1
    else:
        assert code == (0 if failpoint in not_opened | VOTED else 1), zombie.said
        assert code == 0 or "twophase.core.errors.Fenced: " in zombie.said
        assert replacement_promises.everything(but=ITS_OWN) == before
    replacement_promises.check_as_of(record)
    replacement_promises.check_end(record)


# --- sweeps ----------------------------------------------------------------------------------------------------------


def _sweeps() -> Iterator[Any]:
    for name in ("sweep", "sweep with tombstones"):
        for point in BY_NAME[name].points:
            marks = [] if point == "sweep.swept" else [pytest.mark.slow]
            yield pytest.param(BY_NAME[name], point, id=f"{name}-{point}", marks=marks)


@pytest.mark.parametrize(("way", "failpoint"), list(_sweeps()))
def test_a_sweep_that_wakes_after_more_was_replaced_removes_nothing_of_that(
    way: Way, failpoint: str, record: PostgresRecord, home: Path
) -> None:
    if not way.exchanges:
        disk._renameat2 = None
    way.prepare(1)
    late = start(scenarios.impatiently, way.go, 1, log=home / "late.log", failpoints=f"{failpoint}=stop")
    with stopped_at_end(late):
        assert late.until_stopped(), f"{failpoint} was not reached:\n{late.said}"
        for checkpoint_id in (1, 2):
            replacements.replace("words", checkpoint_id)
        replacements.sweep()
        replacements.replace("words")
        replacement_promises.check_as_of(record)

        late.wake()
        code = late.wait()

    if failpoint == "sweep.inside":  # its transaction was ended from under it
        assert code == 0 or "StoreUnavailable" in late.said, late.said
    else:
        assert code == 0, late.said
    replacement_promises.check_never_wrong(record)
    replacement_promises.check_as_of(record)
    replacement_promises.check_end(record, tombstones=not way.exchanges)
