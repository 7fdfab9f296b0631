"""`KeptState`: what a transform is given as `state`, and what stages the new one. `spark.stage` makes one per state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.accumulators import AccumulatorParam
from pyspark.sql.types import StructType

from twophase.core.errors import AttemptFailed, BadValue, ConfigError, SchemaChanged
from twophase.core.manifest import Schema, schema_changes, widens
from twophase.spark import state_tasks
from twophase.spark.state_tasks import CHANGES, NOTHING, ROWS, StatePlace, WriteRuns
from twophase.state import hashes
from twophase.state.declaration import State
from twophase.state.differences import CHANGE
from twophase.state.manifest import StateManifest
from twophase.state.newest_rows import microseconds, ranges
from twophase.state.next_state import next_state, one_per_partition
from twophase.state.reader import RANGE_ROWS
from twophase.state.run_files import DELETED, HASH
from twophase.state.task_runs import TaskReport
from twophase.storage import spark_task_errors
from twophase.storage.spark_paths import ddl, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: What `mapInArrow` reports when nothing else is given out.
_REPORT = "report string"


class _Reports(AccumulatorParam[list[dict[str, Any]]]):
    """Adds up what tasks report; Spark adds the report of a task once, when the task has succeeded."""

    def zero(self, value: list[dict[str, Any]]) -> list[dict[str, Any]]:  # noqa: ARG002 - Spark's signature
        return []

    def addInPlace(self, value1: list[dict[str, Any]], value2: list[dict[str, Any]]) -> list[dict[str, Any]]:  # noqa: N802
        return [*value1, *value2]


@dataclass(frozen=True)
class StagedState:
    """A new state that is being staged."""

    #: What the sinks must stage in place of the output that was given.
    output: DataFrame | None
    _manifest: Callable[[int | None], StateManifest]

    def manifest(self, rows: int | None = None) -> StateManifest:
        """Return the manifest, after the output was staged; `rows`: how many rows of it there are, by the sink."""
        return self._manifest(rows)


class KeptState:
    """The state of a pipeline as its checkpoint reads it."""

    def __init__(  # noqa: PLR0913 - what the plan says of a state
        self,
        spark: SparkSession,
        declaration: State,
        home: Path,
        base: StateManifest,
        *,
        name: str,
        run_name: str,
        timestamp: datetime,
    ) -> None:
        """Keep the state before; an error if the declaration does not fit it."""
        self._spark, self._declaration, self._home = spark, declaration, home
        self._which = f"state {name!r}"
        self._begin, self._timestamp = run_name, timestamp
        self._check_base(base)
        self._base = replace(base, schema=declaration.columns)
        self._place = StatePlace(str(home), self._base, timestamp)
        self._shared: list[DataFrame] = []
        self._changelogs: list[tuple[DataFrame, DataFrame]] = []
        self._watermarks = dict(base.watermarks)

    def _check_base(self, base: StateManifest) -> None:
        declared = self._declaration
        problems = schema_changes(base.schema, declared.columns, by_position=False)
        if base.key != declared.key:
            problems.insert(0, f"its key was {', '.join(base.key)} and is now {', '.join(declared.key)}")
        if problems:
            msg = (
                f"{self._which}: {'; '.join(problems)}; only new columns may come: keep the old ones, or run"
                " `twophase state migrate`"
            )
            raise SchemaChanged(msg)

    # --- reading ------------------------------------------------------------------------------------------------------

    def lookup(self, frame: DataFrame, prefix: str = "") -> DataFrame:
        """Return the frame with the state's values beside each row, null where the key is new; nothing is shuffled."""
        names = {column.name: prefix + column.name for column in self._declaration.values}
        there = {column.lower() for column in frame.columns}
        if clash := [name for name in names.values() if name.lower() in there]:
            msg = (
                f"{self._which}: lookup: the frame has a column {', '.join(clash)}, and so has the state; give"
                " prefix='before_', or rename it"
            )
            raise ConfigError(msg)
        self._check_keys(frame, "lookup")
        beside = _types(self._spark, [(names[name], kind) for name, kind in self._declaration.values])
        schema = StructType([*frame.schema.fields, *beside.fields])
        found = self._hashed(frame).mapInArrow(state_tasks.LookUp(self._place, names), schema)
        self._shared.append(found)
        return found

    def of(self, frame: DataFrame) -> DataFrame:
        """Return the state's rows for the keys of a frame, each once."""
        self._check_keys(frame, "of")
        declared = ((quoted(name), kind) for name, kind in self._declaration.keys)
        keys = frame.selectExpr(*(f"cast({name} as {kind}) AS {name}" for name, kind in declared)).distinct()
        found = self._hashed(keys).mapInArrow(state_tasks.Present(self._place), ddl(self._declaration.columns))
        self._shared.append(found)
        return found

    def whole(self) -> DataFrame:
        """Return all rows; a scan."""
        return whole_state(self._spark, self._home, self._base, self._timestamp)

    def changelog(self, new_state: DataFrame) -> DataFrame:
        """Return the changes from the state to the new one as rows with `_change`; nothing is joined."""
        self._check_new(new_state)
        found = self._hashed(new_state).mapInArrow(state_tasks.Changelog(self._place), self._change_columns)
        self._changelogs.append((found, new_state))
        return found

    @property
    def key(self) -> tuple[str, ...]:
        """Return the key columns."""
        return self._declaration.key

    @property
    def watermarks(self) -> Mapping[str, Any]:
        """Return how far event time had come before this checkpoint, by the names of reads."""
        return self._base.watermarks

    def advance(self, watermarks: Mapping[str, Any]) -> None:
        """Take what the manifest is to keep of event time; `twophase.windows` and continuous queries call it."""
        self._watermarks = dict(watermarks)

    @property
    def _change_columns(self) -> str:
        return ddl([*self._declaration.columns, (CHANGE, "string")])

    def _hashed(self, frame: DataFrame) -> DataFrame:
        return frame.selectExpr("*", f"{hashes.in_spark(self._declaration.keys)} AS {HASH}")

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_keys(self, frame: DataFrame, what: str) -> None:
        self._check_types(frame, self._declaration.keys, f"{self._which}: {what}")

    def _check_new(self, new_state: DataFrame) -> None:
        which = f"{self._which}: new_state"
        self._check_types(new_state, self._declaration.columns, which)
        known = {column.name for column in self._declaration.columns} | {DELETED}
        if more := [name for name in new_state.columns if name not in known]:
            msg = f"{which}: column {', '.join(more)} is not in the state; leave it out, or declare it"
            raise ConfigError(msg)
        kinds = {field.name: field.dataType.simpleString() for field in new_state.schema.fields}
        if kinds.get(DELETED, "boolean") != "boolean":
            msg = f"{which}: column {DELETED!r} is {kinds[DELETED]}, expected boolean: true deletes the key"
            raise ConfigError(msg)

    def _check_types(self, frame: DataFrame, columns: Schema, which: str) -> None:
        found = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        for name, kind in columns:
            if name not in found:
                msg = f"{which}: column {name!r} is missing; found {', '.join(found)}"
                raise ConfigError(msg)
            if found[name] != kind and not widens(found[name], kind):
                msg = (
                    f"{which}: column {name!r} is {found[name]}, expected {kind}; cast it, or declare another type and"
                    " run `twophase state migrate`"
                )
                raise SchemaChanged(msg)

    # --- staging ------------------------------------------------------------------------------------------------------

    def stage(self, new_state: DataFrame) -> StateManifest:
        """Stage a new state by a job of its own."""
        with self.staging(new_state) as staged:
            return staged.manifest()

    @contextmanager
    def staging(
        self, new_state: DataFrame, output: DataFrame | None = None, *, writes: int = 1
    ) -> Iterator[StagedState]:
        """Stage a new state beside the output that `writes` sinks stage; the sinks stage inside the `with`.

        If the output is the new state itself or its changelog, and one sink stages it, the sink's own job writes the
        runs, too. Otherwise a job before it does, and what both read is kept until the sinks are done.
        """
        self._check_new(new_state)
        emit = self._emitted(new_state, output)
        context = getattr(self._spark, "sparkContext", None)  # Connect has none
        with self._explained(), ExitStack() as held:
            if emit != NOTHING and writes == 1 and context is not None:
                reports = context.accumulator([], _Reports())
                schema = new_state.schema if emit == ROWS else self._change_columns
                frame = self._hashed(new_state).mapInArrow(self._writer(emit, reports.add), schema)
                yield StagedState(frame, lambda rows: self._next(reports.value, rows))
            else:
                shared = [new_state] if emit != NOTHING else self._shared
                for one in shared if output is not None else ():
                    held.callback(_kept(one).unpersist)
                rows = self._hashed(new_state).mapInArrow(self._writer(NOTHING, None), _REPORT).collect()
                made = self._next([json.loads(row.report) for row in rows], None)
                yield StagedState(output, lambda _rows: made)

    def _emitted(self, new_state: DataFrame, output: DataFrame | None) -> str:
        """Say what the output is: the rows of the new state, its changelog, or nothing that its tasks could give."""
        if output is new_state:
            return ROWS
        known = any(output is frame and new_state is of for frame, of in self._changelogs)
        return CHANGES if known else NOTHING

    def _writer(self, emit: str, report: Callable[[list[dict[str, Any]]], None] | None) -> WriteRuns:
        lives = self._declaration.lives_for
        expires = None if lives is None else microseconds(self._timestamp + lives)
        return WriteRuns(self._place, self._begin, expires, emit, report)

    def _next(self, reports: Sequence[dict[str, Any]], rows: int | None) -> StateManifest:
        try:
            tasks = one_per_partition(TaskReport.of_json(report) for report in reports)
            given = sum(task.emitted for task in tasks)
            if rows is not None and given != rows:
                msg = f"new_state: the tasks gave out {given} rows, and the sink staged {rows}; run again"
                raise AttemptFailed(msg)  # noqa: TRY301 - named below like the others
            columns = self._declaration.columns
            return next_state(
                self._home, self._base, columns, tasks,
                begin=self._begin, timestamp=self._timestamp, watermarks=self._watermarks,
            )  # fmt: skip
        except AttemptFailed as error:
            msg = f"{self._which}: {error}"
            raise type(error)(msg) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace an error of Spark by the one that a task of ours raised in it."""
        try:
            yield
        except Exception as error:
            if said := spark_task_errors.heard(str(error)):
                msg = f"{self._which}: {said}"
                raise BadValue(msg) from error
            raise


def whole_state(spark: SparkSession, home: Path, manifest: StateManifest, as_of: datetime | None = None) -> DataFrame:
    """Return all rows of a state as of a manifest; each task scans a range of hashes."""
    types = ddl(manifest.schema)
    parts = ranges(manifest.runs, rows=RANGE_ROWS)
    if not parts:
        return spark.createDataFrame([], types)
    place = StatePlace(str(home), manifest, as_of)
    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(state_tasks.Whole(place, parts), types)


def _types(spark: SparkSession, columns: Sequence[Sequence[str]]) -> StructType:
    """Return columns as Spark's types; Spark 3.5 parses them only for a frame."""
    parse = getattr(StructType, "fromDDL", None)
    found: StructType = parse(ddl(columns)) if parse else spark.createDataFrame([], ddl(columns)).schema
    return found


def _kept(frame: DataFrame) -> DataFrame:
    from pyspark import StorageLevel

    return frame.persist(StorageLevel.MEMORY_AND_DISK)
