"""One step of a checkpoint with many files, in a process that does nothing else; prints its peak memory as JSON."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

from benchmarks.harness import timed
from benchmarks.workload import Linked, land, pipeline
from twophase.core import failpoints
from twophase.core.failpoints import FailpointError
from twophase.runner import Runner
from twophase.verification import verify
from twophase.wiring import load

NAME = "memory"


def peak_mb() -> float:
    """Return the most that this program has had in memory.

    Linux counts what `getrusage` tells from before the program was loaded, when this process was still its parent's
    copy; what /proc tells begins with the program.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(found[1]) / 1000
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def stage(files: int) -> None:
    """Take a checkpoint up to the commit point, and stop there."""
    failpoints.configure("commit.before=raise")
    declared = pipeline(NAME)
    land(NAME, 1)
    try:
        with Runner(declared, Linked(files)) as runner:
            runner.run()
    except FailpointError:
        return
    raise RuntimeError


def commit(files: int) -> None:
    """Take the checkpoint over and commit it."""
    with Runner(pipeline(NAME), Linked(0)) as runner:
        done = runner.run()
    if done is None or done.rows != files:
        raise RuntimeError


def check(files: int) -> None:
    """Compare what is committed with the record, byte by byte."""
    with Runner(pipeline(NAME), Linked(files)) as runner:
        if [difference for difference in verify(runner.record, load(runner.record, NAME)) if difference]:
            raise RuntimeError


def main() -> None:
    """Do the step that was asked for."""
    step = {"stage": stage, "commit": commit, "verify": check}[sys.argv[1]]
    before = peak_mb()
    seconds = timed(lambda: step(int(sys.argv[2])))
    print(json.dumps({"before": before, "peak": peak_mb(), "seconds": seconds}))


if __name__ == "__main__":
    main()
