"""The model's promoter is a copy of the shipped one over folders in memory: from any state both do the same."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.model.memory_ports import TOMBSTONE, Folder, MemoryPromoter, MemorySink
from support.model.memory_ports import Marker as MemoryMarker
from support.pipelines.factories import SCHEMA, stage_rows
from twophase.core.checkpoint import Json, Key, Output
from twophase.core.ports import Promotion
from twophase.sinks.files.promotion import FilesPromoter
from twophase.sinks.files.sink import Files
from twophase.sinks.staged_files.layout import FilesPaths, Marker, markers
from twophase.storage import disk

#: What may lie in a place: the output of a revision and attempt, whole or not; a folder without a marker; a tombstone.
OLD, EARLIER, OURS, LATER = (1, 1), (2, 1), (2, 2), (3, 1)
OUTPUTS = (OLD, EARLIER, OURS, LATER)
SHORT, STRAY, BARE, TOMB = "a file is missing", "a file too many", "no marker", "tombstone"
STAGED = (None, OURS, SHORT, STRAY, BARE)
TAKEN = (None, OURS, OLD, BARE)
VISIBLE = (None, OLD, EARLIER, OURS, LATER, BARE)
#: Where a replaced revision was put away: of what, and what lies there.
PUT_AWAY = (None, (1, OLD), (1, TOMB), (2, OURS), (2, TOMB))
KEY = Key("p", 1, 2)


class State(NamedTuple):
    """What lies where when a promoter comes."""

    staged: Any
    taken: Any
    visible: Any
    put_away: Any


class Result(NamedTuple):
    """What a promoter said, did and left."""

    outcome: str
    attempt: int | None
    told_anew: bool
    steps: list[str]
    left: dict[str, Any]


STATES = [State(*state) for state in itertools.product(STAGED, TAKEN, VISIBLE, PUT_AWAY)]
ALONE, EXCHANGING, RENAMING = "first", "exchanged", "renamed twice"


def result(promoted: Promotion, steps: list[str], left: dict[str, Any]) -> Result:
    runs = [step for step, _ in itertools.groupby(steps)]
    return Result(promoted.outcome.name, promoted.attempt, promoted.manifest is not None, runs, left)


# --- the shipped one, on a disk --------------------------------------------------------------------------------------


class Shipped:
    """The shipped promoter, and what it is to find."""

    def __init__(self, folder: Path, way: str, steps: list[str]) -> None:
        self.steps = steps
        self.sink = Files(str(folder / "table"))
        self.sink.prepare()
        self.made = folder / "made"
        self.summaries: dict[Any, Json] = {}
        for revision, attempt in OUTPUTS:
            key = Key("p", 1, revision)
            output = Output(key, attempt, self.sink.place(key, attempt, "7c1e"), sink="lake")
            stage_rows(
                self.sink,
                output.handle,
                f"part-r{revision}-a{attempt}",
                [{"id": attempt, "word": "w", "frequency": 1}],
                2,
            )
            self.summaries[revision, attempt] = self.sink.seal(output, SCHEMA)
            shutil.move(FilesPaths(key, output.handle).staged, self.made / f"{revision}.{attempt}")
        replaces = {} if way == ALONE else {"replaces": str(self.marker(OLD))}
        place = {**self.sink.place(KEY, OURS[1], "7c1e"), **replaces}
        earlier = (self.summaries[EARLIER]["digest"],)
        self.output = Output(KEY, OURS[1], place, self.summaries[OURS], earlier=earlier)
        self.paths = FilesPaths(KEY, place)

    def marker(self, output: Any) -> Marker:
        return Marker(output[0], output[1], self.summaries[output]["digest"])

    def put(self, what: Any, where: Path) -> None:
        if what in OUTPUTS or what in {SHORT, STRAY}:
            name = "{}.{}".format(*(what if what in OUTPUTS else OURS))
            shutil.copytree(self.made / name, where)
        if what in {BARE, TOMB}:
            where.mkdir()
        if what == SHORT:
            min(where.glob("*.parquet")).unlink()
        if what in {STRAY, BARE}:
            (where / "stray.parquet").write_text("x")
        if what == TOMB:
            (where / TOMBSTONE).touch()

    def run(self, state: State) -> list[Result]:
        paths = self.paths
        for folder in (
            paths.visible,
            *paths.taken.iterdir(),
            *paths.staged.parent.iterdir(),
            *paths.superseded(0).parent.iterdir(),
        ):
            shutil.rmtree(folder, ignore_errors=True)
        self.put(state.staged, paths.staged)
        self.put(state.taken, paths.taken / f"{paths.prefix}.other")
        self.put(state.visible, paths.visible)
        if state.put_away:
            self.put(state.put_away[1], paths.superseded(state.put_away[0]))
        return [self.act(FilesPromoter(self.output), name) for name in ("find", "promote")]

    def act(self, promoter: FilesPromoter, name: str) -> Result:
        self.steps.clear()
        promoted = getattr(promoter, name)()
        return result(promoted, list(self.steps), dict(self.left()))

    def left(self) -> Iterator[tuple[str, Any]]:
        taken = sorted(self.paths.taken.iterdir(), key=self.content)
        yield from (
            (f"taken {n}{folder.suffix * (folder.suffix == '.junk')}", self.content(folder))
            for n, folder in enumerate(taken)
        )
        places = {"visible": self.paths.visible, "staged": self.paths.staged}
        places |= {f"superseded r{revision}": self.paths.superseded(revision) for revision in (1, 2, 3)}
        yield from ((name, self.content(folder)) for name, folder in places.items() if folder.exists())

    @staticmethod
    def content(folder: Path) -> str:
        found = [f"r{marker.revision}a{marker.attempt}" for marker in markers(folder)]
        names = sorted(path.name.partition(".")[0] for path in folder.iterdir() if not Marker.parse(path.name))
        return " ".join(found + names)


@pytest.fixture(params=[ALONE, EXCHANGING, RENAMING])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shipped(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """Return the shipped promoter on a disk whose steps are noted; one without exchanges if that is the way."""
    steps: list[str] = []

    made = Shipped(tmp_path, way, steps)

    def noting(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Path | str, *more: Any) -> Any:
            if step != "fsync" or Path(path).parent != made.paths.taken:  # not of what a taken folder has in it
                steps.append(step)
            return function(path, *more)

        return noted

    exchange = disk.exchange if way != RENAMING else lambda *_: False
    monkeypatch.setattr(disk, "rename_new", noting("rename", disk.rename_new))
    monkeypatch.setattr(disk, "exchange", noting("exchange", exchange) if way != RENAMING else exchange)
    monkeypatch.setattr(disk, "fsync_folder", noting("fsync", lambda *_: None))
    monkeypatch.setattr(Path, "rename", noting("rename", Path.rename))
    return made


# --- the model's, in memory ------------------------------------------------------------------------------------------


class Modelled:
    """The model's promoter, and the same to find."""

    def __init__(self, way: str) -> None:
        self.steps: list[str] = []
        self.way = way

    def put(self, what: Any, where: str) -> None:
        if what is None:
            return
        names: dict[str, Any] = {}
        marker = None
        if what in OUTPUTS or what in {SHORT, STRAY}:
            marker = self.marker(what if what in OUTPUTS else OURS)
            names = dict(self.sink.manifests[marker.digest])
        if what == SHORT:
            names.pop(next(iter(names)))
        if what in {STRAY, BARE}:
            names["stray"] = ()
        if what == TOMB:
            names[TOMBSTONE] = ()
        self.sink.folders[where] = Folder(names, marker)

    @staticmethod
    def marker(output: Any) -> MemoryMarker:
        return MemoryMarker(output[0], output[1], "{}.{}".format(*output))

    def run(self, state: State) -> list[Result]:
        self.sink = MemorySink(self.note, exchanges=self.way != RENAMING)
        for output in OUTPUTS:
            name = "part-r{}-a{}".format(*output)
            self.sink.manifests[self.marker(output).digest] = {f"{name}-0000{n}": () for n in (0, 1)}
        handle: dict[str, Any] = {"prefix": "1.r2.a2", "token": "7c1e"}
        if self.way != ALONE:
            handle["replaces"] = list(self.marker(OLD))
        self.put(state.staged, self.sink.staged(handle))
        self.put(state.taken, "taken/1.r2.a2.other")
        self.put(state.visible, "visible/1")
        if state.put_away:
            self.put(state.put_away[1], f"superseded/1.r{state.put_away[0]}")
        earlier, summary = (self.marker(EARLIER).digest,), {"digest": self.marker(OURS).digest}
        promoter = MemoryPromoter(self.sink, Output(KEY, OURS[1], handle, summary, earlier=earlier))
        return [self.act(promoter, name) for name in ("find", "promote")]

    def act(self, promoter: MemoryPromoter, name: str) -> Result:
        self.steps.clear()
        promoted = getattr(promoter, name)()
        return result(promoted, list(self.steps), dict(self.left()))

    def note(self, step: str) -> None:
        name = step.partition(".")[2]
        if name in {"rename", "exchange", "fsync"}:
            self.steps.append(name)

    def left(self) -> Iterator[tuple[str, Any]]:
        taken = sorted(
            ((path, folder) for path, folder in self.sink.folders.items() if path.startswith("taken/")),
            key=lambda found: self.content(found[1]),
        )
        yield from (
            (f"taken {n}{'.junk' * path.endswith('.junk')}", self.content(f)) for n, (path, f) in enumerate(taken)
        )
        for path, folder in self.sink.folders.items():
            where, _, name = path.partition("/")
            if where != "taken":
                names = {"visible": "visible", "staging": "staged", "superseded": f"superseded {name[2:]}"}
                yield names[where], self.content(folder)

    @staticmethod
    def content(folder: Folder) -> str:
        found = [f"r{folder.marker.revision}a{folder.marker.attempt}"] if folder.marker else []
        return " ".join(found + sorted(folder.files))


def test_from_any_state_the_models_promoter_says_does_and_leaves_what_the_shipped_one_does(
    shipped: Shipped, way: str
) -> None:
    """First both only look, then both promote."""
    modelled = Modelled(way)
    found = {state: (shipped.run(state), modelled.run(state)) for state in STATES}

    assert {state: both for state, both in found.items() if both[0] != both[1]} == {}
