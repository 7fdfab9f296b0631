"""The names of folders, markers and manifests of a files table; log tables and write-ahead sinks use some of them.

    <table>/checkpoint=00000017/dt=2026-11-15/part-….parquet     visible: readers see whole checkpoints only
    <table>/checkpoint=00000017/_manifest.r1.a3.<xxh3>           the marker: an empty file, its name says all
    <table>.twophase/manifests/00000017.r1.a3.json               the manifest, durable before the vote
    <table>.twophase/staging/00000018.r1.a3.7c1e09ab/…           pre-committed, private to one attempt
    <table>.twophase/taken/00000018.r1.a3.<uuid>/…               one promoter's own, on its way to the table (R1)
    <table>.twophase/receipts/orders/000000000/000000000018.json the receipt of a decision, by its commit_seq
    <table>.twophase/superseded/00000017.r1/…                    replaced by a later revision, until retention is over

With a slot folder the interval owns `<table>/dt=2026-11-15/`, and there is no checkpoint level.
Nothing unfinished is ever inside the table's folder: DuckDB and polars read folders that start with `_` too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from twophase.core.checkpoint import Json, Key
from twophase.storage import disk
from twophase.storage.base import DISK, Storage

MARKER = re.compile(r"_manifest\.r(\d+)\.a(\d+)\.([0-9a-f]{16})")
CHECKPOINT = re.compile(r"checkpoint=(\d{8,})")
ATTEMPT = re.compile(r"(\d{8,})\.r(\d+)\.a(\d+)\..+")
SUPERSEDED = re.compile(r"(\d{8,})\.r(\d+)")
#: The file that stays under superseded/ in place of a swept revision, where folders cannot be exchanged (R3).
TOMBSTONE = "_swept"
#: The endings of folders under taken/ that no promoter takes any more.
DEAD = (".junk", ".dead")
#: The folders in the folder beside a table.
SIDES = ("staging", "taken", "manifests", "superseded")


class Marker(NamedTuple):
    """A marker, as its file name says it."""

    revision: int
    attempt: int
    digest: str

    def __str__(self) -> str:
        """Return the marker's file name."""
        return f"_manifest.r{self.revision}.a{self.attempt}.{self.digest}"

    @classmethod
    def parse(cls, name: str) -> Marker | None:
        """Read a marker from a file's name; None if it is no marker."""
        match = MARKER.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


def markers(folder: Path | int) -> list[Marker]:
    """Return the markers in a folder; FileNotFoundError if it is not there."""
    return [marker for marker in map(Marker.parse, os.listdir(folder)) if marker]  # noqa: PTH208 - a descriptor, too


def side(table: Path) -> Path:
    """Return the folder beside a table: it holds all that readers of the table must not see."""
    return table.with_name(f"{table.name}.twophase")


class FilesPaths:
    """The paths of one attempt's output: staged, taken, visible and superseded."""

    storage: Storage = DISK

    def __init__(self, key: Key, handle: Json) -> None:
        """Derive every path from the handle in the record."""
        self.key = key
        self.table = Path(handle["table"])
        self.side = side(self.table)
        self.name: str = handle["name"]
        #: The marker of the committed revision that this one takes the place of.
        self.replaces: Marker | None = Marker.parse(handle.get("replaces") or "")
        self.prefix = self.name.rpartition(".")[0]
        self.staged = self.side / "staging" / self.name
        self.taken = self.side / "taken"
        self.visible = self.table / (handle.get("folder") or f"checkpoint={key.checkpoint_id:08d}")

    @property
    def parents(self) -> list[Path]:
        """Return the folders above the visible one, from the table down; a slot folder may lie several levels deep."""
        below = self.visible.relative_to(self.table).parts[:-1]
        return [self.table.joinpath(*below[:length]) for length in range(len(below) + 1)]

    def manifest(self, attempt: int) -> Path:
        """Return where an attempt's manifest is."""
        return self.side / "manifests" / f"{self.key.checkpoint_id:08d}.r{self.key.revision}.a{attempt}.json"

    def superseded(self, revision: int) -> Path:
        """Return the folder that a revision of this checkpoint is moved to when it is replaced."""
        return self.side / "superseded" / f"{self.key.checkpoint_id:08d}.r{revision}"

    @property
    def reachable(self) -> bool:
        """Say whether the table's folder is there; False if its storage is not mounted."""
        return self.table.is_dir()

    def make_sides(self) -> None:
        """Make taken/ and superseded/ again if somebody removed them; they are empty most of the time."""
        for folder in (self.taken, self.superseded(0).parent):
            if self.side.is_dir() and not folder.exists():
                folder.mkdir(exist_ok=True)
                disk.fsync_folder(self.side)

    def taken_by_others(self, prefix: str | None = None) -> list[Path]:
        """List the folders under taken/ of this attempt, or of another prefix: promoters have taken them."""
        start = f"{self.prefix if prefix is None else prefix}."
        try:
            with os.scandir(self.taken) as entries:
                names = [entry.name for entry in entries if entry.name.startswith(start)]
        except FileNotFoundError:
            return []
        return [self.taken / name for name in names if not name.endswith(DEAD)]
