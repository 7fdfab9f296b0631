"""Rules R9 to R11: a decided replacement is final, and only the dead is swept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.pipelines.replacement_bench import Bench, Killed, words
from twophase.core import failpoints
from twophase.core.errors import Parked
from twophase.core.failpoints import FailpointError
from twophase.core.states import State
from twophase.sinks.base import Attempt
from twophase.sinks.files.sink import Files
from twophase.storage import disk
from twophase.sweep import sweep

# --- R9: decided is final ---------------------------------------------------------------------------------------------


def test_r9_a_parked_replacement_cannot_be_aborted_and_restage_is_its_way_out(bench: Bench) -> None:
    first = bench.committed()
    replacement = bench.replacing()
    bench.lose(replacement.key)
    with pytest.raises(Parked, match="is gone"):
        bench.coordinator.finish(replacement.key)
    parked, meanwhile = bench.read(replacement.key), words()
    aborted = bench.coordinator.abort(replacement, "by a person")

    bench.stage(bench.coordinator.restage(replacement.key, "lost"))
    done = bench.coordinator.finish(replacement.key)

    assert parked.parked_reason is not None
    assert meanwhile == [(1, "r1a1")]
    assert (aborted.state, aborted.commit_seq) == (State.COMMITTING, 2)
    assert (done.state, done.parked_reason, done.commit_seq) == (State.COMMITTED, None, 2)
    assert bench.read(first.key).state is State.SUPERSEDED
    assert words() == [(1, "r2a2")]
    assert words("lake/copy") == [(1, "r2a1")]
    assert bench.beside("taken", "staging", "superseded") == {"superseded/00000001.r1"}
    assert bench.differences() == []


def test_r9_what_stands_can_be_read_while_its_replacement_is_parked(bench: Bench) -> None:
    """Both tables: `copy` was replaced already, `lake` was not."""
    first = bench.committed()
    replacement = bench.replacing()
    bench.lose(replacement.key)
    bench.process().recover(decided_only=True)
    with pytest.raises(Parked):
        bench.coordinator.finish(replacement.key)

    tables = (words(), words("lake/copy"))
    with bench.record.transaction() as tx:
        standing = tx.committed_revision(bench.name, 1)
    assert tables == ([(1, "r1a1")], [(1, "r2a1")])
    assert standing is not None
    assert standing.key == first.key
    for name in ("lake", "copy"):
        assert all(Path(path).exists() for path in bench.sink(name).files(bench.output(first.key, name)))


def test_r9_regular_runs_go_on_while_a_replacement_is_parked(bench: Bench) -> None:
    bench.committed()
    replacement = bench.replacing()
    bench.lose(replacement.key)

    second = bench.committed()

    assert (second.checkpoint_id, second.state) == (2, State.COMMITTED)
    assert bench.read(replacement.key).parked_reason is not None
    assert words() == [(1, "r1a1"), (2, "r1a1")]


def test_r9_staged_output_of_a_replacement_that_comes_back_is_promoted(bench: Bench) -> None:
    bench.committed()
    replacement = bench.replacing()
    lost = bench.lose(replacement.key)
    bench.coordinator.recover(decided_only=True)
    lost.rename(bench.staged(replacement.key))

    bench.coordinator.recover(decided_only=True)

    assert (bench.read(replacement.key).state, bench.read(replacement.key).parked_reason) == (State.COMMITTED, None)
    assert words() == [(1, "r2a1")]


# --- R10: what the sink holds is what the record says -----------------------------------------------------------------


def test_r10_the_record_adopts_the_attempt_of_a_replacement_that_the_sink_holds(bench: Bench) -> None:
    """Restaged as attempt 2 and voted for; then attempt 1 comes back and a late promoter of it wins."""
    bench.committed()
    replacement = bench.replacing()
    first = bench.participants(replacement.key)["lake"]
    lost = bench.lose(replacement.key)
    bench.stage(bench.coordinator.restage(replacement.key, "lost"))
    lost.rename(Path(f"{first.handle['table']}.twophase/staging/{first.handle['name']}"))
    Files.promote(bench.lake, first.output(replacement))

    done = bench.coordinator.finish(replacement.key)

    found = bench.participants(replacement.key)["lake"]
    assert done.state is State.COMMITTED
    assert (found.attempt, found.manifest) == (1, first.manifest)
    assert words() == [(1, "r2a1")]
    assert bench.differences() == []
    third = bench.replaced()
    assert (third.state, words()) == (State.COMMITTED, [(1, "r3a1")])


def test_r10_an_attempt_that_turns_up_while_it_is_restaged_lets_the_revision_end(bench: Bench) -> None:
    """The lost one came back and is in the table before its copy is voted for; its promoter died without a word."""
    bench.committed()
    replacement = bench.replacing()
    first = bench.participants(replacement.key)["lake"]
    lost = bench.lose(replacement.key)
    restaged = bench.coordinator.restage(replacement.key, "lost")
    lost.rename(Path(f"{first.handle['table']}.twophase/staging/{first.handle['name']}"))
    Files.promote(bench.lake, first.output(replacement))

    bench.stage(restaged)

    assert bench.coordinator.finish(replacement.key).state is State.COMMITTED
    assert words() == [(1, "r2a1")]


def test_r10_what_came_back_does_not_stay_in_the_table_in_place_of_what_is_committed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its promoter slept before the exchange, while its copy was restaged and committed, and dies after it.

    No exchange can ask what it brings out: `verify` tells it, and the next sweep lets the two change places again.
    """
    bench.committed()
    replacement = bench.replacing()
    exchange = disk.exchange
    slept: list[Path] = []

    def late(one: Path, other: Path) -> bool:
        if other.parent == Path(bench.lake.location()) and not slept:
            slept.append(one)
            away = one.rename(one.parents[2] / "away")
            bench.stage(bench.coordinator.restage(replacement.key, "lost"))
            assert bench.process().finish(replacement.key).state is State.COMMITTED
            away.rename(one)
            failpoints.configure("promote.visible=raise")
        return exchange(one, other)

    monkeypatch.setattr(disk, "exchange", late)
    with pytest.raises(FailpointError):
        bench.promote(replacement.key)
    failpoints.configure("")
    told = bench.differences()
    bench.sweep()

    assert slept
    assert told
    assert bench.differences() == []


