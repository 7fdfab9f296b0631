"""Compares the files of a state with its manifest. For `twophase verify`, the vote, and the look before a promotion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twophase.state import run_files
from twophase.state.manifest import StateManifest
from twophase.storage import disk


def missing(home: Path, manifest: StateManifest) -> list[str]:
    """Say which listed files are not there, or have another size."""
    problems = []
    for run in manifest.files():
        found = disk.identity(run_files.folder(home) / run.path)
        if found is None:
            problems.append(f"{run.path}: is not there")
        elif found[0] != run.bytes:
            problems.append(f"{run.path}: expected {run.bytes} bytes, found {found[0]}")
    return problems


def damages(home: Path, manifest: StateManifest, *, only: str = "") -> Iterator[str]:
    """Say which listed files are not what the manifest says, byte by byte; `only` is how their names begin."""
    for run in manifest.files():
        if not run.path.startswith(only):
            continue
        path = run_files.folder(home) / run.path
        found = disk.identity(path)
        if found is None:
            yield f"{run.path}: is not there"
        elif found[0] != run.bytes:
            yield f"{run.path}: expected {run.bytes} bytes, found {found[0]}"
        elif (checksum := disk.digest_file(path)) != run.xxh3:
            yield f"{run.path}: expected checksum {run.xxh3}, found {checksum}"
