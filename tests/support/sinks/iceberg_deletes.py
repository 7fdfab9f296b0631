"""Delete files as engines write them that take rows out of an Iceberg table without rewriting its files."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

if TYPE_CHECKING:
    from pyiceberg.table import Table

PATH, POSITION = 2147483546, 2147483545


class Deletes(ManifestWriterV2):
    """Writes a manifest of delete files."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class RowDelta(_FastAppendFiles):
    """Adds a snapshot with one more manifest of delete files."""

    file: DataFile

    def _manifests(self) -> list[ManifestFile]:
        spec = self.spec(self.file.spec_id)
        output = self.new_manifest_output()
        with Deletes(spec, self.schema(), output, self._snapshot_id, self._compression) as writer:
            writer.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=self.file))
        return [writer.to_manifest_file(), *self._existing_manifests()]


def delete_positions(table: Table, positions: Mapping[str, Sequence[int]], partition: Record | None = None) -> str:
    """Take rows out by file and position; return the delete file."""
    schema = pa.schema([_field("file_path", pa.string(), PATH), _field("pos", pa.int64(), POSITION)])
    rows = [{"file_path": path, "pos": at} for path, found in positions.items() for at in sorted(found)]
    return _commit(table, pa.Table.from_pylist(rows, schema), DataFileContent.POSITION_DELETES, partition)


def delete_values(table: Table, column: str, values: Sequence[Any], partition: Record | None = None) -> str:
    """Take rows out by their values; return the delete file."""
    number = table.schema().find_field(column).field_id
    kind = table.schema().as_arrow().field(column).type
    rows = pa.table([pa.array(values, kind)], schema=pa.schema([_field(column, kind, number)]))
    return _commit(table, rows, DataFileContent.EQUALITY_DELETES, partition, equality_ids=[number])


def _field(name: str, kind: pa.DataType, number: int) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(number)})


def _commit(table: Table, rows: pa.Table, content: DataFileContent, partition: Record | None, **more: Any) -> str:
    path = f"{table.location()}/data/{uuid.uuid4().hex}-deletes.parquet"
    output = table.io.new_output(path)
    with output.create() as stream:
        pq.write_table(rows, stream)
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition or Record(),
        record_count=rows.num_rows,
        file_size_in_bytes=len(output),
        **more,
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as transaction:
        update = RowDelta(Operation.OVERWRITE, transaction, table.io)
        update.file = file
        update.commit()
    return path
