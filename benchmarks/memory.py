"""What a commit and a verification need in memory, with very many files in one checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.harness import Figure, Findings, Measure, Series, number, say
from benchmarks.place import Place

#: The steps of a checkpoint, in order, and the goal for the peak of each, in MB; `stage` is sealing, without Spark.
STEPS = {"stage": None, "commit": 500.0, "verify": 500.0}
#: Seconds; the process that commits waits for the lease of the one that staged.
LEASE = "3"

_ERROR = re.compile(r"[\w.]+(Error|Unavailable|Failed|Fenced|Mismatch)\b")


@dataclass(frozen=True)
class Sizes:
    """How many files one checkpoint has."""

    files: int


class ChildFailed(Exception):
    """A step did not come to its end."""


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure; a step that fails is told, and the others are kept."""
    dsn = place.database("memory")
    found: dict[str, dict[str, float]] = {}
    errors = []
    for what in STEPS:
        try:
            found[what] = in_child(what, dsn, sizes.files)
        except ChildFailed as error:
            errors.append(str(error))
            say(errors[-1])
        else:
            say(f"{what}: {found[what]['peak']:.0f} MB, {found[what]['seconds']:.1f} s")
    return Findings(
        compared=f"{sizes.files:,} files in one checkpoint",
        figures=[
            Figure(f"peak memory of {what}", Series((child["peak"],)), goal=STEPS[what], unit="MB")
            for what, child in found.items()
        ],
        profile={"seconds": {what: child["seconds"] for what, child in found.items()}},
        notes=[
            f"{what}: {number(child['before'])} MB of it are Python and what it imports"
            for what, child in found.items()
        ],
        errors=errors,
    )


def in_child(what: str, dsn: str, files: int) -> dict[str, float]:
    """Do one step in a process of its own; return its peak in MB and its seconds."""
    command = [sys.executable, "-m", "benchmarks.memory_child", what, str(files)]
    environment = {**os.environ, "TWOPHASE_DSN": dsn, "TWOPHASE_LEASE": LEASE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        why = next((line for line in done.stderr.splitlines()[::-1] if _ERROR.match(line)), "see above")
        msg = f"{what} ended with code {done.returncode}: {why}"
        raise ChildFailed(msg)
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
