"""A pipeline that keeps counts per word as its state, and a stager that counts without Spark.

A checkpoint adds a file with the counts that it changed, or one with all of them in place of the files before it. They
are JSON, so a test can read a state without any of the shipped readers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.pipelines.factories import SCHEMA, PreStaged
from twophase import Pipeline, State, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Json
from twophase.core.failpoints import hit
from twophase.core.settings import data_path
from twophase.runner import Runner
from twophase.sinks.base import Sink
from twophase.spark.plan import Plan
from twophase.state.manifest import SortedRun, StateManifest
from twophase.storage import disk

#: With so many files the next checkpoint writes one in place of them.
MANY = 3

KEPT = State(key=["word"], schema="word string, frequency bigint")


def counting_pipeline(name: str = "counts", *, max_pending: int = 1, **arguments: Any) -> Pipeline:
    """Declare a word count with state, from a landing folder to one table."""
    data_path("landing/words").mkdir(parents=True, exist_ok=True)
    writes: Mapping[str, Sink] = arguments.pop("writes", None) or {"lake": sinks.Files(f"lake/{name}")}
    return Pipeline(
        name,
        reads={"words": sources.Files("landing/words", format="json", max_files=1)},
        transform="word_count:copy",
        writes=writes,
        state=arguments.pop("state", KEPT),
        max_pending=max_pending,
        **arguments,
    )


class Counted(PreStaged):
    """Stages the input as it is, and the counts of all input so far as the state; `weight` is today's transform."""

    def __init__(self, weight: int = 1) -> None:
        super().__init__(files=1, schema=SCHEMA)
        self.weight = weight
        #: What each attempt has read as its state.
        self.read_counts: list[dict[str, int]] = []

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        hit("state.staged")
        staged = dict(super().__call__(plan, folder, lost))
        rows, _ = self.read(plan)
        for name, planned in plan.states.items():
            if planned.handle is not None:
                before = StateManifest.of_json(planned.base) if planned.base else StateManifest.empty(KEPT)
                counts = Counter(_counts(Path(planned.home), [vars(run) for run in before.runs]))
                self.read_counts.append(dict(counts))
                for row in rows:
                    counts[row["word"]] += self.weight * row["frequency"]
                changed = {row["word"]: counts[row["word"]] for row in rows}
                staged[name] = _write(planned.handle, before, changed, counts, plan)
        hit("state.merged")
        return staged


def _counts(home: Path, runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in reversed(runs):
        counts |= json.loads((home / "runs" / run["path"]).read_bytes())
    return counts


def _write(
    handle: Json, before: StateManifest, changed: Mapping[str, int], counts: Mapping[str, int], plan: Plan
) -> Json:
    """Write what changed, or everything if there are many files, durably; return the manifest."""
    merges = len(before.runs) >= MANY
    content = json.dumps(dict(sorted((counts if merges else changed).items()))).encode()
    path = f"{handle['name']}.0.1.arrow"
    file = Path(handle["home"]) / "runs" / path
    file.write_bytes(content)
    disk.fsync_folder(file.parent)
    hit("stage.durable")
    run = SortedRun(path, 0, len(counts), len(content), 0, 0, disk.digest(content), plan.checkpoint_id)
    runs = (run,) if merges else (run, *before.runs)
    return replace(before, runs=runs, own=(run,), keys=len(counts), changed=len(changed)).to_json()


def state_of(record: PostgresRecord, pipeline: Pipeline, checkpoint_id: int = 1 << 40) -> dict[str, int]:
    """Return the counts that stand after a checkpoint, the last one unless told otherwise, by the record's word."""
    with record.transaction() as tx:
        states = tx.states(pipeline.name, tx.standing_base(pipeline.name, checkpoint_id + 1).base)
    return _counts(pipeline.states["state"].home, states["state"]["runs"])


def runner(record: PostgresRecord, pipeline: Pipeline, stager: PreStaged | None = None) -> Runner:
    """Return a runner of the pipeline that stages without Spark."""
    return Runner(pipeline, stager or Counted(), record=record)
