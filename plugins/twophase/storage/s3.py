"""The storage in an S3-compatible object store, reached by pyarrow here and on the executors; for log tables.

An object is whole and durable once its PUT is answered, so nothing needs an fsync, and nothing is ever renamed. An
Airflow connection (`aws` or `s3`) has the credentials. Its secret goes to the executors over Spark's own channel, and
into no plan, record, command line or log.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from twophase.core import connections
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable
from twophase.core.manifest import StagedFile
from twophase.storage import arrow_files, disk, listing, spark_frames, spark_paths
from twophase.storage.base import FileFacts, Given, Storage, Target, Where, Within
from twophase.storage.conditional_put import Keys, Store, put_if_absent

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem

    from twophase.core.checkpoint import Json
    from twophase.storage.base import Stat

SCHEME = "s3://"
#: More threads than on a disk: requests wait for the network.
THREADS = 16
#: What a connection's extra may have; others are refused, since they could mean another identity.
_EXTRAS = frozenset({"aws_session_token", "config_kwargs", "endpoint_url", "region_name"})
_CONFIG = frozenset({"connect_timeout", "read_timeout"})
#: Timeouts in seconds, unless the connection says others; a request that is not answered is tried three times.
_CONNECT, _READ = 5.0, 30.0
_REGION = "us-east-1"


@dataclass(frozen=True)
class Access:
    """The credentials of a store, and how to reach it; its repr shows no secret. It is pickled for the executors."""

    endpoint: str | None = None
    region: str = _REGION
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect: float = _CONNECT
    read: float = _READ

    @classmethod
    def of(cls, conn_id: str) -> Access:
        """Read a connection as Airflow's own hooks do; without a login the machine's identity is used."""
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

    def keys(self) -> Keys | None:
        """Return what requests are signed with: of the connection, or of the environment; None: another identity."""
        if self.key and self.secret:
            return Keys(self.key, self.secret, self.token)
        key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        return Keys(key, secret, os.environ.get("AWS_SESSION_TOKEN")) if key and secret else None

    def store(self) -> Store:
        """Return where the store is."""
        return Store(self.endpoint, self.region, self.read)

    def open(self) -> S3FileSystem:
        """Open the store; no request is made yet."""
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
    """What a listing says of an object; a store knows times in seconds only."""

    st_size: int
    st_mtime_ns: int


class S3(Storage):
    """The buckets of a store, by URLs `s3://bucket/…`."""

    def __init__(self, who: str, path: str | None, conn_id: str | None) -> None:
        """Check path and connection id; the connection is looked up when it is first needed."""
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
        """Return the credentials of the connection."""
        return Access.of(self.conn_id)

    @cached_property
    def _files(self) -> S3FileSystem:
        return self.access.open()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of a store that is down, or refuses, into SinkUnavailable; a missing object is no such error."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            msg = f"{self.who}: {str(error).strip().partition(chr(10))[0]}"
            raise SinkUnavailable(msg) from error

    # --- folders and files -------------------------------------------------------------------------------------------

    def prepare(self, who: str, *folders: Where) -> None:
        """Check that the bucket is there; folders come to be with their first object."""
        from pyarrow.fs import FileType

        bucket = _key(folders[0]).partition("/")[0]
        with self._explained():
            [found] = self._files.get_file_info([bucket])
        if found.type is FileType.NotFound:
            msg = f"{who}: there is no bucket {bucket!r}; make it, or correct the path"
            raise ConfigError(msg)

    def reachable(self, folder: Where) -> bool:  # noqa: ARG002 - a folder is made by its first object
        """Return True: the first request will tell."""
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
        """Ask for size and time of each object; times are in seconds."""

        def look(path: Where) -> tuple[int, int] | None:
            with self._explained():
                [info] = self._files.get_file_info([_key(path)])
            return (info.size, info.mtime_ns) if info.is_file else None

        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(look, files))

    def open(self, path: Where) -> IO[bytes]:
        """Open an object; bytes are requested when they are read."""
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

    def create(self, path: Where, content: bytes, *, name_durable: bool = True) -> None:  # noqa: ARG002 - it always is
        """Put an object, unless one of other content is there: of two writers at once the store takes one.

        The request is signed here. With the identity of a profile or a role there is nothing to sign with; then it is
        two requests, a look and a PUT, and of two writers at once the later one wins. For a manifest that is noticed
        when it is loaded, by the digest in the record.
        """
        if keys := self.access.keys():
            with self._explained():
                if put_if_absent(self.access.store(), keys, _key(path), content):
                    return
            found = self.read(path)
        else:
            try:
                found = self.read(path)
            except FileNotFoundError:
                self.replace(path, content)
                return
        if found != content:
            raise FileExistsError(path)

    def replace(self, path: Where, content: bytes) -> None:
        """Put an object, whatever was there."""
        with self._explained(), self._files.open_output_stream(_key(path)) as stream:
            stream.write(content)

    def remove(self, path: Where, graveyard: Where) -> None:  # noqa: ARG002 - nothing is renamed
        """Delete an object, or all objects below a folder; the next sweep finds what a late writer puts there."""
        from pyarrow.fs import FileType

        with self._explained():
            [info] = self._files.get_file_info([_key(path)])
            if info.is_file:
                self._files.delete_file(info.path)
            elif info.type is FileType.Directory:
                self._files.delete_dir(info.path)

    def sync(self, files: Sequence[Where], folders: Sequence[Where] = ()) -> None:
        """Do nothing: an answered PUT is durable."""

    def url(self, path: Where) -> str:
        """Return the URL as it is."""
        return str(path)

    # --- what Spark writes and reads ---------------------------------------------------------------------------------

    def check_options(self, who: str, options: Json) -> None:
        """Accept `compression` only: it is all that staging by pyarrow has."""
        if strange := sorted(name for name in options if name.lower() != "compression"):
            msg = f"{who}: option {strange[0]!r}: expected compression, which is all that staging to s3:// has"
            raise ConfigError(msg)

    def save(self, frame: Any, target: Target) -> Mapping[str, FileFacts]:  # noqa: ANN401 - a DataFrame
        """Let each task put its own files; the driver collects the reports of the tasks that count."""
        writer = arrow_files.Writer(self.access.open, _key(target.folder), target)
        if target.partition_by:
            frame = frame.sortWithinPartitions(*target.partition_by)
        with self._told():
            found = frame.mapInArrow(writer, arrow_files.WRITTEN).collect()
        return {row.path: FileFacts(row.size, row.rows, row.xxh3) for row in found}

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise SinkUnavailable if the store stopped a task."""
        try:
            yield
        except Exception as error:
            if told := arrow_files.UNWRITTEN.search(str(error)):
                msg = f"{self.who}: the object store failed in a task of Spark: {told[2]}; nothing was committed"
                raise SinkUnavailable(msg) from error
            raise

    def seal(self, target: Target, known: Mapping[str, FileFacts] | None = None) -> list[StagedFile]:
        """Compare the reports of the tasks with the objects that are there; read all files if there are no reports."""
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
        """Read the files with `listed`; their paths give the columns of folders, and `checkpoint`."""
        given = {**spark_frames.given_by(folders), "checkpoint": lambda path: str(spark_frames.checkpoint_of(path))}
        return self.listed(spark, files, [*schema, ("checkpoint", "bigint")], given, {})

    def listed(  # noqa: PLR0913, PLR0917 - as declared
        self,
        spark: Any,  # noqa: ANN401 - a SparkSession
        files: Sequence[str],
        schema: Sequence[Sequence[str]],
        given: Given,
        options: Json,  # noqa: ARG002 - Spark's own reader is not used
        within: Within | None = None,
    ) -> Any:  # noqa: ANN401 - a DataFrame
        """Let the executors read the files by pyarrow, one file at a time."""
        empty = spark.createDataFrame([], spark_paths.ddl(schema))
        named = [(_key(path), [value(path) for value in given.values()]) for path in files]
        if not named:
            return empty
        reader = arrow_files.ArrowReader(self.access.open, arrow_files.arrow_schema(empty), tuple(given), within)
        rows = spark.createDataFrame(named, "path string, given array<string>").repartition(min(len(named), _TASKS))
        return rows.mapInArrow(reader, empty.schema)

    @contextmanager
    def at_hand(self, files: Sequence[str]) -> Iterator[Sequence[str]]:
        """Copy the files to this machine, each below its partition folders."""
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
        """Return the store's connection."""
        return (self.conn_id,)

    def for_delta(self) -> dict[str, str]:
        """Return the options of deltalake; `aws_conditional_put` refuses a log entry whose name exists."""
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


#: The most tasks of a read; a task reads its files one after the other.
_TASKS = 200


def _key(path: Where) -> str:
    return str(path).removeprefix(SCHEME)
