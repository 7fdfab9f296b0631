"""A landing folder: each file belongs to exactly one checkpoint."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Input, InputFile
from twophase.core.errors import ConfigError, InputChanged
from twophase.core.failpoints import hit
from twophase.core.ports import Progress
from twophase.core.settings import data_path
from twophase.sinks import disk
from twophase.sources import bad_records
from twophase.sources.base import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS = ("json", "csv", "parquet", "text")
AFTER_COMMIT = ("keep", "archive", "delete")

#: Spark takes a path with one of these for a pattern. Its option against that, `__globPaths__`, reads every file once
#: more for each such path, so they are escaped; and then Hadoop cannot have a colon in the same path.
_PATTERN = re.compile(r"[][{}*?\\]")
#: Hadoop's local file system looks for a checksum file beside each file, and cannot name one with a colon in it.
_WITH_COLONS = {"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem", "fs.file.impl.disable.cache": "true"}
#: Above this many paths Spark starts a job of up to 10,000 tasks to look at them: three times slower on local files.
_LISTING_THRESHOLD = "spark.sql.sources.parallelPartitionDiscovery.threshold"


class Files(Source):
    """The files of a folder and the folders below it, in the order in which they were last modified.

    Names that start with `_` or `.` and names that end with `.tmp` or `._COPYING_` are unfinished and not looked at;
    symbolic links to folders are not followed. A writer puts a file here by renaming it when it is complete.
    """

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
    ) -> None:
        """Declare the folder (relative: below the data folder), its format, and how much one checkpoint takes."""
        self.path = str(path)
        self.format = format
        self.schema = schema
        self.options = dict(options or {})
        self.max_files = max_files
        self.max_bytes = max_bytes
        self.after_commit = after_commit
        self._check_arguments()

    def _check_arguments(self) -> None:
        for name, value, known in (
            ("format", self.format, FORMATS),
            ("after_commit", self.after_commit, AFTER_COMMIT),
        ):
            if value not in known:
                msg = f"files source {self.path}: {name} {value!r}: expected one of {', '.join(known)}"
                raise ConfigError(msg)
        limits: dict[str, object] = {"max_files": self.max_files, "max_bytes": self.max_bytes}
        for name, limit in limits.items():
            if limit is not None and not (type(limit) is int and limit > 0):
                msg = f"files source {self.path}: {name} {limit!r}: expected a whole number above 0"
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
        }

    @property
    def folder(self) -> Path:
        """Return the landing folder."""
        return data_path(self.path)

    @property
    def archive(self) -> Path:
        """Return the folder beside it for files that were committed."""
        return self.folder.with_name(f"{self.folder.name}.archive")

    def folders(self) -> tuple[str, ...]:
        """Return the landing folder, and the one that its files go to."""
        return (str(self.folder), str(self.archive)) if self.settles else (str(self.folder),)

    def shown(self, file: InputFile) -> str:
        """Return a file's path below the folder as it was declared."""
        return f"{self.path.rstrip('/')}/{file.path}"

    # --- at begin ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check that the folder is there and can be listed, and that its files may leave it if they have to."""
        folder = self.folder
        if not folder.exists():
            msg = f"files source {self.path}: no folder {folder}; create it, or correct the path"
            raise ConfigError(msg)
        if not folder.is_dir():
            msg = f"files source {self.path}: {folder} is a file, expected a folder"
            raise ConfigError(msg)
        if not os.access(folder, os.R_OK | os.X_OK):
            raise self._unreadable(folder)
        if not self.settles:
            return
        if folder.stat().st_dev != folder.parent.stat().st_dev:
            msg = (
                f"files source {self.path}: after_commit={self.after_commit!r} renames files to {self.archive}, which "
                f"is not on the file system of {folder}; use a folder below the mount point"
            )
            raise ConfigError(msg)
        for place in (folder, folder.parent):
            if not os.access(place, os.W_OK | os.X_OK):
                msg = (
                    f"files source {self.path}: after_commit={self.after_commit!r} may not write to {place}; "
                    f"give this user the right to, or use after_commit='keep'"
                )
                raise ConfigError(msg)

    def _unreadable(self, folder: Path) -> ConfigError:
        return ConfigError(f"files source {self.path}: may not list {folder}; give this user the right to read it")

    def discover(self) -> list[InputFile]:
        """List the finished files, in no order."""
        root = str(self.folder)
        found: list[InputFile] = []
        pending = [""]
        while pending:
            below = pending.pop()
            try:
                with os.scandir(root + "/" + below) as entries:
                    pending.extend(self._look_at(entries, below, found))
            except PermissionError as error:
                raise self._unreadable(Path(root, below)) from error
            except FileNotFoundError:
                if not below:
                    self.prepare()
        return found

    def _look_at(self, entries: Iterator[os.DirEntry[str]], below: str, found: list[InputFile]) -> Iterator[str]:
        """Add one folder's files to those found; yield the folders in it."""
        for entry in entries:
            name = entry.name
            if name.startswith(("_", ".")) or name.endswith((".tmp", "._COPYING_")):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield f"{below}{name}/"
                continue
            try:
                if not entry.is_file():
                    continue
                stat = entry.stat()
            except FileNotFoundError:  # removed since it was listed
                continue
            if ":" in name or not name.isascii():
                self._check_name(below + name)
            found.append(InputFile(below + name, stat.st_size, stat.st_mtime_ns))

    def _check_name(self, path: str) -> None:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            msg = f"files source {self.path}: file name {os.fsencode(path)!r} is not UTF-8; rename the file"
            raise ConfigError(msg) from error
        if ":" in path and (found := _PATTERN.search(f"{self.folder}/{path}")):
            both = f"both ':' and {found[0]!r}"
            msg = f"files source {self.path}: file {path}: Spark cannot read a path with {both}; rename the file"
            raise ConfigError(msg)

    def fix(self, found: list[InputFile], progress: Progress) -> Input:
        """Take the oldest files that no checkpoint owns, up to the limits; a file above max_bytes goes alone.

        A name may be free because its file was committed and has left the folder since it was found: each file is
        looked at once more, after the record was asked.
        """
        new = sorted(progress.new_files(found), key=lambda file: (file.mtime_ns, file.path))
        if self.max_files is not None:
            new = new[: self.max_files]
        if self.max_bytes is not None:
            totals = accumulate(file.size for file in new)
            new = [
                file
                for number, (file, total) in enumerate(zip(new, totals, strict=True))
                if number == 0 or total <= self.max_bytes
            ]
        root = str(self.folder)
        return Input(files=tuple(file for file in new if _identity(f"{root}/{file.path}") == file[1:]))

    # --- around an attempt -------------------------------------------------------------------------------------------

    def check(self, fixed: Input) -> None:
        """Raise InputChanged for the first file that is not what it was."""
        root = str(self.folder)
        for file in fixed.files:
            now = _identity(f"{root}/{file.path}")
            if now != (file.size, file.mtime_ns):
                found = "nothing" if now is None else _words(*now)
                msg = (
                    f"files source {self.path}: file {file.path}: expected {_words(file.size, file.mtime_ns)}, found "
                    f"{found}; put the file back as it was, or abort the checkpoint and `twophase release` it"
                )
                raise InputChanged(msg)

    def read(self, spark: SparkSession, fixed: Input) -> DataFrame:
        """Return a frame over exactly these files."""
        if not fixed.files:
            return self._nothing(spark)
        reader = spark.read.format(self.format).options(**self._options(fixed))
        if self.schema:
            reader = reader.schema(self.schema)
        root = self.folder.as_posix()
        with _listed_in_the_driver(spark):
            return reader.load([f"file://{_literal(f'{root}/{file.path}')}" for file in fixed.files])

    def _nothing(self, spark: SparkSession) -> DataFrame:
        schema = self.schema or ("value string" if self.format == "text" else None)
        if schema is None:
            msg = (
                f"files source {self.path}: no new files in this checkpoint, so there is nothing to infer a schema "
                f"from; declare schema=…"
            )
            raise ConfigError(msg)
        return spark.createDataFrame([], schema)

    def _options(self, fixed: Input) -> dict[str, Any]:
        """Return the reader's options: nothing is skipped or guessed silently unless the user asked for it."""
        strict: dict[str, Any] = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
        if any(":" in file.path.rpartition("/")[2] for file in fixed.files):
            strict |= _WITH_COLONS
        if self.format in {"json", "csv"}:
            strict["mode"] = "FAILFAST"
        if self.format == "csv":
            strict["header"] = "true"
            if self.schema:
                # by default Spark ignores what a header says: swapped columns, or a first record lost as a header
                strict["enforceSchema"] = "false"
        given = {name.lower() for name in self.options}
        return {name: value for name, value in strict.items() if name.lower() not in given} | self.options

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Name the file and the record that Spark could not read; a file that changed meanwhile explains it first."""
        text = bad_records.text_of(error)
        if not bad_records.is_about_input(text):
            return None
        try:
            self.check(fixed)
        except InputChanged as changed:
            return changed
        root = str(self.folder)
        files = [(self.shown(file), f"{root}/{file.path}") for file in fixed.files]
        return bad_records.find(files, self.format, self._options(fixed), self.schema, text)

    # --- after COMMITTED ---------------------------------------------------------------------------------------------

    @property
    def settles(self) -> bool:
        """Say whether files have to leave the folder."""
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
            self._take(source, target, (file.size, file.mtime_ns))
            if self.after_commit == "delete" and _identity(target) == (file.size, file.mtime_ns):
                Path(target).unlink(missing_ok=True)
        if self.after_commit == "delete":
            _remove_empty(taken)
        _make_durable(root, taken, below)
        hit("settle.moved")

    def _take(self, source: str, target: str, expected: tuple[int, int]) -> None:
        """Move one file out of the landing folder, if it is the one that was read.

        It is looked at again after the move: whoever was stopped in between may have moved a newer one.
        """
        while _identity(source) == expected:
            try:
                disk.rename_new(Path(source), Path(target))
            except FileExistsError as error:
                raise self._occupied(source, target) from error
            except FileNotFoundError:  # no folder yet, or another process was faster or has just removed the folder
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                continue
            if _identity(target) not in {None, expected}:
                try:
                    disk.rename_new(Path(target), Path(source))
                except FileExistsError as error:
                    raise self._occupied(source, target) from error
            return
        if _identity(target) not in {None, expected}:
            raise self._occupied(source, target)

    def _occupied(self, source: str, target: str) -> ConfigError:
        there = _identity(target)
        found = "nothing any more" if there is None else _words(*there)
        msg = f"files source {self.path}: {source} cannot go to {target}, which holds {found}; move one of them away"
        return ConfigError(msg)


def _identity(path: Path | str) -> tuple[int, int] | None:
    """Return a file's size and modification time; None: not there."""
    try:
        stat = os.stat(path)  # noqa: PTH116 - 100,000 files: a Path for each costs
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_size, stat.st_mtime_ns


