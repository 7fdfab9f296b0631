"""Rules R12 to R17: the order of decisions, the last step, who is fenced, and places that are used once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import stage_rows
from support.pipelines.rules_bench import ME, Bench, words
from twophase.core import failpoints
from twophase.core.checkpoint import InputFile, Key, Output, Revision, Run
from twophase.core.errors import Busy, Fenced, ManifestMismatch, PromotionPending, TooManyPending
from twophase.core.failpoints import FailpointError
from twophase.core.states import State
from twophase.sinks.files.sink import Files

OTHER = Run("dag", "run_2")


# --- R12: commit_seq is taken in the decision itself ------------------------------------------------------------------


def test_r12_decisions_at_once_have_no_gaps_and_no_doubles(bench: Bench) -> None:
    bench.coordinator = bench.process(max_pending=9)
    revisions = [bench.precommitted(bench.begin(slot=f"slot {number}")) for number in range(5)]

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(bench.coordinator.decide_commit, revisions))

    assert sorted(bench.read(revision.key).commit_seq or 0 for revision in revisions) == [1, 2, 3, 4, 5]


def test_r12_a_refused_or_crashed_decision_takes_no_number(bench: Bench) -> None:
    revision = bench.precommitted()
    failpoints.configure("commit.inside=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.commit(revision)
    newer = bench.precommitted(revision)
    with pytest.raises(Fenced):
        bench.coordinator.commit(revision)

    done = bench.coordinator.commit(newer)

    assert done.commit_seq == 1
    assert bench.committed().commit_seq == 2


# --- R13: promoted in the order of decisions, at most max_pending undone ----------------------------------------------


def test_r13_a_later_decision_is_not_promoted_before_an_earlier_one(bench: Bench) -> None:
    bench.coordinator = bench.process(max_pending=2)
    bench.lake.down = {1}
    with pytest.raises(PromotionPending, match="the disk is away"):
        bench.committed()

    with pytest.raises(PromotionPending, match=r"/1 r1: decided, not promoted yet \(lake: the disk is away\)"):
        bench.committed()

    assert bench.read(bench.key(2, 1)).state is State.COMMITTING
    assert words() == []
    bench.lake.down = set()
    assert bench.coordinator.finish(bench.key(2, 1)).state is State.COMMITTED
    assert bench.read(bench.key(1, 1)).state is State.COMMITTED
    assert words() == [(1, "r1a1"), (2, "r1a1")]


def test_r13_recovery_keeps_the_order_too(bench: Bench) -> None:
    bench.coordinator = bench.process(max_pending=2)
    bench.lake.down = {1}
    for _ in range(2):
        bench.committing()

    bench.process().recover(decided_only=True)

    assert [bench.read(bench.key(number, 1)).state for number in (1, 2)] == [State.COMMITTING] * 2
    assert words() == []


def test_r13_more_than_max_pending_are_not_decided(bench: Bench) -> None:
    bench.lake.down = {1}
    with pytest.raises(PromotionPending):
        bench.committed()
    second = bench.precommitted()

    with pytest.raises(TooManyPending, match=r"1 decided before it .*\(words_.*/1 r1\).*; it stays pre-committed"):
        bench.coordinator.decide_commit(second)
    with pytest.raises(PromotionPending):
        bench.coordinator.commit(second)

    assert bench.read(second.key).state is State.PRECOMMITTED
    bench.lake.down = set()
    assert bench.coordinator.commit(second).commit_seq == 2
    assert words() == [(1, "r1a1"), (2, "r1a1")]


def test_r13_a_backfill_is_in_a_lane_of_its_own(bench: Bench) -> None:
    bench.committed()
    bench.lake.down = {2}
    with pytest.raises(PromotionPending):
        bench.committed()
    backfill = bench.precommitted(bench.again(1))

    done = bench.coordinator.commit(backfill)

    assert done.state is State.COMMITTED
    assert words() == [(1, "r2a1")]


def test_what_no_marker_tells_of_is_not_committed(bench: Bench) -> None:
    """Unknown is not promoted, however often it is said."""
    bench.lake.silent.add(1)
    revision = bench.committing()

    with pytest.raises(PromotionPending, match="lake: unknown"):
        bench.coordinator.finish(revision.key)

    assert bench.read(revision.key).state is State.COMMITTING
    bench.lake.silent.clear()
    assert bench.coordinator.finish(revision.key).state is State.COMMITTED


# --- R14: the last step is conditional, and supersedes in one transaction ---------------------------------------------


def test_r14_a_late_finisher_finds_it_done_and_touches_nothing(bench: Bench) -> None:
    """Stopped before its last step; meanwhile somebody finished, and a backfill replaced the result."""
    first = bench.committed()
    replacement = bench.precommitted(bench.again(1))
    bench.coordinator.commit(replacement)
    before = (bench.events(first.key), bench.events(replacement.key))

    bench.coordinator._record_all(first.key, [])
    late = bench.coordinator.finish(first.key)

    assert late.state is State.SUPERSEDED
    assert bench.read(replacement.key).state is State.COMMITTED
    assert (bench.events(first.key), bench.events(replacement.key)) == before
    assert words() == [(1, "r2a1")]


def test_r14_superseding_and_committing_happen_together_or_not_at_all(bench: Bench) -> None:
    first = bench.committed()
    replacement = bench.precommitted(bench.again(1))
    failpoints.configure("finish.inside=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.commit(replacement)
    between = [bench.read(key).state for key in (first.key, replacement.key)]

    bench.coordinator.finish(replacement.key)

    assert between == [State.COMMITTED, State.COMMITTING]
    assert [bench.read(key).state for key in (first.key, replacement.key)] == [State.SUPERSEDED, State.COMMITTED]


def test_r14_finishing_at_once_is_finishing_once(bench: Bench) -> None:
    revision = bench.committing()

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: bench.process().finish(revision.key), range(4)))

    assert {found.state for found in done} == {State.COMMITTED}
    assert bench.events(revision.key).count("committed") == 1
    assert words() == [(1, "r1a1")]


# --- R15: who is fenced touches nothing -------------------------------------------------------------------------------


def test_r15_a_fenced_abort_leaves_the_newer_attempt_alone(bench: Bench) -> None:
    zombie = bench.coordinator.attempt(bench.begin())
    newer = bench.precommitted(zombie)

    with pytest.raises(Fenced, match="at epoch 1, found precommitted at epoch 2; nothing was changed"):
        bench.coordinator.abort(zombie, "woke up")

    assert bench.read(newer.key).state is State.PRECOMMITTED
    assert bench.coordinator.commit(newer).state is State.COMMITTED
    assert words() == [(1, "r1a2")]


def test_r15_an_abort_after_the_commit_point_changes_nothing(bench: Bench) -> None:
    revision = bench.committing()

    after = bench.coordinator.abort(revision, "too late")

    assert after.state is State.COMMITTING
    assert bench.coordinator.finish(revision.key).state is State.COMMITTED
    assert words() == [(1, "r1a1")]


def test_r15_a_fenced_abort_after_a_restage_changes_nothing(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    restaged = bench.coordinator.restage(revision.key, "lost")

    with pytest.raises(Fenced):
        bench.coordinator.abort(revision, "too late")

    assert bench.coordinator.finish(bench.stage(restaged).key).state is State.COMMITTED


def test_r15_an_abort_leaves_alone_what_another_run_has_taken_over(bench: Bench) -> None:
    zombie = bench.coordinator.attempt(bench.begin(ME))
    bench.expire(zombie)
    bench.ended[ME] = True
    taken = bench.process().begin(OTHER)
    assert taken is not None

    with pytest.raises(Fenced):
        bench.coordinator.abort(zombie, "woke up")

    assert (bench.read(taken.key).state, bench.read(taken.key).run) == (State.OPEN, OTHER)


# --- R16: what waits for its run is left alone until that run has ended -----------------------------------------------


@pytest.mark.parametrize("ended", [None, False], ids=["nobody knows", "it goes on"])
@pytest.mark.parametrize("voted", [False, True], ids=["open", "pre-committed"])
def test_r16_another_run_leaves_alone_what_waits_for_its_own(bench: Bench, ended: bool | None, voted: bool) -> None:
    """An approval may take days: the revision has no lease, and its run has not ended."""
    revision = bench.precommitted() if voted else bench.coordinator.attempt(bench.begin())
    with bench.record.transaction() as tx:
        tx.renew(revision.key, epoch=revision.epoch, lease=None)
    bench.ended[ME] = ended

    with pytest.raises(Busy, match="it waits for run dag/run_1, which has not ended") as busy:
        bench.process().begin(OTHER)
    bench.process().recover()

    after = bench.read(revision.key)
    assert busy.value.lease_left is None
    assert (after.state, after.epoch, after.run) == (revision.state, revision.epoch, ME)


def test_r16_a_lease_is_respected_even_when_its_run_has_ended(bench: Bench) -> None:
    revision = bench.coordinator.attempt(bench.begin())
    bench.ended[ME] = True

    with pytest.raises(Busy, match="run dag/run_1 works on it") as busy:
        bench.process().begin(OTHER)
    bench.process().recover()

    assert 0 < (busy.value.lease_left or 0) <= 60
    assert bench.read(revision.key).state is State.OPEN


def test_r16_once_its_run_has_ended_another_takes_it_over(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.expire(revision)
    bench.ended[ME] = True

    taken = bench.process().begin(OTHER)

    assert taken is not None
    assert (taken.key, taken.state, taken.run) == (revision.key, State.PRECOMMITTED, OTHER)
    assert bench.events(revision.key)[-1] == "taken over"


def test_r16_its_own_run_takes_it_again_at_once(bench: Bench) -> None:
    revision = bench.coordinator.attempt(bench.begin())

    taken = bench.process().begin(ME)

    assert taken is not None
    assert (taken.key, taken.epoch) == (revision.key, 1)


def test_r16_recovery_aborts_it_once_its_run_has_ended(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.expire(revision)
    bench.ended[ME] = True

    bench.process().recover()

    assert bench.read(revision.key).state is State.ABORTED
    assert not list(Path(f"{bench.lake.location()}.twophase/staging").iterdir())


# --- R17: a staging place is never used twice -------------------------------------------------------------------------


def restore(bench: Bench, key: Key) -> Revision:
    """Put the record back to before a revision's first attempt, as from a backup."""
    bench.sql("ALTER TABLE twophase.revision DISABLE TRIGGER guard")
    bench.sql("UPDATE twophase.revision SET state = 'OPEN', epoch = 0 WHERE pipeline = :p")
    bench.sql("ALTER TABLE twophase.revision ENABLE TRIGGER guard")
    bench.sql("DELETE FROM twophase.participant WHERE pipeline = :p")
    return bench.read(key)


