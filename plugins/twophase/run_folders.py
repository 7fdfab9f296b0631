"""Run folders: each holds one attempt's plan, result and log. Runs name them here; sweeps remove them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from twophase.core.checkpoint import Key
from twophase.core.settings import home
from twophase.storage import disk

_NAME = re.compile(r"(\d{8,})\.r(\d+)\.a\d+\..+")


def run_folder(key: Key, attempt: int, token: str) -> Path:
    """Return the folder of one attempt's plan, result and log."""
    return _folder(key.pipeline) / f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}"


def of(pipeline: str) -> Iterator[tuple[Key, Path]]:
    """Yield the run folders of a pipeline, each with its revision."""
    for name, _ in disk.entries(_folder(pipeline)):
        if match := _NAME.fullmatch(name):
            yield Key(pipeline, int(match[1]), int(match[2])), _folder(pipeline) / name


def _folder(pipeline: str) -> Path:
    return home() / "runs" / pipeline
