"""What one task of Spark writes of a new state: its changed rows as sorted runs, and a report of them for the driver.

The names of the runs are random, and only the report of a task that succeeded reaches the driver. So what a failed or
speculative task wrote is in no manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from twophase.core.errors import BadValue
from twophase.state import run_files
from twophase.state.differences import Compared, difference
from twophase.state.manifest import SortedRun
from twophase.state.reader import StateReader
from twophase.state.row_order import Flags, ordered
from twophase.state.run_files import DELETED, EXPIRES, HASH

#: A task with more rows writes several runs, so that its memory is bounded.
MOST_ROWS = 1 << 21


@dataclass
class TaskReport:
    """What a task wrote."""

    partition: int
    #: Which run of the task it was: Spark may run one again, or compute several partitions of ours in one.
    task: int = 0
    runs: list[SortedRun] = field(default_factory=list)
    #: The keys of rows that changed nothing, in files that no manifest lists: the driver looks for a key given twice.
    unchanged: list[SortedRun] = field(default_factory=list)
    inserted: int = 0
    changed: int = 0
    deleted: int = 0
    #: How many rows it gave out for the output.
    emitted: int = 0

    def content(self) -> tuple[Any, ...]:
        """Return what is equal if a task is run twice with the same rows."""
        sums = [[run.xxh3 for run in runs] for runs in (self.runs, self.unchanged)]
        return (*sums, self.inserted, self.changed, self.deleted, self.emitted)

    def to_json(self) -> dict[str, Any]:
        """Return it in a form that a task can send."""
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> TaskReport:
        """Read what `to_json` returned."""
        runs = {name: [SortedRun(**run) for run in found[name]] for name in ("runs", "unchanged")}
        return cls(**{**found, **runs})


class TaskRuns:
    """Takes the rows of a task and writes those that change anything as sorted runs."""

    def __init__(
        self, home: Path | str, reader: StateReader, begin: str, report: TaskReport, expires: int | None = None
    ) -> None:
        """Keep the state before, and when what is written now expires (microseconds; None: never)."""
        self._home, self._reader, self._begin, self._expires = home, reader, begin, expires
        self._pending: list[Compared] = []
        self._rows = 0
        self.report = report

    def add(self, rows: pa.RecordBatch) -> Compared:
        """Take some rows; return what they change."""
        found = difference(self._reader, rows)
        self._pending.append(found)
        self._rows += len(found.hashes)
        if self._rows >= MOST_ROWS:
            self._flush()
        return found

    def finish(self) -> TaskReport:
        """Write what is left, and return the report."""
        self._flush()
        return self.report

    def _flush(self) -> None:
        if not self._rows:
            return
        pending, self._pending, self._rows = self._pending, [], 0
        hashed = np.concatenate([one.hashes for one in pending])
        deleted = np.concatenate([one.deleted for one in pending])
        counted = np.concatenate([one.before.counted for one in pending])
        written = np.concatenate([one.changed for one in pending])
        if self._expires is not None:  # an equal row is written again, for it lives from now on
            written |= ~deleted
        columns = {name: pa.concat_arrays([one.after[name] for one in pending]) for name in pending[0].after}
        key = self._reader.manifest.key
        order = ordered(hashed, [columns[name] for name in key])
        if order.repeated.any():
            raise two_rows({name: columns[name].take(pa.array(order.positions[order.repeated][:1])) for name in key})
        in_order = written[order.positions]
        rows, rest = order.positions[in_order], order.positions[~in_order]
        if len(rows):
            self.report.runs.append(self._written(hashed, columns, deleted, rows))
        if len(rest):
            keys = pa.table({HASH: hashed, **{name: columns[name] for name in key}}).take(pa.array(rest))
            self.report.unchanged.append(run_files.write(self._home, self._begin, 0, keys))
        self.report.inserted += int((written & ~deleted & ~counted).sum())
        self.report.changed += int((written & ~deleted).sum())
        self.report.deleted += int((written & deleted).sum())

    def _written(
        self, hashed: np.ndarray[Any, Any], columns: Mapping[str, pa.Array], deleted: Flags, rows: np.ndarray[Any, Any]
    ) -> SortedRun:
        at = pa.array(rows)
        key = self._reader.manifest.key
        kept = {HASH: pa.array(hashed[rows]), **{name: column.take(at) for name, column in columns.items()}}
        if deleted[rows].any():
            gone = pa.array(deleted[rows])
            kept |= {
                name: pc.if_else(gone, pa.scalar(None, column.type), column)
                for name, column in kept.items()
                if name != HASH and name not in key
            }
            kept[DELETED] = gone
        if self._expires is not None:
            kept[EXPIRES] = pa.repeat(pa.scalar(self._expires, pa.int64()), len(rows))
        return run_files.write(self._home, self._begin, 0, pa.table(kept))


def two_rows(key: Mapping[str, Any]) -> BadValue:
    """Return the error for a key that has more than one new row."""
    shown = ", ".join(f"{name}={column[0].as_py()!r}" for name, column in key.items())
    return BadValue(f"new_state has two rows for the key {shown}; a state has one row for each key: aggregate by it")
