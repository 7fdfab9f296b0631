"""Receipts of decisions, kept as files beside a table. Promoters write them, `twophase reconcile` reads them.

    <home>/receipts/<pipeline>/000000012/000000012345.json      of the decision with commit_seq 12,345

A receipt is written before the output becomes visible, so every visible output has one. It says all that the record
knew of the decision: the input, the participants, when, by whom. A commit_seq belongs to one decision for ever. A
record that was restored from a backup may give it to another decision; `keep` refuses that. Each folder holds a
thousand receipts, so that finding the newest one is cheap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from twophase.core.checkpoint import Json, Key
from twophase.core.failpoints import hit
from twophase.storage.base import Storage, Where

#: How many receipts share a folder.
SHARE = 1000
_SUFFIX = ".json"
_DONE = ".done"


@dataclass(frozen=True)
class Receipts:
    """The receipts beside one table, of every pipeline that ever wrote there."""

    storage: Storage
    home: Where

    def _folder(self, pipeline: str) -> str:
        return f"{self.home}/receipts/{pipeline}"

    def _path(self, pipeline: str, seq: int, suffix: str = _SUFFIX) -> str:
        return f"{self._folder(pipeline)}/{seq // SHARE:09d}/{seq:012d}{suffix}"

    def keep(self, receipt: Json) -> str | None:
        """Write a receipt, durably; return why not, if its number belongs to another decision. Repeatable.

        A restage raises the epoch; of two receipts of one decision the one with the later epoch stays.
        """
        if not receipt:  # the output was not given one
            return None
        content = json.dumps(receipt, separators=(",", ":")).encode()
        path = self._path(receipt["pipeline"], receipt["commit_seq"])
        try:
            self.storage.create(path, content)
        except FileExistsError:
            there = json.loads(self.storage.read(path))
            if refusal := conflict(receipt, there):
                return refusal
            if there["epoch"] < receipt["epoch"]:
                self.storage.replace(path, content)
        hit("promote.receipt")
        return None

    def of(self, pipeline: str, seq: int) -> Json | None:
        """Return the receipt of a decision; None if there is none."""
        try:
            found: Json = json.loads(self.storage.read(self._path(pipeline, seq)))
        except FileNotFoundError:
            return None
        return found

    def newest(self, pipeline: str) -> int | None:
        """Return the highest commit_seq that has a receipt; None if there is none."""
        for share in reversed(self._shares(pipeline)):
            if found := self._numbers(pipeline, share):
                return max(found)
        return None

    def since(self, pipeline: str, seq: int) -> Iterator[Json]:
        """Yield the receipts from one commit_seq on, in order."""
        for share in self._shares(pipeline):
            if share >= seq // SHARE:
                for number in sorted(self._numbers(pipeline, share)):
                    if number >= seq and (found := self.of(pipeline, number)):
                        yield found

    def _shares(self, pipeline: str) -> list[int]:
        return sorted(int(name) for name, _ in self.storage.entries(self._folder(pipeline)) if name.isdigit())

    def _numbers(self, pipeline: str, share: int) -> list[int]:
        entries = self.storage.entries(f"{self._folder(pipeline)}/{share:09d}")
        stems = [name.removesuffix(_SUFFIX) for name, _ in entries if name.endswith(_SUFFIX)]
        return [int(stem) for stem in stems if stem.isdigit()]

    # --- for a write-ahead sink, whose committer may have been restored from a backup --------------------------------

    def close(self, receipt: Json) -> None:
        """Note that the output of a decision was sent completely."""
        if receipt:
            self.storage.create(self._path(receipt["pipeline"], receipt["commit_seq"], _DONE), b"")

    def is_closed(self, key: Key, seq: int) -> bool:
        """Say whether the output of a decision was sent completely."""
        try:
            self.storage.read(self._path(key.pipeline, seq, _DONE))
        except FileNotFoundError:
            return False
        found = self.of(key.pipeline, seq)
        return found is not None and key_of(found) == key


def key_of(receipt: Json) -> Key:
    """Return the key of the revision that a receipt is of."""
    return Key(receipt["pipeline"], receipt["checkpoint_id"], receipt["revision"])


def conflict(mine: Json, there: Json) -> str | None:
    """Say that two receipts of one commit_seq are of different decisions; None if they are of the same one."""
    if key_of(mine) == key_of(there):
        return None
    return (
        f"commit_seq {mine['commit_seq']} is that of {key_of(there)} here: the record is older than what this sink"
        f" holds; see `twophase reconcile {mine['pipeline']}`"
    )
