"""Iceberg's delete files, by which engines take rows out of data files without rewriting them. For sink and source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile, ManifestEntry
    from pyiceberg.table import Table as IcebergTable


def entries(table: IcebergTable, *, deletes: bool) -> Iterator[ManifestEntry]:
    """Yield the data files, or the delete files, of a table's current snapshot."""
    from pyiceberg.manifest import ManifestContent

    snapshot = table.current_snapshot()
    for manifest in snapshot.manifests(table.io) if snapshot else ():
        if (manifest.content == ManifestContent.DELETES) == deletes:
            yield from manifest.fetch_manifest_entry(table.io, discard_deleted=True)


def by_value(entry: ManifestEntry) -> bool:
    """Say whether a delete file takes out rows by their values (an equality delete)."""
    from pyiceberg.manifest import DataFileContent

    return entry.data_file.content == DataFileContent.EQUALITY_DELETES


def reduced(table: IcebergTable, files: Iterable[ManifestEntry]) -> Iterator[str]:
    """Yield the paths of the data files that delete files take rows out of, or may: values are not compared."""
    found = list(entries(table, deletes=True))
    if not found:
        return

    @cache
    def named(path: str) -> frozenset[str]:
        import pyarrow.parquet as pq

        with table.io.new_input(path).open() as file:
            return frozenset(pq.read_table(file, columns=["file_path"])["file_path"].to_pylist())

    def applies(delete: ManifestEntry, file: ManifestEntry) -> bool:
        age = (delete.sequence_number or 0) - (file.sequence_number or 0)
        if by_value(delete):
            return age > 0 and _same_partition(table, delete.data_file, file.data_file)
        if age < 0:
            return False
        if _format(delete.data_file) != "PARQUET":
            return _same_partition(table, delete.data_file, file.data_file)
        return file.data_file.file_path in named(delete.data_file.file_path)

    yield from (file.data_file.file_path for file in files if any(applies(delete, file) for delete in found))


def _same_partition(table: IcebergTable, delete: DataFile, file: DataFile) -> bool:
    """Say whether a delete file applies to the partition of a data file; one without partitions applies to all."""
    if not table.specs()[delete.spec_id].fields:
        return True
    return bool(delete.spec_id == file.spec_id and delete.partition == file.partition)


def _format(file: DataFile) -> str:
    return str(file.file_format).rpartition(".")[2].upper()
