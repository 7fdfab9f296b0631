"""A record of a million checkpoints, beside one of a thousand: begin, and what people ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection

from benchmarks.filling import FAILED, fill
from benchmarks.harness import Figure, Findings, Measure, interleave, medians, step, timed
from benchmarks.place import Place
from benchmarks.plans import FEW, long_reads
from benchmarks.workload import Checkpoints
from twophase.committer import queries
from twophase.core.states import State

Query = Callable[[Connection], Any]


@dataclass(frozen=True)
class Sizes:
    """How many checkpoints each record has, how many are run, and how often each question is asked."""

    many: int
    few: int
    checkpoints: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    sides = {}
    for name, checkpoints in (("many", sizes.many), ("few", sizes.few)):
        dsn = place.database(f"million_{name}")
        with step(f"{checkpoints:,} checkpoints in a record"):
            fill(name, dsn, checkpoints)
        sides[name] = Checkpoints(name, dsn)
    asked = {name: _asker(side, questions(name, getattr(sizes, name))) for name, side in sides.items()}
    with step("running and asking"):
        ran = interleave(sides, rounds=sizes.checkpoints, warmup=3)
        told = interleave(asked, rounds=sizes.rounds, warmup=3)
    count, reads = long_reads(sides["many"].runner.record.engine, lambda: (sides["many"](), asked["many"]()))
    for side in sides.values():
        side.close()
    figures = [Figure("begin", ran["many"]["begin"], ran["few"]["begin"], goal=1.5)]
    figures += [Figure(question, told["many"][question], told["few"][question], goal=1.5) for question in told["many"]]
    figures.append(Figure("commit path", ran["many"]["commit path"], ran["few"]["commit path"]))
    return Findings(
        compared=f"{sizes.many:,} checkpoints in the record ÷ {sizes.few:,}",
        figures=figures,
        profile={f"a checkpoint, {name}": medians(parts) for name, parts in ran.items()},
        notes=[
            f"{count} different statements explained, {len(reads)} of them read more than {FEW:,} rows in one step",
            *reads,
        ],
    )


def questions(name: str, checkpoints: int) -> dict[str, Query]:
    """Return what people ask of the record; `checkpoints` is how many there are."""
    failed = checkpoints // 2 // FAILED * FAILED + 1

    def listing(**how: Any) -> Query:  # noqa: ANN401 - arguments of the listing
        return lambda connection: queries.checkpoints(connection, name, **how)

    return {
        "listing, first page": listing(),
        "listing, a page in the middle": listing(before=checkpoints // 2),
        "listing, the last page": listing(before=51),
        "listing, committed": listing(state=State.COMMITTED),
        "listing, committed, a page in the middle": listing(state=State.COMMITTED, before=checkpoints // 2),
        "listing, aborted": listing(state=State.ABORTED, limit=5),
        "listing, open (there is none)": listing(state=State.OPEN),
        "pipelines": queries.pipelines,
        "one checkpoint whole": lambda connection: queries.show(connection, name, failed),
        "the last schema": lambda connection: queries.last_schema(connection, name, "lake"),
    }


def _asker(side: Checkpoints, asked: Mapping[str, Query]) -> Callable[[], Mapping[str, float]]:
    """Return what asks everything once, each over a connection that is open already."""

    def ask() -> Mapping[str, float]:
        with side.runner.record.engine.connect() as connection:
            return {question: timed(partial(query, connection)) for question, query in asked.items()}

    return ask


MEASURE = Measure(
    "million",
    "Do begin and the listings stay as fast with 1,000,000 checkpoints in the record as with 1,000?",
    full=Sizes(many=1_000_000, few=1000, checkpoints=50, rounds=200),
    quick=Sizes(many=10_000, few=1000, checkpoints=10, rounds=50),
    tiny=Sizes(many=400, few=200, checkpoints=1, rounds=1),
    run=run,
)
