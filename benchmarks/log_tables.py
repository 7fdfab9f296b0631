"""Promotion into a log table: as fast after 1,000 commits as after 10, beside the plain library's own writes."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from benchmarks.harness import Figure, Findings, Measure, interleave, medians, step, timed
from benchmarks.place import Place
from benchmarks.workload import SCHEMA, link_files
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome
from twophase.core.settings import data_path

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from twophase.sinks.log_tables.base import LogTableSink


@dataclass(frozen=True)
class Sizes:
    """How many commits each table has behind it, and how many are measured on top by each side."""

    old: int
    young: int
    rounds: int


class Table(ABC):
    """A table of one format, filled by promotions; measured by promotions and by the plain library's writes."""

    #: The library, and what a user without us calls.
    plain: str

    def __init__(self, name: str, commits: int) -> None:
        self.name = name
        self.sink = self.declare()
        self.sink.prepare()
        self._numbers = count(1)
        self.rows = pa.table({"id": pa.array([1], pa.int64()), "word": ["w"]})
        for _ in range(commits):
            self.promoted()

    @abstractmethod
    def declare(self) -> LogTableSink:
        """Return the sink."""

    @abstractmethod
    def write(self) -> None:
        """Write one row as a user without us does: open the table, append."""

    def promoted(self) -> Mapping[str, float]:
        """Stage one file, and time its promotion."""
        number = next(self._numbers)
        key = Key(self.name, number, 1)
        output = Output(key, 1, self.sink.place(key, 1, "benchmark"), commit_seq=number, sink="lake")
        folder = Path(self.sink.staging_path(output))
        folder.mkdir(parents=True)
        link_files(folder, "part-r1-a1", 1)
        staged = replace(output, manifest=self.sink.seal(output, SCHEMA))
        return {"promotion": _timed(lambda: self._promote(staged))}

    def _promote(self, output: Output) -> None:
        found = self.sink.promote(output)
        if found.outcome is not Outcome.PROMOTED:
            msg = f"{self.name}: expected to promote, found {found}"
            raise RuntimeError(msg)

    def written(self) -> Mapping[str, float]:
        """Time the library's own write."""
        return {"write": _timed(self.write)}


def _timed(action: Callable[[], object]) -> float:
    """Time something without the garbage of what came before."""
    gc.collect()
    return timed(action)


class Delta(Table):
    """A Delta table."""

    plain = "write_deltalake"

    def declare(self) -> LogTableSink:
        return sinks.Delta(f"lake/{self.name}")

    def write(self) -> None:
        from deltalake import write_deltalake

        write_deltalake(str(data_path(f"lake/{self.name}")), self.rows, mode="append")


class Iceberg(Table):
    """An Iceberg table in a catalog of its own."""

    plain = "pyiceberg's append"

    def declare(self) -> LogTableSink:
        self.uri = f"sqlite:///{data_path(f'lake/{self.name}.db')}"
        properties = {"type": "sql", "uri": self.uri}
        return sinks.Iceberg(f"bench.{self.name}", path=f"lake/{self.name}", catalog=properties)

    def write(self) -> None:
        self._catalog().load_table(f"bench.{self.name}").append(self.rows)

    def _catalog(self) -> Catalog:
        from pyiceberg.catalog import load_catalog

        return load_catalog("default", type="sql", uri=self.uri)


def run(place: Place, sizes: Sizes) -> Findings:  # noqa: ARG001 - needs no database
    """Measure."""
    figures: list[Figure] = []
    profile: dict[str, dict[str, float]] = {}
    for form in (Delta, Iceberg):
        tables = {}
        for age, commits in (("old", sizes.old), ("young", sizes.young)):
            with step(f"{commits:,} promotions into {form.__name__} table {age}"):
                tables[age] = form(f"{form.__name__.lower()}_{age}", commits)
        sides = {f"{age}, ours": table.promoted for age, table in tables.items()}
        sides |= {f"{age}, plain": table.written for age, table in tables.items()}
        found = interleave(sides, rounds=sizes.rounds, warmup=1)
        old, young = found["old, ours"]["promotion"], found["young, ours"]["promotion"]
        figures.append(Figure(f"promotion into {form.__name__}", old, young, goal=2))
        old, young = found["old, plain"]["write"], found["young, plain"]["write"]
        figures.append(Figure(f"the plain library: {form.plain}", old, young))
        profile |= {f"{form.__name__}, {side}": medians(parts) for side, parts in found.items()}
    return Findings(
        compared=f"after {sizes.old:,} commits ÷ after {sizes.young:,}",
        figures=figures,
        profile=profile,
        notes=[
            "a promotion opens the table, commits, reads its marker back and makes log or metadata durable",
            "Iceberg's metadata lists every snapshot, and each commit reads and writes it whole: ours leaves 200 in it",
            "both sides add to the same tables, so each has a few commits more than it says by the end",
        ],
    )


MEASURE = Measure(
    "log_tables",
    "Does promotion into Delta and Iceberg stay as fast after 1,000 commits as after 10?",
    full=Sizes(old=1_000, young=10, rounds=15),
    quick=Sizes(old=200, young=10, rounds=7),
    tiny=Sizes(old=4, young=2, rounds=1),
    run=run,
)
