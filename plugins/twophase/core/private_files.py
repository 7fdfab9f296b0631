"""Make folders and files that only this account can read, whatever the umask; for plans, results and logs of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Literal

from twophase.core import settings

_FOLDER, _FILE = 0o700, 0o600


def make_folder(path: Path) -> None:
    """Make a folder and its parents below the run folder, private; the run folder's own rights are left alone."""
    home = settings.home()
    home.mkdir(parents=True, exist_ok=True)
    for folder in reversed((path, *path.parents)):
        if folder != home and folder not in home.parents:
            folder.mkdir(mode=_FOLDER, exist_ok=True)


def open_file(path: Path, mode: Literal["w", "ab"]) -> IO[Any]:
    """Open a private file for writing (`w`) or appending (`ab`), and make its folder if need be."""
    make_folder(path.parent)
    how = os.O_TRUNC if mode == "w" else os.O_APPEND
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, _FILE)
    return os.fdopen(descriptor, mode, encoding=None if mode == "ab" else "utf-8")
