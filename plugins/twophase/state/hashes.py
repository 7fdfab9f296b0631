"""The hash of a key: Spark's `xxhash64` of the key columns, and of which are null. Sorted runs are sorted by it.

Spark skips nulls, so ('a', null) and (null, 'a') would have one hash; therefore a last int has a bit for each null.
`in_spark` and `of` are the same function, for a DataFrame and for Arrow columns; a test compares them. Two keys of one
hash are possible: whoever looks for a key compares the key, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    from twophase.core.manifest import Schema

#: A test's knob: only these bits of a hash are kept, so that most keys collide. None: all.
WEAK: int | None = None

Hashes = np.ndarray[Any, np.dtype[np.int64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]

_SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
#: Decimals of more digits than a long has.
_LONG_DIGITS = 18


def in_spark(keys: Schema) -> str:
    """Return the hash of the key columns of a DataFrame, in Spark's SQL; each is cast to its declared type first."""
    names = [quoted(name) for name, _ in keys]
    nulls = " | ".join(f"if({name} is null, {1 << at}, 0)" for at, name in enumerate(names))
    cast = ", ".join(f"cast({name} as {kind})" for name, (_, kind) in zip(names, keys, strict=True))
    found = f"xxhash64({cast}, {nulls})"
    return found if WEAK is None else f"({found} & {WEAK}L)"


def of(keys: Sequence[pa.Array]) -> Hashes:
    """Return the hash of each row of the key columns, which have their declared types."""
    count = len(keys[0])
    found = np.full(count, _SEED, dtype=np.uint64)
    nulls = np.zeros(count, dtype=np.int32)
    for at, column in enumerate(keys):
        found = _chained(column, found)
        nulls |= column.is_null().to_numpy(zero_copy_only=False).astype(np.int32) << at
    signed = _of_ints(nulls, found).view(np.int64)
    return signed if WEAK is None else signed & np.int64(WEAK)


def _chained(column: pa.Array, seeds: _Words) -> _Words:
    """Return the hash of each value with the hash of the columns before as its seed; a null leaves that as it is."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _of_bytes(column.cast(pa.binary()).to_pylist(), seeds)
    if pa.types.is_decimal(kind) and kind.precision > _LONG_DIGITS:
        return _of_bytes([_big_endian(value, kind.scale) for value in column.to_pylist()], seeds)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_decimal(kind):
        words = np.frombuffer(column.buffers()[1], dtype=np.int64)[2 * column.offset :: 2][: len(column)]
        return np.where(valid, _of_longs(words, seeds), seeds)
    if pa.types.is_timestamp(kind) or pa.types.is_int64(kind):
        return np.where(valid, _of_longs(_numbers(column, pa.int64()), seeds), seeds)
    return np.where(valid, _of_ints(_numbers(column, pa.int32()), seeds), seeds)


def _numbers(column: pa.Array, kind: pa.DataType) -> np.ndarray[Any, Any]:
    plain = column.cast(pa.int32()) if pa.types.is_date(column.type) else column
    found: np.ndarray[Any, Any] = pc.fill_null(plain.cast(kind), 0).to_numpy(zero_copy_only=False)
    return found


def _big_endian(value: Any, scale: int) -> bytes | None:  # noqa: ANN401 - a Decimal, or None
    """Return the digits of a decimal as Java's BigInteger has them: two's complement in as few bytes as it needs."""
    if value is None:
        return None
    sign, digits, exponent = value.as_tuple()
    number: int = int("".join(map(str, digits))) * 10 ** (scale + exponent) * (-1 if sign else 1)
    bits = (number if number >= 0 else ~number).bit_length()
    return number.to_bytes(bits // 8 + 1, "big", signed=True)


def _of_bytes(values: Sequence[bytes | None], seeds: _Words) -> _Words:
    digest = xxhash.xxh64_intdigest
    found = (seed if value is None else digest(value, seed) for value, seed in zip(values, seeds.tolist(), strict=True))
    return np.fromiter(found, dtype=np.uint64, count=len(values))


def _rotated(words: _Words, by: int) -> _Words:
    return (words << np.uint64(by)) | (words >> np.uint64(64 - by))


def _of_longs(values: np.ndarray[Any, Any], seeds: _Words) -> _Words:
    """Hash 8 bytes each by xxh64."""
    lane = _rotated(values.astype(np.int64).view(np.uint64) * _P2, 31) * _P1
    return _mixed(_rotated((seeds + _P5 + np.uint64(8)) ^ lane, 27) * _P1 + _P4)


def _of_ints(values: np.ndarray[Any, Any], seeds: _Words) -> _Words:
    """Hash 4 bytes each by xxh64."""
    lane = values.astype(np.int32).view(np.uint32).astype(np.uint64) * _P1
    return _mixed(_rotated((seeds + _P5 + np.uint64(4)) ^ lane, 23) * _P2 + _P3)


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(33))) * _P2
    words = (words ^ (words >> np.uint64(29))) * _P3
    return words ^ (words >> np.uint64(32))
