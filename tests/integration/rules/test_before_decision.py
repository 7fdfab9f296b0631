"""Rules R4 to R8: positions, revisions, markers, votes and attempts up to the commit point."""

from __future__ import annotations

import pytest

from support.pipelines.rules_bench import Bench, words
from twophase.core import failpoints
from twophase.core.checkpoint import Input, Output
from twophase.core.errors import Fenced, IllegalTransition, SinkUnavailable
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome
from twophase.core.states import State


@pytest.fixture
def offsets(bench: Bench) -> Bench:
    """Return the same with a source of offsets."""
    bench.coordinator = bench.process(sources={"topic": bench.topic})
    return bench


# --- R4: the position moves by compare-and-set, and only for the first revision that is decided -----------------------


def test_r4_files_that_went_to_another_checkpoint_refuse_the_commit_point(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.sql("INSERT INTO twophase.checkpoint (pipeline, checkpoint_id, inputs) VALUES (:p, 2, '{}')")
    bench.sql("UPDATE twophase.input_file SET checkpoint_id = 2 WHERE pipeline = :p")

    with pytest.raises(IllegalTransition, match="source 'words': expected 1 files of its own, found 0; refused"):
        bench.coordinator.commit(revision)

    assert bench.read(revision.key).state is State.PRECOMMITTED
    assert words() == []


def test_r4_a_range_that_another_checkpoint_took_is_not_applied_twice(offsets: Bench) -> None:
    """Aborted, taken by the next checkpoint, committed there; then the first run is cleared."""
    first = offsets.begin()
    offsets.coordinator.abort(first, "failed")
    with offsets.record.transaction() as tx:
        number = tx.add_checkpoint(offsets.name, "by hand", {"topic": Input(ranges={"0": (0, 10)})})
    offsets.coordinator.commit(offsets.precommitted(offsets.again(number, "regular")))
    cleared = offsets.precommitted(offsets.again(first.checkpoint_id, "regular"))

    with pytest.raises(IllegalTransition, match="source 'topic' partition 0 is no longer at 0; refused"):
        offsets.coordinator.commit(cleared)

    assert offsets.position() == 10
    assert offsets.read(cleared.key).state is State.PRECOMMITTED
    assert words() == [(number, "r1a1")]


def test_r4_a_replacement_never_touches_the_position(offsets: Bench) -> None:
    offsets.committed()
    offsets.topic.end = 20
    offsets.committed()
    replacement = offsets.precommitted(offsets.again(1))

    offsets.coordinator.decide_commit(replacement)

    assert offsets.position() == 20
    assert offsets.read(replacement.key).state is State.COMMITTING


def test_r4_what_was_never_committed_is_no_replacement_whatever_its_kind(offsets: Bench) -> None:
    first = offsets.begin()
    offsets.coordinator.abort(first, "failed")

    offsets.coordinator.commit(offsets.precommitted(offsets.again(1, "backfill")))

    assert offsets.position() == 10


# --- R5: one live revision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED, State.COMMITTING])
def test_r5_no_revision_begins_beside_a_live_one(bench: Bench, state: State) -> None:
    live = bench.begin()
    if state is not State.OPEN:
        live = bench.precommitted(live)
    if state is State.COMMITTING:
        bench.coordinator.decide_commit(live)

    with pytest.raises(IllegalTransition, match="revision_one_live"):
        bench.again(live.checkpoint_id)


def test_r5_an_aborting_revision_does_not_stand_in_the_way(bench: Bench) -> None:
    revision = bench.precommitted()
    failpoints.configure("abort.after=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.abort(revision, "failed")

    second = bench.again(revision.checkpoint_id, "regular")

    assert bench.read(revision.key).state is State.ABORTING
    assert second.key == bench.key(1, 2)


def test_r5_staged_output_that_cannot_be_removed_does_not_stand_in_the_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = bench.precommitted()

    def refuse(output: Output) -> None:
        raise PermissionError

    monkeypatch.setattr(bench.lake, "discard", refuse)
    with pytest.raises(SinkUnavailable, match="not discarded yet"):
        bench.coordinator.abort(revision, "failed")

    assert bench.begin().key == bench.key(1, 2)


# --- R6: markers are for ever, and name their revision ----------------------------------------------------------------


def test_r6_every_revision_has_its_own_rows_in_committed(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.again(1))

    bench.coordinator.commit(replacement)

    rows = bench.sql("SELECT array_agg(operator_id || ' r' || revision) FROM twophase.committed WHERE job_id = :p")
    assert sorted(rows) == ["copy r1", "copy r2", "lake r1", "lake r2"]


def test_r6_the_marker_of_an_older_revision_is_not_this_ones(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.again(1))
    bench.coordinator.decide_commit(replacement)
    mine = bench.participants(replacement.key)["lake"]

    found = bench.lake.find(mine.output(replacement))

    assert found.outcome is not Outcome.ALREADY_PROMOTED


# --- R7: votes are for one attempt ------------------------------------------------------------------------------------


def test_r7_a_late_vote_of_an_older_attempt_does_not_count(bench: Bench) -> None:
    first = bench.coordinator.attempt(bench.begin())
    manifest = bench.write(first, bench.participants(first.key)["lake"])
    second = bench.coordinator.attempt(first)

    with pytest.raises(Fenced, match="vote for epoch 1 refused, found open at epoch 2; nothing was changed"):
        bench.coordinator.vote(first, "lake", yes=True, manifest=manifest)

    assert {(p.attempt, p.vote) for p in bench.participants(second.key).values()} == {(2, None)}


def test_r7_opening_an_attempt_clears_every_vote(bench: Bench) -> None:
    first = bench.precommitted()

    second = bench.coordinator.attempt(first)

    assert (second.state, second.epoch) == (State.OPEN, 2)
    assert {(p.attempt, p.vote, len(p.manifest)) for p in bench.participants(first.key).values()} == {(2, None, 0)}


def test_r7_an_older_attempt_cannot_commit_what_a_newer_one_staged(bench: Bench) -> None:
    first = bench.precommitted()
    second = bench.precommitted(first)

    with pytest.raises(Fenced, match="commit for epoch 1 refused, found precommitted at epoch 2"):
        bench.coordinator.commit(first)

    assert bench.read(second.key).state is State.PRECOMMITTED
    assert words() == []


def test_r7_one_missing_vote_refuses_the_commit_point(bench: Bench) -> None:
    revision = bench.coordinator.attempt(bench.begin())
    bench.coordinator.vote(
        revision, "lake", yes=True, manifest=bench.write(revision, bench.participants(revision.key)["lake"])
    )

    with pytest.raises(Fenced):
        bench.coordinator.commit(revision)

    assert bench.read(revision.key).state is State.OPEN


def test_r7_a_vote_is_not_taken_back(bench: Bench) -> None:
    revision = bench.precommitted()

    with pytest.raises(Fenced):
        bench.coordinator.vote(revision, "lake", yes=False, reason="changed my mind")

    assert bench.read(revision.key).state is State.PRECOMMITTED


# --- R8: attempts are opened before the decision only -----------------------------------------------------------------


def test_r8_in_committing_no_attempt_is_opened_and_a_retry_promotes(bench: Bench) -> None:
    revision = bench.committing()

    with pytest.raises(Fenced, match="found committing at epoch 1"):
        bench.coordinator.attempt(revision)
    done = bench.coordinator.commit(revision)

    assert (done.state, done.epoch) == (State.COMMITTED, 1)
    assert words() == [(1, "r1a1")]


@pytest.mark.parametrize("state", [State.COMMITTED, State.ABORTED])
def test_r8_what_has_ended_opens_no_attempt(bench: Bench, state: State) -> None:
    revision = bench.precommitted()
    if state is State.COMMITTED:
        bench.coordinator.commit(revision)
    else:
        bench.coordinator.abort(revision, "failed")

    with pytest.raises(Fenced, match=f"found {state.lower()} at epoch 1"):
        bench.coordinator.attempt(revision)


def test_r8_a_restage_replaces_only_what_is_missing(bench: Bench) -> None:
    revision = bench.committing()
    before = bench.participants(revision.key)
    bench.lose(revision.key, "lake")

    restaged = bench.coordinator.restage(revision.key, "lost")

    after = bench.participants(revision.key)
    assert (restaged.state, restaged.epoch) == (State.COMMITTING, 2)
    assert after["copy"] == before["copy"]
    assert (after["lake"].attempt, after["lake"].vote, after["lake"].manifest) == (2, None, {})
    assert after["lake"].handle != before["lake"].handle
