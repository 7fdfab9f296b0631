"""Rules R1 and R2 where a folder was there before the pipeline: adopted, replaced, put away."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import SCHEMA, stage_rows, visible
from support.pipelines.replacement_bench import durable
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.files import foreign_folder
from twophase.sinks.files.sink import Files
from twophase.sinks.staged_files.layout import Marker, markers

DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"


class Slotted:
    """A table with slot folders, one of which somebody else wrote."""

    def __init__(self, pattern: str) -> None:
        self.sink = Files("lake/days", slot_folder=pattern, adopt=True)
        self.sink.prepare()
        self.folder = Path(self.sink.location()) / "dt=2026-11-15"

    def write(self) -> None:
        """Write what somebody else did."""
        self.stage(self.folder, "theirs")

    def stage(self, folder: Path, word: str) -> None:
        handle = {"table": str(folder.parent / "unused"), "name": folder.name}
        stage_rows(self.sink, handle, "part", [{"id": 1, "word": word, "frequency": 1}], 1)
        (folder.parent / "unused.twophase/staging" / folder.name).rename(folder)
        shutil.rmtree(folder.parent / "unused.twophase")

    def staged(self, key: Key, older: Output | None = None) -> Output:
        output = Output(key, 1, self.sink.place(key, 1, "7c1e", slot=DAY, older=older), sink="lake")
        stage_rows(self.sink, output.handle, "part", [{"id": 1, "word": f"r{key.revision}", "frequency": 1}], 1)
        return replace(output, manifest=self.sink.seal(output, SCHEMA))

    def promote(self, output: Output) -> Promotion:
        return self.sink.promote(output)


@pytest.fixture
def slotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slotted:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    made = Slotted("dt={start:%Y-%m-%d}")
    made.write()
    return made


def test_r1_an_adopted_folder_is_replaced_and_put_away_like_any_revision(slotted: Slotted) -> None:
    adopted = slotted.sink.adopt(Key("days", 1, 0), DAY)
    assert adopted is not None
    first = slotted.staged(Key("days", 1, 1), adopted)

    promoted = slotted.promote(first)

    assert promoted.outcome is Outcome.PROMOTED
    assert [row["word"] for row in visible("lake/days")] == ["r1"]
    assert slotted.sink.where(adopted) == Path(f"{slotted.sink.location()}.twophase/superseded/00000001.r0")
    assert all(Path(path).exists() for path in slotted.sink.files(adopted))


def test_r1_adopting_again_gives_the_same_whoever_died_in_between(slotted: Slotted) -> None:
    one, two = (slotted.sink.adopt(Key("days", 1, 0), DAY) for _ in range(2))
    (slotted.folder / "part-late.parquet").write_bytes(next(slotted.folder.glob("*.parquet")).read_bytes())
    three = slotted.sink.adopt(Key("days", 1, 0), DAY)

    assert one == two
    assert one is not None
    assert three is not None
    assert (one.manifest["files"], three.manifest["files"]) == (1, 2)
    assert three.manifest["digest"] in {marker.digest for marker in markers(slotted.folder)}


def test_r1_an_adopter_that_wakes_after_the_slot_was_replaced_changes_nothing(
    slotted: Slotted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had opened the folder; then another run took over, adopted it, and put revision 1 in its place."""
    describe = foreign_folder.describe
    adopted: list[Output] = []

    def late(*args: Any) -> Any:
        monkeypatch.setattr(foreign_folder, "describe", describe)
        found = slotted.sink.adopt(Key("days", 1, 0), DAY)
        assert found is not None
        adopted.append(found)
        slotted.promote(slotted.staged(Key("days", 1, 1), found))
        return describe(*args)

    monkeypatch.setattr(foreign_folder, "describe", late)

    slotted.sink.adopt(Key("days", 1, 0), DAY)

    (recorded,) = adopted
    assert slotted.sink.where(recorded) is not None
    assert all(Path(path).exists() for path in slotted.sink.files(recorded))


def test_r1_an_adopter_that_wakes_leaves_the_marker_that_another_one_recorded(
    slotted: Slotted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had described the folder; then one more file came, and another run adopted both and went on from there."""
    mark = foreign_folder.Foreign.mark
    adopted: list[Output] = []

    def late(folder: foreign_folder.Foreign, marker: Marker) -> None:
        monkeypatch.setattr(foreign_folder.Foreign, "mark", mark)
        (slotted.folder / "part-late.parquet").write_bytes(next(slotted.folder.glob("*.parquet")).read_bytes())
        found = slotted.sink.adopt(Key("days", 1, 0), DAY)
        assert found is not None
        adopted.append(found)
        mark(folder, marker)

    monkeypatch.setattr(foreign_folder.Foreign, "mark", late)

    slotted.sink.adopt(Key("days", 1, 0), DAY)

    (recorded,) = adopted
    assert recorded.manifest["files"] == 2
    first = slotted.staged(Key("days", 1, 1), recorded)
    slotted.sink.check(first)
    assert slotted.promote(first).outcome is Outcome.PROMOTED
    assert slotted.sink.where(recorded) is not None


def test_r2_every_folder_that_a_promotion_makes_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of slot folders that lie deeper, each one above that is new has to be in its own parent for good."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    deeper = Slotted("year={start:%Y}/month={start:%m}/day={start:%d}")
    staged = deeper.staged(Key("days", 1, 1))
    found = durable(monkeypatch)

    promoted = deeper.promote(staged)

    table = deeper.sink.location()
    assert promoted.outcome is Outcome.PROMOTED
    assert {table, f"{table}/year=2026", f"{table}/year=2026/month=11"} <= set(found)
