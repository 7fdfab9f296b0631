"""Puts rows in the order of a sorted run, by hash and then by key, and finds rows of one key. For runs and merges.

A stable sort of several sorted parts, one after another, merges them: it finds the parts by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def ordered(hashes: Hashes, keys: Sequence[pa.Array]) -> Ordered:
    """Order rows; of those of one key the one that comes first counts, so newer rows are given before older ones."""
    positions = np.argsort(hashes, kind="stable")
    together = hashes[positions]
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
