"""Where a files table keeps what: the names of its folders, markers and manifests.

    <table>/checkpoint=00000017/dt=2026-11-15/part-….parquet     visible: readers see whole checkpoints only
    <table>/checkpoint=00000017/_manifest.r1.a3.<xxh3>           the marker: empty, its name says all
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
#: What keeps the name of a swept revision taken where folders cannot be exchanged.
TOMBSTONE = "_swept"
#: What the names of folders under taken/ end in that no promoter takes any more.
DEAD = (".junk", ".dead")
#: What the side folder of a table has in it.
SIDES = ("staging", "taken", "manifests", "superseded")


class Marker(NamedTuple):
    """What a marker's name says."""

    revision: int
    attempt: int
    digest: str

    def __str__(self) -> str:
        """Return the marker's file name."""
        return f"_manifest.r{self.revision}.a{self.attempt}.{self.digest}"

    @classmethod
    def parse(cls, name: str) -> Marker | None:
        """Read a file's name; None: it is no marker."""
        match = MARKER.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


def markers(folder: Path | int) -> list[Marker]:
    """Return the markers in a folder; FileNotFoundError if it is not there."""
    return [marker for marker in map(Marker.parse, os.listdir(folder)) if marker]  # noqa: PTH208 - a descriptor, too


def side(table: Path) -> Path:
    """Return the folder beside a table."""
    return table.with_name(f"{table.name}.twophase")


class FilesPaths:
    """Where one attempt's output is, was, or will be."""

    storage: Storage = DISK

    def __init__(self, key: Key, handle: Json) -> None:
        """Derive every path from what the record keeps."""
        self.key = key
        self.table = Path(handle["table"])
        self.side = side(self.table)
        self.name: str = handle["name"]
        #: Digests that were voted for before a restage: what they stand for may still turn up (R10).
        self.earlier: list[str] = handle.get("earlier", [])
        #: The marker of the committed revision that this one takes the place of.
        self.replaces: Marker | None = Marker.parse(handle.get("replaces") or "")
        self.prefix = self.name.rpartition(".")[0]
        self.staged = self.side / "staging" / self.name
        self.taken = self.side / "taken"
        self.visible = self.table / (handle.get("folder") or f"checkpoint={key.checkpoint_id:08d}")

    @property
    def parents(self) -> list[Path]:
        """Return the folders that lead to the visible one: the table, and those in it for slots that lie deeper."""
        below = self.visible.relative_to(self.table).parts[:-1]
        return [self.table.joinpath(*below[:length]) for length in range(len(below) + 1)]

    def manifest(self, attempt: int) -> Path:
        """Return where an attempt's manifest is."""
        return self.side / "manifests" / f"{self.key.checkpoint_id:08d}.r{self.key.revision}.a{attempt}.json"

    def superseded(self, revision: int) -> Path:
        """Return where a revision of this checkpoint goes when it is replaced."""
        return self.side / "superseded" / f"{self.key.checkpoint_id:08d}.r{revision}"

    @property
    def reachable(self) -> bool:
        """Say whether the table is there: it is not, if its storage is not mounted."""
        return self.table.is_dir()

    def make_sides(self) -> None:
        """Make the folders that promotion moves into, if somebody removed them: they are empty most of the time."""
        for folder in (self.taken, self.superseded(0).parent):
            if self.side.is_dir() and not folder.exists():
                folder.mkdir(exist_ok=True)
                disk.fsync_folder(self.side)

    def taken_by_others(self, prefix: str | None = None) -> list[Path]:
        """List the folders of this attempt (or with another prefix) that a promoter took and left."""
        start = f"{self.prefix if prefix is None else prefix}."
        try:
            with os.scandir(self.taken) as entries:
                names = [entry.name for entry in entries if entry.name.startswith(start)]
        except FileNotFoundError:
            return []
        return [self.taken / name for name in names if not name.endswith(DEAD)]
