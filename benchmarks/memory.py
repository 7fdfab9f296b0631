"""What a commit and a verification need in memory, with very many files in one checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.harness import Figure, Findings, Measure, Series, number, say
from benchmarks.place import Place

GOAL = 500.0
#: Seconds; the process that commits waits for the lease of the one that staged.
LEASE = "3"


@dataclass(frozen=True)
class Sizes:
    """How many files one checkpoint has."""

    files: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    dsn = place.database("memory")
    found = {}
    for what in ("stage", "commit", "verify"):
        found[what] = in_child(what, dsn, sizes.files)
        say(f"{what}: {found[what]['peak']:.0f} MB, {found[what]['seconds']:.1f} s")
    return Findings(
        compared=f"{sizes.files:,} files in one checkpoint",
        figures=[
            Figure("peak memory of the commit", _peak(found["commit"]), goal=GOAL, unit="MB"),
            Figure("peak memory of verify", _peak(found["verify"]), goal=GOAL, unit="MB"),
            Figure("peak memory of sealing", _peak(found["stage"]), unit="MB"),
        ],
        profile={"seconds": {what: child["seconds"] for what, child in found.items()}},
        notes=[
            f"{what}: {number(child['before'])} MB of it are Python and what it imports"
            for what, child in found.items()
        ],
    )


def _peak(child: dict[str, float]) -> Series:
    return Series((child["peak"],))


def in_child(what: str, dsn: str, files: int) -> dict[str, float]:
    """Do one step in a process of its own; return its peak in MB and its seconds."""
    command = [sys.executable, "-m", "benchmarks.memory_child", what, str(files)]
    environment = {**os.environ, "TWOPHASE_DSN": dsn, "TWOPHASE_LEASE": LEASE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        msg = f"{what} ended with code {done.returncode}:\n{done.stderr}"
        raise RuntimeError(msg)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


MEASURE = Measure(
    "memory",
    "How much memory do a commit and a verification need with 100,000 files in one checkpoint?",
    full=Sizes(files=100_000),
    quick=Sizes(files=500),
    tiny=Sizes(files=5),
    run=run,
)
