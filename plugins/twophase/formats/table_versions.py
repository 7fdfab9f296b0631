"""Reads which files a log table has at one version, with their partition values. The interval source calls it at begin.

Delta's log and Iceberg's metadata are read here. Spark gets a list of plain Parquet files, and needs no runtime of
Delta or Iceberg.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from twophase.core.checkpoint import Input, InputFile, Json
from twophase.core.errors import ConfigError, InputMissing, ManifestMismatch
from twophase.core.manifest import Column, Schema
from twophase.formats import parquet_schema, spark_types
from twophase.formats.log_columns import PARTITION_TYPES
from twophase.storage.base import DISK, Storage
from twophase.storage.listing import check_name
from twophase.storage.partition_folders import partition_values

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.table import FileScanTask
    from pyiceberg.table import Table as IcebergTable

#: The reader features that we accept: they ask nothing of a reader of whole files.
_FEATURES = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
_EPOCH = date(1970, 1, 1)

#: The URL schemes that engines use for the same place in S3.
_S3 = frozenset({"s3", "s3a", "s3n"})

Values = list[str | None]
Names = tuple[str, ...]


class Version(NamedTuple):
    """A table at one version."""

    version: str
    schema: Schema
    #: The columns whose values come from the log, whatever the files have.
    partition_by: list[str]
    #: The possible names of each file below the table's root, with its partition values.
    files: list[tuple[Names, Values]]

    def fixed(self, who: str, root: str, storage: Storage) -> Input:
        """Look at the files, and return the input of a revision; InputMissing if a vacuum or an expiry removed one.

        The record keeps partition values only for files whose folders do not say them.
        """
        found: list[InputFile] = []
        given: dict[str, Values] = {}
        there = _there(root, storage, [names for names, _ in self.files])
        for (names, values), (path, identity) in zip(self.files, there, strict=True):
            if storage is DISK:
                check_name(root, path, who)
            if identity is None:
                expected = f"version {self.version}: expected file {root}/{names[0]}"
                msg = f"{who}: {expected}, found nothing; was it vacuumed or expired?"
                raise InputMissing(msg)
            found.append(InputFile(path, *identity))
            if _in_path(path, self.partition_by) != values:
                given[path] = values
        table = {
            "version": self.version,
            "schema": [list(column) for column in self.schema],
            "partition_by": self.partition_by,
            "values": given,
        }
        return Input(files=tuple(sorted(found)), table=table)


def _there(root: str, storage: Storage, files: Sequence[Names]) -> list[tuple[str, tuple[int, int] | None]]:
    """Return for each file the name under which it exists, with its size and modification time."""
    first = storage.identities([f"{root}/{names[0]}" for names in files])
    found = [(names[0], one) for names, one in zip(files, first, strict=True)]
    others = [at for at, (_, one) in enumerate(found) if one is None and len(files[at]) > 1]
    again = storage.identities([f"{root}/{files[at][1]}" for at in others])
    for at, one in zip(others, again, strict=True):
        if one is not None:
            found[at] = (files[at][1], one)
    return found


def values_of(fixed: Json, path: str) -> Values:
    """Return the partition values of a file of a recorded version."""
    found: Values | None = fixed["values"].get(path)
    return partition_values(path, fixed["partition_by"]) if found is None else found


def _in_path(path: str, partition_by: Sequence[str]) -> Values | None:
    try:
        return partition_values(path, partition_by)
    except ManifestMismatch:
        return None


def _refuse(who: str, what: str) -> ConfigError:
    return ConfigError(f"{who}: {what}, which cannot be read here as plain files; read another table, or rewrite it")


def _checked(who: str, schema: Schema, partition_by: Sequence[str]) -> Schema:
    """Return the columns; ConfigError if Spark cannot read one of them from Parquet as it is."""
    for name, kind in schema:
        try:
            spark_types.parse(kind)
        except ValueError as error:
            raise _refuse(who, f"column {name!r} has the {error}") from error
    kinds = dict(schema)
    for name in partition_by:
        if kinds.get(name) not in PARTITION_TYPES:
            raise _refuse(who, f"partition column {name!r} is a {kinds.get(name)}")
    return schema


# --- Delta -----------------------------------------------------------------------------------------------------------


def delta(root: str, storage: Storage, who: str) -> Version | None:
    """Read the newest version of a Delta table; None if there is no table; Trouble if nobody can tell."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    from twophase.formats.log_errors import delta_explained

    try:
        with delta_explained():
            return _newest(DeltaTable(root, storage_options=storage.for_delta()), who)
    except TableNotFoundError:
        return None


def _newest(table: DeltaTable, who: str) -> Version:
    metadata, protocol = table.metadata(), table.protocol()
    if unknown := sorted({*(protocol.reader_features or ())} - _FEATURES):
        raise _refuse(who, f"the table has the feature {unknown[0]}")
    if (mode := metadata.configuration.get("delta.columnMapping.mode", "none")) != "none":
        raise _refuse(who, f"the table has delta.columnMapping.mode={mode}")
    fields = json.loads(table.schema().to_json())["fields"]
    schema = tuple(Column(field["name"], parquet_schema.simple(field["type"])) for field in fields)
    partition_by = list(metadata.partition_columns)
    version = str(table.version())
    files = list(_added(table, partition_by))
    return Version(version, _checked(who, schema, partition_by), partition_by, files)


