"""Find new files in a landing folder in which nearly every file has an owner; the files source calls it.

The record keeps (`Known`) the latest modification time of the files with an owner, and one sum per bucket of names,
over hashes of name, size and time. `look` computes the same sums. If a bucket's sum is the same, so are its files. So
only newer files and those of changed buckets are looked up in the record and held in memory. A file that was changed,
removed, or added with an old time changes the sum of its bucket.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from twophase.core.checkpoint import InputFile, Known
from twophase.storage.listing import batches, entries

#: 256 buckets take 2 kB in the record; in a folder of 100,000 files each has about 400.
BUCKETS = 256
_MASK = 2**64 - 1
_SIZE, _TIME = attrgetter("st_size"), attrgetter("st_mtime_ns")


@dataclass(frozen=True)
class Found:
    """What may be new in a folder."""

    files: list[InputFile]
    #: What the folder was compared with; None: nothing was known, so all files are here.
    known: Known | None = None
    #: The changed buckets: all of their files are here.
    buckets: frozenset[int] = frozenset(range(BUCKETS))
    #: Checksums of some files: path, size and time → checksum of the bytes.
    sums: Mapping[tuple[str, int, int], str | None] = field(default_factory=dict)

    def after(self, left: Iterable[InputFile]) -> Known:
        """Return what to remember once all of these files have an owner, except those in `left`."""
        later = set(left)
        owned = [file for file in self.files if file not in later]
        sums = array("Q", self.known.sums if self.known else bytes(8 * BUCKETS))
        for bucket in self.buckets:
            sums[bucket] = 0
        newest = self.known.newest if self.known else 0
        for file in owned:
            bucket, value = _sum_of(file)
            sums[bucket] = (sums[bucket] + value) & _MASK
        return Known(max([newest, *(file.mtime_ns for file in owned)]), sums.tobytes())


def look(root: str, who: str, known: Known | None) -> Found:
    """List every file below a folder; return those that may be new or changed since `known`.

    Raise FileNotFoundError if the folder is not there.
    """
    if known is None or len(known.sums) != 8 * BUCKETS:
        return Found([file for path, entry in entries(root, "", who) if (file := _file(path, entry))])
    later, sums = _add_up(root, who, known.newest)
    before = array("Q", known.sums)
    others = frozenset(bucket for bucket in range(BUCKETS) if sums[bucket] & _MASK != before[bucket])
    if others:
        seen = {file.path for file in later}
        # A name decides the bucket, so only files of the changed buckets are looked at again.
        again = (pair for pair in entries(root, "", who) if _bucket(_hash(pair[0])) in others and pair[0] not in seen)
        later += [file for path, entry in again if (file := _file(path, entry))]
    return Found(later, known, others)


def _add_up(root: str, who: str, newest: int) -> tuple[list[InputFile], list[int]]:
    """Return the files that are newer, and per bucket the sum over all others.

    This runs over every file at every begin, so all work per file is done in C, except for one addition.
    """
    import xxhash

    later: list[InputFile] = []
    sums = [0] * BUCKETS
    for paths, sizes, times in _looks(root, who):
        if max(times, default=0) > newest:
            files = list(map(InputFile, paths, sizes, times))
            later += [file for file in files if file.mtime_ns > newest]
            for bucket, value in (_sum_of(file) for file in files if file.mtime_ns <= newest):
                sums[bucket] += value
            continue
        names = list(map(xxhash.xxh3_64_intdigest, map(str.encode, paths)))
        for name, value in zip(names, map(hash, zip(names, sizes, times, strict=True)), strict=True):
            sums[name % BUCKETS] += value
    return later, sums


def _looks(root: str, who: str) -> Iterator[tuple[Sequence[str], Sequence[int], Sequence[int]]]:
    """Yield paths, sizes and times of all files, in batches."""
    for paths, found in batches(root, "", who):
        try:
            stats = list(map(os.DirEntry.stat, found))
        except FileNotFoundError:  # removed since it was listed: one by one
            files = [file for path, entry in zip(paths, found, strict=True) if (file := _file(path, entry))]
            yield [one.path for one in files], [one.size for one in files], [one.mtime_ns for one in files]
            continue
        yield paths, list(map(_SIZE, stats)), list(map(_TIME, stats))


def _sum_of(file: InputFile) -> tuple[int, int]:
    """Return a file's bucket, and what it adds to that bucket's sum.

    Python's hash of numbers is the same in every process. If another version computes it differently, no bucket
    matches, and all files are looked up.
    """
    name = _hash(file.path)
    return _bucket(name), hash((name, file.size, file.mtime_ns)) & _MASK


def _hash(path: str) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(path.encode())


def _bucket(name: int) -> int:
    return name % BUCKETS


def _file(path: str, entry: os.DirEntry[str]) -> InputFile | None:
    """Return a listed file with its size and time; None: it was removed meanwhile."""
    try:
        stat = entry.stat()
    except FileNotFoundError:
        return None
    return InputFile(path, stat.st_size, stat.st_mtime_ns)
