"""What a table with a log holds at one version: its files, as plain Parquet, and the columns that they do not have.

Delta's log and Iceberg's metadata are read here, at begin; Spark is told the list and needs no runtime of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from twophase.core.checkpoint import InputFile, Json
from twophase.core.errors import ConfigError, InputMissing, ManifestMismatch
from twophase.core.manifest import Column, Schema
from twophase.sinks import adopting, types
from twophase.sinks.columns import PARTITION_TYPES
from twophase.sinks.relations import partition_values
from twophase.sources.listing import check_name, identity

if TYPE_CHECKING:
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.table import FileScanTask
    from pyiceberg.table import Table as IcebergTable

#: What a Delta table may ask of its readers, because it asks nothing of those who read whole files.
_FEATURES = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"})
_EPOCH = date(1970, 1, 1)

Values = list[str | None]


class Version(NamedTuple):
    """A table at one version."""

    version: str
    schema: Schema
    #: The columns that the log knows, whatever the files have.
    partition_by: list[str]
    #: What each file is (its path below the table's root), with its partition's values.
    files: list[tuple[InputFile, Values]]

    def fixed(self) -> Json:
        """Return what the record keeps besides the files: values only of those whose folders do not say them."""
        given = {file.path: values for file, values in self.files if _in_path(file.path, self.partition_by) != values}
        return {
            "version": self.version,
            "schema": [list(column) for column in self.schema],
            "partition_by": self.partition_by,
            "values": given,
        }


def values_of(fixed: Json, path: str) -> Values:
    """Return the partition values of a file of a fixed version."""
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
    """Return the columns, if Spark reads them from Parquet as they are."""
    for name, kind in schema:
        try:
            types.parse(kind)
        except ValueError as error:
            raise _refuse(who, f"column {name!r} has the {error}") from error
    kinds = dict(schema)
    for name in partition_by:
        if kinds.get(name) not in PARTITION_TYPES:
            raise _refuse(who, f"partition column {name!r} is a {kinds.get(name)}")
    return schema


def _looked_at(who: str, root: str, path: str, version: str) -> InputFile:
    """Look at a file of a version; a vacuum, or an expiry, may have removed it."""
    check_name(root, path, who)
    there = identity(f"{root}/{path}")
    if there is None:
        msg = f"{who}: version {version}: expected file {root}/{path}, found nothing; was it vacuumed or expired?"
        raise InputMissing(msg)
    return InputFile(path, *there)


# --- Delta -----------------------------------------------------------------------------------------------------------


def delta(folder: Path, who: str) -> Version | None:
    """Read the newest version of a Delta table; None: there is no table."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        table = DeltaTable(str(folder))
    except TableNotFoundError:
        return None
    metadata, protocol = table.metadata(), table.protocol()
    if unknown := sorted({*(protocol.reader_features or ())} - _FEATURES):
        raise _refuse(who, f"the table has the feature {unknown[0]}")
    if (mode := metadata.configuration.get("delta.columnMapping.mode", "none")) != "none":
        raise _refuse(who, f"the table has delta.columnMapping.mode={mode}")
    fields = json.loads(table.schema().to_json())["fields"]
    schema = tuple(Column(field["name"], adopting.simple(field["type"])) for field in fields)
    partition_by = list(metadata.partition_columns)
    version = str(table.version())
    files = [
        (_looked_at(who, str(folder), path, version), values) for path, values in _added(table, folder, partition_by)
    ]
    return Version(version, _checked(who, schema, partition_by), partition_by, files)


def _added(table: Any, folder: Path, partition_by: Sequence[str]) -> Iterator[tuple[str, Values]]:  # noqa: ANN401 - a DeltaTable
    """Yield the files of a table with their partition's values, as texts."""
    import pyarrow as pa

    for action in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        encoded = action["path"]
        path = unquote(encoded)  # the log has URLs, but for some writers'
        found = (action[f"partition.{name}"] for name in partition_by)
        yield path if (folder / path).exists() else encoded, [_text(value) for value in found]


def _text(value: object) -> str | None:
    """Write a partition's value as Delta does; an empty text is none."""
    if value is None or value == "":
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- Iceberg ---------------------------------------------------------------------------------------------------------


def iceberg(table: IcebergTable, who: str) -> Version:
    """Read the current snapshot of an Iceberg table."""
    from twophase.sinks.iceberg_types import simple

    if table.metadata.format_version > 2:  # noqa: PLR2004 - the newest whose files are all there is
        raise _refuse(who, f"the table has format-version {table.metadata.format_version}")
    schema = table.schema()
    _check_history(table, schema, who)
    snapshot = table.current_snapshot()
    version = str(snapshot.snapshot_id) if snapshot else "none"
    tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files()) if snapshot else []
    columns = tuple(Column(field.name, simple(field.field_type)) for field in schema.fields)
    specs = {task.file.spec_id for task in tasks}
    if len(specs) > 1:
        raise _refuse(who, "its files are of several partition specs")
    parts = _identities(table, specs.pop() if specs else table.spec().spec_id)
    partition_by = [name for name, _ in parts]
    kinds = dict(columns)
    files = [
        (_planned(task, version, who), [_iceberg_text(task.file.partition[at], kinds[name]) for name, at in parts])
        for task in tasks
    ]
    return Version(version, _checked(who, columns, partition_by), partition_by, files)


def _planned(task: FileScanTask, version: str, who: str) -> InputFile:
    """Look at a file of a snapshot, if its rows are just those in it."""
    path = str(task.file.file_path)
    if task.delete_files:
        raise _refuse(who, f"file {path} has rows that delete files take out")
    if str(task.file.file_format).rpartition(".")[2].upper() != "PARQUET":
        raise _refuse(who, f"file {path} is no Parquet")
    local = path.removeprefix("file://")
    if not local.startswith("/"):
        raise _refuse(who, f"file {path} is not on a disk")
    return _looked_at(who, "", local.lstrip("/"), version)


def _iceberg_text(value: Any, kind: str) -> str | None:  # noqa: ANN401 - a partition's
    """Write a partition's value; Iceberg has dates as days since 1970."""
    if value is not None and kind == "date" and not isinstance(value, date):
        return (_EPOCH + timedelta(days=value)).isoformat()
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _identities(table: IcebergTable, spec_id: int) -> list[tuple[str, int]]:
    """Return the columns that files are partitioned by as they are, and where their values are."""
    fields = {field.field_id: field.name for field in table.schema().fields}
    parts = enumerate(table.specs()[spec_id].fields)
    return [
        (fields[part.source_id], at)
        for at, part in parts
        if str(part.transform) == "identity" and part.source_id in fields
    ]


def _check_history(table: IcebergTable, schema: IcebergSchema, who: str) -> None:
    """Refuse a table whose older files have a column under another name or type: Parquet knows columns by name."""
    now = {number: (schema.find_column_name(number), schema.find_type(number)) for number in schema.field_ids}
    names = {name: number for number, (name, _) in now.items()}
    for older in table.schemas().values():
        for number in older.field_ids:
            name, kind = older.find_column_name(number), older.find_type(number)
            if number in now and (name != now[number][0] or (kind.is_primitive and kind != now[number][1])):
                raise _refuse(who, f"column {now[number][0]!r} was {name} {kind} before")
            if number not in now and name in names:
                raise _refuse(who, f"column {name!r} was dropped and added again")
