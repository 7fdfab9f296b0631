"""What tasks of Spark do with a state, each a function for `mapInArrow`. `kept_state` sends them to the executors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from twophase.core.errors import TwophaseError
from twophase.state.manifest import StateManifest
from twophase.state.reader import FoundRows, StateReader, plain
from twophase.state.task_runs import TaskReport, TaskRuns
from twophase.storage.spark_task_errors import say

Batches = Iterator[pa.RecordBatch]

#: So many rows are looked up at once; Spark sends fewer at a time.
AT_ONCE = 1 << 16


@dataclass(frozen=True)
class StatePlace:
    """Where the state is that tasks read."""

    home: str
    manifest: StateManifest
    as_of: datetime | None

    def reader(self) -> StateReader:
        """Open the state, in a task."""
        return StateReader(self.home, self.manifest, as_of=self.as_of)


@contextmanager
def told() -> Iterator[None]:
    """Mark errors of ours, so that the driver finds them in the error that Spark raises."""
    try:
        yield
    except TwophaseError as error:
        raise type(error)(say(str(error))) from error


def gathered(batches: Batches) -> Batches:
    """Put small batches together; the last column of each is the hash of its key."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= AT_ONCE:
            yield _one(waiting)
            waiting = []
    if waiting:
        yield _one(waiting)


def _one(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays([batch.column(at) for batch in batches]) for at in range(batches[0].num_columns)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


@dataclass(frozen=True)
class LookUp:
    """Puts the values of the state beside each row."""

    place: StatePlace
    #: The state's columns, and how they are called in the result.
    names: dict[str, str]

    def __call__(self, batches: Batches) -> Batches:
        """Look up the rows of a partition."""
        with told():
            reader = self.place.reader()
            for batch in gathered(batches):
                found = _found(reader, batch, list(self.names))
                columns = [*batch.columns[:-1], *found.values.values()]
                yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names[:-1], *self.names.values()])


@dataclass(frozen=True)
class Present:
    """Gives the state's rows for keys, each of which comes once."""

    place: StatePlace

    def __call__(self, batches: Batches) -> Batches:
        """Look up the keys of a partition."""
        with told():
            reader = self.place.reader()
            for batch in gathered(batches):
                found = _found(reader, batch, list(reader.kinds))
                yield pa.RecordBatch.from_pydict(found.values).filter(pa.array(found.there))


def _found(reader: StateReader, batch: pa.RecordBatch, names: Sequence[str]) -> FoundRows:
    hashed = plain(batch.column(batch.num_columns - 1), pa.int64()).to_numpy(zero_copy_only=False)
    return reader.look_up(hashed, reader.key_columns(batch), names)


@dataclass(frozen=True)
class Whole:
    """Scans the state: each row that it is given is the number of a range of hashes."""

    place: StatePlace
    ranges: Sequence[tuple[int, int]]

    def __call__(self, batches: Batches) -> Batches:
        """Scan the ranges of a partition."""
        with told():
            reader = self.place.reader()
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    yield from reader.scan(self.ranges[at])


@dataclass(frozen=True)
class Changelog:
    """Gives the changelog of new rows."""

    place: StatePlace

    def __call__(self, batches: Batches) -> Batches:
        """Compare the rows of a partition with the state."""
        from twophase.state.differences import difference

        with told():
            reader = self.place.reader()
            for batch in gathered(batches):
                yield from difference(reader, batch).changelog().to_batches()


#: What a task gives out besides its report.
NOTHING, ROWS, CHANGES = "nothing", "rows", "changes"


@dataclass(frozen=True)
class WriteRuns:
    """Writes the changed rows of a new state as sorted runs, and gives out the rows of the output in the same pass."""

    place: StatePlace
    begin: str
    expires: int | None
    emit: str
    #: Takes the report to the driver when the task has succeeded; None: the report is the only row given out.
    report: Callable[[list[dict[str, Any]]], None] | None = None

    def __call__(self, batches: Batches) -> Batches:
        """Write the rows of a partition."""
        with told():
            task = TaskRuns(self.place.home, self.place.reader(), self.begin, _task(), self.expires)
            for batch in gathered(batches):
                compared = task.add(batch)
                if self.emit == ROWS:
                    task.report.emitted += batch.num_rows
                    yield batch.select(batch.schema.names[:-1])
                elif self.emit == CHANGES:
                    changes = compared.changelog()
                    task.report.emitted += changes.num_rows
                    yield from changes.to_batches()
            report = task.finish().to_json()
        if self.report is None:
            yield pa.RecordBatch.from_pydict({"report": [json.dumps(report)]})
        else:
            self.report([report])


def _task() -> TaskReport:
    from pyspark import TaskContext

    context = TaskContext.get()
    return TaskReport(context.partitionId(), context.taskAttemptId()) if context else TaskReport(0)
