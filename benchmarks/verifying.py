"""`verify` reads every byte again: at the speed at which the files can be read at all."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.harness import Figure, Findings, Measure, interleave, medians, number, step, timed
from benchmarks.place import Place
from benchmarks.workload import stage_bytes
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.storage import base, disk

#: So much longer may it take, to reach 0.7 of the bytes a second.
SLOWER = 1.43


@dataclass(frozen=True)
class Sizes:
    """How much is verified, and how often."""

    bytes: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:  # noqa: ARG001 - needs no database
    """Measure."""
    sink = sinks.Files("lake/verifying")
    sink.prepare()
    key = Key("verifying", 1, 1)
    output = Output(key, 1, sink.place(key, 1, "benchmark"), sink="lake")
    with step(f"staging {sizes.bytes / 1e6:,.0f} MB"):
        output = stage_bytes(sink, output, sizes.bytes)
    sink.promote(output)
    files = sink.files(output)

    def verify() -> Mapping[str, float]:
        def whole() -> None:
            differences = list(sink.verify(output))
            if differences:
                raise RuntimeError(differences[0])

        return {"whole": timed(whole)}

    def plain() -> Mapping[str, float]:
        def whole() -> None:
            with ThreadPoolExecutor(base.THREADS) as pool:
                list(pool.map(read, files))

        return {"whole": timed(whole)}

    found = interleave({"verify": verify, "plain read": plain}, rounds=sizes.rounds, warmup=1)
    mine, theirs = found["verify"]["whole"], found["plain read"]["whole"]
    speed = output.manifest["bytes"] / 1e6 / mine.median
    return Findings(
        compared=f"verify of {output.manifest['bytes'] / 1e6:,.0f} MB ÷ reading it, each in {base.THREADS} threads",
        figures=[Figure("time of verify", mine, theirs, goal=SLOWER)],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=[
            f"verify read {number(speed)} MB/s, {theirs.median / mine.median:.2f} of a plain read; the goal is 0.7",
            "the files are in the page cache, so this is the processor's work",
        ],
    )


def read(path: str) -> None:
    """Read a file to its end."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as `verify` does
        while file.read(disk.CHUNK):
            pass


MEASURE = Measure(
    "verify",
    "How fast is a table verified, against reading it?",
    full=Sizes(bytes=1_000_000_000, rounds=7),
    quick=Sizes(bytes=200_000_000, rounds=5),
    tiny=Sizes(bytes=1_000_000, rounds=1),
    run=run,
)
