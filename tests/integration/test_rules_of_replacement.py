"""The rules that model checking asked for, for replacement: each test goes red when its rule is left out."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pytest
from sqlalchemy import text

from support.pipelines.factories import SCHEMA, land_words, stage_rows, visible, words_pipeline
from twophase import Pipeline
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Input, Json, Key, Known, Output, Participant, Revision, Run
from twophase.core.coordinator import Coordinator
from twophase.core.errors import Busy, ConfigError, Fenced, IllegalTransition, Parked, PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome, Progress, Promotion
from twophase.core.recovery import recover
from twophase.core.states import State
from twophase.maintenance import sweep, verify
from twophase.runner import enter
from twophase.sinks.base import Attempt, Superseded
from twophase.sinks.files import foreign
from twophase.sinks.files.sink import Files
from twophase.sinks.staged_files.layout import Marker, markers
from twophase.storage import disk

ME = Run("dag", "run_1")
OTHER = Run("dag", "run_2")
DAY = "2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00"


class Flaky(Files):
    """A table that is down for the revisions it is told."""

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.down: set[tuple[int, int]] = set()

    def promote(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        if (key.checkpoint_id, key.revision) in self.down:
            return Promotion(Outcome.RETRY_LATER, "the disk is away")
        return super().promote(key, handle, manifest)


class Offsets:
    """A source of one partition that has grown to `end`."""

    settles = False
    per_revision = False

    def __init__(self) -> None:
        self.end = 10

    def discover(self, slot: str | None = None, known: Known | None = None) -> int:
        return self.end

    def fix(self, found: int, progress: Progress) -> Input:
        return Input(ranges={"0": (progress.position().get("0", 0), found)})

    def written_again(self, fixed: Any) -> list[Any]:
        return []

    def settle(self, checkpoint_id: int, files: Any) -> None:
        raise AssertionError


class Bench:
    """One pipeline with the tables `lake` and `copy`, and what a test does with it."""

    def __init__(self, record: PostgresRecord) -> None:
        self.record = record
        self.name = f"words_{uuid.uuid4().hex[:8]}"
        self.lake, self.copy = Flaky("lake/words"), Flaky("lake/copy")
        self.pipeline: Pipeline = words_pipeline(self.name, writes={"lake": self.lake, "copy": self.copy})
        self.pipeline.prepare()
        enter(record, self.pipeline)
        self.ended: dict[Run | None, bool | None] = {}
        self.coordinator = self.process()
        self.landed = 0

    def process(self, **kwargs: Any) -> Coordinator:
        """Return a coordinator as another process would have it."""
        parts: dict[str, Any] = {"sources": self.pipeline.reads, "sinks": self.pipeline.writes, "lease": 60.0}
        return Coordinator(self.record, self.name, run_ended=self.ended.get, patience=(), **{**parts, **kwargs})

    def key(self, checkpoint_id: int, revision: int = 1) -> Key:
        return Key(self.name, checkpoint_id, revision)

    def begin(self, run: Run = ME) -> Revision:
        """Land a file, and take a checkpoint."""
        land_words(start=self.landed, rows=2)
        self.landed += 1
        taken = self.coordinator.begin(run)
        assert taken is not None
        return taken

    def stage(self, revision: Revision) -> Revision:
        """Stage every output that has no vote yet, and vote yes for it."""
        for participant in self.participants(revision.key).values():
            if participant.vote is None:
                self.vote(revision, participant)
        return self.read(revision.key)

    def vote(self, revision: Revision, participant: Participant) -> None:
        """Stage one output, check it, and vote yes for it."""
        manifest = self.write(revision, participant)
        self.sink(participant.name).check(revision.key, participant.handle, manifest)
        self.coordinator.vote(revision, participant.name, yes=True, manifest=manifest)

    def write(self, revision: Revision, participant: Participant) -> Json:
        """Write what Spark would: one row that says which revision and attempt it is from."""
        name = f"r{revision.revision}a{participant.attempt}"
        rows = [{"id": revision.checkpoint_id, "word": name, "frequency": 1}]
        sink = self.sink(participant.name)
        prefix = f"part-r{revision.revision}-a{participant.attempt}"
        stage_rows(sink, participant.handle, prefix, rows, 1)
        return sink.seal(revision.key, participant.attempt, participant.name, participant.handle, SCHEMA)

    def sink(self, name: str) -> Flaky:
        return {"lake": self.lake, "copy": self.copy}[name]

    def precommitted(self, revision: Revision | None = None) -> Revision:
        """Take a revision up to where everybody has voted yes."""
        return self.stage(self.coordinator.attempt(revision or self.begin()))

    def committed(self) -> Revision:
        """Take a new checkpoint all the way."""
        return self.coordinator.commit(self.precommitted())

    def replace(self, checkpoint_id: int = 1, run: Run = ME) -> Revision:
        """Begin a replacement."""
        return self.coordinator.replace(run, checkpoint_id)

    def replacing(self, checkpoint_id: int = 1) -> Revision:
        """Take a replacement just past its commit point."""
        revision = self.precommitted(self.replace(checkpoint_id))
        self.coordinator.decide_commit(revision)
        return self.read(revision.key)

    def replaced(self, checkpoint_id: int = 1) -> Revision:
        """Take a replacement all the way."""
        return self.coordinator.commit(self.precommitted(self.replace(checkpoint_id)))

    def staged(self, key: Key, name: str = "lake") -> Path:
        """Return the staging folder that the record names for a sink."""
        handle = self.participants(key)[name].handle
        return Path(f"{handle['table']}.twophase/staging/{handle['name']}")

    def lose(self, key: Key, name: str = "lake") -> Path:
        """Move a staged folder away; return where it is now."""
        staged = self.staged(key, name)
        return staged.rename(staged.parents[2] / f"lost-{staged.name}")

    def read(self, key: Key) -> Revision:
        with self.record.transaction() as tx:
            return tx.revision(key)

    def participants(self, key: Key) -> dict[str, Participant]:
        with self.record.transaction() as tx:
            return {participant.name: participant for participant in tx.participants(key)}

    def output(self, key: Key, name: str = "lake") -> Output:
        found = self.participants(key)[name]
        return Output(key, found.attempt, found.handle, found.manifest)

    def promote(self, key: Key, name: str = "lake") -> Promotion:
        """Promote one sink as another process would, without a word to the record."""
        found = self.participants(key)[name]
        return Files.promote(self.sink(name), key, found.handle, found.manifest)

    def events(self, key: Key) -> list[str]:
        with self.record.engine.connect() as connection:
            found = queries.show(connection, self.name, key.checkpoint_id)["events"]
        return [event["action"] for event in found if event["revision"] == key.revision]

    def sql(self, statement: str) -> Any:
        """Do something behind the protocol's back; `:p` is the name of the pipeline."""
        with self.record.engine.begin() as connection:
            found = connection.execute(text(statement), {"p": self.name} if ":p" in statement else {})
            return found.scalar() if found.returns_rows else None

    def age(self, days: int = 30) -> None:
        """Let everything that was superseded have been so for some days."""
        self.sql(
            f"UPDATE twophase.revision SET superseded_at = superseded_at - interval '{days} days' WHERE pipeline = :p"
        )

    def sweep(self) -> list[str]:
        """Sweep; return the names of what went from the table `lake` or beside it."""
        swept = list(sweep(self.record, self.pipeline))
        return sorted(Path(one.path).name for one in swept if one.sink == "lake")

    def beside(self, *kinds: str) -> set[str]:
        """Return what lies beside the table `lake`."""
        side = Path(f"{self.lake.location()}.twophase")
        return {f"{kind}/{path.name}" for kind in kinds for path in (side / kind).iterdir()}

    def differences(self) -> list[object]:
        return [found for found in verify(self.record, self.pipeline) if found]


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def bench(record: PostgresRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Return a pipeline of this test's own, with two tables."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    yield Bench(record)
    failpoints.configure("")


@pytest.fixture
def renaming(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return the same on a file system that cannot exchange two folders."""
    monkeypatch.setattr(disk, "_renameat2", None)
    return bench


def words(table: str = "lake/words") -> list[tuple[int, str]]:
    """Return what a reader of a table sees: checkpoint, and the revision and attempt it is from."""
    return sorted((row["id"], row["word"]) for row in visible(table))


# --- any two steps ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


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
            handle = self.sink.place(key, 1, "7c1e", older=older)
            rows = [{"id": number, "word": f"r{revision}", "frequency": 1} for number in range(2)]
            stage_rows(self.sink, handle, f"part-r{revision}-a1", rows, 2)
            older = self.outputs[revision] = Output(key, 1, handle, self.sink.seal(key, 1, "lake", handle, SCHEMA))
            if revision == 1:
                self.sink.promote(key, handle, older.manifest)
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
            revision: output._replace(handle={**output.handle, "table": str(table)})
            for revision, output in outputs.items()
        }

    def promoter(self, revision: int = 2) -> Actor:
        key, _, handle, manifest = self.outputs[revision]
        return Actor(lambda: self.sink.promote(key, handle, manifest))

    def finder(self, revision: int = 1) -> Actor:
        return Actor(lambda: self.sink.where(self.outputs[revision]))

    def promote(self, revision: int = 2) -> Promotion:
        key, _, handle, manifest = self.outputs[revision]
        return self.sink.promote(key, handle, manifest)

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


# --- R1: take, look, put away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["promote.taken", "promote.checked", "promote.visible", "promote.superseded"])
def test_r1_what_a_killed_promoter_left_is_found_by_its_marker(bench: Bench, point: str) -> None:
    bench.committed()
    replacement = bench.replacing()
    failpoints.configure(f"{point}=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.finish(replacement.key)
    failpoints.configure("")

    recover(bench.process(), decided_only=True)

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
        Files.promote(bench.lake, replacement.key, first.handle, first.manifest)
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


def durable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each folder that is made durable."""
    found: list[str] = []
    monkeypatch.setattr(disk, "fsync_folder", lambda path: found.append(str(path)))
    return found


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

    promoted.append(bench.lake.find(replacement.key, mine.handle, mine.manifest).outcome)
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

    recover(renaming.process(), decided_only=True)

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


# --- R4: a replacement needs something to replace, and moves no position ----------------------------------------------


def test_r4_a_replacement_leaves_positions_and_files_to_their_checkpoint(bench: Bench) -> None:
    topic = Offsets()
    bench.coordinator = bench.process(sources={**bench.pipeline.reads, "topic": topic})
    bench.committed()
    topic.end = 20
    bench.committed()
    query = "SELECT array_agg(path || ' ' || checkpoint_id ORDER BY path) FROM twophase.input_file WHERE pipeline = :p"
    before = bench.sql(query)
    topic.end = 30

    bench.replaced(1)

    with bench.record.transaction() as tx:
        assert tx.position(bench.name, "topic") == {"0": 20}
        assert tx.inputs(bench.key(1, 2))["topic"].ranges == {"0": (0, 10)}
    assert bench.sql(query) == before == ["000000.json 1", "000001.json 2"]
    assert words() == [(1, "r2a1"), (2, "r1a1")]


def test_r4_a_replacement_of_an_older_checkpoint_is_not_refused_by_the_position(bench: Bench) -> None:
    """Principle 2: committed means that this checkpoint is recorded, not that a larger one is."""
    bench.coordinator = bench.process(sources={"topic": Offsets()})
    bench.committed()

    assert bench.replaced(1).state is State.COMMITTED
    assert bench.replaced(1).revision == 3


@pytest.mark.parametrize("state", [State.ABORTED, None], ids=["aborted", "unknown"])
def test_r4_what_has_no_committed_revision_cannot_be_replaced(bench: Bench, state: State | None) -> None:
    if state is State.ABORTED:
        bench.coordinator.abort(bench.begin(), "failed")

    with pytest.raises(ConfigError, match=r"nothing of it is committed|it is not in the record"):
        bench.replace(1)

    assert bench.sql("SELECT count(*) FROM twophase.revision WHERE pipeline = :p") == (1 if state else 0)


def test_r4_an_aborted_replacement_leaves_the_checkpoint_committed_and_replaceable(bench: Bench) -> None:
    first = bench.committed()
    bench.coordinator.abort(bench.precommitted(bench.replace()), "failed")

    done = bench.replaced()

    assert (done.revision, done.state) == (3, State.COMMITTED)
    assert bench.read(first.key).state is State.SUPERSEDED
    assert words() == [(1, "r3a1")]
    assert bench.beside("superseded") == {"superseded/00000001.r1"}


# --- R5: one live revision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED])
def test_r5_a_replacement_that_is_under_way_is_not_begun_beside(bench: Bench, state: State) -> None:
    bench.committed()
    live = bench.replace()
    if state is State.PRECOMMITTED:
        live = bench.precommitted(live)

    with pytest.raises(Busy, match="run dag/run_1 works on it"):
        bench.process().replace(OTHER, 1)
    with pytest.raises(IllegalTransition, match="revision_one_live"), bench.record.transaction() as tx:
        tx.add_revision(bench.name, 1, "backfill", OTHER, 60.0)

    assert bench.read(live.key).state is state
    assert words() == [(1, "r1a1")]


def test_r5_a_replacement_that_is_decided_is_promoted_before_the_next_one_begins(bench: Bench) -> None:
    bench.committed()
    bench.lake.down = {(1, 2)}
    decided = bench.replacing()

    with pytest.raises(PromotionPending, match=r"/1 r2: it is decided and not promoted yet"):
        bench.process().replace(OTHER, 1)
    bench.lake.down = set()
    third = bench.process().replace(OTHER, 1)

    assert bench.read(decided.key).state is State.COMMITTED
    assert third.key == bench.key(1, 3)


def test_r5_a_checkpoint_whose_first_revision_is_live_is_not_replaced(bench: Bench) -> None:
    live = bench.begin()

    with pytest.raises(Busy):
        bench.process().replace(OTHER, 1)

    assert bench.sql("SELECT count(*) FROM twophase.revision WHERE pipeline = :p") == 1
    assert bench.read(live.key).run == ME


def test_r5_a_replacement_that_is_being_aborted_does_not_stand_in_the_way(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.replace())
    failpoints.configure("abort.after=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.abort(replacement, "failed")
    failpoints.configure("")

    third = bench.replace()

    assert third.key == bench.key(1, 3)
    assert bench.coordinator.commit(bench.precommitted(third)).state is State.COMMITTED
    assert words() == [(1, "r3a1")]


# --- R6: markers are for ever, and name their revision ----------------------------------------------------------------


def test_r6_the_rows_of_every_revision_stay_whatever_is_replaced_and_swept(bench: Bench) -> None:
    bench.committed()
    bench.replaced()
    bench.replaced()
    bench.age()
    bench.sweep()

    rows = bench.sql("SELECT array_agg(operator_id || ' r' || revision) FROM twophase.committed WHERE job_id = :p")
    assert sorted(rows) == ["copy r1", "copy r2", "copy r3", "lake r1", "lake r2", "lake r3"]
    for change in ("DELETE FROM twophase.committed", "UPDATE twophase.committed SET revision = 9"):
        with pytest.raises(Exception, match="its rows are never changed"):
            bench.sql(f"{change} WHERE job_id = :p")


def test_r6_the_marker_of_what_is_replaced_is_not_this_ones(bench: Bench) -> None:
    bench.committed()
    replacement = bench.replacing()
    mine = bench.participants(replacement.key)["lake"]

    found = bench.lake.find(replacement.key, mine.handle, mine.manifest)

    assert found.outcome is Outcome.RETRY_LATER
    assert "staged at" in (found.reason or "")


def test_r6_the_marker_of_a_later_revision_says_that_this_one_was_promoted(bench: Bench) -> None:
    first = bench.committed()
    bench.replaced()

    assert bench.promote(first.key).outcome is Outcome.ALREADY_PROMOTED
    assert words() == [(1, "r2a1")]


def test_r6_a_folder_that_is_not_the_one_to_be_replaced_is_left_alone(bench: Bench) -> None:
    """Somebody put something else in its place after the vote: a person has to look."""
    bench.committed()
    replacement = bench.replacing()
    shown = Path(bench.lake.location()) / "checkpoint=00000001"
    shown.rename(shown.with_name("elsewhere"))
    shown.mkdir()
    (shown / "notes.txt").write_text("mine")

    with pytest.raises(Parked, match=r"folder .* is there already, with no marker"):
        bench.coordinator.finish(replacement.key)

    assert (shown / "notes.txt").exists()
    assert bench.staged(replacement.key).exists()


def test_r6_the_marker_of_another_slot_in_the_same_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours of a day give one folder, as a wrong pattern may have it; each was voted for when it was free."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    sink = Files("lake/hours", slot_folder="dt={start:%Y-%m-%d}")
    sink.prepare()

    def staged(key: Key, hour: int, older: Output | None = None) -> Output:
        slot = f"2026-11-15T{hour:02d}:00:00+00:00/2026-11-15T{hour + 1:02d}:00:00+00:00"
        handle = sink.place(key, 1, "7c1e", slot=slot, older=older)
        stage_rows(sink, handle, "part", [{"id": hour, "word": "w", "frequency": 1}], 1)
        manifest = sink.seal(key, 1, "lake", handle, SCHEMA)
        sink.check(key, handle, manifest)
        return Output(key, 1, handle, manifest)

    voted = staged(Key("hours", 2, 1), 1)
    other = staged(Key("hours", 1, 1), 0)
    sink.promote(other.key, other.handle, other.manifest)
    newer = staged(Key("hours", 1, 2), 0, other)
    sink.promote(newer.key, newer.handle, newer.manifest)

    promoted = sink.promote(voted.key, voted.handle, voted.manifest)

    assert [row["id"] for row in visible("lake/hours")] == [0]
    assert promoted.outcome is Outcome.FAILED


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
    recover(bench.process(), decided_only=True)
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
    recover(bench.coordinator, decided_only=True)
    lost.rename(bench.staged(replacement.key))

    recover(bench.coordinator, decided_only=True)

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
    Files.promote(bench.lake, replacement.key, first.handle, first.manifest)

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
    Files.promote(bench.lake, replacement.key, first.handle, first.manifest)

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

    recover(bench.process(), decided_only=True)

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

    recover(bench.process(), decided_only=True)

    assert between == [State.COMMITTED, State.COMMITTING]
    assert shown == [(1, "r2a1")]
    assert [bench.read(key).state for key in (first.key, replacement.key)] == [State.SUPERSEDED, State.COMMITTED]


def test_r14_a_late_finisher_of_a_replacement_finds_it_done_and_touches_nothing(bench: Bench) -> None:
    """Stopped before its last step; meanwhile somebody finished, and a third revision took its place."""
    bench.committed()
    replacement = bench.replaced()
    third = bench.replaced()
    before = [bench.events(key) for key in (replacement.key, third.key)]

    bench.coordinator._mark_committed(replacement.key)
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

    bench.lake.seal(revision.key, 1, "lake", mine.handle, SCHEMA)

    names = sorted(path.name for path in bench.staged(revision.key).glob("*.parquet"))
    assert names == ["part-r2-a1-00000.parquet", "part-r2-a1-00001.parquet"]


# --- slots: what was there before us ----------------------------------------------------------------------------------


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
        handle = self.sink.place(key, 1, "7c1e", slot=DAY, older=older)
        stage_rows(self.sink, handle, "part", [{"id": 1, "word": f"r{key.revision}", "frequency": 1}], 1)
        return Output(key, 1, handle, self.sink.seal(key, 1, "lake", handle, SCHEMA))

    def promote(self, output: Output) -> Promotion:
        return self.sink.promote(output.key, output.handle, output.manifest)


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
    describe = foreign.describe
    adopted: list[Output] = []

    def late(*args: Any) -> Any:
        monkeypatch.setattr(foreign, "describe", describe)
        found = slotted.sink.adopt(Key("days", 1, 0), DAY)
        assert found is not None
        adopted.append(found)
        slotted.promote(slotted.staged(Key("days", 1, 1), found))
        return describe(*args)

    monkeypatch.setattr(foreign, "describe", late)

    slotted.sink.adopt(Key("days", 1, 0), DAY)

    (recorded,) = adopted
    assert slotted.sink.where(recorded) is not None
    assert all(Path(path).exists() for path in slotted.sink.files(recorded))


def test_r1_an_adopter_that_wakes_leaves_the_marker_that_another_one_recorded(
    slotted: Slotted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had described the folder; then one more file came, and another run adopted both and went on from there."""
    mark = foreign.Foreign.mark
    adopted: list[Output] = []

    def late(folder: foreign.Foreign, marker: Marker) -> None:
        monkeypatch.setattr(foreign.Foreign, "mark", mark)
        (slotted.folder / "part-late.parquet").write_bytes(next(slotted.folder.glob("*.parquet")).read_bytes())
        found = slotted.sink.adopt(Key("days", 1, 0), DAY)
        assert found is not None
        adopted.append(found)
        mark(folder, marker)

    monkeypatch.setattr(foreign.Foreign, "mark", late)

    slotted.sink.adopt(Key("days", 1, 0), DAY)

    (recorded,) = adopted
    assert recorded.manifest["files"] == 2
    first = slotted.staged(Key("days", 1, 1), recorded)
    slotted.sink.check(first.key, first.handle, first.manifest)
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
