"""A sink and a source in memory: they stand for a table of folders on a file system, and for a log of numbered records.

Like `memory_record`, they can be stopped between any two of their primitive steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from support.model.memory_record import Pause, Row, no_pause
from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Output, Position
from twophase.core.claims import Claim
from twophase.core.errors import (
    ManifestMismatch,
)
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome, Progress, Promotion


class Marker(NamedTuple):
    """Which revision and attempt a folder holds, and the checksum of its manifest."""

    revision: int
    attempt: int
    digest: str


@dataclass
class Folder:
    """Files by name, and the marker once they are sealed."""

    files: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    marker: Marker | None = None

    def rows(self) -> list[Row]:
        return [row for rows in self.files.values() for row in rows]


class Left(NamedTuple):
    """What an attempt left beside the table."""

    checkpoint_id: int
    revision: int
    attempt: int
    path: str


class Superseded(NamedTuple):
    """A revision that a later one took the place of."""

    checkpoint_id: int
    revision: int
    path: str


ATTEMPT = re.compile(r"(\d+)\.r(\d+)\.a(\d+)\..+")
#: What keeps the name of a swept revision taken where folders cannot be exchanged.
TOMBSTONE = "_swept"


def _is_dead(left: Left) -> bool:
    return left.path.endswith((".junk", ".dead"))


class MemorySink:
    """A table of folders: staged beside it, taken by one promoter, then made visible by one rename or exchange.

    It takes the steps of `sinks.Files`, one by one, and promotes as `MemoryPromoter` says. A rename is durable only
    after the next fsync.
    """

    #: How often a promoter starts over before it leaves the work to whoever comes next.
    TRIES = 5
    copies = True
    ordered = False

    def objection(self, *, latest: bool) -> str | None:
        return None

    def newest(self, pipeline: str) -> int | None:
        return None

    def markers(self, pipeline: str) -> Iterable[tuple[int, int]]:
        return ()

    def __init__(self, pause: Pause = no_pause, *, exchanges: bool = True) -> None:
        self.pause = pause
        #: Whether two folders can change places in one step.
        self.exchanges = exchanges
        self.version = 0
        self.down = False
        #: What its target does not take: (revision, attempt).
        self.refused: set[tuple[Key, int]] = set()
        #: The next promotion ends in UNKNOWN: "before" its visible step, which then does not happen, or "after" it.
        self.loses_reply: str | None = None
        self.folders: dict[str, Folder] = {}
        self.manifests: dict[str, dict[str, tuple[Row, ...]]] = {}
        #: Staged output that nobody can see for a while, or ever again.
        self.hidden: dict[str, Folder] = {}
        self._names = 0
        self._volatile: list[tuple[str, str, bool]] = []
        self._prepare()

    def _prepare(self) -> None:
        """Set up what a kind of sink has besides."""

    # --- what readers see --------------------------------------------------------------------------------------------

    def shown(self) -> dict[int, Folder]:
        """Return what readers see, by checkpoint."""
        return {int(path[8:]): folder for path, folder in self.folders.items() if path.startswith("visible/")}

    def kept(self, marker: Marker) -> list[list[Row]]:
        """Return the rows that were promoted under a marker, wherever they are now."""
        places = ("visible/", "taken/", "superseded/")
        found = [(path, folder) for path, folder in self.folders.items() if folder.marker == marker]
        alive = [folder for path, folder in found if path.startswith(places) and not path.endswith((".junk", ".dead"))]
        return [folder.rows() for folder in alive]

    # --- the file system ---------------------------------------------------------------------------------------------

    def _step(self, name: str) -> None:
        self.pause(f"sink.{name}")

    def _fresh(self) -> str:
        self._names += 1
        return f"{self._names:04d}"

    def _rename(self, source: str, target: str) -> None:
        self._step("rename")
        if source not in self.folders:
            raise FileNotFoundError(source)
        if target in self.folders:
            raise FileExistsError(target)
        self.folders[target] = self.folders.pop(source)
        self._volatile.append((source, target, False))
        self.version += 1

    def _exchange(self, one: str, other: str) -> None:
        self._step("exchange")
        if one not in self.folders or other not in self.folders:
            raise FileNotFoundError(one)
        self.folders[one], self.folders[other] = self.folders[other], self.folders[one]
        self._volatile.append((one, other, True))
        self.version += 1

    def _fsync(self) -> None:
        self._step("fsync")
        self._volatile.clear()

    def power_failure(self, kept: int = 0) -> None:
        """Undo the renames that no fsync made durable; the first few may have reached the disk all the same."""
        lost = self._volatile[kept % (len(self._volatile) + 1) :]
        for source, target, exchanged in reversed(lost):
            if exchanged and {source, target} <= self.folders.keys():
                self.folders[source], self.folders[target] = self.folders[target], self.folders[source]
            elif not exchanged and target in self.folders and source not in self.folders:
                self.folders[source] = self.folders.pop(target)
        self._volatile.clear()
        self.version += 1

    def hide(self, key: Key) -> bool:
        """Make a revision's staged output disappear, as a careless hand does; say whether there was any."""
        prefix = f"{key.checkpoint_id}.r{key.revision}."
        paths = [
            path
            for path, folder in self.folders.items()
            if path.startswith((f"staging/{prefix}", f"taken/{prefix}"))
            and (folder.marker is None or folder.marker.revision == key.revision)
        ]
        for path in paths:
            self.hidden[path] = self.folders.pop(path)
        self.version += bool(paths)
        return bool(paths)

    def bring_back(self) -> set[tuple[int, int]]:
        """Make what disappeared appear again; return the checkpoints and revisions it is of."""
        back = set()
        while self.hidden:
            path, folder = self.hidden.popitem()
            self.folders.setdefault(path, folder)
            self.version += 1
            checkpoint_id, revision, *_ = path.partition("/")[2].split(".")
            back.add((int(checkpoint_id), int(revision[1:])))
        return back

    def _has(self, path: str, marker: Marker | None, step: str = "look") -> bool:
        self._step(step)
        return marker is not None and path in self.folders and self.folders[path].marker == marker

    def _list(self, prefix: str) -> list[str]:
        self._step("list")
        return [path for path in self.folders if path.startswith(prefix) and not path.endswith((".junk", ".dead"))]

    def _remove(self, path: str) -> None:
        dead = f"taken/{path.rpartition('/')[2]}.{self._fresh()}.dead"
        try:
            self._rename(path, dead)
        except FileNotFoundError:
            return
        self._step("remove")
        self.folders.pop(dead, None)
        self.version += 1

    # --- stage -------------------------------------------------------------------------------------------------------

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        place: dict[str, Any] = {"prefix": f"{key.checkpoint_id}.r{key.revision}.a{attempt}", "token": token}
        if older is not None:
            place["replaces"] = [older.key.revision, older.attempt, older.manifest["digest"]]
        return place

    def claim(self, slot: str) -> Claim | None:
        raise NotImplementedError  # nothing here has slots

    def adopt(self, key: Key, slot: str) -> Output | None:
        return None

    @staticmethod
    def staged(handle: Json) -> str:
        return f"staging/{handle['prefix']}.{handle['token']}"

    def write(self, handle: Json, name: str, rows: Sequence[Row]) -> None:
        """Write one file as an executor does, into a folder that is made if it is not there."""
        self._step("write")
        self.folders.setdefault(self.staged(handle), Folder()).files[name] = tuple(rows)
        self.version += 1

    def seal(self, output: Output) -> Json:
        """Describe what was staged, then put the marker in."""
        key, attempt, handle = output.key, output.attempt, output.handle
        self._step("manifest")
        folder = self.folders.setdefault(self.staged(handle), Folder())
        digest = f"{key.checkpoint_id}.{key.revision}.{attempt}.{handle['token']}"
        self.manifests[digest] = dict(folder.files)
        self._step("marker")
        folder = self.folders.setdefault(self.staged(handle), Folder())
        folder.marker = Marker(key.revision, attempt, digest)
        self.version += 1
        return {"digest": digest, "rows": len(folder.rows()), "bytes": 0, "attempt": attempt}

    def check(self, output: Output) -> None:
        """Compare the staged folder with its manifest before the vote, and see that it may take its place."""
        key, promoter = output.key, MemoryPromoter(self, output)
        self._step("check")
        if promoter.is_refused():
            msg = f"checkpoint {key}: the table holds something else than {promoter.replaces}"
            raise ManifestMismatch(msg)
        folder = self.folders.get(promoter.staged)
        if folder is None or folder.marker != promoter.marker:
            msg = f"checkpoint {key}: staged folder {promoter.staged} has no marker; stage it again"
            raise ManifestMismatch(msg)
        if self.manifests[output.manifest["digest"]].items() - folder.files.items():
            msg = f"checkpoint {key}: staged folder {promoter.staged} was altered"
            raise ManifestMismatch(msg)

    # --- promote -----------------------------------------------------------------------------------------------------

    def find(self, output: Output) -> Promotion:
        return MemoryPromoter(self, output).find()

    def promote(self, output: Output) -> Promotion:
        if self.down:
            return Promotion(Outcome.RETRY_LATER, "the sink is down")
        promoter = MemoryPromoter(self, output)
        if (output.key, output.attempt) in self.refused:
            return promoter._promoted() or Promotion(Outcome.FAILED, "the target refuses it", Hindrance.REFUSED)
        return promoter.promote()

    def lost_reply(self, when: str) -> bool:
        lost = self.loses_reply == when
        if lost:
            self.loses_reply = None
        return lost

    def discard(self, output: Output) -> None:
        for left in self.attempts():
            if left[:2] == output.key[1:]:
                self.remove(left)

    def prepare(self, slot: str | None = None) -> None:
        """Need nothing."""

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what earlier attempts staged, wherever it is, until nothing of it is left."""
        while earlier := [
            left
            for left in self.attempts()
            if left[:2] == output.key[1:] and left.attempt < output.attempt and not _is_dead(left)
        ]:
            for left in earlier:
                self.remove(left)

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> list[Left]:
        """List what attempts left beside the table."""
        self._step("list")
        found = [(path, ATTEMPT.fullmatch(path.rpartition("/")[2])) for path in self.folders]
        beside = [(path, match) for path, match in found if match and path.startswith(("staging/", "taken/"))]
        return [Left(int(match[1]), int(match[2]), int(match[3]), path) for path, match in beside]

    def beside(self) -> list[Left]:
        """List what a sweep has to leave nothing of."""
        return self.attempts()

    def remove(self, left: Left) -> None:
        """Remove one of those; what an exchange brought out is not this attempt's and is put away."""
        if left.path.startswith("taken/") and not left.path.endswith(".dead"):
            self._step("look")
            marker = self.folders[left.path].marker if left.path in self.folders else None
            if marker is not None and (marker.revision, marker.attempt) != (left.revision, left.attempt):
                with suppress(FileNotFoundError, FileExistsError):
                    self._put_back(left, marker)
                return
        self._remove(left.path)

    def _put_back(self, left: Left, found: Marker) -> None:
        """Put away what an exchange brought out; if that is what is committed, let it change places again."""
        if found.revision < left.revision:
            self._rename(left.path, f"superseded/{left.checkpoint_id}.r{found.revision}")
            return
        self._step("look")
        shown = self.folders.get(f"visible/{left.checkpoint_id}")
        if shown is not None and shown.marker is not None and shown.marker.attempt == left.attempt:
            self._exchange(left.path, f"visible/{left.checkpoint_id}")
            self._fsync()

    def superseded(self) -> list[Superseded]:
        """List what later revisions took the place of."""
        self._step("list")
        paths = [path for path, folder in self.folders.items() if path.startswith("superseded/") and folder.marker]
        keys = [path.partition("/")[2].split(".r") for path in paths]
        return [Superseded(int(key[0]), int(key[1]), path) for key, path in zip(keys, paths, strict=True)]

    def forget(self, old: Superseded) -> None:
        """Remove one of those; where folders cannot be exchanged its name stays taken for ever."""
        if self.exchanges:
            self._remove(old.path)
            return
        self._step("tombstone")
        if old.path in self.folders:
            self.folders[old.path] = Folder({TOMBSTONE: ()})
            self.version += 1


