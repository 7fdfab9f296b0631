"""Rules R12 to R14 and R17: numbers, lanes, the last step, and names that keep revisions apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest

from support.pipelines.factories import SCHEMA, stage_rows
from support.pipelines.replacement_bench import Bench, words
from twophase.committer import queries
from twophase.core import failpoints
from twophase.core.errors import Fenced, PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.states import State

# --- R12: commit_seq is taken in the decision itself ------------------------------------------------------------------


def test_r12_replacements_and_regular_commits_at_once_have_no_gaps_and_no_doubles(bench: Bench) -> None:
    for _ in range(3):
        bench.committed()
    decided = [bench.precommitted(bench.replace(number)) for number in (1, 2, 3)]
    decided.append(bench.precommitted())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bench.process().commit, decided))

    assert sorted(bench.read(revision.key).commit_seq or 0 for revision in decided) == [4, 5, 6, 7]
    assert words() == [(1, "r2a1"), (2, "r2a1"), (3, "r2a1"), (4, "r1a1")]


def test_r12_a_replacement_that_is_refused_or_aborted_takes_no_number(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.replace())
    failpoints.configure("commit.inside=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.commit(replacement)
    failpoints.configure("")
    bench.coordinator.abort(replacement, "failed")

    assert bench.replaced().commit_seq == 2
    assert bench.committed().commit_seq == 3


def test_r12_time_travel_goes_by_the_order_of_decisions_not_of_checkpoints(bench: Bench) -> None:
    """Checkpoint 1 is replaced after checkpoint 2 was committed: as of 2 it is still what it was."""
    for _ in range(2):
        bench.committed()
    bench.replaced(1)

    def as_of(seq: int) -> list[tuple[int, int]]:
        found = queries.promoted(bench.record.engine, bench.name, "lake", seq)
        return sorted((one.output.key.checkpoint_id, one.output.key.revision) for one in found)

    assert [as_of(seq) for seq in range(4)] == [[], [(1, 1)], [(1, 1), (2, 1)], [(1, 2), (2, 1)]]


# --- R13: a lane of its own -------------------------------------------------------------------------------------------


def test_r13_a_replacement_that_waits_for_its_sink_holds_up_nobody_else(bench: Bench) -> None:
    for _ in range(2):
        bench.committed()
    bench.lake.down = {(1, 2)}
    with pytest.raises(PromotionPending, match="the disk is away"):
        bench.replaced(1)

    regular, other = bench.committed(), bench.replaced(2)

    assert [regular.state, other.state] == [State.COMMITTED] * 2
    assert bench.read(bench.key(1, 2)).state is State.COMMITTING
    assert words() == [(1, "r1a1"), (2, "r2a1"), (3, "r1a1")]
    bench.lake.down = set()
    assert bench.coordinator.finish(bench.key(1, 2)).state is State.COMMITTED
    assert words() == [(1, "r2a1"), (2, "r2a1"), (3, "r1a1")]


def test_r13_a_regular_commit_that_waits_does_not_hold_up_a_replacement_and_keeps_its_turn(bench: Bench) -> None:
    bench.committed()
    bench.lake.down = {(2, 1)}
    with pytest.raises(PromotionPending):
        bench.committed()

    replacement = bench.replaced(1)
    later = bench.precommitted()
    with pytest.raises(PromotionPending):
        bench.coordinator.commit(later)

    assert replacement.state is State.COMMITTED
    assert bench.read(later.key).state is State.PRECOMMITTED
    assert words() == [(1, "r2a1")]
    bench.lake.down = set()
    assert bench.coordinator.commit(later).state is State.COMMITTED
    assert words() == [(1, "r2a1"), (2, "r1a1"), (3, "r1a1")]


def test_r13_recovery_promotes_every_lane_though_one_is_held_up(bench: Bench) -> None:
    for _ in range(2):
        bench.committed()
    bench.lake.down = {(1, 2)}
    keys = [bench.replacing(number).key for number in (1, 2)]

    bench.process().recover(decided_only=True)

    assert [bench.read(key).state for key in keys] == [State.COMMITTING, State.COMMITTED]


# --- R14: the last step is conditional, and supersedes in one transaction ---------------------------------------------


def test_r14_superseding_and_committing_happen_together_or_not_at_all(bench: Bench) -> None:
    first = bench.committed()
    replacement = bench.precommitted(bench.replace())
    failpoints.configure("finish.inside=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.commit(replacement)
    failpoints.configure("")
    between = [bench.read(key).state for key in (first.key, replacement.key)]
    shown = words()

    bench.process().recover(decided_only=True)

    assert between == [State.COMMITTED, State.COMMITTING]
    assert shown == [(1, "r2a1")]
    assert [bench.read(key).state for key in (first.key, replacement.key)] == [State.SUPERSEDED, State.COMMITTED]


def test_r14_a_late_finisher_of_a_replacement_finds_it_done_and_touches_nothing(bench: Bench) -> None:
    """Stopped before its last step; meanwhile somebody finished, and a third revision took its place."""
    bench.committed()
    replacement = bench.replaced()
    third = bench.replaced()
    before = [bench.events(key) for key in (replacement.key, third.key)]

    bench.coordinator._record_all(replacement.key, [])
    late = bench.coordinator.finish(replacement.key)

    assert late.state is State.SUPERSEDED
    assert bench.read(third.key).state is State.COMMITTED
    assert [bench.events(key) for key in (replacement.key, third.key)] == before
    assert words() == [(1, "r3a1")]


def test_r14_finishing_a_replacement_at_once_is_finishing_once(bench: Bench) -> None:
    first = bench.committed()
    replacement = bench.replacing()

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: bench.process().finish(replacement.key), range(4)))

    assert {found.state for found in done} == {State.COMMITTED}
    assert bench.events(first.key).count("superseded") == 1
    assert bench.events(replacement.key).count("committed") == 1
    assert bench.beside("taken", "staging", "superseded") == {"superseded/00000001.r1"}
    assert words() == [(1, "r2a1")]


def test_r14_a_replacement_is_fenced_like_any_other(bench: Bench) -> None:
    """An older attempt of it commits, votes and aborts nothing."""
    bench.committed()
    zombie = bench.precommitted(bench.replace())
    newer = bench.precommitted(zombie)

    for step in (bench.coordinator.commit, lambda revision: bench.coordinator.abort(revision, "woke up")):
        with pytest.raises(Fenced):
            step(zombie)

    assert bench.read(newer.key).state is State.PRECOMMITTED
    assert bench.coordinator.commit(newer).state is State.COMMITTED
    assert words() == [(1, "r2a2")]


# --- R17: two revisions are never mixed -------------------------------------------------------------------------------


def test_r17_a_reader_that_listed_before_the_exchange_fails_loudly(bench: Bench) -> None:
    bench.committed()
    listed = sorted(Path(bench.lake.location()).rglob("*.parquet"))

    bench.replaced()

    with duckdb.connect() as connection, pytest.raises(duckdb.IOException, match=r"No files found|Cannot open"):
        connection.execute("SELECT * FROM read_parquet(?)", [[str(path) for path in listed]]).fetchall()
    assert {path.name[:10] for path in listed} == {"part-r1-a1"}
    assert {path.name[:10] for path in Path(bench.lake.location()).rglob("*.parquet")} == {"part-r2-a1"}


def test_r17_names_that_lack_revision_and_attempt_get_them_before_the_vote(bench: Bench) -> None:
    """Whoever wrote them: a job that names its files alike in both revisions would let a reader mix them."""
    bench.committed()
    revision = bench.coordinator.attempt(bench.replace())
    mine = bench.participants(revision.key)["lake"]
    rows = [{"id": 1, "word": "r2a1", "frequency": 1}]
    stage_rows(bench.lake, mine.handle, "part", rows, 2)

    bench.lake.seal(mine.output(revision), SCHEMA)

    names = sorted(path.name for path in bench.staged(revision.key).glob("*.parquet"))
    assert names == ["part-r2-a1-00000.parquet", "part-r2-a1-00001.parquet"]