def _literal(path: str) -> str:
    """Return a path so that Spark finds just the file of that name."""
    return _PATTERN.sub(r"\\\g<0>", path)


def _words(size: int, mtime_ns: int) -> str:
    return f"{size} bytes modified at {mtime_ns / 1e9:.6f}"


def _make_durable(root: Path, taken: Path, below: Iterable[str]) -> None:
    """Make the moves durable: the folders that files left, those they went to, and all that lead there."""
    folders = {root.parent, taken.parent, taken}
    for path in below:
        folders |= {root / path, *(taken / part for part in (path, *map(str, Path(path).parents)))}
    for folder in sorted(folders):
        if folder.is_dir():
            disk.fsync_folder(folder)


def _remove_empty(folder: Path) -> None:
    """Remove a folder and those below it, and the one above, as far as nothing is in them."""
    below = [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
    for path in (*below, folder.parent):
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                raise


@contextmanager
def _listed_in_the_driver(spark: SparkSession) -> Iterator[None]:
    """Let Spark look at the paths in the driver, however many there are."""
    before = spark.conf.get(_LISTING_THRESHOLD)
    spark.conf.set(_LISTING_THRESHOLD, str(2**31 - 1))
    try:
        yield
    finally:
        if before is not None:
            spark.conf.set(_LISTING_THRESHOLD, before)
