"""Rules R1, R3, R11 and R17 between any two steps of a promotion: stopped, killed, late, looked at."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import SCHEMA, stage_rows
from support.pipelines.replacement_bench import Killed
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.base import Superseded
from twophase.sinks.files.sink import Files
from twophase.sinks.staged_files.layout import markers
from twophase.storage import disk


class Actor(threading.Thread):
    """A process that stops before each step on the file system until it is told to go on."""

    def __init__(self, body: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.body = body
        self.result: Any = None
        self.error: BaseException | None = None
        self.steps = 0
        self.done = False
        self.killed = False
        self._budget: int | None = 0
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        self._turn.acquire()
        try:
            self.result = self.body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the test judges it
            self.error = error
        self.done = True
        self._back.release()

    def go(self, steps: int | None = None) -> None:
        """Let it take some steps, or all that are left."""
        if not self.done:
            self._budget = steps
            self._turn.release()
            self._back.acquire()

    def kill(self) -> None:
        self.killed = True
        self.go()

    def pause(self) -> None:
        if self._budget == 0:
            self._back.release()
            self._turn.acquire()
        if self.killed:
            raise Killed
        self.steps += 1
        if self._budget is not None:
            self._budget -= 1


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actors stop before each step of a promoter on the file system."""

    def stopping(function: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*args: Any, **kwargs: Any) -> Any:
            actor = threading.current_thread()
            if isinstance(actor, Actor):
                actor.pause()
            return function(*args, **kwargs)

        return stopped

    for owner, name in ((Path, "rename"), (Path, "exists"), (os, "listdir"), (os, "scandir"), (disk, "_rename_with")):
        monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))


