"""On what a figure was taken: without it a figure says nothing."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from twophase.local import postgres_programs


def describe(folder: Path) -> dict[str, str]:
    """Describe the machine, the programs, and how busy it is right now; `folder` tells which file system is used."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "file system": _file_system(folder),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "spark": version("pyspark"),
        "postgres": postgres_programs.run(["postgres", "--version"]).stdout.split()[-1],
        "twophase": version("twophase"),
        "code": CODE,
        "load average": load(),
    }


def _code() -> str:
    """Return the commit that is measured, with a + if the package has been changed since."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parents[1])]
    asked = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "plugins"])
    try:
        commit, changed = (
            subprocess.run([*git, *what], capture_output=True, text=True, check=True).stdout.strip() for what in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


#: As it was when this program was loaded.
CODE = _code()


def load() -> str:
    """Return the load averages of 1, 5 and 15 minutes."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return found[1].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on: that of the longest mount point above it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    found = ("", "unknown")
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]
