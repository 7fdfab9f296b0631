"""Where the files of a table are: what a sink asks of a storage, and how Spark gets at it.

A table's code knows folders and files by name, and no more: a `Storage` lists, reads, creates and removes them, lets
Spark write and read them, and says how the libraries of the table formats find the same place. Names are paths on a
disk, or URLs of an object store.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from twophase.core.errors import ConfigError
from twophase.core.manifest import StagedFile
from twophase.storage import disk, spark_frames
from twophase.storage.row_counts import count_rows

if TYPE_CHECKING:
    from twophase.core.checkpoint import Json

#: A folder or a file.
Where = Path | str

THREADS = 4
#: Spark would write times as INT96, which table formats do not have.
_TIMES = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


class Stat(Protocol):
    """What a listing says of a file."""

    @property
    def st_size(self) -> int:
        """Return its bytes."""
        ...

    @property
    def st_mtime_ns(self) -> int:
        """Return when it was written, as finely as the storage tells."""
        ...


class Target(NamedTuple):
    """Where a frame is written, and in which shape."""

    folder: Where
    #: What the names of its files begin with: revision and attempt, so that a reader never mixes two (R17).
    prefix: str
    format: str
    #: Of Spark's writer.
    options: Json
    #: One file has one value of each of these.
    partition_by: Sequence[str] = ()
    #: Whether their values are in the names of folders instead of the files.
    in_folders: bool = False


#: What columns hold by the path of a file.
Given = Mapping[str, Callable[[str], str | None]]


class Within(NamedTuple):
    """The rows that are asked for: those with start <= column < end."""

    column: str
    start: datetime
    end: datetime


class FileFacts(NamedTuple):
    """What whoever wrote a file knows of it."""

    size: int
    rows: int
    xxh3: str


class Storage(ABC):
    """A place for files. What it raises for a storage that does not answer is SinkUnavailable, or an OSError."""

    # --- folders and files -------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, who: str, *folders: Where) -> None:
        """Make these folders where there is such a thing; ConfigError if they cannot be written to."""

    @abstractmethod
    def reachable(self, folder: Where) -> bool:
        """Say whether a folder that was made is there: it is not if its disk is not mounted."""

    @abstractmethod
    def has(self, folder: Where) -> bool:
        """Say whether there is such a folder."""

    @abstractmethod
    def entries(self, folder: Where) -> list[tuple[str, str]]:
        """Return the names in a folder with their paths; one that is not there is empty."""

    @abstractmethod
    def walk(self, folder: Where) -> Iterator[tuple[str, Stat]]:
        """Yield every file below a folder, as a path relative to it."""

    @abstractmethod
    def identities(self, files: Sequence[Where]) -> list[tuple[int, int] | None]:
        """Return what each file is known by: its size and its time; None: there is no such file."""

    @abstractmethod
    def open(self, path: Where) -> IO[bytes]:
        """Open a file for reading; FileNotFoundError if there is none."""

    @abstractmethod
    def read(self, path: Where) -> bytes:
        """Return what is in a file; FileNotFoundError if there is none."""

    @abstractmethod
    def digest_file(self, path: Where) -> str:
        """Return a file's checksum (xxh3, 64 bits)."""

    @abstractmethod
    def create(self, path: Where, content: bytes) -> None:
        """Create a file, whole and durable; FileExistsError if one of other content is there."""

    @abstractmethod
    def replace(self, path: Where, content: bytes) -> None:
        """Put a file in the place of another of its name, whole and durable."""

    @abstractmethod
    def remove(self, path: Where, graveyard: Where) -> None:
        """Remove a file or a folder, if it is there; others may still write into it."""

    @abstractmethod
    def sync(self, files: Sequence[Where]) -> None:
        """Make files durable that others wrote, and their names."""

    @abstractmethod
    def url(self, path: Where) -> str:
        """Return a path as the libraries of table formats have it."""

    # --- what Spark writes and reads ---------------------------------------------------------------------------------

    @abstractmethod
    def check_options(self, who: str, options: Json) -> None:
        """Refuse, by a ConfigError, options that whoever writes here does not have."""

    @abstractmethod
    def save(self, frame: Any, target: Target) -> Mapping[str, FileFacts] | None:  # noqa: ANN401 - a DataFrame
        """Let Spark write a frame as Parquet; return what is known of the files of the tasks that count, if anything.

        Runs in the Spark driver. What other tasks left in the folder is no part of it.
        """

    @abstractmethod
    def seal(self, target: Target, known: Mapping[str, FileFacts] | None = None) -> list[StagedFile]:
        """Make what lies in a folder durable, and describe it; remove what is not data, or not `known`."""

    @abstractmethod
    def load(self, spark: Any, files: Sequence[str], schema: Sequence[Sequence[str]], folders: Sequence[str]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return a frame over files in the folders of their attempts; the columns `folders` only their paths have."""

    @abstractmethod
    def listed(  # noqa: PLR0913, PLR0917 - a SparkSession, and what a list of files is
        self,
        spark: Any,  # noqa: ANN401 - a SparkSession
        files: Sequence[str],
        schema: Sequence[Sequence[str]],
        given: Given,
        options: Json,
        within: Within | None = None,
    ) -> Any:  # noqa: ANN401 - a DataFrame
        """Return a frame over files, wherever they are, with the columns of a schema.

        `given` says by a file's path what columns hold, whatever is in the file. `options` are for Spark's reader, if
        that is who reads. Rows that are not `within` may be left out, or not.
        """

    @abstractmethod
    def at_hand(self, files: Sequence[str]) -> AbstractContextManager[Sequence[str]]:
        """Give local paths of these files for a while, in the same order, below the same names of folders."""

    # --- what the libraries of table formats need --------------------------------------------------------------------

    def connections(self) -> tuple[str, ...]:
        """Return the ids of the connections by which Spark gets here."""
        return ()

    def for_delta(self) -> dict[str, str]:
        """Return the storage options of deltalake, secrets included."""
        return {}

    def for_iceberg(self) -> dict[str, str]:
        """Return the properties of pyiceberg, secrets included."""
        return {}


class Disk(Storage):
    """A disk of this machine, or one that all machines share."""

    def prepare(self, who: str, *folders: Where) -> None:
        """Make the folders, each durable in its parent."""
        try:
            for folder in map(Path, folders):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    disk.fsync_folder(folder.parent)
        except OSError as error:
            msg = f"{who}: folder {error.filename} cannot be made: {error.strerror}"
            raise ConfigError(msg) from error
        if not all(os.access(folder, os.W_OK | os.X_OK) for folder in folders):
            msg = f"{who}: folder {' or '.join(map(str, folders))} is not writable"
            raise ConfigError(msg)

    def reachable(self, folder: Where) -> bool:
        """Look whether the folder is there."""
        return Path(folder).is_dir()

    def has(self, folder: Where) -> bool:
        """Look whether the folder is there."""
        return Path(folder).is_dir()

    def entries(self, folder: Where) -> list[tuple[str, str]]:
        """List a folder."""
        return disk.entries(Path(folder))

    def walk(self, folder: Where) -> Iterator[tuple[str, Stat]]:
        """Walk a folder."""
        return disk.walk(folder)

    def identities(self, files: Sequence[Where]) -> list[tuple[int, int] | None]:
        """Look at each file."""
        return list(map(disk.identity, files))

    def open(self, path: Where) -> IO[bytes]:
        """Open a file."""
        return Path(path).open("rb")

    def read(self, path: Where) -> bytes:
        """Read a file."""
        return Path(path).read_bytes()

    def digest_file(self, path: Where) -> str:
        """Read a file for its checksum."""
        return disk.digest_file(path)

    def create(self, path: Where, content: bytes) -> None:
        """Create a file by one link."""
        disk.create(Path(path), content)

    def replace(self, path: Where, content: bytes) -> None:
        """Replace a file by one rename."""
        disk.replace(Path(path), content)

    def remove(self, path: Where, graveyard: Where) -> None:
        """Move it out of the reach of others, then remove it."""
        disk.remove(Path(path), Path(graveyard))

    def sync(self, files: Sequence[Where]) -> None:
        """Fsync files and their folders; one that was cleaned up meanwhile is not needed."""
        for path in files:
            try:
                disk.fsync_file(path)
            except FileNotFoundError:
                continue
        for folder in {Path(path).parent for path in files}:
            disk.fsync_folder(folder)

    def url(self, path: Where) -> str:
        """Return it as a URL of a file."""
        return f"file://{path}"

    def check_options(self, who: str, options: Json) -> None:
        """Take all of them: Spark's own writer knows."""

    def save(self, frame: Any, target: Target) -> None:  # noqa: ANN401 - a DataFrame
        """Let Spark's own writer write, whose commit leaves out the files of failed tasks."""
        columns = list(target.partition_by)
        if not target.in_folders:  # a copy of each makes the folders, so that the values stay in the files
            names = {name: f"_twophase_{name}" for name in columns}
            frame = frame.withColumns({copy: frame[name] for name, copy in names.items()})
            columns = list(names.values())
        options = {**target.options, **writer_options(target.prefix)}
        with configured(frame.sparkSession, _TIMES):
            frame.write.format(target.format).options(**options).partitionBy(*columns).save(self.url(target.folder))
        if not target.in_folders:
            _flatten(Path(target.folder))

    def seal(self, target: Target, known: Mapping[str, FileFacts] | None = None) -> list[StagedFile]:  # noqa: ARG002 - every file is read
        """Fsync every file while it is read for its checksum."""
        folder = Path(target.folder)
        _name_files(folder, target.prefix)

        def describe(item: tuple[str, os.stat_result]) -> StagedFile:
            path, stat = item
            full = f"{folder}/{path}"
            checksum = disk.seal_file(full)
            rows = count_rows(full, target.format, target.options)
            return StagedFile(path, stat.st_size, stat.st_mtime_ns, rows, checksum)

        with ThreadPoolExecutor(THREADS) as pool:
            files = list(pool.map(describe, sorted(disk.walk(folder))))
            list(pool.map(disk.fsync_folder, list(disk.folders(folder))))
        disk.fsync_folder(folder.parent)
        return files

    def load(self, spark: Any, files: Sequence[str], schema: Sequence[Sequence[str]], folders: Sequence[str]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Let Spark's own reader read."""
        return spark_frames.attempts(spark, spark.read.format("parquet"), files, schema, folders)

    def listed(  # noqa: PLR0913, PLR0917 - see above
        self,
        spark: Any,  # noqa: ANN401 - a SparkSession
        files: Sequence[str],
        schema: Sequence[Sequence[str]],
        given: Given,
        options: Json,
        within: Within | None = None,  # noqa: ARG002 - Spark's own reader skips by what is asked of the frame
    ) -> Any:  # noqa: ANN401 - a DataFrame
        """Let Spark's own reader read."""
        reader = spark.read.format("parquet").options(**options)
        return spark_frames.listed(spark, reader, files, schema, given).drop(spark_frames.FILE)

    def at_hand(self, files: Sequence[str]) -> AbstractContextManager[Sequence[str]]:
        """Return them as they are."""
        return nullcontext(files)


DISK = Disk()


def storage_of(who: str, path: str, conn_id: str | None) -> Storage:
    """Return the storage of a path, reached by a connection unless it is a disk; ConfigError if they do not fit."""
    if "://" not in path:
        if conn_id is not None:
            msg = f"{who}: conn_id {conn_id!r} with a path on a disk; it is for s3://bucket/…"
            raise ConfigError(msg)
        return DISK
    from twophase.storage.s3 import S3

    return S3(who, path, conn_id)


def writer_options(prefix: str) -> dict[str, Any]:
    """Return what makes Spark's writer name files for their attempt, and leave out those of failed tasks."""
    return {
        "mapreduce.output.basename": prefix,
        "mapreduce.fileoutputcommitter.algorithm.version": 1,
        "mapreduce.fileoutputcommitter.marksuccessfuljobs": False,
    }


def _name_files(folder: Path, prefix: str) -> None:
    """Remove what is not data, and put revision and attempt into the names that lack them.

    Then a reader across an exchange of two revisions fails instead of mixing them (R17). Spark 4 writes the names
    so; 3.5 cannot.
    """
    strays = False
    for path, _ in list(disk.walk(folder)):
        below, _, name = path.rpartition("/")
        if any(part.startswith(("_", ".")) for part in path.split("/")):
            (folder / path).unlink()
            strays = True
        elif not name.startswith(f"{prefix}-"):
            (folder / path).rename(folder / below / f"{prefix}-{name.removeprefix('part-')}")
    if strays:
        disk.prune(folder)


def _flatten(folder: Path) -> None:
    """Take files out of the folders of their values: a path may be a URL to a reader, and values may be anything."""
    nested = sorted(path for path, _ in disk.walk(folder) if "/" in path)
    for number, path in enumerate(nested):
        name = path.rpartition("/")[2]
        (folder / path).rename(folder / f"{name.removesuffix('.parquet')}-p{number:05d}.parquet")
    if nested:
        disk.prune(folder)


@contextmanager
def configured(spark: Any, settings: Mapping[str, str]) -> Iterator[None]:  # noqa: ANN401 - a SparkSession
    """Give Spark some settings for a while."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
