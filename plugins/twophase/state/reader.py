"""`StateReader`: finds keys in a state, scans it, and tells the history of a key. For Spark's side and for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from twophase.core.errors import ConfigError
from twophase.formats.arrow_types import arrow
from twophase.state import hashes
from twophase.state.hashes import Hashes
from twophase.state.manifest import StateManifest
from twophase.state.newest_rows import flags, living, microseconds, newest, ranges
from twophase.state.row_order import Flags, Positions, equal
from twophase.state.run_files import DELETED, EXPIRES, MappedRun, opened

#: How many rows a scan takes at a time.
RANGE_ROWS = 1 << 20
#: How many rows there are in a record batch of a scan.
BATCH_ROWS = 1 << 16


class FoundRows(NamedTuple):
    """What a state has for some keys: one row for each of them, in their order."""

    #: The columns that were asked for; null where the key is not there.
    values: dict[str, pa.Array]
    #: Which keys are there.
    there: Flags
    #: Which keys count as there until the next merge: also those that have expired.
    counted: Flags
    #: Which keys have a tombstone.
    deleted: Flags


class StateReader:
    """A state as of one manifest; at `as_of`, by default the time of its checkpoint, what has expired is not there."""

    def __init__(self, home: Path | str, manifest: StateManifest, *, as_of: datetime | None = None) -> None:
        """Keep where the runs are; each is mapped when it is first needed."""
        self.manifest = manifest
        self.runs = opened(home, manifest.runs)
        moment = as_of or manifest.timestamp
        self.as_of = None if moment is None else microseconds(moment)
        self.kinds = {name: arrow(kind) for name, kind in manifest.schema}

    def find(self, keys: pa.Table) -> pa.Table:
        """Return the rows of those keys that are there, in the order of `keys`, which has the key columns."""
        columns = self.key_columns(keys)
        found = self.look_up(hashes.of(columns), columns, list(self.kinds))
        return pa.table(found.values).filter(pa.array(found.there))

    def key_columns(self, rows: pa.Table | pa.RecordBatch) -> list[pa.Array]:
        """Return the key columns of some rows, with their declared types."""
        return [plain(rows.column(name), self.kinds[name]) for name in self.manifest.key]

    def look_up(self, hashed: Hashes, keys: Sequence[pa.Array], names: Sequence[str]) -> FoundRows:
        """Return columns of the newest row of each key; its cost follows the keys and the number of runs."""
        by_hash = np.argsort(hashed, kind="stable")
        wanted = hashed[by_hash]
        places = np.full(len(wanted), -1, dtype=np.int64)
        pending = np.arange(len(wanted))
        taken: list[tuple[MappedRun, Positions]] = []
        total = 0
        for run in self.runs:
            if not len(pending):
                break
            which, rows = self._in_run(run, wanted, pending, by_hash, keys)
            if len(which):
                places[which] = np.arange(total, total + len(which))
                total += len(which)
                taken.append((run, rows))
                pending = pending[places[pending] < 0]
        in_order = np.empty(len(wanted), dtype=np.int64)
        in_order[by_hash] = places
        return self._gathered(taken, in_order, names)

    def _in_run(
        self, run: MappedRun, wanted: Hashes, pending: Positions, by_hash: Positions, keys: Sequence[pa.Array]
    ) -> tuple[Positions, Positions]:
        """Return which of the pending keys a run has, and in which of its rows."""
        asked = wanted[pending]
        near = slice(np.searchsorted(asked, run.run.low), np.searchsorted(asked, run.run.high, side="right"))
        asked, which = asked[near], pending[near]
        rows = np.searchsorted(run.hashes, asked)
        found_keys, found_rows = [], []
        while len(which):
            hit = rows < run.run.rows
            hit[hit] = run.hashes[rows[hit]] == asked[hit]
            which, rows, asked = which[hit], rows[hit], asked[hit]
            same = np.ones(len(which), dtype=np.bool_)
            for name, key in zip(self.manifest.key, keys, strict=True):
                there = run.column(name, self.kinds[name]).take(pa.array(rows))
                same &= equal(there, key.take(pa.array(by_hash[which])))
            found_keys.append(which[same])
            found_rows.append(rows[same])
            which, rows, asked = which[~same], rows[~same] + 1, asked[~same]  # another key of that hash: look along
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *found_keys]), np.concatenate([empty, *found_rows])

    def _gathered(self, taken: list[tuple[MappedRun, Positions]], places: Positions, names: Sequence[str]) -> FoundRows:
        at = pa.array(places, mask=places < 0)

        def column(name: str, kind: pa.DataType) -> pa.Array:
            parts = [run.column(name, kind).take(pa.array(rows)) for run, rows in taken]
            return pa.concat_arrays(parts or [pa.array([], kind)]).take(at)

        deleted = np.zeros(len(places), dtype=np.bool_)
        expired = np.zeros(len(places), dtype=np.bool_)
        if any(run.has(DELETED) for run, _ in taken):
            deleted = flags(column(DELETED, pa.bool_()))
        if self.as_of is not None and any(run.has(EXPIRES) for run, _ in taken):
            expires = column(EXPIRES, pa.int64())
            expired = flags(pc.less_equal(expires, self.as_of))
        counted = (places >= 0) & ~deleted
        there = counted & ~expired
        if expired.any() or deleted.any():
            at = pa.array(places, mask=~there)
        return FoundRows({name: column(name, self.kinds[name]) for name in names}, there, counted, deleted)

    def scan(self, within: tuple[int, int] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows that are there, or those of one range of hashes; in the order of their hashes."""
        for low, high in [within] if within else ranges(self.manifest.runs, rows=RANGE_ROWS):
            rows = newest(self.runs, self.manifest.schema, self.manifest.key, low, high)
            yield from living(rows, self.as_of).select(list(self.kinds)).to_batches(max_chunksize=BATCH_ROWS)


class KeyChange(NamedTuple):
    """What one revision did to a key: its new row, or None if it was deleted."""

    label: Any
    row: Mapping[str, Any] | None


def history(
    home: Path | str, states: Iterable[tuple[Any, StateManifest]], key: Mapping[str, Any]
) -> Iterator[KeyChange]:
    """Yield what each of the states changed in one key; each is given with a label, such as its checkpoint."""
    for label, manifest in states:
        reader = StateReader(home, replace(manifest, runs=manifest.own, timestamp=None))
        columns = reader.key_columns(key_rows(manifest, [key]))
        found = reader.look_up(hashes.of(columns), columns, list(reader.kinds))
        if found.there[0]:
            yield KeyChange(label, {name: value[0].as_py() for name, value in found.values.items()})
        elif found.deleted[0]:
            yield KeyChange(label, None)


def key_rows(manifest: StateManifest, keys: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return keys as a table; a text is read as a value of the column's type, so that keys can come from a command."""
    kinds = {name: arrow(kind) for name, kind in manifest.schema}
    for one in keys:
        if set(one) != set(manifest.key):
            msg = f"state: key {', '.join(map(str, one))}: expected a value for {', '.join(manifest.key)}"
            raise ConfigError(msg)
    return pa.table({name: _read([one[name] for one in keys], kinds[name], name) for name in manifest.key})


def _read(values: Sequence[Any], kind: pa.DataType, name: str) -> pa.Array:
    try:
        texts = all(value is None or isinstance(value, str) for value in values)
        return pa.array(values, pa.string()).cast(kind) if texts else pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        msg = f"state: key column {name!r}: {values!r} is no {kind}"
        raise ConfigError(msg) from error


def plain(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Return a column as one array of the declared type; what Spark sends may have another size or time zone."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole if whole.type == kind else whole.cast(kind)
