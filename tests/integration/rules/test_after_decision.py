"""Rules R9 to R11: decided is final, the sink's marker is what the record says, only the dead is swept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.pipelines.rules_bench import ME, Bench, words
from twophase.committer import revisions
from twophase.core.checkpoint import Output
from twophase.core.errors import IllegalTransition, Parked
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Promotion
from twophase.core.states import State
from twophase.sweep import sweep
from twophase.verification import verify

# --- R9: decided is final ---------------------------------------------------------------------------------------------


def test_r9_what_lost_its_output_is_parked_restaged_and_promoted(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")

    with pytest.raises(
        Parked, match=r"decided, but it cannot be promoted \(lake: .* is gone\); parked: .*twophase restage"
    ):
        bench.coordinator.commit(revision)
    parked = bench.read(revision.key)
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    done = bench.coordinator.finish(revision.key)

    assert parked.state is State.COMMITTING
    assert "is gone" in (parked.parked_reason or "")
    assert parked.hindrances == {"lake": Hindrance.LOST}
    assert (done.state, done.parked_reason, done.commit_seq) == (State.COMMITTED, None, parked.commit_seq)
    assert words() == [(1, "r1a2")]
    assert words("lake/copy") == [(1, "r1a1")]
    assert [difference for difference in verify(bench.record, bench.pipeline) if difference] == []


def test_r9_what_is_parked_cannot_be_aborted(bench: Bench) -> None:
    """Recovery has promoted the other sink: the one that lost its output holds up itself alone."""
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    bench.coordinator.recover(decided_only=True)

    after = bench.coordinator.abort(revision, "by a person")

    assert (after.state, after.commit_seq) == (State.COMMITTING, 1)
    assert words("lake/copy") == [(1, "r1a1")]


def test_r9_an_output_that_comes_back_is_promoted_and_the_flag_is_gone(bench: Bench) -> None:
    revision = bench.committing()
    lost = bench.lose(revision.key, "lake")
    bench.coordinator.recover(decided_only=True)
    lost.rename(bench.staged(revision.key, "lake"))

    bench.coordinator.recover(decided_only=True)

    done = bench.read(revision.key)
    assert (done.state, done.parked_reason) == (State.COMMITTED, None)


def test_r9_the_marker_is_read_again_before_parking(bench: Bench) -> None:
    """Somebody promoted it and died before saying so: its staged output is gone because it is in the table."""
    revision = bench.committing()
    for name, participant in bench.participants(revision.key).items():
        bench.pipeline.writes[name].promote(participant.output(revision))

    bench.coordinator.recover(decided_only=True)

    assert bench.read(revision.key).state is State.COMMITTED
    assert "parked" not in bench.events(revision.key)


def test_r9_what_is_not_lost_is_not_restaged(bench: Bench) -> None:
    revision = bench.committing()

    with pytest.raises(IllegalTransition, match="nothing to restage"):
        bench.coordinator.restage(revision.key, "for fun")

    assert bench.read(revision.key).epoch == 1


def test_r9_only_what_is_decided_is_restaged(bench: Bench) -> None:
    revision = bench.precommitted()
    bench.lose(revision.key, "lake")

    with pytest.raises(IllegalTransition, match="expected committing, found precommitted"):
        bench.coordinator.restage(revision.key, "lost")

    assert bench.read(revision.key).epoch == 1


def test_r9_recovery_leaves_alone_what_is_being_restaged(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    restaged = bench.coordinator.restage(revision.key, "lost")

    bench.process().recover(decided_only=True)

    assert bench.read(revision.key).state is State.COMMITTING
    assert bench.coordinator.finish(bench.stage(restaged).key).state is State.COMMITTED


def test_r9_a_restage_that_died_before_its_vote_can_be_restaged_again(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    bench.coordinator.restage(revision.key, "lost")

    bench.stage(bench.coordinator.restage(revision.key, "again"))

    assert bench.coordinator.finish(revision.key).state is State.COMMITTED
    assert words() == [(1, "r1a3")]


def test_r9_a_table_that_lost_everything_beside_it_is_parked(bench: Bench) -> None:
    revision = bench.committing()
    shutil.rmtree(f"{bench.lake.location()}.twophase")

    bench.coordinator.recover(decided_only=True)

    assert bench.read(revision.key).parked_reason is not None


# --- R10: what the sink holds is what the record says -----------------------------------------------------------------


def test_r10_the_record_adopts_the_attempt_that_the_sink_holds(bench: Bench) -> None:
    """Restaged as attempt 2 and voted for; then attempt 1 comes back and a late promoter of it wins."""
    revision = bench.committing()
    first = bench.participants(revision.key)["lake"]
    lost = bench.lose(revision.key, "lake")
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    lost.rename(lost.parent / "words.twophase/staging" / first.handle["name"])
    bench.lake.promote(first.output(revision))

    done = bench.coordinator.finish(revision.key)

    found = bench.participants(revision.key)["lake"]
    assert done.state is State.COMMITTED
    assert (found.attempt, found.manifest) == (1, first.manifest)
    assert words() == [(1, "r1a1")]
    assert [difference for difference in verify(bench.record, bench.pipeline) if difference] == []


def test_r10_after_two_restages_the_attempt_that_the_sink_holds_counts(bench: Bench) -> None:
    """Though the second restage began from the vote of the first one: a sweep goes by what the record names."""
    revision = bench.committing()
    first = bench.participants(revision.key)["lake"]
    lost = bench.lose(revision.key, "lake")
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    bench.lose(revision.key, "lake")
    third = bench.coordinator.restage(revision.key, "lost again")
    lost.rename(lost.parent / "words.twophase/staging" / first.handle["name"])
    bench.lake.promote(first.output(revision))

    bench.stage(third)

    assert words() == [(1, "r1a1")]
    assert revisions.voted(bench.record.engine, bench.name, "lake", [1]) == {revision.key: 1}


def test_r10_a_promoter_that_was_overtaken_by_a_restage_says_what_it_promoted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staged folder was out of sight while somebody restaged, and came back before it went on."""
    revision = bench.committing()
    promote = bench.lake.promote

    def overtaken(output: Output) -> Promotion:
        staged = bench.staged(output.key, "lake")
        lost = bench.lose(output.key, "lake")
        bench.process().restage(output.key, "lost")
        lost.rename(staged)
        return promote(output)

    monkeypatch.setattr(bench.lake, "promote", overtaken)

    done = bench.coordinator.finish(revision.key)

    found = bench.participants(revision.key)["lake"]
    assert done.state is State.COMMITTED
    assert words() == [(1, "r1a1")]
    assert (found.attempt, found.manifest.get("rows")) == (1, 1)


