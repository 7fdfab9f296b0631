"""Taking new input from a landing folder that is full of files which are done."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import Figure, Findings, Measure, Stopwatch, interleave, medians, say, step, timed
from benchmarks.place import Place, administer
from benchmarks.workload import LINKS, Checkpoints
from twophase.committer.record import PostgresTransaction
from twophase.core.settings import data_path
from twophase.sources.files import Files


@dataclass(frozen=True)
class Sizes:
    """How many files each folder holds, and how often a new one comes."""

    many: int
    few: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    sides: dict[str, Callable[[], Mapping[str, float]]] = {}
    runs: list[Checkpoints] = []
    taking: dict[str, dict[str, float]] = {}
    for name, files in (("many", sizes.many), ("few", sizes.few)):
        dsn = place.database(f"landing_{name}")
        checkpoints = Checkpoints(name, dsn)
        with step(f"{files:,} files in a landing folder, taken by one checkpoint"):
            fill(name, files)
            first = _watched(checkpoints)
        say(f"that checkpoint's begin took {first['begin']:.2f} s")
        taking[f"the begin that took {files:,} files"] = first
        administer(dsn, "VACUUM ANALYZE")
        runs.append(checkpoints)
        sides[name] = partial(_watched, checkpoints)
    found = interleave(sides, rounds=sizes.rounds, warmup=2)
    for checkpoints in runs:
        checkpoints.close()
    many, few = found["many"], found["few"]
    return Findings(
        compared=f"{sizes.many:,} files done in the landing folder ÷ {sizes.few:,}",
        figures=[
            Figure("begin with one new file", many["begin"], few["begin"]),
            Figure("the same, beyond a bare listing of the folder", many["beyond"], few["beyond"], goal=3),
        ],
        profile={
            **{f"begin, {name}": medians(parts, ("begin", "bare", "list", "compare")) for name, parts in found.items()},
            **taking,
        },
        notes=[
            "`list` looks at every file of the folder, `compare` asks the record which of them are new",
            "`bare` is what listing the folder takes by itself: each name, with its size and time",
        ],
    )


def _watched(checkpoints: Checkpoints) -> dict[str, float]:
    """Run one checkpoint over a new file; return what its begin took."""
    with Stopwatch(
        list=(Files, "discover"),
        compare=(PostgresTransaction, "new_files"),
        claim=(PostgresTransaction, "add_checkpoint"),
    ) as stopwatch:
        whole = checkpoints()
        bare = timed(partial(list_bare, checkpoints.name))
        return {"begin": whole["begin"], "bare": bare, "beyond": whole["begin"] - bare, **stopwatch.take()}


def list_bare(name: str) -> int:
    """Look at every file of a landing folder, and do nothing with it."""
    total = 0
    with os.scandir(data_path(f"landing/{name}")) as entries:
        for entry in entries:
            total += entry.stat().st_size
    return total


def fill(name: str, files: int) -> None:
    """Land many files: one tiny file under many names, a new one every so often."""
    folder = data_path(f"landing/{name}")
    original = ""
    for number in range(files):
        path = f"{folder}/done-{number:08d}.json"
        if number % LINKS == 0:
            original = path
            with open(path, "w") as file:  # noqa: PTH123 - 100,000 files: a Path for each costs
                file.write('{"id": 1, "word": "w"}\n')
        else:
            os.link(original, path)


MEASURE = Measure(
    "landing",
    "What does begin cost in a landing folder where 100,000 files are done, beside one with 100?",
    full=Sizes(many=100_000, few=100, rounds=20),
    quick=Sizes(many=500, few=50, rounds=10),
    tiny=Sizes(many=20, few=10, rounds=1),
    run=run,
)
