"""What new rows change in a state, and the changelog rows that say so. For the tasks of Spark and for `changes`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from twophase.state.hashes import Hashes
from twophase.state.newest_rows import flags
from twophase.state.reader import FoundRows, StateReader, plain
from twophase.state.row_order import Flags, equal
from twophase.state.run_files import DELETED, HASH

#: The column of a changelog that says what a row is: inserted, before and after an update, deleted.
CHANGE = "_change"
INSERT, BEFORE, AFTER, DELETE = "+I", "-U", "+U", "-D"


@dataclass(frozen=True)
class Compared:
    """Some rows beside what a state has for their keys."""

    hashes: Hashes
    #: The new rows, all columns of the state.
    after: dict[str, pa.Array]
    #: What the state has: the columns that are no key.
    before: FoundRows
    #: Which rows delete their key.
    deleted: Flags
    #: Which rows change anything; an equal row does not, nor does a deletion of a key that is not there.
    changed: Flags

    def changelog(self) -> pa.Table:
        """Return the changes as rows with `_change`; the two rows of an update follow each other."""
        old, new = self.changed & self.before.there, self.changed & ~self.deleted
        kinds = (np.where(self.deleted, DELETE, BEFORE), np.where(self.before.there, AFTER, INSERT))
        count = len(self.hashes)
        starts = np.cumsum(old.astype(np.int64) + new) - (old.astype(np.int64) + new)
        rows = np.empty(int(old.sum() + new.sum()), dtype=np.int64)
        rows[starts[old]] = np.flatnonzero(old)
        rows[(starts + old)[new]] = np.flatnonzero(new) + count
        at = pa.array(rows)
        columns = {
            name: pa.concat_arrays([self.before.values.get(name, column), column]).take(at)
            for name, column in self.after.items()
        }
        return pa.table({**columns, CHANGE: pa.array(np.concatenate(kinds)[rows], pa.string())})


def difference(reader: StateReader, rows: pa.RecordBatch | pa.Table) -> Compared:
    """Look up the keys of new rows; these have `_hash`, the columns of the state and perhaps `_deleted`."""
    hashed = plain(rows.column(HASH), pa.int64()).to_numpy(zero_copy_only=False)
    after = {name: plain(rows.column(name), kind) for name, kind in reader.kinds.items()}
    key = reader.manifest.key
    values = [name for name in after if name not in key]
    before = reader.look_up(hashed, [after[name] for name in key], values)
    deleted = np.zeros(len(hashed), dtype=np.bool_)
    if DELETED in rows.schema.names:
        deleted = flags(plain(rows.column(DELETED), pa.bool_()))
    same = before.there.copy()
    for name in values:
        if not same.any():
            break
        same &= equal(before.values[name], after[name])
    return Compared(hashed, after, before, deleted, np.where(deleted, before.there, ~same))
