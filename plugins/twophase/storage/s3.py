"""Files in an S3-compatible object store, reached by pyarrow here and on the executors.

An object is there as a whole, and durable, when its PUT was answered: nothing is made durable afterwards, and nothing
is ever renamed. Who may write there says an Airflow connection (`aws` or `s3`); its secret goes to the executors over
Spark's own channel, and into no plan, record, command line or log.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from twophase.core import connections
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable
from twophase.core.manifest import StagedFile
from twophase.storage import arrow_files, disk, listing, spark_frames, spark_paths
from twophase.storage.base import FileFacts, Given, Storage, Target, Where, Within

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

    from twophase.core.checkpoint import Json
    from twophase.storage.base import Stat

SCHEME = "s3://"
#: Requests wait for a network, not for a disk.
THREADS = 16
#: What a connection's extra may have; anything else would be another identity than the one that is meant.
_EXTRAS = frozenset({"aws_session_token", "config_kwargs", "endpoint_url", "region_name"})
_CONFIG = frozenset({"connect_timeout", "read_timeout"})
#: Seconds, as long as a connection says nothing else; a request that is not answered is tried three times.
_CONNECT, _READ = 5.0, 30.0
_REGION = "us-east-1"


@dataclass(frozen=True)
class Access:
    """How to get at a store; its text shows no secret. It is pickled for the executors."""

    endpoint: str | None = None
    region: str = _REGION
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect: float = _CONNECT
    read: float = _READ

    @classmethod
    def of(cls, conn_id: str) -> Access:
        """Read a connection as Airflow's own hooks do; without a login the machine's own identity is used."""
        found = connections.required(conn_id)
        which = f"connection {conn_id}"
        if found.conn_type not in {"aws", "s3"}:
            msg = f"{which}: expected type aws or s3, found {found.conn_type!r}"
            raise ConfigError(msg)
        config = found.extra.get("config_kwargs") or {}
        unknown = sorted({*(found.extra.keys() - _EXTRAS), *(config.keys() - _CONFIG)})
        if unknown:
            known = ", ".join(sorted(_EXTRAS | _CONFIG))
            msg = f"{which}: its extra has {', '.join(unknown)}, which is not known here; expected {known}"
            raise ConfigError(msg)
        extra = {name: value for name, value in found.extra.items() if value}
        return cls(
            extra.get("endpoint_url"),
            extra.get("region_name", _REGION),
            found.login,
            found.password,
            extra.get("aws_session_token"),
            float(config.get("connect_timeout", _CONNECT)),
            float(config.get("read_timeout", _READ)),
        )

    def open(self) -> S3FileSystem:
        """Open the store; nothing is asked yet."""
        from pyarrow.fs import S3FileSystem

        return S3FileSystem(
            access_key=self.key,
            secret_key=self.secret,
            session_token=self.token,
            region=self.region,
            endpoint_override=self.endpoint,
            connect_timeout=self.connect,
            request_timeout=self.read,
            allow_delayed_open=True,  # a small file is one request
        )


class Listed(NamedTuple):
    """What a listing says of an object; a store tells times in seconds."""

    st_size: int
    st_mtime_ns: int


class S3(Storage):
    """The buckets of a store, by URLs `s3://bucket/…`."""

    def __init__(self, who: str, path: str | None, conn_id: str | None) -> None:
        """Declare it, for a folder if one is known; the connection is looked up when it is first needed."""
        if path is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[^/#?%\s]+)+", path):
            msg = (
                f"{who}: path {path!r}: expected a folder on a disk, or s3://bucket/folder without any of #?% or spaces"
            )
            raise ConfigError(msg)
        if not conn_id:
            msg = f"{who}: conn_id is missing; name the Airflow connection of the object store"
            raise ConfigError(msg)
        self.who = who
        self.conn_id = conn_id

    @cached_property
    def access(self) -> Access:
        """Return what the connection says."""
        return Access.of(self.conn_id)

    @cached_property
    def _files(self) -> S3FileSystem:
        return self.access.open()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell a store that is down, or refuses, from an object that is not there."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            msg = f"{self.who}: {str(error).strip().partition(chr(10))[0]}"
            raise SinkUnavailable(msg) from error

    # --- folders and files -------------------------------------------------------------------------------------------

    def prepare(self, who: str, *folders: Where) -> None:
        """Look whether the bucket is there: folders come with their first object."""
        from pyarrow.fs import FileType

        bucket = _key(folders[0]).partition("/")[0]
        with self._explained():
            [found] = self._files.get_file_info([bucket])
        if found.type is FileType.NotFound:
            msg = f"{who}: there is no bucket {bucket!r}; make it, or correct the path"
            raise ConfigError(msg)

    def reachable(self, folder: Where) -> bool:  # noqa: ARG002 - a folder is made by its first object
        """Leave it to the first request."""
        return True

    def has(self, folder: Where) -> bool:
        """Look whether any object is below the folder."""
        from pyarrow.fs import FileType

        with self._explained():
            return bool(self._files.get_file_info([_key(folder)])[0].type is FileType.Directory)

    def entries(self, folder: Where) -> list[tuple[str, str]]:
        """List a folder."""
        return [(info.base_name, f"{SCHEME}{info.path}") for info in self._listed(folder, recursive=False)]

    def walk(self, folder: Where) -> Iterator[tuple[str, Stat]]:
        """List every object below a folder."""
        start = len(_key(folder)) + 1
        for info in self._listed(folder, recursive=True):
            if info.is_file:
                yield info.path[start:], Listed(info.size, info.mtime_ns)

    def _listed(self, folder: Where, *, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        with self._explained():
            found = self._files.get_file_info(FileSelector(_key(folder), recursive=recursive, allow_not_found=True))
        return cast("list[Any]", found)

    def identities(self, files: Sequence[Where]) -> list[tuple[int, int] | None]:
        """Ask for the head of each object; its time comes in seconds."""

        def look(path: Where) -> tuple[int, int] | None:
            with self._explained():
                [info] = self._files.get_file_info([_key(path)])
            return (info.size, info.mtime_ns) if info.is_file else None

        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(look, files))

    def open(self, path: Where) -> IO[bytes]:
        """Open an object; what is read is asked for when it is read."""
        with self._explained():
            return cast("IO[bytes]", self._files.open_input_file(_key(path)))

    def read(self, path: Where) -> bytes:
        """Read an object."""
        with self._explained(), self._files.open_input_stream(_key(path)) as stream:
            return bytes(stream.read())

    def digest_file(self, path: Where) -> str:
        """Read an object for its checksum."""
        import xxhash

        state = xxhash.xxh3_64()
        with self._explained(), self._files.open_input_stream(_key(path)) as stream:
            while chunk := stream.read(disk.CHUNK):
                state.update(chunk)
        return state.hexdigest()

    def create(self, path: Where, content: bytes) -> None:
        """Put an object unless one of other content is there.

        The name is one attempt's own, and whoever loads it holds it to the digest in the record: one that came in
        between would be noticed there.
        """
        with suppress(FileNotFoundError):
            if self.read(path) != content:
                raise FileExistsError(path)
            return
        self.replace(path, content)

    def replace(self, path: Where, content: bytes) -> None:
        """Put an object, whatever was there."""
        with self._explained(), self._files.open_output_stream(_key(path)) as stream:
            stream.write(content)

    def remove(self, path: Where, graveyard: Where) -> None:  # noqa: ARG002 - nothing is renamed
        """Delete an object, or all below a folder; what a late writer puts there the next sweep finds."""
        from pyarrow.fs import FileType

        with self._explained():
            [info] = self._files.get_file_info([_key(path)])
            if info.is_file:
                self._files.delete_file(info.path)
            elif info.type is FileType.Directory:
                self._files.delete_dir(info.path)

    def sync(self, files: Sequence[Where]) -> None:
        """Do nothing: what was answered is durable."""

    def url(self, path: Where) -> str:
        """Return it as it is."""
        return str(path)

    # --- what Spark writes and reads ---------------------------------------------------------------------------------

    def check_options(self, who: str, options: Json) -> None:
        """Take what pyarrow's writer has, too."""
        if strange := sorted(name for name in options if name.lower() != "compression"):
            msg = f"{who}: option {strange[0]!r}: expected compression, which is all that staging to s3:// has"
            raise ConfigError(msg)

    def save(self, frame: Any, target: Target) -> Mapping[str, FileFacts]:  # noqa: ANN401 - a DataFrame
        """Let each task put its files by itself; what Spark collects is the word of the tasks that count."""
        writer = arrow_files.Writer(self.access.open, _key(target.folder), target)
        if target.partition_by:
            frame = frame.sortWithinPartitions(*target.partition_by)
        with self._told():
            found = frame.mapInArrow(writer, arrow_files.WRITTEN).collect()
        return {row.path: FileFacts(row.size, row.rows, row.xxh3) for row in found}

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say what stopped a task if it was the store."""
        try:
            yield
        except Exception as error:
            if told := arrow_files.UNWRITTEN.search(str(error)):
                msg = f"{self.who}: the object store failed in a task of Spark: {told[2]}; nothing was committed"
                raise SinkUnavailable(msg) from error
            raise

    def seal(self, target: Target, known: Mapping[str, FileFacts] | None = None) -> list[StagedFile]:
        """Compare what the tasks said with what is there; read it all where nobody said anything."""
        found = dict(self.walk(target.folder))
        counts = known if known is not None else {path: None for path in found if listing.is_data(path)}
        for path in found.keys() - counts.keys():
            self.remove(f"{target.folder}/{path}", target.folder)

        def describe(item: tuple[str, FileFacts | None]) -> StagedFile:
            path, told = item
            if path not in found:
                msg = f"staged file {target.folder}/{path} is missing; stage it again"
                raise ManifestMismatch(msg)
            stat = found[path]
            said = told or self._look(f"{target.folder}/{path}", stat.st_size)
            if said.size != stat.st_size:
                differs = f"expected {said.size} bytes, found {stat.st_size}"
                msg = f"staged file {target.folder}/{path}: {differs}; stage it again"
                raise ManifestMismatch(msg)
            return StagedFile(path, stat.st_size, stat.st_mtime_ns, said.rows, said.xxh3)

        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(describe, sorted(counts.items())))

    def _look(self, path: str, size: int) -> FileFacts:
        import pyarrow.parquet as pq

        with self._explained(), self.open(path) as file:
            return FileFacts(size, int(pq.read_metadata(file).num_rows), self.digest_file(path))

    def load(self, spark: Any, files: Sequence[str], schema: Sequence[Sequence[str]], folders: Sequence[str]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Read the files as any others: their paths say the rest."""
        given = {**spark_frames.given_by(folders), "checkpoint": lambda path: str(spark_frames.checkpoint_of(path))}
        return self.listed(spark, files, [*schema, ("checkpoint", "bigint")], given, {})

    def listed(  # noqa: PLR0913, PLR0917 - as declared
        self,
        spark: Any,  # noqa: ANN401 - a SparkSession
        files: Sequence[str],
        schema: Sequence[Sequence[str]],
        given: Given,
        options: Json,  # noqa: ARG002 - Spark's reader does not come here
        within: Within | None = None,
    ) -> Any:  # noqa: ANN401 - a DataFrame
        """Let the executors read the files by pyarrow, a file at a time."""
        empty = spark.createDataFrame([], spark_paths.ddl(schema))
        named = [(_key(path), [value(path) for value in given.values()]) for path in files]
        if not named:
            return empty
        reader = arrow_files.ArrowReader(self.access.open, arrow_files.arrow_schema(empty), tuple(given), within)
        rows = spark.createDataFrame(named, "path string, given array<string>").repartition(min(len(named), _TASKS))
        return rows.mapInArrow(reader, empty.schema)

    @contextmanager
    def at_hand(self, files: Sequence[str]) -> Iterator[Sequence[str]]:
        """Copy the files to this machine, each below the folders of its values."""
        with tempfile.TemporaryDirectory(prefix="twophase-s3-") as folder:
            paths = [Path(folder, _key(path)) for path in files]

            def copy(source: str, target: Path) -> None:
                target.parent.mkdir(parents=True, exist_ok=True)
                with (
                    self._explained(),
                    self._files.open_input_stream(_key(source)) as stream,
                    target.open("wb") as file,
                ):
                    shutil.copyfileobj(stream, file, disk.CHUNK)

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(copy, files, paths))
            yield list(map(str, paths))

    # --- what the libraries of table formats need --------------------------------------------------------------------

    def connections(self) -> tuple[str, ...]:
        """Return the connection."""
        return (self.conn_id,)

    def for_delta(self) -> dict[str, str]:
        """Return the options of deltalake: an entry of the log is put only if there is none of its name."""
        access = self.access
        found = {
            "AWS_ENDPOINT_URL": access.endpoint,
            "AWS_ALLOW_HTTP": str((access.endpoint or "").startswith("http://")).lower(),
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": None if access.endpoint is None else "false",
            "AWS_REGION": access.region,
            "AWS_ACCESS_KEY_ID": access.key,
            "AWS_SECRET_ACCESS_KEY": access.secret,
            "AWS_SESSION_TOKEN": access.token,
            "aws_conditional_put": "etag",
            "connect_timeout": f"{access.connect}s",
            "timeout": f"{access.read}s",
            "max_retries": "2",
            "retry_timeout": f"{3 * access.read}s",
        }
        return {name: value for name, value in found.items() if value is not None}

    def for_iceberg(self) -> dict[str, str]:
        """Return the properties of pyiceberg."""
        access = self.access
        found = {
            "py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO",
            "s3.endpoint": access.endpoint,
            "s3.region": access.region,
            "s3.access-key-id": access.key,
            "s3.secret-access-key": access.secret,
            "s3.session-token": access.token,
            "s3.connect-timeout": str(access.connect),
            "s3.request-timeout": str(access.read),
        }
        return {name: value for name, value in found.items() if value is not None}


#: How many tasks read at most: a task takes some files, one after another.
_TASKS = 200


def _key(path: Where) -> str:
    return str(path).removeprefix(SCHEME)
