"""A look at a folder in which nearly every file has an owner already: what may be new, without asking about each.

The record keeps of the files that have an owner their latest modification time and, per bucket of names, the sum of
their checksums (`Known`). A look adds up the same. Where a bucket's sum is what it was, its files are the same: the
same names, sizes and times. So only later files and those of the other buckets are asked about, and nothing but those
is held in memory. A file that was changed, came with an old time, or has gone makes the sum of its bucket another one.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from twophase.core.checkpoint import InputFile, Known
from twophase.storage.listing import batches, entries

#: 2 kB of sums in the record; in a folder of 100,000 files a bucket has 400.
BUCKETS = 256
_MASK = 2**64 - 1
_SIZE, _TIME = attrgetter("st_size"), attrgetter("st_mtime_ns")


@dataclass(frozen=True)
class Found:
    """What may be new in a folder."""

    files: list[InputFile]
    #: What the look was held against; None: nothing was known, so all files are here.
    known: Known | None = None
    #: The buckets all of whose files are here.
    buckets: frozenset[int] = frozenset(range(BUCKETS))
    #: The checksums of the bytes of some: path, size and time → checksum.
    sums: Mapping[tuple[str, int, int], str | None] = field(default_factory=dict)

    def after(self, left: Iterable[InputFile]) -> Known:
        """Return what is known once all of these have an owner but those that are left for later."""
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
    """Look at every file below a folder; return those that what is known does not account for.

    FileNotFoundError: the folder is not there.
    """
    if known is None or len(known.sums) != 8 * BUCKETS:
        return Found([file for path, entry in entries(root, "", who) if (file := _file(path, entry))])
    later, sums = _add_up(root, who, known.newest)
    before = array("Q", known.sums)
    others = frozenset(bucket for bucket in range(BUCKETS) if sums[bucket] & _MASK != before[bucket])
    if others:
        seen = {file.path for file in later}
        # Names tell the bucket, so only the files of these are looked at once more.
        again = (pair for pair in entries(root, "", who) if _bucket(_hash(pair[0])) in others and pair[0] not in seen)
        later += [file for path, entry in again if (file := _file(path, entry))]
    return Found(later, known, others)


def _add_up(root: str, who: str, newest: int) -> tuple[list[InputFile], list[int]]:
    """Return the files with a later time, and per bucket the sum over all others.

    Every file is looked at each time, so what is done for each is done in C, but for one addition.
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
    """Yield paths, sizes and times of all files, many at a time."""
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

    Python's hash of numbers is the same in every process; with another version's nothing matches, and all is asked.
    """
    name = _hash(file.path)
    return _bucket(name), hash((name, file.size, file.mtime_ns)) & _MASK


def _hash(path: str) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(path.encode())


def _bucket(name: int) -> int:
    return name % BUCKETS


def _file(path: str, entry: os.DirEntry[str]) -> InputFile | None:
    """Look at a file; None: it was removed since it was listed."""
    try:
        stat = entry.stat()
    except FileNotFoundError:
        return None
    return InputFile(path, stat.st_size, stat.st_mtime_ns)
