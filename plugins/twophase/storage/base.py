"""The base class of storages, and the storage on disk. Sinks and sources of files call it.

A `Storage` lists, reads, creates and removes files, lets Spark write and read them, and gives the libraries of Delta
and Iceberg their options for the same place. Files and folders are named by paths on a disk, or by URLs of an object
store; sinks and sources know nothing else of them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from twophase.core.errors import ConfigError
from twophase.core.manifest import StagedFile
from twophase.storage import disk, spark_frames
from twophase.storage.row_counts import count_rows

if TYPE_CHECKING:
    from twophase.core.checkpoint import Json

T = TypeVar("T")
U = TypeVar("U")
#: The path or URL of a folder or a file.
Where = Path | str

THREADS = 4
#: Without this Spark would write timestamps as INT96, which table formats do not have.
_TIMES = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


class Stat(Protocol):
    """What a listing says of a file."""

    @property
    def st_size(self) -> int:
        """Return its size in bytes."""
        ...

    @property
    def st_mtime_ns(self) -> int:
        """Return when it was written, as precisely as the storage knows."""
        ...


class Target(NamedTuple):
    """Where a DataFrame is written, and how."""

    folder: Where
    #: The prefix of its files' names: revision and attempt, so that a reader never mixes two (R17).
    prefix: str
    format: str
    #: Options of Spark's writer.
    options: Json
    #: The partition columns: a file has one value of each.
    partition_by: Sequence[str] = ()
    #: Whether their values are in the names of folders instead of the files.
    in_folders: bool = False


#: Columns whose value follows from the path of a file: how to find it.
Given = Mapping[str, Callable[[str], str | None]]


class Within(NamedTuple):
    """The rows that a read wants: those with start <= column < end."""

    column: str
    start: datetime
    end: datetime


class FileFacts(NamedTuple):
    """What the writer of a file reports of it."""

    size: int
    rows: int
    xxh3: str


class Storage(ABC):
    """A place for files. It raises SinkUnavailable or OSError if the storage does not answer."""

    # --- folders and files -------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, who: str, *folders: Where) -> None:
        """Create these folders, if the storage has folders; ConfigError if they cannot be written to."""

    @abstractmethod
    def reachable(self, folder: Where) -> bool:
        """Say whether a folder that was created is there; False if its disk is not mounted."""

    @abstractmethod
    def has(self, folder: Where) -> bool:
        """Say whether the folder exists."""

    @abstractmethod
    def entries(self, folder: Where) -> list[tuple[str, str]]:
        """Return the names in a folder with their paths; none if the folder does not exist."""

    @abstractmethod
    def walk(self, folder: Where) -> Iterator[tuple[str, Stat]]:
        """Yield every file below a folder, as a path relative to it."""

    @abstractmethod
    def identities(self, files: Sequence[Where]) -> list[tuple[int, int] | None]:
        """Return size and modification time of each file; None for a file that does not exist."""

    @abstractmethod
    def open(self, path: Where) -> IO[bytes]:
        """Open a file for reading; FileNotFoundError if there is none."""

    @abstractmethod
    def read(self, path: Where) -> bytes:
        """Return the content of a file; FileNotFoundError if there is none."""

    @abstractmethod
    def digest_file(self, path: Where) -> str:
        """Return a file's checksum (xxh3, 64 bits)."""

    @abstractmethod
    def create(self, path: Where, content: bytes, *, name_durable: bool = True) -> None:
        """Create a file, whole and durable; FileExistsError if one of other content is there.

        Without `name_durable` its name is durable after `sync` of its folder.
        """

    @abstractmethod
    def replace(self, path: Where, content: bytes) -> None:
        """Write a file, whole and durable, in place of one of the same name."""

    @abstractmethod
    def remove(self, path: Where, graveyard: Where) -> None:
        """Remove a file or a folder, if it is there; others may still write into it."""

    @abstractmethod
    def sync(self, files: Sequence[Where], folders: Sequence[Where] = ()) -> None:
        """Make files durable, with their names, and the names in these folders, too."""

    @abstractmethod
    def url(self, path: Where) -> str:
        """Return a path as a URL for the libraries of table formats."""

    # --- what Spark writes and reads ---------------------------------------------------------------------------------

    @abstractmethod
    def check_options(self, who: str, options: Json) -> None:
        """Raise ConfigError for writer options that this storage's writer does not have."""

    @abstractmethod
    def save(self, frame: Any, target: Target) -> Mapping[str, FileFacts] | None:  # noqa: ANN401 - a DataFrame
        """Let Spark write a DataFrame; return the facts of the files of successful tasks, None if nobody reports them.

        Runs in the Spark driver. Files that failed or repeated tasks left in the folder do not count.
        """

    @abstractmethod
    def seal(self, target: Target, known: Mapping[str, FileFacts] | None = None) -> list[StagedFile]:
        """Make the files in a folder durable, and describe them; remove what is not data, or not `known`.

        The names in the folder itself, and its own, are durable after `sync` of it and of the one above.
        """

    @abstractmethod
    def load(self, spark: Any, files: Sequence[str], schema: Sequence[Sequence[str]], folders: Sequence[str]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return a DataFrame over files in folders of attempts, with the column `checkpoint`.

        The values of the columns `folders` are in the files' paths only.
        """

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
        """Return a DataFrame over files, wherever they are, with the columns of a schema.

        `given` columns get their value from the path of a file, whatever is in the file. `options` are for Spark's
        reader, if that one reads. Rows that are not `within` may be left out; the caller filters.
        """

    @abstractmethod
    def at_hand(self, files: Sequence[str]) -> AbstractContextManager[Sequence[str]]:
        """Provide local paths of these files inside a `with`, in the same order, with the same partition folders."""

    # --- what the libraries of table formats need --------------------------------------------------------------------

    def connections(self) -> tuple[str, ...]:
        """Return the ids of the connections that Spark needs to reach the storage."""
        return ()

    def for_delta(self) -> dict[str, str]:
        """Return the storage options of deltalake, secrets included."""
        return {}

    def for_iceberg(self) -> dict[str, str]:
        """Return the properties of pyiceberg, secrets included."""
        return {}


class Disk(Storage):
    """The storage on a disk of this machine, or on one that all machines share."""

    def prepare(self, who: str, *folders: Where) -> None:
        """Create the folders, each durable in its parent."""
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

    def create(self, path: Where, content: bytes, *, name_durable: bool = True) -> None:
        """Create a file by one link."""
        disk.create(Path(path), content, name_durable=name_durable)

    def replace(self, path: Where, content: bytes) -> None:
        """Replace a file by one rename."""
        disk.replace(Path(path), content)

    def remove(self, path: Where, graveyard: Where) -> None:
        """Move a file or a folder out of the reach of others, then remove it."""
        disk.remove(Path(path), Path(graveyard))

    def sync(self, files: Sequence[Where], folders: Sequence[Where] = ()) -> None:
        """Fsync files and their folders; skip files that were cleaned up meanwhile."""
        for path in files:
            try:
                disk.fsync_file(path)
            except FileNotFoundError:
                continue
        for folder in {*(Path(path).parent for path in files), *map(Path, folders)}:
            disk.fsync_folder(folder)

    def url(self, path: Where) -> str:
        """Return a `file://` URL."""
        return f"file://{path}"

    def check_options(self, who: str, options: Json) -> None:
        """Accept all options: Spark's own writer checks them."""

    def save(self, frame: Any, target: Target) -> None:  # noqa: ANN401 - a DataFrame
        """Let Spark's own writer write; its commit leaves out the files of failed tasks."""
        columns = list(target.partition_by)
        if not target.in_folders:  # partition by a copy of each column, so that the values stay in the files
            names = {name: f"_twophase_{name}" for name in columns}
            frame = frame.withColumns({copy: frame[name] for name, copy in names.items()})
            columns = list(names.values())
        options = {**target.options, **writer_options(target.prefix)}
        with configured(frame.sparkSession, _TIMES):
            frame.write.format(target.format).options(**options).partitionBy(*columns).save(self.url(target.folder))
        if not target.in_folders:
            _flatten(Path(target.folder))

    def seal(self, target: Target, known: Mapping[str, FileFacts] | None = None) -> list[StagedFile]:  # noqa: ARG002 - every file is read
        """Fsync every file, and read it for its checksum."""
        folder = Path(target.folder)
        _name_files(folder, target.prefix)

        def describe(item: tuple[str, os.stat_result]) -> StagedFile:
            path, stat = item
            full = f"{folder}/{path}"
            checksum = disk.seal_file(full)
            rows = count_rows(full, target.format, target.options)
            return StagedFile(path, stat.st_size, stat.st_mtime_ns, rows, checksum)

        files = in_threads(describe, sorted(disk.walk(folder)))
        in_threads(disk.fsync_folder, [below for below in disk.folders(folder) if below != str(folder)])
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
        within: Within | None = None,  # noqa: ARG002 - Spark pushes the caller's own filter down
    ) -> Any:  # noqa: ANN401 - a DataFrame
        """Let Spark's own reader read."""
        reader = spark.read.format("parquet").options(**options)
        return spark_frames.listed(spark, reader, files, schema, given).drop(spark_frames.FILE)

    def at_hand(self, files: Sequence[str]) -> AbstractContextManager[Sequence[str]]:
        """Return the paths as they are."""
        return nullcontext(files)