def test_r10_in_a_replacement_the_voted_and_the_newest_attempt_are_not_swept(bench: Bench) -> None:
    bench.committed()
    replacement = bench.replacing()
    bench.lose(replacement.key)
    bench.stage(bench.coordinator.restage(replacement.key, "lost"))

    swept = list(sweep(bench.record, bench.pipeline))

    assert swept == []
    assert bench.coordinator.finish(replacement.key).state is State.COMMITTED
    assert (words(), words("lake/copy")) == ([(1, "r2a2")], [(1, "r2a1")])


# --- R11: swept is what the record says is dead, nothing else ---------------------------------------------------------


def test_r11_what_was_replaced_is_kept_with_its_manifest_until_its_retention_is_over(bench: Bench) -> None:
    first = bench.committed()
    bench.coordinator.abort(bench.precommitted(bench.replace()), "failed")
    bench.replaced()
    bench.age(6)
    early = bench.sweep()
    kept = bench.lake.files(bench.output(first.key))
    bench.age(2)

    gone = bench.sweep()

    assert early == []
    assert all(Path(path).exists() is False for path in kept)
    assert gone == ["00000001.r1", "00000001.r1.a1.json"]
    assert bench.beside("staging", "taken", "superseded", "manifests") == {"manifests/00000001.r3.a1.json"}
    assert bench.differences() == []


@pytest.mark.parametrize("committed", [False, True], ids=["committing", "committed"])
def test_r11_what_an_exchange_brought_out_is_never_swept_with_the_attempt_that_brought_it_out(
    bench: Bench, committed: bool
) -> None:
    """It lies under the name of the newer revision's attempt; its own marker says whose it is."""
    first = bench.committed()
    replacement = bench.replacing()
    failpoints.configure("promote.visible=raise@2")  # the first one is of the table `copy`
    with pytest.raises(FailpointError):
        bench.coordinator.finish(replacement.key)
    failpoints.configure("")
    if committed:
        (brought_out,) = Path(f"{bench.lake.location()}.twophase/taken").iterdir()
        away = brought_out.rename(brought_out.parents[2] / "away")
        assert bench.process().finish(replacement.key).state is State.COMMITTED
        away.rename(brought_out)

    bench.sweep()
    bench.process().finish(replacement.key)

    assert all(Path(path).exists() for path in bench.lake.files(bench.output(first.key)))
    assert bench.beside("taken", "superseded") == {"superseded/00000001.r1"}
    assert words() == [(1, "r2a1")]


def test_r11_a_dead_replacement_leaves_nothing_and_takes_nothing_along(bench: Bench) -> None:
    first = bench.committed()
    zombie = bench.precommitted(bench.replace())
    newer = bench.precommitted(zombie)
    bench.coordinator.abort(newer, "failed")
    bench.staged(newer.key).mkdir()  # a straggling task made it again

    bench.sweep()

    assert bench.beside("staging", "taken", "superseded") == set()
    assert words() == [(1, "r1a1")]
    assert bench.read(first.key).state is State.COMMITTED
    assert bench.differences() == []


def test_r11_only_what_is_recorded_as_swept_is_forgotten(bench: Bench) -> None:
    """A sweeper that died after it recorded that leaves the rest to the next one; time travel is refused at once."""
    first = bench.committed()
    bench.replaced()
    bench.age()
    failpoints.configure("sweep.inside=raise")
    with pytest.raises(FailpointError):
        bench.sweep()
    not_yet = (bench.read(first.key).swept, bench.beside("superseded"))
    failpoints.configure("sweep.swept=raise")
    with pytest.raises(FailpointError):
        bench.sweep()
    failpoints.configure("")
    between = (bench.read(first.key).swept, bench.beside("superseded"))

    gone = bench.sweep()

    assert not_yet == (False, {"superseded/00000001.r1"})
    assert between == (True, {"superseded/00000001.r1"})
    assert "00000001.r1" in gone
    assert bench.beside("superseded") == set()


def test_r11_a_sweeper_killed_while_it_removes_a_replaced_revision_leaves_nothing_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.committed()
    bench.replaced()
    bench.age()

    def killed(path: Path, **_: object) -> None:
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            bench.sweep()

    for _ in range(2):
        bench.sweep()

    assert bench.beside("taken", "superseded") == set()


def test_r11_a_sweeper_that_meets_a_promoter_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find what an exchange brought out, and the promoter is faster."""
    bench.committed()
    replacement = bench.replacing()
    failpoints.configure("promote.visible=raise@2")
    with pytest.raises(FailpointError):
        bench.coordinator.finish(replacement.key)
    failpoints.configure("")
    (brought_out,) = Path(f"{bench.lake.location()}.twophase/taken").iterdir()
    rename_new = disk.rename_new
    slept: list[Path] = []

    def late(source: Path, target: Path) -> None:
        if not slept:
            slept.append(source)
            bench.process().finish(replacement.key)
        rename_new(source, target)

    monkeypatch.setattr(disk, "rename_new", late)

    bench.lake.remove(Attempt(1, 2, 1, str(brought_out)))

    assert slept
    assert bench.beside("superseded") == {"superseded/00000001.r1"}
