"""`Files`, the source that reads a landing folder; each file belongs to exactly one checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from twophase.core.checkpoint import Input, InputFile, Known, Position, looks
from twophase.core.errors import ConfigError
from twophase.core.failpoints import hit
from twophase.core.ports import Progress
from twophase.sources import new_files
from twophase.sources.fixed_files import FixedFiles, checksum
from twophase.sources.new_files import Found
from twophase.sources.quarantine import Quarantine
from twophase.storage import disk
from twophase.storage.disk import identity
from twophase.storage.listing import unreadable

AFTER_COMMIT = ("keep", "archive", "delete")

#: The order in which checkpoints read files: the oldest first.
_AGE = attrgetter("mtime_ns", "path")


class Files(FixedFiles):
    """The files of a folder and of the folders below it, in the order of their modification times."""

    identity = ("format",)
    fixed_while_pending = ("path",)

    kind = "files source"
    to_correct = "abort the checkpoint and `twophase release` it, then correct the file"
    to_restore = "put the file back as it was, or abort the checkpoint and `twophase release` it"

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        path: str | Path,
        format: str,  # noqa: A002 - the word that Spark's readers use
        *,
        schema: str | None = None,
        options: Mapping[str, Any] | None = None,
        max_files: int | None = None,
        max_bytes: int | None = None,
        after_commit: str = "keep",
        on_bad_record: str = "fail",
        bad_record_limit: float | None = None,
        quarantine_path: str | Path | None = None,
    ) -> None:
        """Declare the folder (relative: below the data folder), its format, and how much one checkpoint reads.

        With on_bad_record="quarantine" bad records go to a table of their own, up to bad_record_limit of them (a whole
        number, or a share of the checkpoint's records).
        """
        bad = Quarantine(on_bad_record, bad_record_limit, None if quarantine_path is None else str(quarantine_path))
        super().__init__(path, format, schema, options, bad)
        self.max_files = max_files
        self.max_bytes = max_bytes
        self.after_commit = after_commit
        self.expect_one_of("after_commit", after_commit, AFTER_COMMIT)
        limits: dict[str, object] = {"max_files": max_files, "max_bytes": max_bytes}
        for name, limit in limits.items():
            if limit is not None and not (type(limit) is int and limit > 0):
                msg = f"{self.who}: {name} {limit!r}: expected a whole number above 0"
                raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the path in full, so that it means the same everywhere."""
        return {
            "path": str(self.folder),
            "format": self.format,
            "schema": self.schema,
            "options": self.options,
            "max_files": self.max_files,
            "max_bytes": self.max_bytes,
            "after_commit": self.after_commit,
            **self.bad.config(),
        }

    @property
    def place(self) -> str:
        """Return the landing folder as it was declared."""
        return self.path

    @property
    def archive(self) -> Path:
        """Return the folder beside the landing folder that archived files go to."""
        return self.folder.with_name(f"{self.folder.name}.archive")

    def folders(self) -> tuple[str, ...]:
        """Return the landing folder, and the archive if files leave it."""
        return (str(self.folder), str(self.archive)) if self.settles else (str(self.folder),)

    # --- at begin ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check that the folder can be listed, and that files can be moved out of it if `after_commit` needs that."""
        folder = self.folder
        if not folder.exists():
            msg = f"{self.who}: no folder {folder}; create it, or correct the path"
            raise ConfigError(msg)
        if not folder.is_dir():
            msg = f"{self.who}: {folder} is a file, expected a folder"
            raise ConfigError(msg)
        if not os.access(folder, os.R_OK | os.X_OK):
            raise unreadable(folder, self.who)
        if not self.settles:
            return
        if folder.stat().st_dev != folder.parent.stat().st_dev:
            msg = (
                f"{self.who}: after_commit={self.after_commit!r} renames files to {self.archive}, which "
                f"is not on the file system of {folder}; use a folder below the mount point"
            )
            raise ConfigError(msg)
        for place in (folder, folder.parent):
            if not os.access(place, os.W_OK | os.X_OK):
                msg = (
                    f"{self.who}: after_commit={self.after_commit!r} may not write to {place}; "
                    f"give this user the right to, or use after_commit='keep'"
                )
                raise ConfigError(msg)

    def discover(
        self,
        slot: str | None = None,  # noqa: ARG002 - takes what has landed
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,  # noqa: ARG002 - has no offsets
    ) -> Found:
        """List the finished files, without those that `known` says are unchanged.

        Checksums of the files that one checkpoint would read are computed here, because nothing is locked.
        """
        try:
            found = new_files.look(str(self.folder), self.who, known)
        except FileNotFoundError:
            self.prepare()
            return Found([])
        first = self._limited(sorted(found.files, key=_AGE))
        return replace(found, sums={file[:3]: file.xxh3 for file in self.summed(Input(files=tuple(first)))})

    def fix(self, found: Found, progress: Progress) -> Input:
        """Take the oldest files that no checkpoint owns, up to the limits; a file above max_bytes goes alone.

        Storage may be slow, so it is not touched here, where the pipeline is locked. If files leave the folder after
        the commit, few are left in it, and nothing is remembered of them.
        """
        new = progress.new_files(found.files)
        taken = self._limited(sorted(new, key=_AGE))
        if not self.settles and (known := found.after(set(new) - set(taken))) != found.known:
            progress.remember(found.known, known)
        return Input(files=tuple(file._replace(xxh3=found.sums.get(file[:3])) for file in taken))

    def _limited(self, new: list[InputFile]) -> list[InputFile]:
        """Return the new files that fit into one checkpoint."""
        if self.max_files is not None:
            new = new[: self.max_files]
        if self.max_bytes is not None:
            totals = accumulate(file.size for file in new)
            new = [
                file
                for number, (file, total) in enumerate(zip(new, totals, strict=True))
                if number == 0 or total <= self.max_bytes
            ]
        return new

    def paths(self, fixed: Input) -> list[str]:
        """Return the full paths of the fixed files: in the landing folder, or in the archive after their commit."""
        landed = super().paths(fixed)
        if self.after_commit != "archive" or fixed.checkpoint_id is None:
            return landed
        archived = f"{self.archive}/checkpoint={fixed.checkpoint_id:08d}"
        return [
            path
            if identity(path) == (file.size, file.mtime_ns) or identity(f"{archived}/{file.path}") is None
            else f"{archived}/{file.path}"
            for file, path in zip(fixed.files, landed, strict=True)
        ]

    # --- after COMMITTED ---------------------------------------------------------------------------------------------

    @property
    def settles(self) -> bool:
        """Return True if files leave the folder after their commit."""
        return self.after_commit != "keep"

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        """Archive or delete what this checkpoint read, and only that.

        A file with the same name that looks different is a new one and stays. Repeatable after a crash at any point.
        """
        if not self.settles:
            return
        root, taken = self.folder, self.archive / f"checkpoint={checkpoint_id:08d}"
        below: set[str] = set()
        for file in files:
            below.add(file.path.rpartition("/")[0])
            source, target = f"{root}/{file.path}", f"{taken}/{file.path}"
            looks_now = _looks_now(file, target, source)
            self._take(source, target, looks_now)
            if self.after_commit == "delete" and identity(target) == looks_now:
                Path(target).unlink(missing_ok=True)
        if self.after_commit == "delete":
            _remove_empty(taken)
        _make_durable(root, taken, below)
        hit("settle.moved")

    def _take(self, source: str, target: str, expected: tuple[int, int]) -> None:
        """Move one file out of the landing folder, if it is the one that was read.

        It is checked again after the move: if this process was stopped before the move, it may have moved a newer file.
        Then that one is moved back.
        """
        while identity(source) == expected:
            try:
                disk.rename_new(Path(source), Path(target))
            except FileExistsError as error:
                raise self._occupied(source, target) from error
            except FileNotFoundError:  # no folder yet, or another process was faster or has just removed the folder
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                continue
            if identity(target) not in {None, expected}:
                try:
                    disk.rename_new(Path(target), Path(source))
                except FileExistsError as error:
                    raise self._occupied(source, target) from error
            return
        if identity(target) not in {None, expected}:
            raise self._occupied(source, target)

    def _occupied(self, source: str, target: str) -> ConfigError:
        there = identity(target)
        found = "nothing any more" if there is None else looks(*there)
        msg = f"{self.who}: {source} cannot go to {target}, which holds {found}; move one of them away"
        return ConfigError(msg)


def _looks_now(file: InputFile, *places: str) -> tuple[int, int]:
    """Return the size and time by which to recognise a file that was read.

    If the first place that has a file of its name holds the same bytes, written again, these are the new ones.
    """
    known = (file.size, file.mtime_ns)
    place, now = next(((place, now) for place in places if (now := identity(place))), ("", known))
    if file.xxh3 is None or now == known or now[0] != file.size:
        return known
    return now if checksum(place, file._replace(mtime_ns=now[1])) == file.xxh3 else known


def _make_durable(root: Path, taken: Path, below: Iterable[str]) -> None:
    """Make the moves durable: fsync the folders that files left, those they went to, and the parents of these."""
    folders = {root.parent, taken.parent, taken}
    for path in below:
        folders |= {root / path, *(taken / part for part in (path, *map(str, Path(path).parents)))}
    for folder in sorted(folders):
        if folder.is_dir():
            disk.fsync_folder(folder)


def _remove_empty(folder: Path) -> None:
    """Remove a folder, those below it and the one above, if they are empty."""
    below = [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
    for path in (*below, folder.parent):
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                raise
