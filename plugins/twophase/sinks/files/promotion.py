"""The promoter of the files sink: takes a staged folder, checks it, and renames it into the table.

A replacement is exchanged with the revision that it replaces instead. Several promoters may do this at once, be stopped
between any two steps, and wake up after the result was replaced again. So each step is a rename that only one of them
can win: the others find the source gone, and start over (R1). Whoever finds a folder that an exchange took out of the
table knows it by its marker.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

from twophase.core.checkpoint import Output
from twophase.core.errors import ManifestMismatch
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.staged_files import manifest_check, owner
from twophase.sinks.staged_files.layout import TOMBSTONE, FilesPaths, Marker, markers
from twophase.sinks.staged_files.receipts import Receipts
from twophase.storage import disk

#: How often a promoter starts over when others are faster, before it answers RETRY_LATER.
TRIES = 20


class FilesPromoter:
    """Promotes the staged output of one attempt, or says whether it is promoted."""

    def __init__(self, output: Output) -> None:
        """Start from what the record has of the output."""
        self.key = output.key
        self.place = FilesPaths(output.key, output.handle)
        self.marker = Marker(output.key.revision, output.attempt, output.manifest["digest"])
        self.earlier = output.earlier
        self.receipt = output.receipt

    # --- where it stands ---------------------------------------------------------------------------------------------

    def find(self) -> Promotion:
        """Say whether the output is promoted, staged or lost; change nothing."""
        if not self.place.reachable:
            return Promotion(Outcome.RETRY_LATER, f"folder {self.place.table} is not there; is it mounted?")
        promoted = self._promoted()
        if promoted is None:
            # Look in the order in which an output moves (staging, taken, table), so as not to miss one on its way.
            whole, problem = self._staged()
            if whole:
                return Promotion(Outcome.RETRY_LATER, f"staged at {whole}")
            promoted = self._promoted() or Promotion(Outcome.FAILED, problem, Hindrance.LOST)
        return promoted

    def refusal(self) -> str | None:
        """Say why the visible folder cannot be replaced by this revision; None if it can, or if there is none."""
        visible = self.place.visible
        if not visible.exists() or self._is_replaced(visible):
            return None
        found = markers(visible)
        if any(marker.digest in self.earlier for marker in found):
            return None  # an earlier attempt, voted for before a restage, got promoted after all: it counts (R10)
        holder = f"the marker {found[0]}{self._whose(found[0])}" if found else "no marker"
        expected = f"the marker {self.place.replaces}" if self.place.replaces else "nothing"
        return f"folder {visible} is there already, expected {expected}, found {holder}"

    def _whose(self, marker: Marker) -> str:
        """Return " of checkpoint N" for a marker whose manifest is still beside the table, else nothing."""
        named = f"*.r{marker.revision}.a{marker.attempt}.json"
        for path in (self.place.side / "manifests").glob(named):
            if disk.digest(path.read_bytes()) == marker.digest:
                return f" of checkpoint {int(path.name.partition('.')[0])}"
        return ""

    def _is_replaced(self, folder: Path) -> bool:
        """Say whether a folder holds the revision that this one replaces."""
        return self.place.replaces is not None and (folder / str(self.place.replaces)).exists()

    def _staged(self) -> tuple[Path | None, str]:
        """Return the folder of the staged output, or why there is none that can be promoted.

        Promoters may take it from each other meanwhile, so it is missing only if two listings in a row agree.
        """
        place, marker = self.place, self.marker
        problem, before = f"staged output {place.staged} is gone", None
        for _ in range(TRIES):
            folders = [place.staged, *place.taken_by_others()] if before is None else before
            for folder in folders:
                if not (folder / str(marker)).exists():
                    continue
                try:
                    manifest_check.check(folder, manifest_check.load(place, marker.attempt, marker.digest))
                except FileNotFoundError:
                    return folder, ""  # a promoter has just taken it: it is on its way
                except ManifestMismatch as error:
                    problem = str(error)
                    continue
                return folder, ""
            before = [place.staged, *place.taken_by_others()]
            if before == folders:
                break
        return None, problem

    def _promoted(self) -> Promotion | None:
        """Read the marker back; None if nothing is visible in this place, or still the revision to be replaced."""
        place, marker = self.place, self.marker
        found: Marker | None = marker
        if not (place.visible / str(marker)).exists():
            if self._is_replaced(place.visible):
                return None
            try:
                found = next(iter(markers(place.visible)), None)
            except FileNotFoundError:
                # Nothing is visible. Where folders cannot be exchanged, a replacement of it may be under way.
                gone = place.superseded(marker.revision)
                put_away = (gone / str(marker)).exists() or (gone / TOMBSTONE).exists()
                return Promotion(Outcome.ALREADY_PROMOTED) if put_away else None
        ours = found is not None and (found == marker or found.digest in self.earlier or self._replaced_since(found))
        if found is None or not ours:
            holder = f"the marker {found}" if found else "no marker"
            why = f"folder {place.visible} is there already, with {holder}"
            return Promotion(Outcome.FAILED, why, Hindrance.FOREIGN)
        # Whoever counts a marker makes it durable first: its promoter may have died before its own fsync (R2).
        for folder in (*place.parents, place.taken):
            if folder.is_dir():
                disk.fsync_folder(folder)
        if found.revision > marker.revision:  # this revision was promoted, and replaced since
            return Promotion(Outcome.ALREADY_PROMOTED)
        summary = None
        if found != marker:
            summary = manifest_check.load(place, found.attempt, found.digest).summary(found.digest)
        hit("promote.durable")
        return Promotion(Outcome.ALREADY_PROMOTED, attempt=found.attempt, manifest=summary)

    def _replaced_since(self, found: Marker) -> bool:
        """Say whether a marker is of a later revision of this checkpoint: then its manifest is beside the table."""
        if found.revision <= self.marker.revision:
            return False
        later = FilesPaths(
            self.key._replace(revision=found.revision), {"table": self.place.table, "name": self.place.name}
        )
        try:
            manifest_check.load(later, found.attempt, found.digest)
        except ManifestMismatch:
            return False
        return True

    # --- promote -----------------------------------------------------------------------------------------------------

    def promote(self) -> Promotion:  # noqa: PLR0911 - one return per outcome
        """Take the staged folder, check it, show it; start over whenever another was faster (R1)."""
        if not self.place.reachable:
            return self.find()
        if theirs := owner.objection(self.place.storage, str(self.place.side), self.key.pipeline):
            return self._promoted() or Promotion(Outcome.FAILED, theirs, Hindrance.REFUSED)
        self.place.make_sides()
        for _ in range(TRIES):
            promoted = self._promoted()
            if promoted:
                self._put_away()
                return promoted
            if refusal := Receipts(self.place.storage, self.place.side).keep(self.receipt):
                return Promotion(Outcome.FAILED, refusal, Hindrance.FOREIGN)
            self.receipt = {}  # it is kept now; no need to do it again when starting over
            mine = self._take()
            if mine is None:
                found = self.find()
                if found.outcome is Outcome.RETRY_LATER:
                    continue
                return found
            hit("promote.taken")
            try:
                self._check_taken(mine)
            except ManifestMismatch as error:
                return Promotion(Outcome.FAILED, str(error), Hindrance.LOST)
            hit("promote.checked")
            if self._show(mine):
                promoted = self._promoted()
                return replace(promoted, outcome=Outcome.PROMOTED) if promoted else Promotion(Outcome.UNKNOWN)
        return Promotion(Outcome.RETRY_LATER, "other promoters are at it")

    def _take(self) -> Path | None:
        """Rename the staged folder to a name that only this call uses; None if it is not there any more."""
        place = self.place
        for source in (place.staged, *place.taken_by_others()):
            mine = place.taken / f"{place.prefix}.{uuid.uuid4().hex}"
            try:
                source.rename(mine)
            except FileNotFoundError:
                continue
            if (mine / str(self.marker)).exists():
                return mine
            if self._is_replaced(mine):  # another promoter made the exchange, then died or was stopped
                self._supersede(mine)
            else:
                self._put_aside(mine)
        return None

    def _put_aside(self, mine: Path) -> None:
        """Rename a folder without its marker to `.junk`, so that nobody promotes it: a late Spark task made it."""
        try:
            mine.rename(mine.with_name(f"{mine.name}.junk"))
        except FileNotFoundError:
            return  # another promoter took it from us: it is no junk

    def _check_taken(self, mine: Path) -> None:
        """Check a taken folder against its manifest, and remove files that a late Spark task left in it."""
        manifest = manifest_check.load(self.place, self.marker.attempt, self.marker.digest)
        try:
            strays = manifest_check.check(mine, manifest)
            for stray in strays:
                (mine / stray).unlink()
            if strays:
                disk.prune(mine)
        except FileNotFoundError:
            if mine.exists():
                raise
            # another promoter took it from us: `_show` finds it gone and we start over

    def _show(self, mine: Path) -> bool:
        """Make a taken folder visible, in one atomic step; False if somebody was faster: then start over."""
        visible = self.place.visible
        try:
            if self._is_replaced(visible):
                return self._exchange(mine, visible)
            disk.make_folders(self.place.table, visible.parent)
            disk.rename_new(mine, visible)
        except (FileNotFoundError, FileExistsError):
            return False
        hit("promote.visible")
        return True

    def _exchange(self, mine: Path, visible: Path) -> bool:
        """Exchange a taken folder with the revision that it replaces, and move that one to superseded/."""
        if not disk.exchange(mine, visible):
            return self._rename_twice(mine, visible)
        hit("promote.visible")
        if not self._is_replaced(mine):
            # Staged output that was lost came back after its restaged copy was promoted: undo, the copy stays.
            disk.exchange(mine, visible)
            return False
        disk.fsync_folder(visible.parent)
        self._supersede(mine)
        return True

    def _rename_twice(self, mine: Path, visible: Path) -> bool:
        """Replace by two renames, where the file system cannot exchange folders; readers may see a gap.

        A late promoter cannot take the new revision out: the old one's name under superseded/ is never free again (R3).
        """
        if self.place.replaces is not None:
            disk.rename_new(visible, self.place.superseded(self.place.replaces.revision))
        hit("promote.gap")
        disk.rename_new(mine, visible)
        hit("promote.visible")
        return True

    def _put_away(self) -> None:
        """Find the replaced revision under taken/, in a folder of any attempt, and move it to superseded/."""
        if self.place.replaces is None:
            return
        for left in self.place.taken_by_others(f"{self.key.checkpoint_id:08d}.r{self.key.revision}"):
            if self._is_replaced(left):
                self._supersede(left)

    def _supersede(self, mine: Path) -> None:
        """Move the replaced revision to superseded/, unless another promoter has done it."""
        if self.place.replaces is None:
            return
        target = self.place.superseded(self.place.replaces.revision)
        try:
            disk.rename_new(mine, target)
        except (FileNotFoundError, FileExistsError):
            return
        disk.fsync_folder(target.parent)
        hit("promote.superseded")