class Table:
    """A table with revision 1 in it, and revisions 2 and 3 staged, copied afresh for each case."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sink = Files(str(folder / "base" / "t"))
        self.sink.prepare()
        self.outputs: dict[int, Output] = {}
        older = None
        for revision in (1, 2, 3):
            key = Key("words", 1, revision)
            output = Output(key, 1, self.sink.place(key, 1, "7c1e", older=older), sink="lake")
            rows = [{"id": number, "word": f"r{revision}", "frequency": 1} for number in range(2)]
            stage_rows(self.sink, output.handle, f"part-r{revision}-a1", rows, 2)
            older = self.outputs[revision] = replace(output, manifest=self.sink.seal(output, SCHEMA))
            if revision == 1:
                self.sink.promote(older)
        self.cases = 0

    def case(self) -> Case:
        self.cases += 1
        place = self.folder / f"case{self.cases}"
        shutil.copytree(self.folder / "base", place, copy_function=os.link)
        return Case(place / "t", self.outputs)


class Case:
    """One copy of it."""

    def __init__(self, table: Path, outputs: dict[int, Output]) -> None:
        self.table = table
        self.side = table.with_name("t.twophase")
        self.sink = Files(str(table))
        self.outputs = {
            revision: replace(output, handle={**output.handle, "table": str(table)})
            for revision, output in outputs.items()
        }

    def promoter(self, revision: int = 2) -> Actor:
        return Actor(lambda: self.sink.promote(self.outputs[revision]))

    def finder(self, revision: int = 1) -> Actor:
        return Actor(lambda: self.sink.where(self.outputs[revision]))

    def promote(self, revision: int = 2) -> Promotion:
        return self.sink.promote(self.outputs[revision])

    def shown(self) -> int:
        """Return the revision that readers see; it is whole."""
        folder = self.table / "checkpoint=00000001"
        (marker,) = markers(folder)
        assert list(self.sink.verify(self.outputs[marker.revision])) == []
        return marker.revision

    def put_away(self, *revisions: int) -> None:
        """See that these revisions, and no others, lie where they are put when they were replaced, each whole."""
        assert {path.name for path in (self.side / "superseded").iterdir()} == {f"00000001.r{n}" for n in revisions}
        for revision in revisions:
            assert self.sink.where(self.outputs[revision]) == self.side / f"superseded/00000001.r{revision}"
            assert all(Path(path).exists() for path in self.sink.files(self.outputs[revision]))

    def left(self) -> list[str]:
        """Return what of revision 2 is left beside the table."""
        return [
            path.name for kind in ("staging", "taken") for path in (self.side / kind).iterdir() if ".r2." in path.name
        ]

    def close(self) -> None:
        shutil.rmtree(self.table.parent)


@pytest.fixture
def table(tmp_path: Path, stepping: None) -> Table:
    return Table(tmp_path)


@pytest.fixture
def steps(table: Table) -> int:
    """Return how many steps a promoter of a replacement takes when nobody is in its way."""
    alone = table.case().promoter()
    alone.go()
    assert alone.error is None
    assert alone.result.outcome is Outcome.PROMOTED
    return alone.steps


DONE = {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}


@pytest.mark.parametrize("more", [0, 1], ids=["then to its end", "then one step more"])
def test_r1_two_promoters_stopped_between_any_two_steps_exchange_once(table: Table, steps: int, more: int) -> None:
    """The first one is stopped anywhere, then the second one; whoever goes on first, the old revision is not back."""
    for mine in range(steps + 1):
        for yours in range(steps + 1):
            case = table.case()
            one, two = case.promoter(), case.promoter()
            one.go(mine)
            two.go(yours)
            if more:
                one.go(more)
            for actor in (two, one) if more or (mine + yours) % 2 else (one, two):
                actor.go()
            last = case.promote()

            assert [one.error, two.error] == [None, None], (mine, yours)
            assert {one.result.outcome, two.result.outcome} <= DONE, (mine, yours)
            assert last.outcome is Outcome.ALREADY_PROMOTED, (mine, yours)
            assert case.shown() == 2, (mine, yours)
            case.put_away(1)
            assert case.left() == [], (mine, yours)
            case.close()


def test_r1_a_promoter_whose_folder_is_taken_by_another_starts_over(table: Table, steps: int) -> None:
    """Also when that happens right after it took it, before it looked at it."""
    broken = []
    for mine in range(steps + 1):
        case = table.case()
        one = case.promoter()
        one.go(mine)
        case.promote()
        one.go()
        broken += [(mine, one.error)] if one.error else []
        case.close()

    assert broken == []


def test_r1_a_promoter_killed_at_any_step_is_followed_by_one_that_finishes(table: Table, steps: int) -> None:
    for mine in range(steps + 1):
        case = table.case()
        one = case.promoter()
        one.go(mine)
        one.kill()
        before = case.shown()
        outcome = case.promote().outcome

        assert before in {1, 2}
        assert outcome in DONE, mine
        assert case.shown() == 2, mine
        case.put_away(1)
        assert case.left() == [], mine
        case.close()


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_r1_r3_a_late_promoter_changes_nothing_wherever_it_was_stopped(
    table: Table, steps: int, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Another finished its work, a third revision took its place, and retention swept the first one."""
    if not exchanges:
        monkeypatch.setattr(disk, "_renameat2", None)
    for mine in range(steps + 1):
        case = table.case()
        late = case.promoter()
        late.go(mine)
        case.promote()
        case.promote(3)
        case.sink.forget(Superseded(1, 1, str(case.side / "superseded/00000001.r1")))

        late.go()

        assert case.shown() == 3, mine
        assert case.sink.where(case.outputs[2]) == case.side / "superseded/00000001.r2", mine
        assert late.error is None, mine
        assert late.result.outcome in DONE, mine
        case.close()


def test_r11_a_sweeper_after_the_commit_leaves_what_an_exchange_brought_out(table: Table, steps: int) -> None:
    """One promoter sleeps anywhere, another one finishes; then all that the revision left beside the table is dead."""
    for mine in range(steps + 1):
        case = table.case()
        late = case.promoter()
        late.go(mine)
        case.promote()
        for left in list(case.sink.attempts()):
            if left.revision == 2 and not left.manifest:
                case.sink.remove(left)

        late.go()

        assert case.shown() == 2, mine
        case.put_away(1)
        assert case.left() == [], mine
        case.close()


def test_r17_readers_see_one_whole_revision_at_every_step_and_the_old_one_can_be_read_throughout(
    table: Table, steps: int
) -> None:
    seen = []
    for mine in range(steps + 1):
        case = table.case()
        one = case.promoter()
        one.go(mine)
        seen.append(case.shown())

        assert all(Path(path).exists() for path in case.sink.files(case.outputs[1])), mine
        one.kill()
        case.close()

    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
def test_r17_whoever_looks_for_the_old_revision_while_it_moves_finds_it(
    table: Table, steps: int, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """It is met somewhere, however its way and the reader's cross."""
    if not exchanges:
        monkeypatch.setattr(disk, "_renameat2", None)
    for mine in range(steps + 1):
        for looked in range(6):
            case = table.case()
            one, reader = case.promoter(), case.finder()
            one.go(mine)
            reader.go(looked)
            one.go()
            reader.go()

            assert reader.error is None
            assert reader.result is not None, (mine, looked)
            case.close()
