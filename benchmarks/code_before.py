"""The code before a change, kept by its commit: what the present code is measured against, in a process of its own."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The last commit in which each step of the protocol was a transaction of its own.
COMMIT = "c688230"


class NotHere(Exception):
    """The commit is not in this clone, or there is no clone at all."""


def tree() -> Path:
    """Return the files of that commit, taken out of the history once and kept below build/."""
    there = ROOT / "build" / f"before-{COMMIT}"
    if there.is_dir():
        return there
    there.parent.mkdir(exist_ok=True)
    archive, new = there.with_suffix(".tar"), there.with_name(f"{there.name}.new")
    command = ["git", "archive", "--output", str(archive), COMMIT, "plugins", "benchmarks"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        msg = f"the code before ({COMMIT}): git is not installed"
        raise NotHere(msg) from error
    if done.returncode != 0:
        archive.unlink(missing_ok=True)
        said = " ".join(done.stderr.split())
        msg = f"the code before ({COMMIT}) is not in this clone; fetch its whole history (git says: {said})"
        raise NotHere(msg)
    with tarfile.open(archive) as packed:
        packed.extractall(new, filter="data")
    archive.unlink()
    new.rename(there)
    return there
