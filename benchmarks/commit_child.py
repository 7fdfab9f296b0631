"""Checkpoints of some pipelines in a process of its own, by whichever code is on its path: today's, or one before.

    python commit_child.py DSN CHECKPOINTS NAME...     so many checkpoints of each are there; then, for each line with a
                                                       number on the standard input, as many of each are taken through

Each line of the answer has the seconds that it took, and those of CPU. Pipelines of one process run at once.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from benchmarks.filling import fill, fill_table
from benchmarks.workload import Checkpoints, land
from twophase.committer.record import connect
from twophase.committer.upgrade import upgrade


class Side:
    """One pipeline, and the numbers of the files that land for it."""

    def __init__(self, name: str, dsn: str, checkpoints: int) -> None:
        """Give it a history."""
        fill(name, dsn, checkpoints)
        fill_table(name, checkpoints)
        self.name = name
        self.checkpoints = Checkpoints(name, dsn)
        self.numbers = count(1)

    def run(self, times: int) -> None:
        """Take some checkpoints through."""
        for _ in range(times):
            land(self.name, next(self.numbers))
            self.checkpoints.run()


def main(dsn: str, checkpoints: int, names: list[str]) -> None:
    """Answer until the input ends."""
    engine = connect(dsn)
    upgrade(engine)
    engine.dispose()
    sides = [Side(name, dsn, checkpoints) for name in names]
    print(json.dumps({"ready": names}), flush=True)
    with ThreadPoolExecutor(len(sides)) as pool:
        for line in sys.stdin:
            start, cpu = time.perf_counter(), time.process_time()
            list(pool.map(Side.run, sides, [int(line)] * len(sides)))
            seconds = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
            print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