def test_r17_an_epoch_that_comes_again_has_another_staging_place(bench: Bench) -> None:
    before = bench.precommitted()
    places = {name: bench.staged(before.key, name) for name in ("lake", "copy")}

    repeated = bench.coordinator.attempt(restore(bench, before.key))

    assert repeated.epoch == before.epoch == 1
    assert all(bench.staged(repeated.key, name) != places[name] for name in places)
    assert all(place.exists() for place in places.values())


def test_r17_an_epoch_that_comes_again_fails_by_name_and_the_next_one_is_committed(bench: Bench) -> None:
    repeated = bench.coordinator.attempt(restore(bench, bench.precommitted().key))

    with pytest.raises(ManifestMismatch, match="the record is older than the table"):
        bench.stage(repeated)
    done = bench.coordinator.commit(bench.stage(bench.coordinator.attempt(repeated)))

    assert done.state is State.COMMITTED
    assert words() == [(1, "r1a2")]


class Frame:
    """As much of a DataFrame as writes one file, under the name that the sink asks for."""

    columns: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.write = self
        self.schema = self
        self.fields: list[Any] = []
        self.dtypes: list[Any] = []
        self.asked: dict[str, Any] = {}

    def format(self, _: str) -> Frame:
        return self

    def options(self, **asked: Any) -> Frame:
        self.asked = asked
        return self

    def partitionBy(self, *_: str) -> Frame:  # noqa: N802 - Spark's own word for it
        return self

    def save(self, uri: str) -> None:
        folder = Path(uri.removeprefix("file://"))
        stage_rows(
            Files("unused"),
            {"table": str(folder.parents[1]).removesuffix(".twophase"), "name": folder.name},
            self.asked["mapreduce.output.basename"],
            [{"id": 1, "word": "w", "frequency": 1}],
            1,
        )


def test_r17_the_name_of_a_file_carries_revision_and_attempt(bench: Bench) -> None:
    """A reader across a replacement fails loudly instead of mixing two."""
    key = bench.key(1, 2)
    output = Output(key, 3, bench.lake.place(key, 3, "0" * 8), sink="lake")

    bench.lake.stage(Frame(), output)

    staged = Path(f"{bench.lake.location()}.twophase/staging/{output.handle['name']}")
    assert [path.name for path in staged.glob("*.parquet")] == ["part-r2-a3-00000.parquet"]


def test_input_of_a_checkpoint_is_the_same_for_every_attempt_and_revision(bench: Bench) -> None:
    """The barrier: what lands later goes to the next checkpoint."""
    revision = bench.precommitted()
    with bench.record.transaction() as tx:
        before = tx.inputs(revision.key)
    bench.coordinator.abort(revision, "failed")

    second = bench.begin()

    with bench.record.transaction() as tx:
        assert tx.inputs(second.key) == before
    assert second.key == bench.key(1, 2)
    assert [file.path for file in before["words"].files] == ["000000.json"]
    assert isinstance(before["words"].files[0], InputFile)
