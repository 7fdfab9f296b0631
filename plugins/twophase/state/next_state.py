"""Makes the state manifest of an attempt from what its tasks reported, and merges what is due. For Spark's driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.errors import AttemptFailed
from twophase.state import merging, run_files
from twophase.state.manifest import SortedRun, StateManifest
from twophase.state.merging import BASE, FAN, LEAST_ROWS, MergePlace
from twophase.state.newest_rows import microseconds, repeats
from twophase.state.reader import RANGE_ROWS
from twophase.state.task_runs import TaskReport, two_rows

if TYPE_CHECKING:
    from twophase.core.manifest import Schema

#: Runs of one checkpoint with fewer rows than this are put together into one.
PIECE_ROWS = 100_000


def one_per_partition(reports: Iterable[TaskReport]) -> list[TaskReport]:
    """Return what one run of each task reported: Spark may have run a task again, and then with equal rows."""
    found: dict[int, dict[int, list[TaskReport]]] = {}
    for report in reports:
        found.setdefault(report.partition, {}).setdefault(report.task, []).append(report)
    for partition, tasks in found.items():
        contents = [sorted(report.content() for report in task) for task in tasks.values()]
        if any(content != contents[0] for content in contents):
            msg = (
                f"new_state: Spark computed partition {partition} twice, with different rows; nothing was staged:"
                " run again, and let the transform give equal rows for equal input"
            )
            raise AttemptFailed(msg)
    return [report for tasks in found.values() for report in next(iter(tasks.values()))]


def next_state(  # noqa: PLR0913 - what the driver knows of the attempt
    home: Path | str,
    base: StateManifest,
    schema: Schema,
    reports: Iterable[TaskReport],
    *,
    begin: str,
    timestamp: datetime | None = None,
    watermarks: Mapping[str, Any] | None = None,
    fan: int = FAN,
    least_rows: int = LEAST_ROWS,
) -> StateManifest:
    """Return the state after an attempt; `begin` begins the names of its files, by `timestamp` rows expire."""
    tasks = one_per_partition(reports)
    place = MergePlace(home, base.key, schema, begin)
    own = _own_runs(place, tasks)
    runs = (*own, *base.runs)
    as_of = None if timestamp is None else microseconds(timestamp)
    keys = base.keys + sum(task.inserted - task.deleted for task in tasks)
    written = list(own)
    if merge := merging.due(runs, fan=fan, least_rows=least_rows):
        merged = merging.merge(place, merge.runs, merge.level, as_of)
        gone = {run.path for run in merge.runs}
        runs = (*merged, *(run for run in runs if run.path not in gone))
        written += merged
        if merge.level == BASE:
            keys = sum(run.rows for run in merged)
    return StateManifest(
        key=base.key,
        schema=schema,
        runs=runs,
        own=own,
        keys=keys,
        changed=sum(task.changed for task in tasks),
        deleted=sum(task.deleted for task in tasks),
        bytes=sum(run.bytes for run in written),
        timestamp=timestamp,
        watermarks=dict(base.watermarks if watermarks is None else watermarks),
    )


def _own_runs(place: MergePlace, tasks: Sequence[TaskReport]) -> tuple[SortedRun, ...]:
    """Return the runs of the tasks, small ones put together; an error if two tasks had a row for one key."""
    runs = [run for task in tasks for run in task.runs]
    unchanged = [run for task in tasks for run in task.unchanged]
    if len(runs) + len(unchanged) > 1:
        mapped = run_files.opened(place.home, [*runs, *unchanged])
        for given_twice in repeats(mapped, place.schema, place.key, rows=RANGE_ROWS):
            raise two_rows({name: given_twice[name] for name in place.key})
    small = [run for run in runs if run.rows < PIECE_ROWS]
    used = unchanged
    if len(small) > 1:
        together = merging.merge(place, small, 0, None)
        runs = [*together, *(run for run in runs if run.rows >= PIECE_ROWS)]
        used = [*unchanged, *small]
    for run in used:  # no manifest lists them; what is left after a crash is swept
        (run_files.folder(place.home) / run.path).unlink(missing_ok=True)
    return tuple(sorted(runs, key=lambda run: run.low))