class MemoryPromoter:
    """Takes the steps of the shipped `FilesPromoter`, one by one.

    It is a copy, so that a schedule can stop it between any two steps, none of them a system call, and let the power
    fail: folders are entries of a dictionary here, a marker is a field, a manifest a dictionary, and renames that no
    fsync followed can be undone. It leaves out whether the table is mounted and whose it is, receipts, and whether the
    manifest of a later revision is there. `integration/test_model_promoter.py` holds it against the shipped one from
    every state that a promoter may find, with and without exchanges: what is said, done and left.
    """

    def __init__(self, sink: MemorySink, output: Output) -> None:
        key, handle = output.key, output.handle
        self.sink = sink
        self.key = key
        self.prefix: str = handle["prefix"]
        self.staged = sink.staged(handle)
        self.visible = f"visible/{key.checkpoint_id}"
        self.marker = Marker(key.revision, output.attempt, output.manifest["digest"])
        self.replaces = Marker(*handle["replaces"]) if "replaces" in handle else None
        self.earlier = output.earlier

    def _is_replaced(self, path: str) -> bool:
        return self.replaces is not None and self.sink._has(path, self.replaces, "replaced?")

    def is_refused(self) -> bool:
        """Say whether what is visible now can be neither replaced nor counted as promoted."""
        found = self.sink.folders.get(self.visible)
        marker = found.marker if found else None
        return found is not None and marker != self.replaces and (marker is None or marker.digest not in self.earlier)

    def find(self) -> Promotion:
        promoted = self._promoted()
        if promoted is None:
            if self._is_staged():
                return Promotion(Outcome.RETRY_LATER, "staged")
            promoted = self._promoted() or Promotion(Outcome.FAILED, "staged output is gone")
        return promoted

    def _is_staged(self) -> bool:
        """Promoters may take it from each other meanwhile: only what two listings agree on is missing."""
        before: list[str] | None = None
        for _ in range(self.sink.TRIES):
            folders = [self.staged, *self.sink._list(f"taken/{self.prefix}.")] if before is None else before
            if any(self.sink._has(path, self.marker) and self._is_whole(path) for path in folders):
                return True
            before = [self.staged, *self.sink._list(f"taken/{self.prefix}.")]
            if before == folders:
                break
        return False

    def _is_whole(self, path: str) -> bool:
        return not self.sink.manifests[self.marker.digest].items() - self.sink.folders[path].files.items()

    def _promoted(self) -> Promotion | None:
        """Read the marker back; None: nothing is visible in this place, or still what is to be replaced."""
        found: Marker | None = self.marker
        if not self.sink._has(self.visible, self.marker, "marker?"):
            if self._is_replaced(self.visible):
                return None
            self.sink._step("markers")
            if self.visible not in self.sink.folders:  # perhaps because it is being replaced just now
                gone = self.sink.folders.get(f"superseded/{self.key.checkpoint_id}.r{self.key.revision}")
                put_away = gone is not None and (gone.marker == self.marker or TOMBSTONE in gone.files)
                return Promotion(Outcome.ALREADY_PROMOTED) if put_away else None
            found = self.sink.folders[self.visible].marker
        ours = found is not None and (
            found == self.marker or found.revision > self.marker.revision or found.digest in self.earlier
        )
        if found is None or not ours:
            return Promotion(Outcome.FAILED, f"the table holds {found}")
        self.sink._fsync()
        if found.revision > self.marker.revision:  # it was promoted, and replaced since
            return Promotion(Outcome.ALREADY_PROMOTED)
        summary = None
        if found != self.marker:
            rows = sum(len(rows) for rows in self.sink.manifests[found.digest].values())
            summary = {"digest": found.digest, "rows": rows, "bytes": 0, "attempt": found.attempt}
        return Promotion(Outcome.ALREADY_PROMOTED, attempt=found.attempt, manifest=summary)

    def promote(self) -> Promotion:  # noqa: PLR0911 - one return per outcome
        for _ in range(self.sink.TRIES):
            promoted = self._promoted()
            if promoted:
                self._put_away()
                return promoted
            mine = self._take()
            if mine is None:
                found = self.find()
                if found.outcome is Outcome.RETRY_LATER:
                    continue
                return found
            if not self._check_taken(mine):
                return Promotion(Outcome.FAILED, "what was staged is not what was voted for")
            if self.sink.lost_reply("before"):
                return Promotion(Outcome.UNKNOWN)
            if self._show(mine):
                if self.sink.lost_reply("after"):
                    return Promotion(Outcome.UNKNOWN)
                promoted = self._promoted()
                return replace(promoted, outcome=Outcome.PROMOTED) if promoted else Promotion(Outcome.UNKNOWN)
        return Promotion(Outcome.RETRY_LATER, "other promoters are at it")

    def _take(self) -> str | None:
        """Rename the staged folder to a name that only this call uses; None: it is not there (any more)."""
        for source in (self.staged, *self.sink._list(f"taken/{self.prefix}.")):
            mine = f"taken/{self.prefix}.{self.sink._fresh()}"
            try:
                self.sink._rename(source, mine)
            except FileNotFoundError:
                continue
            if self.sink._has(mine, self.marker, "taken"):
                return mine
            if self._is_replaced(mine):  # an exchange was done, and its promoter died or sleeps
                self._supersede(mine)
                continue
            with suppress(FileNotFoundError):
                self.sink._rename(mine, f"{mine}.junk")
        return None

    def _check_taken(self, mine: str) -> bool:
        """Check a taken folder against its manifest, and remove what a straggling task left in it."""
        self.sink._step("check_taken")
        folder = self.sink.folders.get(mine)
        if folder is None:
            return True  # another took it from us: showing it will fail
        expected = self.sink.manifests[self.marker.digest]
        if expected.items() - folder.files.items():
            return False
        folder.files = dict(expected)
        return True

    def _show(self, mine: str) -> bool:
        """Make a taken folder visible: the one atomic step. False: somebody was faster, start over."""
        try:
            if self._is_replaced(self.visible):
                return self._exchange(mine)
            self.sink._rename(mine, self.visible)
        except (FileNotFoundError, FileExistsError):
            return False
        self.sink._step("visible")
        return True

    def _exchange(self, mine: str) -> bool:
        """Let a taken folder and what it replaces change places, and put the latter away."""
        if not self.sink.exchanges:
            return self._rename_twice(mine)
        self.sink._exchange(mine, self.visible)
        self.sink._step("visible")
        if not self._is_replaced(mine):  # what was lost came back when its restaged copy was promoted already
            self.sink._exchange(mine, self.visible)
            return False
        self.sink._fsync()
        self._supersede(mine)
        return True

    def _rename_twice(self, mine: str) -> bool:
        """Replace where folders cannot be exchanged: out with the old, in with the new."""
        assert self.replaces
        self.sink._rename(self.visible, f"superseded/{self.key.checkpoint_id}.r{self.replaces.revision}")
        self.sink._step("gap")
        self.sink._rename(mine, self.visible)
        self.sink._step("visible")
        return True

    def _put_away(self) -> None:
        """Find what an exchange brought out, whichever attempt's it was, and put it away."""
        if self.replaces is None:
            return
        for left in self.sink._list(f"taken/{self.key.checkpoint_id}.r{self.key.revision}."):
            if self._is_replaced(left):
                self._supersede(left)

    def _supersede(self, mine: str) -> None:
        """Move what was replaced to superseded/; another may have done it."""
        assert self.replaces
        try:
            self.sink._rename(mine, f"superseded/{self.key.checkpoint_id}.r{self.replaces.revision}")
        except (FileNotFoundError, FileExistsError):
            return
        self.sink._fsync()


