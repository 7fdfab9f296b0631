"""Read a pipeline's state as of a checkpoint; users call `read_state` and `state_changes`, `twophase state` the rest.

The record says which files are the state after a checkpoint: those of its newest decided revision. A state can be read
for as long as it is declared to be kept (`retain`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ConfigError, NothingCommitted, Swept
from twophase.local.record_access import open_record
from twophase.state.manifest import StateManifest
from twophase.wiring import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from twophase.committer.record import PostgresRecord


@dataclass(frozen=True)
class StateAt:
    """A state as it stands after one checkpoint."""

    pipeline: str
    #: Its name in the record.
    name: str
    checkpoint_id: int
    revision: int
    home: Path
    manifest: StateManifest


def read_state(
    spark: SparkSession, pipeline: str, as_of: int | None = None, *, state: str | None = None, dsn: str | None = None
) -> DataFrame:
    """Return all rows of a state, as of a checkpoint's number; the last one unless told otherwise.

    `state` is the name of one of several.
    """
    from twophase.spark.kept_state import whole_state

    record = open_record(dsn)
    try:
        found = state_at(record, pipeline, as_of, state)
    finally:
        record.engine.dispose()
    return whole_state(spark, found.home, found.manifest)


def state_changes(  # noqa: PLR0913 - which state, and from where to where
    spark: SparkSession, pipeline: str, j: int, k: int, *, state: str | None = None, dsn: str | None = None
) -> DataFrame:
    """Return what changed from the state after checkpoint `j` to that after `k`, as rows with `_change`.

    0 stands for the empty state before the first checkpoint.
    """
    from twophase.storage.spark_paths import ddl

    record = open_record(dsn)
    try:
        found = changed(record, pipeline, j, k, state)
        columns = [*state_at(record, pipeline, max(j, k), state).manifest.schema, ("_change", "string")]
    finally:
        record.engine.dispose()
    rows = [tuple(row[name] for name, _ in columns) for row in found.to_pylist()]
    return spark.createDataFrame(rows, ddl(columns))


def state_at(record: PostgresRecord, pipeline: str, as_of: int | None = None, state: str | None = None) -> StateAt:
    """Return a state as of a checkpoint; Swept if it is not kept any more."""
    name, home = _named(record, pipeline, state)
    with record.transaction() as tx:
        last = 1 << 62 if as_of is None else as_of + 1
        base, swept = tx.standing_base(pipeline, last)
        manifest = tx.states(pipeline, base).get(name)
        oldest = tx.oldest_state(pipeline)
    if manifest is None or not base.checkpoint_id:
        when = "" if as_of is None else f" as of checkpoint {as_of}"
        msg = f"pipeline {pipeline!r}: it has kept no {name}{when} yet"
        raise NothingCommitted(msg)
    if swept:
        msg = (
            f"pipeline {pipeline!r}: its {name} as of checkpoint {base.checkpoint_id} is not kept any more;"
            f" the oldest that is kept is that of checkpoint {oldest}"
        )
        raise Swept(msg)
    return StateAt(pipeline, name, base.checkpoint_id, base.revision, home, StateManifest.of_json(manifest))


def changed(record: PostgresRecord, pipeline: str, j: int, k: int, state: str | None = None) -> pa.Table:
    """Return what changed from the state after checkpoint `j` to that after `k`, by key."""
    from twophase.state.changes import changes

    after = state_at(record, pipeline, k, state)
    empty = StateManifest(key=after.manifest.key, schema=after.manifest.schema)
    before = state_at(record, pipeline, j, state).manifest if j else empty
    return changes(after.home, before, after.manifest)


def found(state: StateAt, keys: list[dict[str, Any]]) -> pa.Table:
    """Return the rows of some keys; values may be texts, which are read by the type of their column."""
    from twophase.state.reader import StateReader, key_rows

    reader = StateReader(state.home, state.manifest)
    return reader.find(key_rows(state.manifest, keys))


def history(
    record: PostgresRecord, pipeline: str, key: Mapping[str, Any], state: str | None = None
) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """Yield each kept checkpoint that changed a key, oldest first, with its row from then on; None: it was deleted."""
    from twophase.committer import state_retention
    from twophase.state.reader import history as told

    name, home = _named(record, pipeline, state)
    with record.engine.connect() as connection:
        states = [
            (number, StateManifest.of_json(one))
            for number, one in state_retention.kept_states(connection, pipeline, name)
        ]
    for change in told(home, states, key):
        yield change.label, change.row


def _named(record: PostgresRecord, pipeline: str, state: str | None) -> tuple[str, Path]:
    """Return the name in the record and the folder of a pipeline's state; one of several has to be named."""
    states = load(record, pipeline).states
    if not states:
        msg = f"pipeline {pipeline!r}: it keeps no state"
        raise ConfigError(msg)
    name = "state" if state is None else state if state in states else f"state.{state}"
    if name not in states:
        there = ", ".join(one.removeprefix("state.") for one in states)
        msg = f"pipeline {pipeline!r}: no state {state or ''!r}; say which: {there}"
        raise ConfigError(msg)
    return name, states[name].home