def test_r10_in_committing_the_voted_and_the_newest_attempt_are_not_swept(bench: Bench) -> None:
    revision = bench.committing()
    bench.lose(revision.key, "lake")
    restaged = bench.coordinator.restage(revision.key, "lost")
    bench.stage(restaged)
    voted, newest = bench.staged(revision.key, "copy"), bench.staged(revision.key, "lake")

    swept = list(sweep(bench.record, bench.pipeline))

    assert swept == []
    assert (voted.name.split(".")[2], newest.name.split(".")[2]) == ("a1", "a2")
    assert bench.coordinator.finish(revision.key).state is State.COMMITTED


def test_r10_in_committing_an_attempt_that_was_replaced_is_swept(bench: Bench) -> None:
    revision = bench.committing()
    staged = bench.staged(revision.key, "lake")
    lost = bench.lose(revision.key, "lake")
    bench.stage(bench.coordinator.restage(revision.key, "lost"))
    lost.rename(staged)

    swept = list(sweep(bench.record, bench.pipeline))

    assert [found.path for found in swept] == [str(staged)]
    assert not staged.exists()


# --- R11: swept is what the record says is dead, nothing else ---------------------------------------------------------


def leftovers(bench: Bench) -> set[str]:
    """Return what lies beside the table `lake`."""
    side = Path(f"{bench.lake.location()}.twophase")
    return {f"{path.parent.name}/{path.name}" for path in side.glob("*/*")}


def test_r11_only_the_dead_is_swept(bench: Bench) -> None:
    """One of each: committed, aborted with a straggler, replaced by a newer attempt, and unknown to the record."""
    done = bench.committed()
    staging = Path(f"{bench.lake.location()}.twophase/staging")
    aborted = bench.precommitted()
    bench.coordinator.abort(aborted, "failed")
    old = bench.precommitted(bench.coordinator.begin(ME))
    new = bench.stage(bench.coordinator.attempt(old))
    dead = {
        f"00000001.r1.a1.{'0' * 8}",  # of the committed one: a straggling task made its folder again
        f"00000002.r1.a1.{'0' * 8}",  # of the aborted one
        *(path.name for path in staging.iterdir() if ".r2.a1." in path.name),
    }
    alive = {"00000009.r1.a1.00000000", bench.staged(new.key, "lake").name, "notes.txt"}
    for name in (dead | alive) - {path.name for path in staging.iterdir()}:
        (staging / name).mkdir()

    list(sweep(bench.record, bench.pipeline))

    assert {path.name for path in staging.iterdir()} == alive
    assert f"manifests/00000001.r1.a{done.epoch}.json" in leftovers(bench)
    assert "manifests/00000002.r2.a2.json" in leftovers(bench)
    assert "manifests/00000002.r2.a1.json" not in leftovers(bench)
    assert bench.coordinator.commit(new).state is State.COMMITTED


def test_r11_a_dry_run_names_the_dead_and_touches_nothing(bench: Bench) -> None:
    old = bench.precommitted()
    bench.stage(bench.coordinator.attempt(old))
    before = leftovers(bench)

    swept = list(sweep(bench.record, bench.pipeline, dry_run=True))

    assert {found.why for found in swept} == {"attempt 2 took its place"}
    assert leftovers(bench) == before
