"""Writes and reads Parquet by pyarrow inside Spark's executors, for S3: Spark itself is not set up to reach it.

Called by `s3.py`; `sources/bad_records.py` recognises its errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from inspect import signature
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from twophase.storage.partition_folders import NULL_PARTITION

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow.fs import FileSystem

    from twophase.storage.base import Target, Within

#: The columns in which a task reports each file.
WRITTEN = "path string, size bigint, rows bigint, xxh3 string"
#: How a task reports that the store failed when it wrote, or read: the error's name, the file and the reason.
UNWRITTEN = re.compile(r"twophase unwritten (\w+): ([^\n]*?) :twophase")
UNREAD = re.compile(r"twophase unread (\w+): ([^\n]*?) :twophase")
#: A row group is written once it has this many bytes, or rows.
GROUP_BYTES, GROUP_ROWS = 128 << 20, 1 << 20
_COMPRESSIONS = {"uncompressed": "none", "lz4raw": "lz4", "lz4_raw": "lz4"}


def arrow_schema(frame: Any) -> pa.Schema:  # noqa: ANN401 - a DataFrame
    """Return a DataFrame's columns as an Arrow schema, with timestamps in UTC: Spark 4 has to be told, 3.5 does not."""
    from pyspark.sql.pandas.types import to_arrow_schema

    zone: Any = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(frame.schema, **zone)