def _added(table: DeltaTable, partition_by: Sequence[str]) -> Iterator[tuple[Names, Values]]:
    """Yield the files of a table with their partition values, as texts."""
    import pyarrow as pa

    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        encoded = action["path"]
        path = unquote(encoded)  # paths in the log are URL-encoded, but some writers do not encode them
        found = (action[f"partition.{name}"] for name in partition_by)
        yield (path,) if path == encoded else (path, encoded), [_text(value) for value in found]


def _text(value: object) -> str | None:
    """Return a partition value as Delta writes it; an empty text counts as null."""
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- Iceberg ---------------------------------------------------------------------------------------------------------


def iceberg(catalog: Callable[[], Catalog], name: str, storage: Storage, who: str) -> Version | None:
    """Read the current snapshot of an Iceberg table; None if there is no table; Trouble if nobody can tell."""
    from pyiceberg.exceptions import NoSuchTableError

    from twophase.formats.log_errors import iceberg_explained

    try:
        with iceberg_explained():
            return _current(catalog().load_table(name), storage, who)
    except NoSuchTableError:
        return None


def _current(table: IcebergTable, storage: Storage, who: str) -> Version:
    from twophase.formats.iceberg_deletes import by_value, entries
    from twophase.formats.iceberg_types import simple

    if table.metadata.format_version > 2:  # noqa: PLR2004 - from version 3 on, files alone do not give the rows
        raise _refuse(who, f"the table has format-version {table.metadata.format_version}")
    schema = table.schema()
    _check_history(table, schema, who)
    snapshot = table.current_snapshot()
    version = str(snapshot.snapshot_id) if snapshot else "none"
    for delete in filter(by_value, entries(table, deletes=True)):
        raise _refuse(who, f"delete file {delete.data_file.file_path} takes out rows by their values")
    tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files()) if snapshot else []
    columns = tuple(Column(field.name, simple(field.field_type)) for field in schema.fields)
    specs = {task.file.spec_id for task in tasks}
    if len(specs) > 1:
        raise _refuse(who, "its files are of several partition specs")
    parts = _identities(table, specs.pop() if specs else table.spec().spec_id)
    partition_by = [name for name, _ in parts]
    kinds = dict(columns)
    files: list[tuple[Names, Values]] = [
        ((_planned(task, storage, who),), [_iceberg_text(task.file.partition[at], kinds[name]) for name, at in parts])
        for task in tasks
    ]
    return Version(version, _checked(who, columns, partition_by), partition_by, files)


def _planned(task: FileScanTask, storage: Storage, who: str) -> str:
    """Return the path of a file of a snapshot; ConfigError if it is no Parquet, or has deleted rows."""
    path = str(task.file.file_path)
    for delete in task.delete_files:
        raise _refuse(who, f"file {path} has rows that delete file {delete.file_path} takes out")
    if str(task.file.file_format).rpartition(".")[2].upper() != "PARQUET":
        raise _refuse(who, f"file {path} is no Parquet")
    scheme, below = path.split("://", 1) if "://" in path else ("", path)
    if storage is DISK and scheme in {"", "file"} and below.startswith("/"):
        return below.lstrip("/")
    if storage is not DISK and scheme in _S3:
        return below
    where = "on a disk; name the connection of its store by conn_id" if storage is DISK else "in an object store"
    msg = f"{who}: file {path}: expected it {where}"
    raise ConfigError(msg)


def _iceberg_text(value: Any, kind: str) -> str | None:  # noqa: ANN401 - a partition's
    """Return a partition value as text; Iceberg has dates as days since 1970."""
    if value is not None and kind == "date" and not isinstance(value, date):
        return (_EPOCH + timedelta(days=value)).isoformat()
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _identities(table: IcebergTable, spec_id: int) -> list[tuple[str, int]]:
    """Return the columns that files are partitioned by (identity), and the position of each in the partition."""
    fields = {field.field_id: field.name for field in table.schema().fields}
    parts = enumerate(table.specs()[spec_id].fields)
    return [
        (fields[part.source_id], at)
        for at, part in parts
        if str(part.transform) == "identity" and part.source_id in fields
    ]


def _check_history(table: IcebergTable, schema: IcebergSchema, who: str) -> None:
    """Refuse a table where a column had another name or type before: plain Parquet knows columns by name."""
    now = {number: (schema.find_column_name(number), schema.find_type(number)) for number in schema.field_ids}
    names = {name: number for number, (name, _) in now.items()}
    for older in table.schemas().values():
        for number in older.field_ids:
            name, kind = older.find_column_name(number), older.find_type(number)
            if number in now and (name != now[number][0] or (kind.is_primitive and kind != now[number][1])):
                raise _refuse(who, f"column {now[number][0]!r} was {name} {kind} before")
            if number not in now and name in names:
                raise _refuse(who, f"column {name!r} was dropped and added again")
