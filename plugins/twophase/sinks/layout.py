"""Where a files table keeps what: the names of its folders, markers and manifests.

    <table>/checkpoint=00000017/dt=2026-11-15/part-….parquet     visible: readers see whole checkpoints only
    <table>/checkpoint=00000017/_manifest.r1.a3.<xxh3>           the marker: empty, its name says all
    <table>.twophase/manifests/00000017.r1.a3.json               the manifest, durable before the vote
    <table>.twophase/staging/00000018.r1.a3.7c1e09ab/…           pre-committed, private to one attempt
    <table>.twophase/taken/00000018.r1.a3.<uuid>/…               one promoter's own, on its way to the table (R1)

Nothing unfinished is ever inside the table's folder: DuckDB and polars read folders that start with `_` too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from twophase.core.checkpoint import Json, Key

MARKER = re.compile(r"_manifest\.r(\d+)\.a(\d+)\.([0-9a-f]{16})")
ATTEMPT = re.compile(r"(\d{8,})\.r(\d+)\.a(\d+)\..+")


class Marker(NamedTuple):
    """What a marker's name says."""

    revision: int
    attempt: int
    digest: str

    def __str__(self) -> str:
        """Return the marker's file name."""
        return f"_manifest.r{self.revision}.a{self.attempt}.{self.digest}"


class Place:
    """Where one attempt's output is, was, or will be."""

    def __init__(self, key: Key, handle: Json) -> None:
        """Derive every path from what the record keeps."""
        self.table = Path(handle["table"])
        self.side = self.table.with_name(f"{self.table.name}.twophase")
        self.name: str = handle["name"]
        #: Digests that were voted for before a restage: what they stand for may still turn up (R10).
        self.earlier: list[str] = handle.get("earlier", [])
        self.prefix = self.name.rpartition(".")[0]
        self.staged = self.side / "staging" / self.name
        self.taken = self.side / "taken"
        self.visible = self.table / f"checkpoint={key.checkpoint_id:08d}"

    def manifest(self, key: Key, attempt: int) -> Path:
        """Return where an attempt's manifest is."""
        return self.side / "manifests" / f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.json"

    @property
    def reachable(self) -> bool:
        """Say whether the table is there: it is not, if its storage is not mounted."""
        return self.table.is_dir()

    def taken_by_others(self) -> list[Path]:
        """List the folders of this attempt that a promoter took and left."""
        if not self.taken.is_dir():
            return []
        with os.scandir(self.taken) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(f"{self.prefix}.")]
        return [self.taken / name for name in names if not name.endswith((".junk", ".dead"))]
