"""The upsert of a Delta table: staged rows are merged by key, in one entry of the log that carries the marker.

    <table>/part-….parquet                              rewritten by the merge: every file that has one of the keys
    <table>/_twophase/00000018.r1.a3.7c1e09ab/…         the staged rows; of no use once they are merged

Called by `delta.py`. The library writes the files and the entry in one call, and syncs neither.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from twophase.changelog import CHANGE, DELETE
from twophase.core.errors import BadValue, ConfigError
from twophase.core.hindrances import Refused
from twophase.core.manifest import Manifest, Schema
from twophase.formats.log_errors import Trouble, delta_explained
from twophase.storage.base import Storage

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties

_BATCH = 65_536
#: The start of types that a key cannot have: what is equal is not clear, or the library cannot compare it.
_NO_KEYS = ("float", "double", "map<", "array<", "struct<", "binary")
_STAYS = f"source.`{CHANGE}` <> '{DELETE}'"


def visible(schema: Schema) -> Schema:
    """Return the columns that the table gets."""
    return tuple(column for column in schema if column.name != CHANGE)


def check_key(which: str, key: Sequence[str], schema: Schema) -> None:
    """Raise ConfigError unless the rows have the key, of types that can be compared."""
    kinds = dict(schema)
    for name in key:
        if kinds.get(name, _NO_KEYS[0]).startswith(_NO_KEYS):
            found = kinds.get(name, "no such column")
            msg = f"{which}: key {name!r}: expected a column of texts, whole numbers, decimals or times, found {found}"
            raise ConfigError(msg)
    if odd := next((name for name in kinds if "`" in name), None):
        msg = f"{which}: column {odd!r}: an upsert cannot name it; rename it"
        raise ConfigError(msg)


@dataclass(frozen=True)
class MergedRows:
    """The staged rows of one attempt, to be merged by key."""

    key: Sequence[str]
    #: The full paths of the files that the manifest lists.
    files: Sequence[str]
    manifest: Manifest
    storage: Storage

    def merge(
        self,
        table: DeltaTable,
        properties: CommitProperties | None = None,
        hooks: PostCommitHookProperties | None = None,
    ) -> None:
        """Merge the rows into a table, unless they change nothing: then no entry is written."""
        import pyarrow as pa

        names = [column.name for column in visible(self.manifest.schema)]
        has_changes = len(names) < len(self.manifest.schema)
        there = {field.name: field.type for field in pa.schema(table.schema().to_arrow())}
        schema = pa.schema([(name, there.get(name, pa.string())) for name, _ in self.manifest.schema])
        values = {f"`{name}`": f"source.`{name}`" for name in names}
        merger = table.merge(
            pa.RecordBatchReader.from_batches(schema, self._batches(schema)),
            " AND ".join(f"target.`{name}` = source.`{name}`" for name in self.key),
            source_alias="source",
            target_alias="target",
            commit_properties=properties,
            post_commithook_properties=hooks,
        )
        if has_changes:
            merger = merger.when_matched_delete(f"source.`{CHANGE}` = '{DELETE}'")
        stays = _STAYS if has_changes else None
        merger.when_matched_update(values, stays).when_not_matched_insert(values, stays).execute()

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the types of the table."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        for path in self.files:
            with self.storage.open(path) as opened, pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as file:
                for batch in file.iter_batches(_BATCH, columns=schema.names):
                    columns = [batch[field.name].cast(field.type) for field in schema]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def try_out(self, which: str, table: DeltaTable) -> None:
        """Merge the rows into an empty table with the same constraints; BadValue if it refuses them.

        Spark has held the rows to them already. But the library that merges does so, too, in its own dialect of SQL,
        and after the commit point it is too late to find out.
        """
        from deltalake import DeltaTable

        prefix = "delta.constraints."
        found = table.metadata().configuration
        constraints = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
        with tempfile.TemporaryDirectory(prefix="twophase-trial-") as folder:
            try:
                with delta_explained():
                    trial = DeltaTable.create(folder, table.schema())
                    for name, condition in constraints.items():
                        trial.alter.add_constraint({name: condition})
                    self.merge(trial)
            except (Trouble, Refused) as error:
                msg = f"{which}: the table would refuse what is staged: {error}; correct it, or alter the table"
                raise BadValue(msg) from error


def merged_files(table: DeltaTable, storage: Storage, path: str, entries: Sequence[str], app: str) -> list[str]:
    """Return the files that our merges wrote: those of these entries of the log, or all if none of them is ours."""
    found: list[str] = []
    ours = False
    for entry in entries:
        for line in storage.read(entry).splitlines():
            action: dict[str, Any] = json.loads(line) if line.strip() else {}
            ours = ours or str(action.get("txn", {}).get("appId", "")).startswith(app)
            found += [f"{path}/{unquote(action[kind]['path'])}" for kind in ("add", "cdc") if kind in action]
    if ours:
        return found
    with delta_explained():
        return [uri.removeprefix("file://") for uri in table.file_uris()]
