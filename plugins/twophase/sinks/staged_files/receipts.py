"""Receipts of decisions, kept as files beside a table. Promoters write them, `twophase reconcile` reads them.

    <home>/receipts/<pipeline>/000000012/000000012345.json      of the decision with commit_seq 12,345
    <home>/receipts/<pipeline>/000000012/000000012345.e4.json   of the same one after a restage, whose epoch is 4

A receipt is written before the output becomes visible, so every visible output has one. It says all that the record
knew of the decision: the input, the participants, when, by whom. A commit_seq belongs to one decision for ever. A
record that was restored from a backup may give it to another decision; `keep` refuses that. Each folder holds a
thousand receipts, so that finding the newest one is cheap. No receipt is ever written over: of those of one decision
the one with the latest epoch counts, in whatever order their promoters came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from twophase.core.checkpoint import Json, Key
from twophase.core.failpoints import hit
from twophase.storage.base import Storage, Where

#: How many receipts share a folder.
SHARE = 1000
_SUFFIX = ".json"
_DONE = ".done"
_RECEIPT = re.compile(r"(\d{12,})(?:\.e(\d+))?\.json")


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
        """Write a receipt, durably; return why not, if its number belongs to another decision. Repeatable."""
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
                later = self._path(receipt["pipeline"], receipt["commit_seq"], f".e{receipt['epoch']}{_SUFFIX}")
                with suppress(FileExistsError):  # another promoter of the same attempt
                    self.storage.create(later, content)
        hit("promote.receipt")
        return None

    def of(self, pipeline: str, seq: int) -> Json | None:
        """Return the receipt of a decision, the one with the latest epoch; None if there is none."""
        return next(self._latest(pipeline, seq // SHARE, seq, seq), None)

    def newest(self, pipeline: str) -> int | None:
        """Return the highest commit_seq that has a receipt; None if there is none."""
        for share in reversed(self._shares(pipeline)):
            names = (name for name, _ in self.storage.entries(f"{self._folder(pipeline)}/{share:09d}"))
            # Numbers of one length sort as texts.
            if last := max(filter(_RECEIPT.fullmatch, names), default=None):
                return int(last.partition(".")[0])
        return None

    def since(self, pipeline: str, seq: int) -> Iterator[Json]:
        """Yield the receipts from one commit_seq on, in order."""
        for share in self._shares(pipeline):
            if share >= seq // SHARE:
                yield from self._latest(pipeline, share, seq, (share + 1) * SHARE)

    def _latest(self, pipeline: str, share: int, first: int, last: int) -> Iterator[Json]:
        """Yield the latest receipt of each decision of a folder from one number through another, in order."""
        named: dict[int, tuple[int, str]] = {}
        for name, path in self.storage.entries(f"{self._folder(pipeline)}/{share:09d}"):
            if (match := _RECEIPT.fullmatch(name)) and first <= (number := int(match[1])) <= last:
                named[number] = max(named.get(number, (0, path)), (int(match[2] or 0), path))
        for number in sorted(named):
            found: Json = json.loads(self.storage.read(named[number][1]))
            yield found

    def _shares(self, pipeline: str) -> list[int]:
        return sorted(int(name) for name, _ in self.storage.entries(self._folder(pipeline)) if name.isdigit())

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
