"""Lists and removes what attempts and replaced revisions left beside a files table, for sweep, discard and restage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from twophase.core.checkpoint import Key
from twophase.core.manifest import Manifest
from twophase.sinks.base import Attempt, Superseded
from twophase.sinks.staged_files.layout import (
    ATTEMPT,
    DEAD,
    SIDES,
    SUPERSEDED,
    TOMBSTONE,
    FilesPaths,
    Marker,
    markers,
    side,
)
from twophase.storage import disk


@dataclass(frozen=True)
class Leftovers:
    """The leftovers beside one table."""

    table: Path
    #: Whether each slot owns a folder of the table.
    slotted: bool

    @property
    def side(self) -> Path:
        """Return the folder beside the table."""
        return side(self.table)

    def attempts(self) -> Iterator[Attempt]:
        """List staged and taken folders, and all manifests."""
        for name in SIDES[:3]:
            for entry, path in disk.entries(self.side / name):
                if match := ATTEMPT.fullmatch(entry):
                    yield Attempt(int(match[1]), int(match[2]), int(match[3]), path, manifest=name == "manifests")

    def of(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List staged and taken folders, and the manifests of their attempts and of these revisions' attempts.

        It looks for each manifest by name and does not list their folder, which grows with every commit.
        """
        looked_for = {(*key, attempt) for key, newest in revisions.items() for attempt in range(1, newest + 1)}
        for name in SIDES[:2]:
            for entry, path in disk.entries(self.side / name):
                if match := ATTEMPT.fullmatch(entry):
                    found = Attempt(int(match[1]), int(match[2]), int(match[3]), path)
                    looked_for.add(found[:3])
                    yield found
        for checkpoint_id, revision, attempt in sorted(looked_for):
            path = f"{self.side}/manifests/{checkpoint_id:08d}.r{revision}.a{attempt}.json"
            if os.path.lexists(path):
                yield Attempt(checkpoint_id, revision, attempt, path, manifest=True)

    def promotable(self) -> Iterator[Attempt]:
        """List what a promoter might still take, staging/ before taken/: the order in which it moves them."""
        yield from (left for left in self.attempts() if not left.path.endswith(DEAD))

    def remove(self, left: Attempt) -> None:
        """Remove one leftover, unless it is the manifest of visible output: then another record knows of it.

        A folder under taken/ may hold another revision than its name says, which an exchange moved there. That one is
        put away, not removed.
        """
        path = Path(left.path)
        if left.manifest and self.is_visible(left):
            return
        if not left.manifest and path.parent.name == "taken" and not path.name.endswith(".dead"):
            try:
                others = [m for m in markers(path) if (m.revision, m.attempt) != (left.revision, left.attempt)]
                if others:
                    self._put_back(left, others[0])
                    return
            except (FileNotFoundError, FileExistsError, NotADirectoryError):
                return  # a promoter was faster
        disk.remove(path, path.parent.parent / "taken")

    def _put_back(self, left: Attempt, found: Marker) -> None:
        """Move a revision that an exchange took out of the table to superseded/, or back into the table.

        It goes back if it is the committed one. That happens when staged output was lost, restaged and promoted, then
        came back, and a late promoter exchanged it for the restaged copy.
        """
        path = Path(left.path)
        if found.revision < left.revision:
            disk.rename_new(path, path.parents[1] / "superseded" / f"{left.checkpoint_id:08d}.r{found.revision}")
            return
        key = Key("", left.checkpoint_id, found.revision)
        content = FilesPaths(key, {"table": str(self.table), "name": path.name}).manifest(found.attempt).read_bytes()
        place = FilesPaths(key, {"table": str(self.table), "name": path.name, "folder": Manifest.loads(content).folder})
        if disk.digest(content) == found.digest and any(m.attempt == left.attempt for m in markers(place.visible)):
            disk.exchange(path, place.visible)
            disk.fsync_folder(place.visible.parent)

    def is_visible(self, left: Attempt) -> bool:
        """Say whether the folder that a manifest describes is in the table."""
        try:
            content = Path(left.path).read_bytes()
        except FileNotFoundError:
            return False
        marker = str(Marker(left.revision, left.attempt, disk.digest(content)))
        folder = f"checkpoint={left.checkpoint_id:08d}" if not self.slotted else Manifest.loads(content).folder
        return folder is not None and (self.table / folder / marker).exists()

    def superseded(self) -> Iterator[Superseded]:
        """List the superseded revisions that are kept."""
        for entry, path in disk.entries(self.side / "superseded"):
            if (match := SUPERSEDED.fullmatch(entry)) and self._is_kept(path):
                yield Superseded(int(match[1]), int(match[2]), path)

    @staticmethod
    def _is_kept(path: str) -> bool:
        """Say whether a folder holds more than a tombstone; False if another sweeper has removed it."""
        try:
            return os.listdir(path) != [TOMBSTONE]  # noqa: PTH208 - a string
        except FileNotFoundError:
            return False

    def forget(self, old: Superseded) -> None:
        """Remove a superseded revision; where folders cannot be exchanged, a tombstone keeps its name for ever (R3)."""
        path = Path(old.path)
        remains = f"{path.name}.a0"  # a name that the next sweep recognises, if this one is killed half-way
        if disk.can_exchange(path.parent):
            disk.remove(path, self.side / "taken", remains)
            return
        try:
            (path / TOMBSTONE).touch()
        except FileNotFoundError:
            return  # another sweeper was faster
        disk.fsync_folder(path)
        for entry in list(path.iterdir()):
            if entry.name != TOMBSTONE:
                disk.remove(entry, self.side / "taken", remains)
