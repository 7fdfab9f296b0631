"""The differences of two states of a pipeline, as changelog rows. For `state_changes` and `twophase state --diff`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from twophase.formats.arrow_types import arrow
from twophase.state.differences import CHANGE, difference
from twophase.state.manifest import StateManifest
from twophase.state.newest_rows import newest, ranges
from twophase.state.reader import RANGE_ROWS, StateReader
from twophase.state.run_files import DELETED, HASH, opened


def changes(
    home: Path | str, before: StateManifest, after: StateManifest, *, as_of: datetime | None = None
) -> pa.Table:
    """Return what changed from one state to another, by key; the schema is that of `after`.

    Rows that have expired by `as_of`, by default the time of the later one, are in neither: an expiry is no change.
    """
    columns = {name: arrow(kind) for name, kind in after.schema}
    empty = pa.table({name: pa.array([], kind) for name, kind in {**columns, CHANGE: pa.string()}.items()})
    return pa.concat_tables([empty, *_changes(home, before, after, as_of)])


def _changes(
    home: Path | str, before: StateManifest, after: StateManifest, as_of: datetime | None
) -> Iterator[pa.Table]:
    """Look up the keys of each run that only one of the two lists in both of them."""
    times = [moment for moment in (before.timestamp, after.timestamp) if moment]
    moment = as_of or (max(times) if times else None)
    old = StateReader(home, replace(before, schema=after.schema), as_of=moment)
    new = StateReader(home, after, as_of=moment)
    shared = {run.path for run in before.runs} & {run.path for run in after.runs}
    only = [run for run in (*after.runs, *before.runs) if run.path not in shared]
    mapped = opened(home, only)
    keys = tuple(column for column in after.schema if column.name in after.key)
    for low, high in ranges(only, rows=RANGE_ROWS):
        touched = newest(mapped, keys, after.key, low, high)
        hashed = touched[HASH].combine_chunks().to_numpy(zero_copy_only=False)
        found = new.look_up(hashed, new.key_columns(touched), list(new.kinds))
        rows = {name: found.values[name] for name in new.kinds if name not in after.key}
        keyed = {name: touched[name].combine_chunks() for name in after.key}
        together = {**keyed, **rows, HASH: pa.array(hashed), DELETED: pa.array(np.logical_not(found.there))}
        yield difference(old, pa.table(together)).changelog()
