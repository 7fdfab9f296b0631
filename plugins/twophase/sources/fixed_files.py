"""The base classes of the sources that read files: how Spark reads them, and how their input is checked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from twophase.core.checkpoint import Input, InputFile, looks
from twophase.core.errors import ConfigError, InputChanged
from twophase.core.settings import data_path
from twophase.sources.bad_record_scan import Reading
from twophase.sources.base import Sifted, Source
from twophase.sources.quarantine import Quarantine, sift
from twophase.storage.base import DISK, Storage, in_threads
from twophase.storage.spark_paths import listed_in_the_driver, literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from twophase.sinks.base import Sink

FORMATS = ("json", "csv", "parquet", "text")

#: Hadoop's local file system looks for a checksum file beside each file, and cannot name one with a colon in it.
_WITH_COLONS = {"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem", "fs.file.impl.disable.cache": "true"}


#: How many bytes of an input are read for checksums at most, the smallest files first: a fifth of a second of CPU.
MOST_SUMMED = 2**30
_READ_MEANWHILE = "the same bytes were written again while they were read; run it again"


class FileFormat(Source):
    """A source that Spark reads from files of one format."""

    #: What the source is called in messages.
    kind: ClassVar[str]
    #: What to do about a file that cannot be read.
    to_correct: ClassVar[str]

    def __init__(self, path: str | Path, format: str, schema: str | None, options: Mapping[str, Any] | None) -> None:  # noqa: A002 - as Spark's readers
        """Keep the arguments that every source of files has."""
        self.path = str(path)
        self.format = format
        self.schema = schema
        self.options = dict(options or {})
        self.expect_one_of("format", format, FORMATS)

    @property
    def who(self) -> str:
        """Return how messages name this source."""
        return f"{self.kind} {self.path}"

    def expect_one_of(self, name: str, value: str, known: Sequence[str]) -> None:
        """Raise ConfigError unless an argument is one of the known values."""
        if value not in known:
            msg = f"{self.who}: {name} {value!r}: expected one of {', '.join(known)}"
            raise ConfigError(msg)

    def load_files(self, spark: SparkSession, paths: Sequence[str], schema: Any = None, **more: Any) -> DataFrame:  # noqa: ANN401 - Spark's own
        """Return a frame over exactly these full paths."""
        reader = spark.read.format(self.format).options(**self.reader_options(paths) | more)
        if given := schema or self.schema:
            reader = reader.schema(given)
        with listed_in_the_driver(spark):
            return reader.load([literal(path) for path in paths])

    def no_files(self, spark: SparkSession) -> DataFrame:
        """Return an empty frame."""
        schema = self.schema or ("value string" if self.format == "text" else None)
        if schema is None:
            msg = (
                f"{self.who}: no new files in this checkpoint, so there is nothing to infer a schema from; "
                f"declare schema=…"
            )
            raise ConfigError(msg)
        return spark.createDataFrame([], schema)

    def reader_options(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return Spark's options for reading; nothing is skipped or guessed silently unless the user asked for it."""
        strict: dict[str, Any] = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
        if any(":" in path.rpartition("/")[2] for path in paths):
            strict |= _WITH_COLONS
        if self.format in {"json", "csv"}:
            strict["mode"] = "FAILFAST"
        if self.format == "csv":
            strict["header"] = "true"
            if self.schema:
                # By default Spark ignores the header: columns may be swapped, or a first record is lost as a header.
                strict["enforceSchema"] = "false"
        given = {name.lower() for name in self.options}
        return {name: value for name, value in strict.items() if name.lower() not in given} | self.options

    def blame(self, files: Sequence[tuple[str, str]], text: str, *, lenient: bool = False) -> Exception | None:
        """Return an error that names the record that Spark could not read; `files` are (shown path, path on disk)."""
        from twophase.sources import bad_records

        reading = Reading.of(self.reader_options(()), self.schema, lenient=lenient)
        return bad_records.find(files, self.format, reading, text, self.to_correct)


