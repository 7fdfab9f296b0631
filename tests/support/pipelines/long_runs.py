"""Long work in processes of its own: backfills of many intervals, and chains of pipelines that read each other.

Everything here runs in a process that a test kills at any moment, again and again, and starts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

from support.pipelines.factories import PreStaged, Row, land
from twophase import Pipeline, sinks, sources
from twophase.attempt import Stager
from twophase.backfill import Backfill, Done, Selection
from twophase.core.settings import data_path
from twophase.local.record_access import open_record
from twophase.runner import Runner, stager_for
from twophase.spark.plan import Plan

FIRST = date(2025, 1, 1)


# --- intervals -------------------------------------------------------------------------------------------------------


def day(number: int) -> date:
    """Return the start of an interval."""
    return FIRST + timedelta(days=number)


def slot(number: int) -> str:
    """Return an interval as a slot."""
    return f"{day(number)}/{day(number + 1)}"


def daily(transform: str = "chaos_jobs:copy") -> Pipeline:
    """Declare a pipeline from one folder a day to one folder a day."""
    data_path("landing").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        "daily",
        reads={"words": sources.Interval("landing/dt={start:%Y-%m-%d}", "json")},
        transform=transform,
        writes={"lake": sinks.Files("lake/daily", slot_folder="dt={start:%Y-%m-%d}")},
    )


def land_days(numbers: range) -> None:
    """Land one file with two rows for each interval."""
    for number in numbers:
        rows = [{"id": 2 * number + i, "word": "w", "frequency": 1} for i in range(2)]
        land("a.json", rows, f"landing/dt={day(number)}")


def marked(rows: list[Row], plan: Plan) -> list[Row]:
    """Let each row say which kind of revision it is from."""
    return [{**row, "word": f"r{plan.revision}"} for row in rows]


def run_days(numbers: range) -> None:
    """Run intervals, one after the other."""
    with Runner(daily(), PreStaged(files=1, change=marked)) as runner:
        for number in numbers:
            assert runner.run(slot(number))


def backfill_days(count: int, parallel: int, master: str | None = None) -> None:
    """Backfill intervals from the first one on; what a killed one did is not done again."""

    def stager(pipeline: Pipeline) -> Stager:
        if master is None:
            return PreStaged(files=1, change=marked)
        from support.servers.spark import CHEAP

        return stager_for(pipeline, master=master, conf=CHEAP)

    selection = Selection(start=str(FIRST), end=str(day(count - 1)), every="1d")
    work = Backfill(open_record(), "daily", selection, stager)
    check(list(work.run(parallel=parallel)))
    work.end()


def check(done: list[Done]) -> None:
    """Fail if anything failed."""
    failed = [f"{one.item}: {one.failed}" for one in done if one.failed]
    assert not failed, failed


# --- three hops ------------------------------------------------------------------------------------------------------


def landing() -> Pipeline:
    """Read what lands, two files a checkpoint."""
    data_path("landing").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        "clean",
        reads={"words": sources.Files("landing", "json", max_files=2)},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/clean")},
    )


def hop(name: str, upstream: str) -> Pipeline:
    """Read what another pipeline committed, three checkpoints at a time."""
    return Pipeline(
        name,
        reads={"rows": sources.Committed(upstream, "lake", max_checkpoints=3)},
        transform="word_count:copy",
        writes={"lake": sinks.Files(f"lake/{name}")},
    )


HOPS: dict[str, Callable[[], Pipeline]] = {
    "clean": landing,
    "daily": lambda: hop("daily", "clean"),
    "report": lambda: hop("report", "daily"),
}


def corrected() -> bool:
    """Say whether the bug in the first hop is put right."""
    return data_path("corrected").exists()


def transformed(rows: list[Row], plan: Plan) -> list[Row]:
    """Clean in the first hop (with a bug, until it is corrected); count by word in the others."""
    if plan.pipeline == "clean":
        by = 10 if corrected() else 1
        return [{**row, "frequency": row["frequency"] * by} for row in rows if row["word"] != "bad"]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["word"]] = counts.get(row["word"], 0) + row["frequency"]
    return [{"id": plan.checkpoint_id, "word": word, "frequency": number} for word, number in sorted(counts.items())]


def drain(name: str) -> None:
    """Take one hop's checkpoints through until there is no new input."""
    with Runner(HOPS[name](), PreStaged(files=1, change=transformed)) as runner:
        while runner.run():
            pass


def run_once(name: str) -> None:
    """Take one checkpoint of a hop through."""
    with Runner(HOPS[name](), PreStaged(files=1, change=transformed)) as runner:
        assert runner.run()


def correct(first: int, last: int) -> None:
    """Backfill the first hop, and everything that was made from it."""
    work = Backfill(
        open_record(),
        "clean",
        Selection(checkpoints=(first, last)),
        lambda _: PreStaged(files=1, change=transformed),
    )
    check([*work.run(parallel=2), *work.downstream()])
    work.end()


def replace(name: str, checkpoint_id: int) -> None:
    """Replace one checkpoint of a hop."""
    with Runner(HOPS[name](), PreStaged(files=1, change=transformed)) as runner:
        runner.replace(checkpoint_id)


def totals(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Add up the frequencies by word."""
    found: dict[str, int] = {}
    for row in rows:
        found[row["word"]] = found.get(row["word"], 0) + row["frequency"]
    return found
