"""A state kept without Spark, checkpoint by checkpoint, beside a plain dict of what must be in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from twophase import State
from twophase.formats.arrow_types import arrow
from twophase.state import hashes
from twophase.state.manifest import StateManifest
from twophase.state.newest_rows import microseconds
from twophase.state.next_state import next_state
from twophase.state.reader import StateReader
from twophase.state.run_files import DELETED, HASH
from twophase.state.task_runs import TaskReport, TaskRuns

#: The time of checkpoint 0; each later one is an hour after the one before.
BEGIN = datetime(2026, 11, 18, tzinfo=UTC)

Key = tuple[Any, ...]
#: Key → values, or None: the key is deleted.
Batch = Mapping[Key, Sequence[Any] | None]


class PlainState:
    """Checkpoints of one state, and a dict of its rows after each."""

    def __init__(self, home: Path, declaration: State, *, fan: int = 12, least_rows: int = 0) -> None:
        self.home, self.declaration = home, declaration
        self.fan, self.least_rows = fan, least_rows
        self.manifests = [StateManifest.empty(declaration)]
        #: Per checkpoint: key → (values, checkpoint that wrote them).
        self.rows: list[dict[Key, tuple[tuple[Any, ...], int]]] = [{}]

    @property
    def kinds(self) -> dict[str, pa.DataType]:
        return {name: arrow(kind) for name, kind in self.declaration.columns}

    def moment(self, number: int) -> datetime | None:
        return BEGIN + timedelta(hours=number) if self.declaration.ttl else None

    def table(self, batch: Batch) -> pa.RecordBatch:
        """Return a batch as a task is given it."""
        keys, values = self.declaration.key, [name for name, _ in self.declaration.values]
        rows = {name: [key[at] for key in batch] for at, name in enumerate(keys)}
        rows |= {name: [None if new is None else new[at] for new in batch.values()] for at, name in enumerate(values)}
        columns = {name: pa.array(rows[name], kind) for name, kind in self.kinds.items()}
        hashed = hashes.of([columns[name] for name in keys])
        deleted = pa.array([new is None for new in batch.values()], pa.bool_())
        return pa.record_batch({**columns, HASH: pa.array(hashed), DELETED: deleted})

    def checkpoint(self, *tasks: Batch) -> StateManifest:
        """Write one checkpoint, with a task for each batch; keep what it must be in the dict."""
        number = len(self.manifests)
        moment, lives = self.moment(number), self.declaration.lives_for
        expires = microseconds(moment + lives) if moment and lives else None
        base, begin = self.manifests[-1], f"{number:08}.r1.a1.{number:04x}"
        reader = StateReader(self.home, base, as_of=moment)
        reports: list[TaskReport] = []
        for partition, batch in enumerate(tasks):
            task = TaskRuns(self.home, reader, begin, TaskReport(partition), expires)
            if batch:
                task.add(self.table(batch))
            reports.append(task.finish())
        self.manifests.append(
            next_state(
                self.home, base, self.declaration.columns, reports, begin=begin, timestamp=moment,
                fan=self.fan, least_rows=self.least_rows,
            )
        )  # fmt: skip
        self._note({key: new for batch in tasks for key, new in batch.items()}, number)
        return self.manifests[-1]

    def _note(self, batch: Batch, number: int) -> None:
        rows = dict(self.rows[-1])
        for key, new in batch.items():
            if new is None:
                rows.pop(key, None)
            else:
                rows[key] = (tuple(new), number)
        self.rows.append(rows)

    def expected(self, number: int = -1, at: int | None = None) -> dict[Key, tuple[Any, ...]]:
        """Return what the state must be after a checkpoint, as seen at the time of another."""
        number %= len(self.rows)
        lives = self.declaration.lives_for
        hours = None if lives is None else lives / timedelta(hours=1)
        seen = number if at is None else at
        return {key: new for key, (new, by) in self.rows[number].items() if hours is None or seen < by + hours}

    def scanned(self, number: int = -1) -> dict[Key, tuple[Any, ...]]:
        """Return what a scan of the state after a checkpoint gives; each key must come once."""
        found: dict[Key, tuple[Any, ...]] = {}
        for batch in StateReader(self.home, self.manifests[number]).scan():
            assert batch.schema.names == list(self.kinds)
            for row in batch.to_pylist():
                key, new = self.split(row)
                assert key not in found
                found[key] = new
        return found

    def found(self, keys: Sequence[Key], number: int = -1) -> dict[Key, tuple[Any, ...]]:
        """Return what a look-up of keys gives."""
        wanted = {name: pa.array([key[at] for key in keys], self.kinds[name]) for at, name in self._numbered()}
        rows = StateReader(self.home, self.manifests[number]).find(pa.table(wanted)).to_pylist()
        return dict(map(self.split, rows))

    def split(self, row: Mapping[str, Any]) -> tuple[Key, tuple[Any, ...]]:
        values = (row[name] for name, _ in self.declaration.values)
        return tuple(row[name] for name in self.declaration.key), tuple(values)

    def _numbered(self) -> list[tuple[int, str]]:
        return list(enumerate(self.declaration.key))


def random_words(count: int, seed: int) -> list[str]:
    """Return distinct words."""
    numbers = np.random.default_rng(seed).choice(10 * count, count, replace=False)
    return [f"word-{number:09}" for number in numbers]
