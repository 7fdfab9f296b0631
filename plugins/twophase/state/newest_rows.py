"""The newest row of each key in a range of hashes, over several sorted runs. For scans, merges and differences.

Whoever goes through a whole state does so range by range, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from twophase.formats.arrow_types import arrow
from twophase.state.manifest import SortedRun
from twophase.state.row_order import Flags, ordered
from twophase.state.run_files import DELETED, EXPIRES, HASH, MappedRun

if TYPE_CHECKING:
    from twophase.core.manifest import Schema

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: What a row of a run has besides the columns of the state, and what a run without that column means.
_MARKS = ((DELETED, pa.bool_(), False), (EXPIRES, pa.int64(), None))


def microseconds(moment: datetime) -> int:
    """Return a time as a run has it."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def ranges(runs: Sequence[SortedRun], *, rows: int, size: int | None = None) -> list[tuple[int, int]]:
    """Cut the hashes of runs into ranges, first and last hash, of about that many rows and at most so many bytes."""
    if not runs:
        return []
    low, high = min(run.low for run in runs), max(run.high for run in runs)
    parts = -(-sum(run.rows for run in runs) // rows)
    if size is not None:
        parts = max(parts, -(-sum(run.bytes for run in runs) // size))
    parts = min(parts, high - low + 1)
    cuts = [low + (high - low + 1) * at // parts for at in range(parts + 1)]
    return [(first, after - 1) for first, after in pairwise(cuts)]


def newest(runs: Sequence[MappedRun], schema: Schema, key: Sequence[str], low: int, high: int) -> pa.Table:
    """Return the newest row of each key in a range of hashes, with tombstones and expired rows; newest run first."""
    near = [run for run in runs if run.run.low <= high and low <= run.run.high]
    parts = [(run, rows) for run in near if (rows := run.within(low, high)).start < rows.stop]
    kinds = {HASH: pa.int64(), **{name: arrow(kind) for name, kind in schema}}
    columns = {
        name: [run.column(name, kind)[rows] for run, rows in parts] or [pa.array([], kind)]
        for name, kind in kinds.items()
    }
    for name, kind, missing in _MARKS:
        if any(run.has(name) for run, _ in parts):
            columns[name] = [_mark(run, name, kind, missing)[rows] for run, rows in parts]
    if len(parts) <= 1:
        return pa.table({name: column[0] for name, column in columns.items()})
    together = {name: pa.concat_arrays(column) for name, column in columns.items()}
    found = ordered(together[HASH].to_numpy(), [together[name] for name in key])
    kept = pa.array(found.positions[~found.repeated])
    return pa.table({name: column.take(kept) for name, column in together.items()})


def _mark(run: MappedRun, name: str, kind: pa.DataType, missing: object) -> pa.Array:
    return run.column(name, kind) if run.has(name) else pa.repeat(pa.scalar(missing, kind), run.run.rows)


def living(rows: pa.Table, as_of: int | None) -> pa.Table:
    """Return the rows that are no tombstone and have not expired at a time in microseconds."""
    if DELETED in rows.column_names:
        rows = rows.filter(pc.invert(rows[DELETED])).drop_columns([DELETED])
    if as_of is not None and EXPIRES in rows.column_names:
        rows = rows.filter(pc.fill_null(pc.greater(rows[EXPIRES], as_of), fill_value=True))
    return rows


def repeats(runs: Sequence[MappedRun], schema: Schema, key: Sequence[str], *, rows: int) -> Iterator[pa.Table]:
    """Yield the keys that several runs have, range by range."""
    keys = tuple(column for column in schema if column.name in key)
    for low, high in ranges([run.run for run in runs], rows=rows):
        parts = [(run, run.within(low, high)) for run in runs]
        columns = {
            name: pa.concat_arrays([run.column(name, arrow(kind))[rows_] for run, rows_ in parts])
            for name, kind in keys
        }
        hashed = np.concatenate([run.hashes[rows_] for run, rows_ in parts])
        found = ordered(hashed, [columns[name] for name in key])
        if found.repeated.any():
            yield pa.table(columns).take(pa.array(found.positions[found.repeated]))


def flags(column: pa.Array) -> Flags:
    """Return a column of booleans as an array; null is False."""
    found: Flags = pc.fill_null(column, fill_value=False).to_numpy(zero_copy_only=False)
    return found