@contextmanager
def _told(what: str, path: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of the store with a text that the driver can find again."""
    try:
        yield
    except kinds as error:
        why = str(error).strip().partition("\n")[0]
        msg = f"twophase {what} {type(error).__name__}: {path}: {why} :twophase"
        raise OSError(msg) from None


class Writer:
    """Writes one Spark partition, a file for each value of the partition columns; the rows come sorted by them.

    A file's name has the partition and the task attempt. So a task that Spark runs twice writes files of its own, and
    only the report of the run that counts reaches the driver.
    """

    def __init__(self, connect: Callable[[], FileSystem], folder: str, target: Target) -> None:
        """Name the folder as the file system knows it; `connect` holds the secret, and is never printed."""
        self._connect = connect
        self._folder = folder
        self._target = target

    def __repr__(self) -> str:
        """Name the folder only."""
        return f"Writer({self._folder})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write a partition, and report its files; a partition without rows makes none."""
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        part, task = (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
        with _told("unwritten", self._folder, OSError):
            written = list(self.write(f"{self._target.prefix}-{part:05d}-{task}", batches))
        names = ("path", "size", "rows", "xxh3")
        yield pa.RecordBatch.from_pylist(
            [dict(zip(names, row, strict=True)) for row in written],
            pa.schema([("path", pa.string()), ("size", pa.int64()), ("rows", pa.int64()), ("xxh3", pa.string())]),
        )

    def write(self, name: str, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, int, int, str]]:
        """Write the files of one task; yield path, size, rows and checksum of each."""
        files = self._connect()
        runs = (run for batch in batches for run in self._runs(batch))
        for number, (values, group) in enumerate(groupby(runs, key=itemgetter(0))):
            with _File(files, self._folder, self._path(values, name, number), self._codec) as file:
                for _, rows in group:
                    file.add(rows)
                yield file.close()

    @property
    def _codec(self) -> str:
        options = {option.lower(): str(value).lower() for option, value in self._target.options.items()}
        codec = options.get("compression", "snappy")
        return _COMPRESSIONS.get(codec, codec)

    def _runs(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
        """Cut a batch where a value of a partition column changes."""
        import pyarrow.compute as pc

        names = list(self._target.partition_by)
        columns = [batch.column(name) for name in names]
        ends = {batch.num_rows}.union(*(pc.run_end_encode(column).run_ends.to_pylist() for column in columns))
        rows = batch.drop_columns(names) if self._target.in_folders and names else batch
        start = 0
        for end in sorted(ends):
            if end > start:
                yield tuple(column[start].as_py() for column in columns), rows.slice(start, end - start)
            start = end

    def _path(self, values: tuple[Any, ...], name: str, number: int) -> str:
        file = f"{name}-{number:05d}.parquet"
        if not self._target.in_folders:
            return file
        folders = [f"{quote(key)}={_text(value)}" for key, value in zip(self._target.partition_by, values, strict=True)]
        return "/".join([*folders, file])


class _File:
    """One Parquet file that is being written to a store; its checksum is computed on the way."""

    def __init__(self, files: FileSystem, folder: str, path: str, codec: str) -> None:
        import xxhash

        self._stream = files.open_output_stream(f"{folder}/{path}")
        self._path = path
        self._codec = codec
        self._state = xxhash.xxh3_64()
        self._size = 0
        self._rows = 0
        self._waiting: list[pa.RecordBatch] = []
        self._writer: Any = None

    def __enter__(self) -> _File:  # noqa: PYI034 - nobody subclasses it
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stream; a file that was cut off in the middle is never reported."""
        self._writer = None
        if not self._stream.closed:
            self._stream.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; they are written in large row groups."""
        self._waiting.append(batch)
        bytes_, rows = (sum(sizes) for sizes in zip(*((b.nbytes, b.num_rows) for b in self._waiting), strict=True))
        if bytes_ >= GROUP_BYTES or rows >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting = []
        if self._writer is None:
            schema = pa.schema([column.with_nullable(True) for column in table.schema])  # noqa: FBT003 - pyarrow's
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self, "w"),
                schema,
                compression=self._codec,
                store_schema=False,  # it would give timestamps the session's zone, which Iceberg's readers refuse
            )
        self._writer.write_table(table.cast(self._writer.schema), row_group_size=table.num_rows)
        self._rows += table.num_rows

    def close(self) -> tuple[str, int, int, str]:
        """Write the last row group and the footer; return path, size, rows and checksum."""
        self._flush()
        self._writer.close()
        self._stream.close()
        return self._path, self._size, self._rows, self._state.hexdigest()

    # --- the file object that pyarrow's writer writes to -------------------------------------------------------------

    closed = False

    def write(self, data: bytes) -> int:
        """Write bytes to the store, and count them into size and checksum."""
        self._state.update(data)
        self._size += len(data)
        self._stream.write(data)
        return len(data)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: the stream buffers by itself."""


class ArrowReader:
    """Reads the files that the rows of a DataFrame name, with the columns of one schema."""

    def __init__(
        self, connect: Callable[[], FileSystem], schema: pa.Schema, given: Sequence[str], within: Within | None
    ) -> None:
        """Name the columns, those of them whose values come with the file's name, and the wanted rows."""
        self._connect = connect
        self._schema = schema
        self._given = given
        self._within = within

    def __repr__(self) -> str:
        """Name the columns only."""
        return f"ArrowReader({self._schema.names})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the files of one task, one after the other."""
        from pyarrow import ArrowInvalid

        files: FileSystem | None = None
        for batch in batches:
            for row in batch.to_pylist():
                files = files or self._connect()
                with _told("unread", row["path"], OSError, ArrowInvalid):
                    yield from self._read(files, row["path"], dict(zip(self._given, row["given"], strict=True)))

    def _read(self, files: FileSystem, path: str, given: dict[str, str | None]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with files.open_input_file(path) as opened:
            file = pq.ParquetFile(opened, pre_buffer=True, coerce_int96_timestamp_unit="us")
            there = {name.lower(): name for name in file.schema_arrow.names}  # as Spark: letter case does not count
            there |= {name: name for name in file.schema_arrow.names}
            found = {
                column.name: there.get(column.name) or there.get(column.name.lower())
                for column in self._schema
                if column.name not in given
            }
            wanted = [name for name in found.values() if name is not None]
            for batch in file.iter_batches(row_groups=self._groups(file, found), columns=wanted):
                arrays = []
                for column in self._schema:
                    if column.name in given:
                        array = pa.array([given[column.name]], pa.string()).cast(column.type)
                        arrays.append(pa.repeat(array[0], batch.num_rows))
                    elif name := found[column.name]:
                        arrays.append(batch.column(name).cast(column.type))
                    else:
                        arrays.append(pa.nulls(batch.num_rows, column.type))
                yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _groups(self, file: pq.ParquetFile, found: Mapping[str, str | None]) -> list[int]:
        """Return the row groups that may have wanted rows; a group without statistics may."""
        groups = range(file.metadata.num_row_groups)
        names = [file.metadata.schema.column(at).path for at in range(file.metadata.num_columns)]
        if self._within is None or (name := found.get(self._within.column)) not in names:
            return list(groups)
        at = names.index(name)
        return [group for group in groups if _may_have(file.metadata.row_group(group).column(at), self._within)]


def _may_have(column: pq.ColumnChunkMetaData, within: Within) -> bool:
    """Say whether a row group may have wanted rows, by the smallest and the largest time in it."""
    found = column.statistics
    if found is None or not found.has_min_max:
        return True
    least, largest = (_moment(value) for value in (found.min, found.max))
    return least is None or largest is None or (least < within.end and largest >= within.start)


def _moment(value: object) -> datetime | None:
    """Return a time, or the midnight of a date, in UTC; None if it is neither."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=value.tzinfo or UTC)
    return datetime(value.year, value.month, value.day, tzinfo=UTC) if isinstance(value, date) else None


def _text(value: Any) -> str:  # noqa: ANN401 - a value of any partition type
    """Return a partition value as Spark writes it in a folder's name; an empty text counts as null."""
    if value is None or value == "":
        return NULL_PARTITION
    if isinstance(value, bool):
        return str(value).lower()
    return quote(value.isoformat() if isinstance(value, date) else str(value), safe="")
