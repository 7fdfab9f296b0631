"""What a promotion into Kafka costs whatever it sends: on its own, after a killed one, and with many markers before it.

As a program it promotes one output, which it reads as JSON from the standard input; a failpoint kills it on the way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Figure, Findings, Measure, Stopwatch, interleave, medians, say, step, timed
from benchmarks.kafka_broker import KafkaPlace, declared, serving
from benchmarks.place import Place
from twophase.core.checkpoint import Key, Output
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks.base import Sink
from twophase.sinks.kafka.markers import Markers, SentMarker, key_of, split
from twophase.sinks.kafka.transaction import Producing

SCHEMA = (Column("key", "string"), Column("value", "string"))
PIPELINE = "promotion"
PARTITIONS = 2
#: Where the killed promoter is: everything is sent, nothing is committed.
_KILLED = "kafka.marked"
_RECEIPT = {"pipeline": PIPELINE, "sinks": ["out"], "note": "x" * 400}


@dataclass(frozen=True)
class Sizes:
    """How many markers the writes have, how many promotions are timed, and how many after a killed one."""

    old: int
    young: int
    rounds: int
    killed: int


class Write:
    """A sink with some markers behind it, and tiny outputs that it promotes one by one."""

    def __init__(self, kafka: KafkaPlace, name: str, markers: int = 0) -> None:
        self.sink = declared(kafka.make_topic(PARTITIONS))
        self.sink.join(PIPELINE, name)
        self.sink.prepare()
        self._numbers = count(markers + 1)
        if markers:
            self._fill(kafka, markers)
            self.sink.prepare()  # as each run does: it notes how the markers stand

    def _fill(self, kafka: KafkaPlace, number: int) -> None:
        """Send as many markers as promotions would have sent, a transaction each."""
        with Markers(kafka.cluster, PIPELINE, self.sink._write) as markers:  # noqa: SLF001 - nobody else asks for it
            producer = Producing(kafka.cluster, f"fill-{markers.prefix}", 600.0)
            for seq in range(1, number + 1):
                pieces = split(_RECEIPT)
                summary = {"digest": f"{seq:032x}", "rows": 1, "bytes": 500, "files": 1}
                marker = SentMarker(
                    seq, seq, 1, 1, self.sink.topic, "none", {"0": [seq, seq + 1]}, summary, len(pieces)
                )
                key = key_of(markers, Key(PIPELINE, seq, 1))
                producer.begin()
                for piece in pieces:
                    producer.put(markers.topic, piece, f"{key}/0".encode(), markers.partition)
                producer.put(markers.topic, marker.dumps(), key.encode(), markers.partition)
                producer.commit(60.0)
            producer.close()

    def staged(self) -> Output:
        """Stage one row, and decide it."""
        number = next(self._numbers)
        key = Key(PIPELINE, number, 1)
        output = Output(key, 1, self.sink.place(key, 1, "benchmark"), sink="out")
        folder = Path(f"{output.handle['table']}.twophase", "staging", output.handle["name"])
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"key": ["k"], "value": ["v" * 90]}), folder / "part-r1-a1-0.parquet")
        output = replace(output, manifest=self.sink.seal(output, SCHEMA))
        return replace(output, commit_seq=number, receipt=_RECEIPT)

    def promoted(self) -> Mapping[str, float]:
        """Time one promotion."""
        output = self.staged()
        with Stopwatch(
            fence=(Producing, "__init__"), look=(Markers, "look"), commit=(Producing, "commit")
        ) as stopwatch:
            whole = timed(lambda: self._promote(output))
            parts = stopwatch.take()
        return {"promotion": whole, **parts, "other": whole - sum(parts.values())}

    def after_killed(self) -> Mapping[str, float]:
        """Let a process die with its transaction open, then time the promotion that finishes its work."""
        output = self.staged()
        told = {"sink": self.sink.declaration(), "output": output.to_json()}
        killed = subprocess.run(
            [sys.executable, "-m", "benchmarks.kafka_promotion"],
            input=json.dumps(told).encode(),
            env={**os.environ, "TWOPHASE_FAILPOINTS": f"{_KILLED}=kill"},
            check=False,
        )
        if killed.returncode >= 0:
            msg = f"expected a promoter that is killed at {_KILLED}, found exit code {killed.returncode}"
            raise RuntimeError(msg)
        return {"promotion": timed(lambda: self._promote(output))}

    def _promote(self, output: Output) -> None:
        """Promote, as recovery does: again if it is put off."""
        while (found := self.sink.promote(output)).outcome in {Outcome.RETRY_LATER, Outcome.UNKNOWN}:
            say(f"put off: {found.reason}")
        if found.outcome is not Outcome.PROMOTED:
            msg = f"{output.key}: expected to promote it, found {found}"
            raise RuntimeError(msg)


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    with serving(place) as kafka:
        sides = {}
        for name, markers in (("old", sizes.old), ("young", sizes.young)):
            with step(f"{markers:,} markers of write {name}"):
                sides[name] = Write(kafka, name, markers)
        found = interleave({name: write.promoted for name, write in sides.items()}, rounds=sizes.rounds, warmup=3)
        victim = Write(kafka, "victim")
        killed = interleave({"killed": victim.after_killed}, rounds=sizes.killed)["killed"]
    old, young = found["old"], found["young"]
    return Findings(
        compared="a promotion of one row; with many markers ÷ with few",
        figures=[
            Figure("fixed cost of a promotion", young["promotion"], goal=0.25),
            Figure("after a killed promoter", killed["promotion"], goal=2.5),
            Figure(f"at marker {sizes.old:,} ÷ at {sizes.young:,}", old["promotion"], young["promotion"], goal=1.1),
        ],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=[
            "a promotion looks for its marker, fences, looks again, sends, commits, and looks until it is there",
            f"the killed promoter dies at {_KILLED}: all is sent, nothing is committed, its transaction is open",
        ],
    )


def main() -> None:
    """Promote what the standard input tells."""
    told = json.load(sys.stdin)
    Sink.load(told["sink"]).promote(Output.of_json(told["output"]))


MEASURE = Measure(
    "kafka-promotion",
    "What does a promotion into Kafka cost at least, and does it stay that cheap?",
    full=Sizes(old=10_000, young=100, rounds=40, killed=10),
    quick=Sizes(old=1_000, young=100, rounds=15, killed=3),
    tiny=Sizes(old=4, young=2, rounds=1, killed=1),
    run=run,
)

if __name__ == "__main__":
    main()