DISK = Disk()


def in_threads(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Apply a function to items, at once in some threads; a single one needs none."""
    if len(items) <= 1:
        return list(map(function, items))
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


def storage_of(who: str, path: str, conn_id: str | None) -> Storage:
    """Return the storage of a path: the disk, or S3 by a connection; ConfigError if path and connection do not fit."""
    if "://" not in path:
        if conn_id is not None:
            msg = f"{who}: conn_id {conn_id!r} with a path on a disk; it is for s3://bucket/…"
            raise ConfigError(msg)
        return DISK
    from twophase.storage.s3 import S3

    return S3(who, path, conn_id)


def writer_options(prefix: str) -> dict[str, Any]:
    """Return the options that make Spark's writer name files for their attempt, and leave out those of failed tasks."""
    return {
        "mapreduce.output.basename": prefix,
        "mapreduce.fileoutputcommitter.algorithm.version": 1,
        "mapreduce.fileoutputcommitter.marksuccessfuljobs": False,
    }


def _name_files(folder: Path, prefix: str) -> None:
    """Remove what is not data, and put revision and attempt into the file names that lack them.

    With them a read that goes on while two revisions are exchanged fails instead of mixing them (R17). Spark 4 writes
    such names by itself; Spark 3.5 cannot.
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
    """Move files out of their partition folders: some readers take a path for a URL, and a value may be anything."""
    nested = sorted(path for path, _ in disk.walk(folder) if "/" in path)
    for number, path in enumerate(nested):
        name = path.rpartition("/")[2]
        (folder / path).rename(folder / f"{name.removesuffix('.parquet')}-p{number:05d}.parquet")
    if nested:
        disk.prune(folder)


@contextmanager
def configured(spark: Any, settings: Mapping[str, str]) -> Iterator[None]:  # noqa: ANN401 - a SparkSession
    """Change settings of a Spark session inside a `with`."""
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