class MemorySource:
    """Numbered records in partitions; a checkpoint takes a range that starts at the decided position."""

    settles = False
    reports = False
    per_revision = False

    def __init__(self, ends: Mapping[str, int], limit: int, pause: Pause = no_pause) -> None:
        self.ends = dict(ends)
        self.limit = limit
        self.pause = pause

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> dict[str, int]:
        self.pause("source.discover")
        return dict(self.ends)

    def fix(self, found: Mapping[str, int], progress: Progress) -> Input:
        position = progress.position()
        starts = {partition: position.get(partition, 0) for partition in found}
        progress.pin({partition: Position(0, {"end": 0}) for partition in found if partition not in position})
        ends = {p: max(start, min(found[p], start + self.limit)) for p, start in starts.items()}
        ranges = {p: (start, ends[p]) for p, start in starts.items()}
        return Input(ranges=ranges, marks={p: {"end": end} for p, end in ends.items()})

    def claim(self, slot: str) -> Claim | None:
        raise NotImplementedError  # nothing here has slots

    def written_again(self, fixed: Input) -> list[InputFile]:
        raise AssertionError

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        raise AssertionError

    def report(self, offsets: Mapping[str, int]) -> None:
        raise AssertionError

    @staticmethod
    def read(fixed: Input) -> list[Row]:
        """Return the records of a fixed input."""
        return [(partition, off) for partition, (start, end) in fixed.ranges.items() for off in range(start, end)]
