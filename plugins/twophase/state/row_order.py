"""Puts rows in the order of a sorted run, by hash and then by key, and finds rows of one key. For runs and merges.

Sorted arrays of hashes are merged, not sorted: the shorter is inserted into the longer one by binary search.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from twophase.state.hashes import Hashes

Positions = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Ordered(NamedTuple):
    """Rows in the order of a sorted run; of several rows of one key the first counts."""

    #: Where each row is, in the rows as they were given.
    positions: Positions
    #: Which rows have the key of the row before them.
    repeated: Flags


def ordered(hashes: Sequence[Hashes], keys: Sequence[pa.Array]) -> Ordered:
    """Order rows that come in several sorted parts, newest part first; `keys` are the key columns of all of them."""
    together, positions = merged(hashes)
    repeated = np.zeros(len(together), dtype=np.bool_)
    alike = together[1:] == together[:-1]
    if not alike.any():
        return Ordered(positions, repeated)
    grouped = np.zeros(len(together), dtype=np.bool_)
    grouped[1:] |= alike
    grouped[:-1] |= alike
    rows, of_group = positions[grouped], together[grouped]
    taken = [key.take(pa.array(rows)) for key in keys]
    same = _like_the_one_before(of_group, taken)
    if not same[1:][of_group[1:] == of_group[:-1]].all():
        # Two keys have one hash: these rows are sorted by key, the newest of each key first.
        sort = [("hash", "ascending"), *((f"key{at}", "ascending") for at, _ in enumerate(keys)), ("row", "ascending")]
        columns = {"hash": of_group, **{f"key{at}": key for at, key in enumerate(taken)}, "row": rows}
        by_key = pc.sort_indices(pa.table(columns), sort_keys=sort)
        rows = rows[by_key.to_numpy()]
        positions[grouped] = rows
        same = _like_the_one_before(of_group, [key.take(by_key) for key in taken])
    repeated[grouped] = same
    return Ordered(positions, repeated)


def sort(hashes: Hashes, keys: Sequence[pa.Array]) -> Ordered:
    """Order rows that come in any order."""
    first = np.argsort(hashes, kind="stable")
    found = ordered([hashes[first]], [key.take(pa.array(first)) for key in keys])
    return Ordered(first[found.positions], found.repeated)


def merged(parts: Sequence[Hashes]) -> tuple[Hashes, Positions]:
    """Merge sorted arrays; return all hashes in order and where each was in the arrays put one after another.

    Of equal hashes, those of an earlier array come first.
    """
    starts = np.cumsum([0, *(len(part) for part in parts)])
    pending = [(part, np.arange(start, start + len(part))) for part, start in zip(parts, starts, strict=False)]
    if not pending:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    while len(pending) > 1:
        sizes = [len(one[0]) + len(other[0]) for one, other in pairwise(pending)]
        at = int(np.argmin(sizes))
        pending[at : at + 2] = [_merged_pair(pending[at], pending[at + 1])]
    return pending[0]


def _merged_pair(newer: tuple[Hashes, Positions], older: tuple[Hashes, Positions]) -> tuple[Hashes, Positions]:
    short, long, side = (newer, older, "left") if len(newer[0]) <= len(older[0]) else (older, newer, "right")
    places = np.searchsorted(long[0], short[0], side=side) + np.arange(len(short[0]))  # type: ignore[call-overload]
    others = np.ones(len(short[0]) + len(long[0]), dtype=np.bool_)
    others[places] = False
    hashes, positions = (np.empty(len(others), dtype=np.int64) for _ in range(2))
    for made, at in ((hashes, 0), (positions, 1)):
        made[places] = short[at]
        made[others] = long[at]
    return hashes, positions


def equal(one: pa.Array, other: pa.Array) -> Flags:
    """Say for each row whether two columns of one type have the same value; null is a value, and so is NaN."""
    kind = one.type
    if pa.types.is_nested(kind):
        pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
        return np.fromiter((a == b for a, b in pairs), dtype=np.bool_, count=len(one))
    if pa.types.is_floating(kind):
        bits = pa.int64() if kind.bit_width == 64 else pa.int32()  # noqa: PLR2004 - a double
        one, other = one.view(bits), other.view(bits)
    same = pc.equal(one, other)
    if same.null_count:
        both = pc.and_(one.is_null(), other.is_null())
        same = pc.if_else(pc.is_valid(same), same, both)
    found: Flags = same.to_numpy(zero_copy_only=False)
    return found


def _like_the_one_before(hashes: Hashes, keys: Sequence[pa.Array]) -> Flags:
    found = np.zeros(len(hashes), dtype=np.bool_)
    found[1:] = hashes[1:] == hashes[:-1]
    for key in keys:
        found[1:] &= equal(key[1:], key[:-1])
    return found
