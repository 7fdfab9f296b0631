"""Merges sorted runs, and says which: 12 of a level into one of the next, all into the base when it has no more rows.

Each checkpoint's attempt merges what is due. Merging changes nothing that can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from twophase.core.manifest import Schema
from twophase.state import run_files
from twophase.state.manifest import SortedRun
from twophase.state.newest_rows import living, newest, ranges

#: The level of the base, which is below all others: nothing is older, so tombstones end there.
BASE = 99
#: How many checkpoints' runs of a level are merged into one.
FAN = 12
#: Levels with fewer rows than this wait until there are twelve runs, however small the base is.
LEAST_ROWS = 100_000
#: A merged run is cut into files of at most so many rows and bytes.
FILE_ROWS = 1 << 22
FILE_BYTES = 256 << 20


class Merge(NamedTuple):
    """Runs that are to be merged, newest first, and the level of the result."""

    runs: tuple[SortedRun, ...]
    level: int


def due(runs: Sequence[SortedRun], *, fan: int = FAN, least_rows: int = LEAST_ROWS) -> Merge | None:
    """Return the merge that is due, if any; runs come newest first, so levels only go up along them."""
    above = [run for run in runs if run.level < BASE]
    rows, in_base = sum(run.rows for run in above), sum(run.rows for run in runs) - sum(run.rows for run in above)
    if rows >= max(in_base, least_rows, 1):
        return Merge(tuple(runs), BASE)
    level = 0
    while _checkpoints(above, level) + (level > 0) >= fan:
        level += 1
    if level == 0:
        return None
    if rows >= in_base:
        return Merge(tuple(runs), BASE)
    return Merge(tuple(run for run in above if run.level < level), level)


def _checkpoints(runs: Sequence[SortedRun], level: int) -> int:
    """Count what a level holds: several files of one checkpoint are one."""
    return len({run.checkpoint_id for run in runs if run.level == level})


class MergePlace(NamedTuple):
    """Where merged runs are written, and what is in them; `begin` begins the names of the files."""

    home: Path | str
    key: Sequence[str]
    schema: Schema
    begin: str


def merge(place: MergePlace, runs: Sequence[SortedRun], level: int, as_of: int | None) -> tuple[SortedRun, ...]:
    """Write merged runs, range by range; in the base there are neither tombstones nor rows expired at `as_of`."""
    mapped = run_files.opened(place.home, runs)
    written = []
    for low, high in ranges(runs, rows=FILE_ROWS, size=FILE_BYTES):
        rows = newest(mapped, place.schema, place.key, low, high)
        if level == BASE:
            rows = living(rows, as_of)
        if rows.num_rows:
            written.append(run_files.write(place.home, place.begin, level, rows))
    return tuple(written)
