"""A log table, in memory: it takes staged folders in where they lie, and its marker is a high-water mark."""

from __future__ import annotations

from support.model.memory_ports import Folder, Left, Marker, MemorySink, Superseded
from support.model.memory_record import Row
from twophase.core.checkpoint import Key, Output
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome, Promotion


class MemoryLog(MemorySink):
    """Takes the steps of `LogTablePromoter`: look at the mark, check what is staged, one entry for all of it."""

    copies = False
    ordered = True

    def _prepare(self) -> None:
        #: What the table lists of each checkpoint: the folder, and the marker of who put it in.
        self.table: dict[int, tuple[str, Marker]] = {}
        #: The highest commit_seq that was put in, and how many entries the log has.
        self.mark = self.entries = 0
        #: Whatever was ever listed, by its digest.
        self.notes: set[str] = set()

    # --- what readers see --------------------------------------------------------------------------------------------

    def shown(self) -> dict[int, Folder]:
        return {number: self._listed(path, marker) for number, (path, marker) in self.table.items()}

    def kept(self, marker: Marker) -> list[list[Row]]:
        found = [path for path, folder in self.folders.items() if folder.marker == marker]
        return [self._listed(path, marker).rows() for path in found if not path.endswith(".dead")]

    def _listed(self, path: str, marker: Marker) -> Folder:
        """Return the files that the log names, as far as they are there: strays in the folder are in no entry."""
        there = self.folders.get(path, Folder())
        named = self.manifests[marker.digest]
        return Folder({name: there.files[name] for name in named if name in there.files}, there.marker)

    # --- promote -----------------------------------------------------------------------------------------------------

    def find(self, output: Output) -> Promotion:
        self._step("look")
        return self._promoted(output) or self._staged_or_lost(output)

    def _promoted(self, output: Output) -> Promotion | None:
        if self.mark < (output.commit_seq or 0):
            return None
        known = {output.manifest["digest"], *output.earlier}
        _, marker = self.table.get(output.key.checkpoint_id, ("", None))
        if marker is not None and marker.digest in known:
            rows = sum(map(len, self.manifests[marker.digest].values()))
            summary = {"digest": marker.digest, "rows": rows, "bytes": 0, "attempt": marker.attempt}
            return Promotion(Outcome.ALREADY_PROMOTED, attempt=marker.attempt, manifest=summary)
        if known & self.notes:
            return Promotion(Outcome.ALREADY_PROMOTED)  # it was replaced since
        return Promotion(Outcome.FAILED, f"the mark is at {self.mark}", Hindrance.FOREIGN)

    def _staged_or_lost(self, output: Output) -> Promotion:
        self._step("look")
        folder = self.folders.get(self.staged(output.handle))
        if folder is None or self.manifests[output.manifest["digest"]].items() - folder.files.items():
            return Promotion(Outcome.FAILED, "staged output is gone", Hindrance.LOST)
        return Promotion(Outcome.RETRY_LATER, "staged")

    def promote(self, output: Output) -> Promotion:  # noqa: PLR0911 - one return per outcome
        if self.down:
            return Promotion(Outcome.RETRY_LATER, "the sink is down")
        marker = Marker(output.key.revision, output.attempt, output.manifest["digest"])
        for _ in range(self.TRIES):
            self._step("look")
            entries = self.entries
            if promoted := self._promoted(output):
                return promoted
            if (output.key, output.attempt) in self.refused:
                return Promotion(Outcome.FAILED, "the target refuses it", Hindrance.REFUSED)
            if (staged := self._staged_or_lost(output)).outcome is Outcome.FAILED:
                return self._promoted(output) or staged
            if self.lost_reply("before"):
                return Promotion(Outcome.UNKNOWN)
            self._step("append")
            if self.entries != entries:
                continue  # another writer was faster
            self.table[output.key.checkpoint_id] = (self.staged(output.handle), marker)
            self.notes.add(marker.digest)
            self.mark, self.entries = output.commit_seq or 0, entries + 1
            self.version += 1
            self._step("visible")
            if self.lost_reply("after"):
                return Promotion(Outcome.UNKNOWN)
            return Promotion(Outcome.PROMOTED, attempt=marker.attempt)
        return Promotion(Outcome.RETRY_LATER, "other promoters are at it")

    # --- sweep -------------------------------------------------------------------------------------------------------

    def hide(self, key: Key) -> bool:
        """Leave alone what the table lists: whoever takes that away breaks more than a promise of ours."""
        return all(marker.revision != key.revision for _, marker in self.table.values()) and super().hide(key)

    def beside(self) -> list[Left]:
        """List what is in no entry and never was; what was replaced stays until its retention is over."""
        markers = {path: folder.marker for path, folder in self.folders.items()}
        listed = {path for path, marker in markers.items() if marker is not None and marker.digest in self.notes}
        return [left for left in self.attempts() if left.path not in listed]

    def remove(self, left: Left) -> None:
        self._step("look")
        if left.path not in {path for path, _ in self.table.values()}:
            self._remove(left.path)

    def superseded(self) -> list[Superseded]:
        self._step("list")
        standing = {path for path, _ in self.table.values()}
        return [
            Superseded(int(path.partition("/")[2].split(".")[0]), folder.marker.revision, path)
            for path, folder in self.folders.items()
            if path not in standing and folder.marker is not None and folder.marker.digest in self.notes
        ]

    def forget(self, old: Superseded) -> None:
        self._remove(old.path)
