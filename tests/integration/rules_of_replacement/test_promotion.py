"""Rules R1 to R3: what is taken, exchanged and put away, and when it is durable."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.pipelines.replacement_bench import Bench, durable, words
from twophase.core import failpoints
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome
from twophase.core.states import State
from twophase.sinks.files.sink import Files
from twophase.storage import disk


@pytest.fixture
def renaming(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return the same on a file system that cannot exchange two folders."""
    monkeypatch.setattr(disk, "_renameat2", None)
    return bench


# --- R1: take, look, put away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["promote.taken", "promote.checked", "promote.visible", "promote.superseded"])
def test_r1_what_a_killed_promoter_left_is_found_by_its_marker(bench: Bench, point: str) -> None:
    bench.committed()
    replacement = bench.replacing()
    failpoints.configure(f"{point}=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.finish(replacement.key)
    failpoints.configure("")

    bench.process().recover(decided_only=True)

    assert bench.read(replacement.key).state is State.COMMITTED
    assert words() == [(1, "r2a1")]
    assert bench.beside("taken", "superseded") == {"superseded/00000001.r1"}
    assert bench.differences() == []


def test_r1_what_came_out_is_put_away_whichever_attempt_brought_it_out(bench: Bench) -> None:
    """Attempt 1 was exchanged and its promoter died; attempt 2 was restaged meanwhile, and is not needed."""
    bench.committed()
    replacement = bench.replacing()
    first = bench.participants(replacement.key)["lake"]
    lost = bench.lose(replacement.key)
    bench.stage(bench.coordinator.restage(replacement.key, "lost"))
    lost.rename(Path(f"{first.handle['table']}.twophase/staging/{first.handle['name']}"))
    failpoints.configure("promote.visible=raise")
    with pytest.raises(FailpointError):
        Files.promote(bench.lake, first.output(replacement))
    failpoints.configure("")
    between = bench.beside("taken", "superseded")

    done = bench.coordinator.finish(replacement.key)

    assert [name.rpartition(".")[0] for name in between] == ["taken/00000001.r2.a1"]
    assert done.state is State.COMMITTED
    assert words() == [(1, "r2a1")]
    assert bench.beside("taken", "superseded") == {"superseded/00000001.r1"}


def test_r1_a_straggling_task_gets_nothing_into_the_table(bench: Bench) -> None:
    """It writes into the staged folder after the vote, and makes the folder again after it was taken."""
    bench.committed()
    replacement = bench.replacing()
    staged = bench.staged(replacement.key)
    (staged / "part-straggler.parquet").write_bytes(b"half a file")
    failpoints.configure("promote.taken=raise@2")  # the first one is of the table `copy`
    with pytest.raises(FailpointError):
        bench.coordinator.finish(replacement.key)
    failpoints.configure("")
    staged.mkdir()
    (staged / "part-straggler.parquet").write_bytes(b"half a file")

    bench.coordinator.finish(replacement.key)

    assert words() == [(1, "r2a1")]
    assert bench.differences() == []


def test_r1_each_of_several_replacements_is_put_away_under_its_own_name(bench: Bench) -> None:
    bench.committed()
    for _ in range(3):
        bench.replaced()

    assert words() == [(1, "r4a1")]
    assert bench.beside("superseded") == {f"superseded/00000001.r{revision}" for revision in (1, 2, 3)}
    assert bench.beside("taken", "staging") == set()
    for revision in (1, 2, 3):
        assert all(f"part-r{revision}-a1-" in path for path in bench.lake.files(bench.output(bench.key(1, revision))))


# --- R2: counted is what is durable -----------------------------------------------------------------------------------


def test_r2_whoever_reads_the_marker_of_a_replacement_back_makes_both_parents_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its promoter may have died between the exchange and its own fsync."""
    bench.committed()
    replacement = bench.replacing()
    failpoints.configure("promote.visible=raise")
    with pytest.raises(FailpointError):
        bench.promote(replacement.key)
    failpoints.configure("")
    parents = {bench.lake.location(), f"{bench.lake.location()}.twophase/taken"}
    mine = bench.participants(replacement.key)["lake"]
    found, promoted = durable(monkeypatch), []

    promoted.append(bench.lake.find(mine.output(replacement)).outcome)
    by_finding = set(found)
    found.clear()
    promoted.append(bench.promote(replacement.key).outcome)

    assert promoted == [Outcome.ALREADY_PROMOTED] * 2
    assert parents <= by_finding
    assert parents <= set(found)


def test_r2_an_exchange_is_durable_before_what_it_brought_out_is_put_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure could leave the old revision under superseded/ and nothing in the table."""
    bench.committed()
    replacement = bench.replacing()
    steps = durable(monkeypatch)
    rename_new = disk.rename_new

    def noted(source: Path, target: Path) -> None:
        steps.append(f"to {target.parent.name}")
        rename_new(source, target)

    monkeypatch.setattr(disk, "rename_new", noted)

    bench.promote(replacement.key)

    assert steps.index(bench.lake.location()) < steps.index("to superseded")
    assert f"{bench.lake.location()}.twophase/superseded" in steps[steps.index("to superseded") :]


def test_r2_a_replacement_that_was_replaced_since_is_counted_as_durable_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.committed()
    replacement = bench.replaced()
    bench.replaced()
    found = durable(monkeypatch)

    promoted = bench.promote(replacement.key)

    assert promoted.outcome is Outcome.ALREADY_PROMOTED
    assert bench.lake.location() in found


# --- R3: where folders cannot be exchanged ----------------------------------------------------------------------------


def test_r3_two_renames_replace_too(renaming: Bench) -> None:
    renaming.committed()

    done = renaming.replaced()

    assert done.state is State.COMMITTED
    assert words() == [(1, "r2a1")]
    assert renaming.beside("taken", "superseded") == {"superseded/00000001.r1"}
    assert not disk.can_exchange(Path(renaming.lake.location()))


def test_r3_a_promoter_killed_in_the_gap_is_finished_and_the_old_revision_can_be_read_meanwhile(
    renaming: Bench,
) -> None:
    first = renaming.committed()
    replacement = renaming.replacing()
    failpoints.configure("promote.gap=raise@2")  # the first one is of the table `copy`
    with pytest.raises(FailpointError):
        renaming.coordinator.finish(replacement.key)
    failpoints.configure("")
    gap = words()
    old = renaming.lake.files(renaming.output(first.key))

    renaming.process().recover(decided_only=True)

    assert gap == []
    assert all(Path(path).parent.name == "00000001.r1" for path in old)
    assert words() == [(1, "r2a1")]
    assert renaming.differences() == []


@pytest.mark.parametrize("swept", [False, True], ids=["kept", "swept"])
def test_r3_a_late_promoter_cannot_take_the_new_revision_out(
    renaming: Bench, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """It was stopped before the first of its two renames; the name that it wants for the old one is never free."""
    renaming.committed()
    replacement = renaming.replacing()
    rename_new = disk.rename_new
    slept: list[Path] = []

    def late(source: Path, target: Path) -> None:
        if source.parent == Path(renaming.lake.location()) and not slept:
            slept.append(source)
            assert renaming.process().finish(replacement.key).state is State.COMMITTED
            if swept:
                renaming.age()
                assert "00000001.r1" in renaming.sweep()
        rename_new(source, target)

    monkeypatch.setattr(disk, "rename_new", late)

    promoted = renaming.promote(replacement.key)

    assert slept
    assert promoted.outcome is Outcome.ALREADY_PROMOTED
    assert words() == [(1, "r2a1")]
    assert renaming.beside("superseded") == {"superseded/00000001.r1"}
    assert renaming.differences() == []


def test_r3_the_tombstone_is_no_revision(renaming: Bench) -> None:
    """It keeps the name and nothing else: it is swept once, and nobody reads it."""
    first = renaming.committed()
    renaming.replaced()
    renaming.age()

    gone = renaming.sweep()

    folder = Path(f"{renaming.lake.location()}.twophase/superseded/00000001.r1")
    assert gone == ["00000001.r1", "00000001.r1.a1.json"]
    assert [path.name for path in folder.iterdir()] == ["_swept"]
    assert renaming.lake.where(renaming.output(first.key)) is None
    assert renaming.sweep() == []
    assert renaming.beside("taken") == set()
