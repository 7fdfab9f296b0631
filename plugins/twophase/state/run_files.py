"""The file of a sorted run: an uncompressed Arrow file of one record batch, written whole and durable, then mapped.

Columns: `_hash`, those of the state, `_deleted` if there are tombstones, `_expires` (microseconds) if rows may expire.
A file of an earlier schema lacks newer columns, which are null there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from twophase.core.errors import ManifestMismatch
from twophase.state.hashes import Hashes
from twophase.state.manifest import SortedRun
from twophase.storage.disk import fsync_folder

HASH = "_hash"
DELETED = "_deleted"
EXPIRES = "_expires"


def folder(home: Path | str) -> Path:
    """Return the folder of a state's runs."""
    return Path(home) / "runs"


def checkpoint_of(name: str) -> int:
    """Return the checkpoint that a file's name, or the beginning of it, starts with."""
    return int(name.partition(".")[0])


class _Summed:
    """A file that adds up its checksum while it is written."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self.sum = xxhash.xxh3_64()
        self.size = 0

    def write(self, data: Any) -> int:  # noqa: ANN401 - a buffer
        whole = memoryview(data)
        rest = whole
        while rest:
            rest = rest[self._file.write(rest) :]
        self.sum.update(whole)
        self.size += len(whole)
        return len(whole)

    def flush(self) -> None:
        """Do nothing: what is written is with the system."""

    def close(self) -> None:
        self.closed = True
        self._file.close()

    def make_durable(self) -> None:
        os.fsync(self._file.fileno())


def write(home: Path | str, begin: str, level: int, rows: pa.Table) -> SortedRun:
    """Write rows in their order as a run, durably; `begin` is the beginning of its name: `00000018.r1.a3.7c1e`."""
    runs = folder(home)
    runs.mkdir(parents=True, exist_ok=True)
    name = f"{begin}.{level}.{uuid.uuid4().hex[:12]}.arrow"
    batch = rows.combine_chunks().to_batches(max_chunksize=max(rows.num_rows, 1))[0]
    file = _Summed(runs / name)
    try:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
        file.make_durable()
    finally:
        file.close()
    fsync_folder(runs)
    hashes = batch.column(HASH)
    return SortedRun(
        path=name,
        level=level,
        rows=batch.num_rows,
        bytes=file.size,
        low=hashes[0].as_py(),
        high=hashes[-1].as_py(),
        xxh3=file.sum.hexdigest(),
        checkpoint_id=checkpoint_of(begin),
    )


class MappedRun:
    """A sorted run mapped into memory: only the pages that are looked at are read."""

    def __init__(self, home: Path | str, run: SortedRun) -> None:
        """Keep which file it is; it is opened when its rows are needed."""
        self.run = run
        self._path = folder(home) / run.path

    @cached_property
    def _batch(self) -> pa.RecordBatch:
        try:
            file = pa.memory_map(str(self._path))
            batch = pa.ipc.open_file(file).get_batch(0)
        except (OSError, pa.ArrowInvalid) as error:
            msg = f"state file {self._path}: cannot be read: {error}; `twophase verify` says what else is wrong"
            raise ManifestMismatch(msg) from error
        if batch.num_rows != self.run.rows:
            msg = f"state file {self._path}: expected {self.run.rows} rows, found {batch.num_rows}"
            raise ManifestMismatch(msg)
        return batch

    @cached_property
    def hashes(self) -> Hashes:
        """Return the hashes, without a copy."""
        found: Hashes = self._batch.column(HASH).to_numpy(zero_copy_only=True)
        return found

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Return a column; all null if the file is older than the column."""
        at = self._batch.schema.get_field_index(name)
        return pa.nulls(self.run.rows, kind) if at < 0 else self._batch.column(at)

    def has(self, name: str) -> bool:
        """Say whether the file has a column."""
        return bool(self._batch.schema.get_field_index(name) >= 0)

    def within(self, low: int, high: int) -> slice:
        """Return which rows have a hash from `low` to `high`, both included."""
        if low <= self.run.low and self.run.high <= high:
            return slice(0, self.run.rows)
        first = np.searchsorted(self.hashes, low, side="left")
        return slice(int(first), int(np.searchsorted(self.hashes, high, side="right")))


def opened(home: Path | str, runs: Sequence[SortedRun]) -> list[MappedRun]:
    """Return runs as they can be read, in the same order."""
    return [MappedRun(home, run) for run in runs]
