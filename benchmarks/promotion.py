"""Making a staged folder visible: as fast with 10,000 files in it as with 10, since it is one rename or exchange."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Figure, Findings, Measure, Stopwatch, interleave, medians, step, timed
from benchmarks.place import Place
from benchmarks.workload import stage
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome
from twophase.sinks.files.promotion import FilesPromoter
from twophase.storage import disk


@dataclass(frozen=True)
class Sizes:
    """How many files lie in the folders, and how often each is promoted."""

    many: int
    few: int
    rounds: int
    #: Whether it takes the place of a committed revision with as many files.
    replacing: bool = False


def run(place: Place, sizes: Sizes) -> Findings:  # noqa: ARG001 - needs no database
    """Measure."""
    sides = {}
    for files in (sizes.many, sizes.few):
        with step(f"staging {files:,} files"):
            sides[f"{files:,} files"] = promoter(files, replacing=sizes.replacing)
    found = interleave(sides, rounds=sizes.rounds, warmup=2)
    many, few = found.values()
    return Findings(
        compared=f"{sizes.many:,} staged files ÷ {sizes.few:,}",
        figures=[
            Figure("replacement" if sizes.replacing else "promotion", many["promotion"], few["promotion"], goal=1.2),
            Figure("the manifest check before it", many["check"], few["check"]),
        ],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=[
            "the check compares every file's size and time with the manifest, so it grows with their number",
            "Python's garbage collector is off meanwhile, as in timeit: what it collects is the check's",
        ],
    )


def promoter(files: int, *, replacing: bool) -> Callable[[], Mapping[str, float]]:
    """Stage a folder once; return what promotes it and puts it back, any number of times."""
    sink = sinks.Files(f"lake/{'replacement' if replacing else 'promotion'}_{files}")
    sink.prepare()
    older = first_revision(sink, files) if replacing else None
    key = Key("promotion", 1, 2 if replacing else 1)
    output = stage(sink, Output(key, 1, sink.place(key, 1, "benchmark", older=older), sink="lake"), files)
    table = Path(output.handle["table"])
    side = Path(f"{table}.twophase")
    staged = side / "staging" / output.handle["name"]

    def promote() -> None:
        if sink.promote(output).outcome is not Outcome.PROMOTED:
            msg = f"{files} files: expected to promote them"
            raise RuntimeError(msg)

    def turn() -> Mapping[str, float]:
        os.sync()
        gc.collect()
        gc.disable()  # as timeit does: the check's garbage would be collected in the middle of the promotion
        with Stopwatch(check=(FilesPromoter, "_check_taken"), fsync=(disk, "fsync_folder")) as stopwatch:
            whole = timed(promote)
            parts = stopwatch.take()
        gc.enable()
        (table / "checkpoint=00000001").rename(staged)
        if replacing:
            (side / "superseded" / "00000001.r1").rename(table / "checkpoint=00000001")
        return {"promotion": whole - parts["check"], **parts}

    return turn


def first_revision(sink: sinks.Files, files: int) -> Output:
    """Commit the revision that is to be replaced."""
    key = Key("promotion", 1, 1)
    output = stage(sink, Output(key, 1, sink.place(key, 1, "benchmark"), sink="lake"), files)
    sink.promote(output)
    return output


REPLACEMENT = Measure(
    "replacement",
    "Does a replacement stay one exchange, however many files a checkpoint has?",
    full=Sizes(many=10_000, few=10, rounds=50, replacing=True),
    quick=Sizes(many=500, few=10, rounds=20, replacing=True),
    tiny=Sizes(many=20, few=10, rounds=1, replacing=True),
    run=run,
)

MEASURE = Measure(
    "promotion",
    "Does promotion stay one rename, however many files a checkpoint has?",
    full=Sizes(many=10_000, few=10, rounds=50),
    quick=Sizes(many=500, few=10, rounds=20),
    tiny=Sizes(many=20, few=10, rounds=1),
    run=run,
)
