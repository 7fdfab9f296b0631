"""The commit path of a pipeline with a long history, beside one with a short history."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import event

from benchmarks.filling import fill, fill_table
from benchmarks.harness import Figure, Findings, Measure, interleave, medians, number, step
from benchmarks.place import Place
from benchmarks.workload import Checkpoints


@dataclass(frozen=True)
class Sizes:
    """How many checkpoints each pipeline has behind it, and how many are measured."""

    old: int
    young: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    sides = {}
    for name, checkpoints in (("old", sizes.old), ("young", sizes.young)):
        with step(f"{checkpoints:,} checkpoints in the record and in the table of {name}"):
            dsn = place.database(f"history_{name}")
            fill(name, dsn, checkpoints)
            fill_table(name, checkpoints)
            sides[name] = Checkpoints(name, dsn)
    found = interleave(sides, rounds=sizes.rounds, warmup=5)
    statements, transactions = traffic(sides["old"])
    for side in sides.values():
        side.close()
    old, young = found["old"], found["young"]
    return Findings(
        compared=f"after {sizes.old:,} checkpoints ÷ after {sizes.young:,}",
        figures=[
            Figure("commit path", old["commit path"], young["commit path"], goal=1.10),
            Figure("whole checkpoint without Spark", old["whole"], young["whole"]),
        ],
        profile={name: medians(parts) for name, parts in found.items()},
        notes=[
            f"one checkpoint is {statements} SQL statements in {transactions} transactions",
            f"{number(1 / old['whole'].median)} checkpoints a second without Spark, one after the other",
        ],
    )


def traffic(checkpoints: Checkpoints) -> tuple[int, int]:
    """Count the SQL statements and the transactions of one checkpoint."""
    engine = checkpoints.runner.record.engine
    counted = {"before_cursor_execute": 0, "begin": 0}

    def counter(name: str) -> None:
        def count(*_: object) -> None:
            counted[name] += 1

        event.listen(engine, name, count)

    for name in counted:
        counter(name)
    checkpoints()
    return counted["before_cursor_execute"], counted["begin"]


MEASURE = Measure(
    "history",
    "Does a commit stay as fast after 10,000 checkpoints as after 100?",
    full=Sizes(old=10_000, young=100, rounds=150),
    quick=Sizes(old=200, young=20, rounds=30),
    tiny=Sizes(old=20, young=10, rounds=2),
    run=run,
)
