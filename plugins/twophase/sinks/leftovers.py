"""What attempts and replaced revisions left beside a table of files, for the sweeper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twophase.core.checkpoint import Key
from twophase.core.manifest import Manifest
from twophase.sinks import disk
from twophase.sinks.base import Attempt, Superseded
from twophase.sinks.layout import ATTEMPT, SIDES, SUPERSEDED, TOMBSTONE, Marker, Place, markers, side


@dataclass(frozen=True)
class Leftovers:
    """What lies beside one table."""

    table: Path
    #: Whether a slot owns a folder of the table.
    slotted: bool

    @property
    def side(self) -> Path:
        """Return the folder beside the table."""
        return side(self.table)

    def attempts(self) -> Iterator[Attempt]:
        """List what attempts left."""
        for name in SIDES[:3]:
            for entry, path in disk.entries(self.side / name):
                if match := ATTEMPT.fullmatch(entry):
                    yield Attempt(int(match[1]), int(match[2]), int(match[3]), path, manifest=name == "manifests")

    def remove(self, left: Attempt) -> None:
        """Remove one of those, unless it is the manifest of what is visible: then another record knows of it.

        What an exchange brought out is not this attempt's, whatever its folder is called: it is put away.
        """
        path = Path(left.path)
        if left.manifest and self._is_visible(left):
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
        """Put away what an exchange brought out; if that is what is committed, let it change places again.

        The latter was lost, restaged and committed, while a promoter slept to whom the lost one came back.
        """
        path = Path(left.path)
        if found.revision < left.revision:
            disk.rename_new(path, path.parents[1] / "superseded" / f"{left.checkpoint_id:08d}.r{found.revision}")
            return
        key = Key("", left.checkpoint_id, found.revision)
        content = Place(key, {"table": str(self.table), "name": path.name}).manifest(found.attempt).read_bytes()
        place = Place(key, {"table": str(self.table), "name": path.name, "folder": Manifest.loads(content).folder})
        if disk.digest(content) == found.digest and any(m.attempt == left.attempt for m in markers(place.visible)):
            disk.exchange(path, place.visible)
            disk.fsync_folder(place.visible.parent)

    def _is_visible(self, left: Attempt) -> bool:
        """Say whether the folder that a manifest describes is in the table."""
        try:
            content = Path(left.path).read_bytes()
        except FileNotFoundError:
            return False
        marker = str(Marker(left.revision, left.attempt, disk.digest(content)))
        folder = f"checkpoint={left.checkpoint_id:08d}" if not self.slotted else Manifest.loads(content).folder
        return folder is not None and (self.table / folder / marker).exists()

    def superseded(self) -> Iterator[Superseded]:
        """List what later revisions took the place of."""
        for entry, path in disk.entries(self.side / "superseded"):
            if (match := SUPERSEDED.fullmatch(entry)) and os.listdir(path) != [TOMBSTONE]:  # noqa: PTH208 - a string
                yield Superseded(int(match[1]), int(match[2]), path)

    def forget(self, old: Superseded) -> None:
        """Remove one of those; where folders cannot be exchanged its name stays taken for ever (R3)."""
        path = Path(old.path)
        remains = f"{path.name}.a0"  # whoever is killed on the way leaves it under a name that the next sweep knows
        if disk.can_exchange(path.parent):
            disk.remove(path, self.side / "taken", remains)
            return
        (path / TOMBSTONE).touch()
        disk.fsync_folder(path)
        for entry in list(path.iterdir()):
            if entry.name != TOMBSTONE:
                disk.remove(entry, self.side / "taken", remains)