class FixedFiles(FileFormat):
    """A source whose input is a list of files, each fixed by its size and modification time.

    Files whose names start with `_` or `.`, or end with `.tmp` or `._COPYING_`, are unfinished and ignored. Symbolic
    links to folders are not followed. A writer brings a file here by renaming it when it is complete.
    """

    #: What to do about a fixed file that has changed.
    to_restore: ClassVar[str]

    def __init__(
        self,
        path: str | Path,
        format: str,  # noqa: A002 - the word that Spark's readers use
        schema: str | None,
        options: Mapping[str, Any] | None,
        quarantine: Quarantine,
    ) -> None:
        """Keep what is read, and what happens to bad records."""
        super().__init__(path, format, schema, options)
        self.bad = quarantine
        quarantine.check(self.who, format, schema, self.options)

    @property
    @abstractmethod
    def place(self) -> str:
        """Return the folder that all files are below, as it was declared."""

    @property
    def folder(self) -> Path:
        """Return the full path of that folder."""
        return data_path(self.place)

    @property
    def storage(self) -> Storage:
        """Return the storage that the files are on."""
        return DISK

    @property
    def root(self) -> str:
        """Return the prefix of a file's full path, without the `/`."""
        return self.folder.as_posix().rstrip("/")

    def shown(self, file: InputFile) -> str:
        """Return a file's path below the folder as it was declared."""
        return f"{self.place.rstrip('/')}/{file.path}"

    def folders(self) -> tuple[str, ...]:
        """Return the folder that the files are in."""
        return (str(self.folder),)

    def check(self, fixed: Input) -> None:
        """Raise InputChanged for the first file that is not what it was."""
        for file, now in zip(fixed.files, self.storage.identities(self.paths(fixed)), strict=True):
            if now != (file.size, file.mtime_ns):
                found = "nothing" if now is None else looks(*now)
                again = self.written_again(replace(fixed, files=(file,)))
                remedy = _READ_MEANWHILE if again else self.to_restore
                expected = looks(file.size, file.mtime_ns)
                msg = f"{self.who}: file {file.path}: expected {expected}, found {found}; {remedy}"
                raise InputChanged(msg)

    def written_again(self, fixed: Input) -> list[InputFile]:
        """Return the files that have another time but the same bytes, as they look now.

        Ask only before anything reads them: a reader of a file that is being written may see a part of it.
        """
        if not self._may_sum(fixed):
            return []
        places = self.paths(fixed)
        known = zip(fixed.files, places, self.storage.identities(places), strict=True)
        others = [
            (file._replace(mtime_ns=now[1]), place)
            for file, place, now in known
            if file.xxh3 is not None and now is not None and now[0] == file.size and now[1] != file.mtime_ns
        ]
        return [now for now, place in others if checksum(place, now) == now.xxh3]

    def summed(self, fixed: Input) -> list[InputFile]:
        """Return files without a checksum, with it; only the smallest ones, up to MOST_SUMMED bytes in all."""
        if not self._may_sum(fixed):
            return []
        sizes = sorted(file.size for file in fixed.files)
        small = {size for size, total in zip(sizes, accumulate(sizes), strict=True) if total <= MOST_SUMMED}
        wanted = [
            (file, place)
            for file, place in zip(fixed.files, self.paths(fixed), strict=True)
            if file.xxh3 is None and file.size in small
        ]
        if not wanted:
            return []
        sums = in_threads(lambda one: checksum(one[1], one[0]), wanted)
        return [file._replace(xxh3=found) for (file, _), found in zip(wanted, sums, strict=True) if found]

    def _may_sum(self, fixed: Input) -> bool:
        """Return True if checksums are of use: the files are on a disk, and not those of a log table."""
        return self.storage is DISK and fixed.table is None

    def paths(self, fixed: Input) -> list[str]:
        """Return the full paths of the fixed files."""
        root = self.root
        return [f"{root}/{file.path}" for file in fixed.files]

    def read(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> DataFrame:  # noqa: ARG002 - of those with slots
        """Return a frame over exactly these files; a bad record fails the query."""
        return self.load_files(spark, self.paths(fixed)) if fixed.files else self.no_files(spark)

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Name the file and the record that Spark could not read, or the file that changed meanwhile."""
        from twophase.sources import bad_records

        text = bad_records.text_of(error)
        if found := bad_records.unread(self.who, text, lambda: self.check(fixed), self.to_correct):
            return found
        if self.storage is not DISK or not bad_records.is_about_input(text):
            return None
        try:
            self.check(fixed)
        except InputChanged as changed:
            return changed
        files = list(zip(map(self.shown, fixed.files), self.paths(fixed), strict=True))
        return self.blame(files, text, lenient=self.bad.wanted)

    # --- bad records -------------------------------------------------------------------------------------------------

    def quarantine(self) -> Sink | None:
        """Return the table that bad records go to; None: a bad record fails the attempt."""
        return self.bad.sink(str(self.folder)) if self.bad.wanted else None

    @contextmanager
    def sifted(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> Iterator[Sifted]:
        """Yield good and bad records as two frames; without a quarantine all records as the good ones."""
        if not self.bad.wanted:
            yield Sifted(self.read(spark, fixed, slot))
            return
        with sift(self, spark, fixed) as frames:
            yield frames


def checksum(path: str, expected: InputFile) -> str | None:
    """Return the checksum of a file's bytes; None: size or time are not as expected, or it cannot be read.

    Whoever has to read the file reports that it is gone or unreadable.
    """
    try:
        found = DISK.digest_file(path)
    except OSError:
        return None
    return found if DISK.identities([path]) == [(expected.size, expected.mtime_ns)] else None
