"""What the sources of files have in common: how Spark reads them, and how their input is checked and explained."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from twophase.core.checkpoint import Input, InputFile, looks
from twophase.core.errors import ConfigError, InputChanged
from twophase.core.settings import data_path
from twophase.sinks.paths import listed_in_the_driver, literal
from twophase.sinks.storage import DISK, Storage
from twophase.sources import bad_records
from twophase.sources.base import Sifted, Source
from twophase.sources.quarantine import Quarantine, sift
from twophase.sources.scanning import Reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from twophase.sinks.base import Sink

FORMATS = ("json", "csv", "parquet", "text")

#: Hadoop's local file system looks for a checksum file beside each file, and cannot name one with a colon in it.
_WITH_COLONS = {"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem", "fs.file.impl.disable.cache": "true"}


class FileFormat(Source):
    """A source that Spark reads from files of one format."""

    #: What the source is called in messages.
    kind: ClassVar[str]
    #: What to do about a file that cannot be read.
    to_correct: ClassVar[str]

    def __init__(self, path: str | Path, format: str, schema: str | None, options: Mapping[str, Any] | None) -> None:  # noqa: A002 - as Spark's readers
        """Keep what every source of files is declared with."""
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
        """Refuse an argument that is none of those there are."""
        if value not in known:
            msg = f"{self.who}: {name} {value!r}: expected one of {', '.join(known)}"
            raise ConfigError(msg)

    def load_files(self, spark: SparkSession, paths: Sequence[str], schema: Any = None, **more: Any) -> DataFrame:  # noqa: ANN401 - Spark's own
        """Return a frame over exactly these paths, given in full."""
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
        """Return the reader's options: nothing is skipped or guessed silently unless the user asked for it."""
        strict: dict[str, Any] = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
        if any(":" in path.rpartition("/")[2] for path in paths):
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

    def blame(self, files: Sequence[tuple[str, str]], text: str, *, lenient: bool = False) -> Exception | None:
        """Name the file (as shown, as on disk) and the record that Spark could not read."""
        reading = Reading.of(self.reader_options(()), self.schema, lenient=lenient)
        return bad_records.find(files, self.format, reading, text, self.to_correct)


class FixedFiles(FileFormat):
    """A source whose input is a list of files, each fixed by its size and modification time.

    Names that start with `_` or `.` and names that end with `.tmp` or `._COPYING_` are unfinished and not looked at;
    symbolic links to folders are not followed. A writer puts a file here by renaming it when it is complete.
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
        """Keep what is read, and what becomes of its bad records."""
        super().__init__(path, format, schema, options)
        self.bad = quarantine
        quarantine.check(self.who, format, schema, self.options)

    @property
    @abstractmethod
    def place(self) -> str:
        """Return the folder, as it was declared, that all files are below."""

    @property
    def folder(self) -> Path:
        """Return that folder in full."""
        return data_path(self.place)

    @property
    def storage(self) -> Storage:
        """Return where that is: a disk."""
        return DISK

    @property
    def root(self) -> str:
        """Return what is before `/` and the path of a file."""
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
                msg = (
                    f"{self.who}: file {file.path}: expected {looks(file.size, file.mtime_ns)}, found {found}; "
                    f"{self.to_restore}"
                )
                raise InputChanged(msg)

    def paths(self, fixed: Input) -> list[str]:
        """Return the fixed files in full."""
        root = self.root
        return [f"{root}/{file.path}" for file in fixed.files]

    def read(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> DataFrame:  # noqa: ARG002 - of those with slots
        """Return a frame over exactly these files; a bad record fails whoever reads it."""
        return self.load_files(spark, self.paths(fixed)) if fixed.files else self.no_files(spark)

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Name the file and the record that Spark could not read; a file that changed meanwhile explains it first."""
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
        """Yield the good records and the bad ones apart; without a quarantine the good ones alone."""
        if not self.bad.wanted:
            yield Sifted(self.read(spark, fixed, slot))
            return
        with sift(self, spark, fixed) as frames:
            yield frames
