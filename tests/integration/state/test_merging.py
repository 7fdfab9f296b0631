"""Merging changes nothing that can be read, whatever is merged when, and whatever keys collide."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.states.plain import Batch, PlainState
from twophase import State
from twophase.state import hashes, merging, verification
from twophase.state.changes import changes
from twophase.state.manifest import SortedRun
from twophase.state.reader import history

NAMES = st.one_of(st.none(), st.sampled_from(["", "a", "b", "ä", "λ🙂", "word"]))
NUMBERS = st.one_of(st.none(), st.integers(-3, 3))
BATCHES = st.lists(
    st.dictionaries(st.tuples(NAMES, NUMBERS), st.one_of(st.none(), st.tuples(NUMBERS)), max_size=8),
    min_size=1,
    max_size=30,
)
#: A base that small batches do not outgrow at once, so that levels are merged, too.
START: Batch = {(f"start {number}", number): (number,) for number in range(60)}
#: Where a file is made durable at no cost.
MEMORY = Path("/dev/shm")
#: Hypothesis and a folder of its own for each example.
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def kept(ttl: str | None, fan: int, least_rows: int = 0) -> Iterator[PlainState]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as home:
        declaration = State(["name", "number"], "name string, number bigint, n int", ttl=ttl)
        yield PlainState(Path(home), declaration, fan=fan, least_rows=least_rows)


@pytest.fixture(params=[None, 15], ids=["hash", "weak hash"])
def collisions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test again with keys that collide in 4 bits."""
    monkeypatch.setattr(hashes, "WEAK", request.param)


def changed(state: PlainState, before: dict[Any, Any], after: dict[Any, Any]) -> list[tuple[Any, ...]]:
    """Return the changelog rows from one dict to another."""
    rows: list[tuple[Any, ...]] = []
    for key in {*before, *after}:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        rows += [(*key, *old, "-U" if new else "-D")] if old else []
        rows += [(*key, *new, "+U" if old else "+I")] if new else []
    return sorted(rows, key=repr)


@QUICK
@given(
    batches=BATCHES,
    fan=st.sampled_from([2, 2, 3, 5, 12]),
    ttl=st.sampled_from([None, "2h", "5h"]),
    start=st.sampled_from([{}, START]),
)
@pytest.mark.usefixtures("collisions")
def test_every_kept_state_reads_as_a_dict_would(batches: list[Batch], fan: int, ttl: str | None, start: Batch) -> None:
    """Scans and look-ups of each checkpoint's manifest give its rows, also after later checkpoints merged its runs."""
    with kept(ttl, fan) as state:
        state.checkpoint(start)
        for batch in batches:
            one = dict(list(batch.items())[::2])
            state.checkpoint(one, {key: new for key, new in batch.items() if key not in one})

        asked = sorted({key for rows in state.rows for key in rows} | {("new", 7), (None, None)}, key=repr)
        for number, manifest in enumerate(state.manifests):
            assert state.scanned(number) == state.expected(number)
            assert state.found(asked, number) == state.expected(number)
            if ttl is None:
                assert manifest.keys == len(state.expected(number))
            assert list(verification.damages(state.home, manifest)) == []


@QUICK
@given(batches=BATCHES, fan=st.integers(2, 4), ttl=st.sampled_from([None, "4h"]), data=st.data())
@pytest.mark.usefixtures("collisions")
def test_the_difference_of_two_states_is_what_changed(
    batches: list[Batch], fan: int, ttl: str | None, data: st.DataObject
) -> None:
    """Also across a merge into the base, which forgets tombstones; what expires is no change."""
    with kept(ttl, fan) as state:
        for batch in batches:
            state.checkpoint(batch)
        numbers = st.integers(0, len(batches))
        one, other = data.draw(numbers), data.draw(numbers)

        rows = changes(state.home, state.manifests[one], state.manifests[other]).to_pylist()
        seen = max(one, other)
        expected = changed(state, state.expected(one, seen), state.expected(other, seen))
        assert sorted((tuple(row.values()) for row in rows), key=repr) == expected


@QUICK
@given(batches=BATCHES, fan=st.integers(2, 4))
@pytest.mark.usefixtures("collisions")
def test_the_history_of_a_key_tells_each_change(batches: list[Batch], fan: int) -> None:
    with kept(None, fan) as state:
        for batch in batches:
            state.checkpoint(batch)

        key = {"name": "a", "number": 1}
        told = [
            (change.label, change.row and (change.row["n"],))
            for change in history(state.home, list(enumerate(state.manifests)), key)
        ]
        steps = [rows.get(("a", 1), (None, 0))[0] for rows in state.rows]
        pairs = itertools.pairwise(steps)
        assert told == [(at, new) for at, (old, new) in enumerate(pairs, start=1) if old != new]


@QUICK
@given(batches=BATCHES, fan=st.integers(2, 5))
def test_the_order_of_rows_does_not_follow_from_the_merges(batches: list[Batch], fan: int) -> None:
    """Two states with the same rows scan in the same order, so digests can be compared."""
    with kept(None, fan) as one, kept(None, 12) as other:
        for batch in batches:
            one.checkpoint(batch)
            other.checkpoint(batch)

        assert list(one.scanned()) == list(other.scanned())


def run(level: int, rows: int, checkpoint_id: int) -> SortedRun:
    return SortedRun(f"{checkpoint_id}.{level}", level, rows, rows, 0, 1, "", checkpoint_id)


def test_the_number_of_runs_is_bounded() -> None:
    """Of 100,000 checkpoints of 10,000 rows over 10 million keys, never more than 4 times the fan are to be read."""
    runs: tuple[SortedRun, ...] = (run(merging.BASE, 10_000_000, 0),)
    most = 0
    for number in range(1, 20_000):
        runs = (run(0, 10_000, number), *runs)
        if merge := merging.due(runs):
            rows = 10_000_000 if merge.level == merging.BASE else sum(one.rows for one in merge.runs)
            runs = (run(merge.level, rows, number), *(one for one in runs if one not in merge.runs))
        most = max(most, len(runs))

    assert 12 < most <= 4 * merging.FAN


def test_small_states_wait_for_twelve_runs_and_large_changes_do_not() -> None:
    few = tuple(run(0, 10, number) for number in range(11, 0, -1))

    assert merging.due(few) is None
    assert merging.due((run(0, 10, 12), *few)) == ((run(0, 10, 12), *few), merging.BASE)
    assert merging.due((run(0, 100_000, 2), run(merging.BASE, 100_001, 1))) is None
    assert merging.due((run(0, 100_001, 2), run(merging.BASE, 100_001, 1))) is not None


def test_several_files_of_one_checkpoint_count_as_one_run() -> None:
    base = run(merging.BASE, 10_000_000, 0)
    files = tuple(run(0, 100_000, number) for number in (5, 5, 5, 4, 4, 4, 3, 3, 3, 2, 1))

    assert merging.due((*files, base), fan=6) is None
    merge = merging.due((*files, base), fan=5)
    assert merge is not None
    assert (merge.level, len(merge.runs)) == (1, 11)
