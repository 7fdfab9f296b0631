"""The sink `Iceberg`: a promotion is one commit to the table's catalog, which adds the staged files and the marker.

    <path>/metadata/…                                   the table's own metadata, if we created the table
    <path>.twophase/00000018.r1.a3.7c1e09ab/…           see `base.py`; in no snapshot until it is promoted

The marker is a property of the table, `twophase.<pipeline>.<folder>`. The commit that adds the snapshot sets it, and it
stays when snapshots expire. The files lie beside the table's folder, where no clean-up looks for orphans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Json
from twophase.core.errors import ConfigError
from twophase.core.hindrances import Refused
from twophase.core.manifest import Column, Manifest, Schema, StagedFile
from twophase.formats import iceberg_catalogs, iceberg_deletes, iceberg_types, spark_types, table_rules
from twophase.formats.log_errors import Conflict, Trouble, iceberg_explained, iceberg_line
from twophase.formats.table_rules import Rule
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.log_tables.commits import Change, LogTable
from twophase.storage.base import Storage

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile, ManifestEntry
    from pyiceberg.table import Table as IcebergTable
    from pyiceberg.table import Transaction
    from pyiceberg.table.metadata import TableMetadata

#: The name of the property that is a marker.
_MARKER = re.compile(r"twophase\.([a-z][a-z0-9_]*)\..+")
#: Where a snapshot says which revision it promoted.
_NOTE = "twophase"
#: The property that says how many snapshots a promotion leaves in the table's metadata; 0 or none: all of them.
_MOST = "history.twophase.max-snapshots"
#: One promotion expires at most this many snapshots: a long history goes little by little.
_EXPIRED_AT_ONCE = 100
#: Properties of a table that we create: without them each commit would cost more than the one before.
_PROPERTIES = {
    _MOST: "200",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    "write.metadata.delete-after-commit.enabled": "true",
}
#: Set on a loaded handle only: the library would retry a stale commit behind others, and a marker could land twice.
_NO_RETRIES = {"commit.retry.num-retries": "0"}
_MERGE = "commit.manifest-merge.enabled"
_MAPPING = "schema.name-mapping.default"
#: The format versions that we accept: from version 3 on rows have ids.
_VERSIONS = ("1", "2")


class Iceberg(LogTableSink):
    """An Iceberg table in any catalog, its files on a shared disk or in S3; the first promotion makes it if needed."""

    identity = ("partition_by", "mode")
    fixed_while_pending = ("path", "table", "catalog")

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        table: str,
        *,
        path: str,
        catalog: str | Mapping[str, str],
        conn_id: str | None = None,
        mode: str = "append",
        partition_by: Iterable[str] = (),
        options: Json | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Declare a table by its name, the folder of its files, and its catalog.

        The catalog is a connection's id, or pyiceberg's own properties without secrets, such as
        `{"type": "sql", "uri": "sqlite:///lake/catalog.db"}`, with its `name` if that is not `default`. `options` go to
        Spark's Parquet writer, `properties` to a table that we create. A path `s3://bucket/…` is reached by the Airflow
        connection `conn_id`. With `mode="retract"` its rows are a changelog: `_change` says +I, -U, +U or -D.
        """
        self.table = table
        self.catalog = iceberg_catalogs.declared(self._who, table, catalog)
        self.mode = mode
        super().__init__(path, conn_id, partition_by, options, properties)
        self._check_names()

    def _check_names(self) -> None:
        if set("#?%") & set(self.location()):
            msg = f"{self._who}: path {self.location()!r}: it cannot have #, ? or % in it"
            raise ConfigError(msg)
        if (version := self.properties.get("format-version", "2")) not in _VERSIONS:
            msg = f"{self._who}: {_newer(version)}"
            raise ConfigError(msg)
        if why := _no_number(self.properties):
            msg = f"{self._who}: {why}"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal sink."""
        return {"table": self.table, "catalog": self.catalog, **super().config()}

    @property
    def _who(self) -> str:
        return f"sinks.Iceberg {self.table!r}"

    @property
    def _home(self) -> str:
        return f"{self.location()}.twophase"

    @property
    def _in_folders(self) -> list[str]:
        return []

    def folders(self) -> tuple[str, ...]:
        """Return the table's folder, and the one beside it."""
        return (self.location(), self._home)

    def app(self, pipeline: str, handle: Json) -> str:
        """Return the property that is the marker; it names the folder, since two writes into one table have two."""
        return f"twophase.{pipeline}.{handle['home'].rpartition('/')[2].removesuffix('.twophase')}"

    def widens(self, before: str, after: str) -> bool:
        """Say whether Iceberg promotes one type to the other; partition columns are checked before the vote."""
        return iceberg_types.promotes(before, after)

    # --- the catalog -------------------------------------------------------------------------------------------------

    def prepare(self, slot: str | None = None) -> None:
        """Check that pyiceberg is installed, that the catalog answers, and what `base.py` checks."""
        self._expect("pyiceberg", "iceberg")
        super().prepare(slot)

    @cached_property
    def client(self) -> Catalog:
        """Return the catalog's client; made when first used."""
        return iceberg_catalogs.client(self._who, self.catalog, self.storage)

    def _handle(self) -> dict[str, Any]:
        return {"table": self.table, "home": self._home}

    def open(self, handle: Json) -> LogTable | None:
        """Load the table of a handle as it is now."""
        from pyiceberg.exceptions import NoSuchTableError

        home = handle["home"]
        if not self.storage.reachable(home):
            msg = f"folder {home} is not there; is it mounted?"
            raise Trouble(msg)
        try:
            with iceberg_explained():
                loaded = self.client.load_table(handle["table"])
        except NoSuchTableError:
            return None
        loaded.metadata.properties.update(_NO_RETRIES)
        return IcebergSnapshot(loaded, home, self.partition_by, self.storage)

    def create(self, handle: Json, schema: Schema) -> None:
        """Create the table, empty; of several who try at once one succeeds, the others get Conflict."""
        from pyiceberg.exceptions import TableAlreadyExistsError

        with iceberg_explained():
            self.client.create_namespace_if_not_exists(self.table.rpartition(".")[0])
            made = iceberg_types.schema_of(schema)
            try:
                self.client.create_table(
                    handle["table"],
                    made,
                    location=self.storage.url(handle["home"].removesuffix(".twophase")),
                    partition_spec=iceberg_types.spec_of(made, self.partition_by),
                    properties={**_PROPERTIES, **self.properties},
                )
            except TableAlreadyExistsError as error:
                raise Conflict(str(error)) from error

    # --- stage -------------------------------------------------------------------------------------------------------

    def _kind(self, kind: spark_types.SparkType) -> object:
        return iceberg_types.type_of(kind, count())


class IcebergSnapshot(LogTable):
    """An Iceberg table at one version of its metadata."""

    def __init__(self, table: IcebergTable, home: str, partition_by: list[str], storage: Storage) -> None:
        """Wrap a loaded table; `partition_by` is what the sink declares."""
        self.table = table
        self.prefix = f"{storage.url(home)}/"
        self.storage = storage
        self.partition_by = partition_by

    @property
    def version(self) -> object:
        """Return the path of the table's metadata file: each commit writes a new one."""
        return self.table.metadata_location

    def marker(self, app: str) -> int | None:
        """Return the number at the start of the table's property; the rest of it names the revision."""
        value = self.table.properties.get(app)
        return None if value is None else int(value.partition(" ")[0])

    def writers(self) -> frozenset[str]:
        """Return the pipelines that have markers: reached by two paths, one table may have two owner files."""
        return frozenset(match[1] for name in self.table.properties if (match := _MARKER.fullmatch(name)))

    def schema(self) -> Schema:
        """Return the table's columns, with Spark's types."""
        return tuple(Column(field.name, iceberg_types.simple(field.field_type)) for field in self.table.schema().fields)

    def takes(self, file: StagedFile) -> bool:
        """Leave out files without rows: they have no partition value."""
        return file.rows > 0

    @cached_property
    def _files(self) -> dict[str, ManifestEntry]:
        """Return the entries of our files in the current snapshot, by path."""
        found = {}
        with iceberg_explained():
            for entry in iceberg_deletes.entries(self.table, deletes=False):
                if entry.data_file.file_path.startswith(self.prefix):
                    found[entry.data_file.file_path.removeprefix(self.prefix)] = entry
        return found

    def reduced(self, manifest: Manifest) -> list[str]:
        """Return the files of a manifest that delete files take rows out of."""
        there = {path: self._files[path] for path in self._paths(manifest) if path in self._files}
        with iceberg_explained():
            found = set(iceberg_deletes.reduced(self.table, there.values()))
        names = [path for path, entry in there.items() if entry.data_file.file_path in found]
        return [path.removeprefix(f"{manifest.folder}/") for path in names]

    def standing(self) -> Mapping[str, frozenset[str]]:
        """Return our attempts in the current snapshot."""
        return self._attempts

    @cached_property
    def _attempts(self) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for path in self._files:
            name, _, file = path.partition("/")
            found.setdefault(name, set()).add(file)
        return {name: frozenset(files) for name, files in found.items()}

    def notes(self) -> Iterator[str]:
        """Yield what the marker and the snapshots say of our commits; snapshots expire, the marker does not."""
        yield from (
            value.partition(" ")[2] for name, value in self.table.properties.items() if name.startswith("twophase.")
        )
        for snapshot in reversed(self.table.snapshots()):
            if snapshot.summary and (note := snapshot.summary.get(_NOTE)):
                yield str(note)

    def objection(self, schema: Schema | None = None) -> str | None:
        """Say which format version, partition or type of the table we cannot honour; None if there is none."""
        metadata = self.table.metadata
        if str(metadata.format_version) not in _VERSIONS:
            return _newer(str(metadata.format_version))
        if why := _no_number(metadata.properties):
            return why
        fields = {field.field_id: field for field in self.table.schema().fields}
        found = []
        for part in self.table.spec().fields:
            name = fields[part.source_id].name if part.source_id in fields else "a nested column"
            if str(part.transform) != "identity":
                return f"partition {part.transform} of {name} cannot be honoured here; expected a column as it is"
            found.append(name)
        if found != self.partition_by:
            return f"partition columns: expected {self.partition_by or 'none'}, found {found or 'none'} in the table"
        return self.misfit(schema or ())

    def rules(self) -> Sequence[Rule]:
        """Return NOT NULL for the required fields."""
        return list(
            table_rules.not_null(iceberg_types.parts_of(self.table.schema().as_struct()), iceberg_types.parts_of)
        )

    def widens(self, name: str, before: str, after: str) -> bool:
        """Say whether Iceberg promotes one type to the other; a partition column keeps its type."""
        return name not in self.partition_by and iceberg_types.promotes(before, after)

    def widen(self, schema: Schema) -> bool:
        """Add the columns that the table lacks, and widen types: a commit of its own, which adds no rows."""
        there = dict(self.schema())
        new = [column for column in schema if column.name not in there]
        wider = [column for column in schema if self.widens(column.name, there.get(column.name, ""), column.type)]
        if new or wider:
            with iceberg_explained(), self.table.update_schema() as update:
                for column in new:
                    update.add_column(column.name, iceberg_types.type_of(spark_types.parse(column.type), count(1)))
                for column in wider:
                    update.update_column(column.name, iceberg_types.type_of(spark_types.parse(column.type), count(1)))
        return bool(new or wider)

    def commit(self, change: Change) -> None:
        """Add one snapshot and set the marker; the catalog refuses unless the table is still at this handle's snapshot.

        An output without rows adds a snapshot, too: a property alone would be set whatever others did meanwhile.
        """
        from pyiceberg.table.update.snapshot import ExpireSnapshots

        with iceberg_explained():
            metadata = self.table.metadata
            transaction = _transaction(self.table)
            marked = {change.app: f"{change.seq} {change.note}"}
            if metadata.name_mapping() is None:  # Spark's files have no ids of fields
                marked[_MAPPING] = metadata.schema().name_mapping.model_dump_json()
            transaction.set_properties(marked)
            update = transaction.update_snapshot(snapshot_properties={_NOTE: change.note})
            merges = self.table.properties.get(_MERGE, "false").lower() == "true"
            append = update.merge_append if merges else update.fast_append
            with update.overwrite() if change.remove else append() as producer:
                for path in self._paths(change.remove) if change.remove else ():
                    producer.delete_data_file(self._files[path].data_file)
                for path in self._paths(change.add):
                    producer.append_data_file(self._described(path))
            if too_many := self._too_many():
                ExpireSnapshots(transaction).by_ids(too_many).commit()
            try:
                transaction.commit_transaction()
            except ValueError as error:  # others expired one of the snapshots meanwhile, or the reply makes no sense
                raise Conflict(iceberg_line(error)[:200]) from error
        self.__dict__.pop("_attempts", None)
        self.__dict__.pop("_files", None)

    def _too_many(self) -> list[int]:
        """Return the snapshots to expire so that the next one fits the limit; none if there are branches or tags."""
        from pyiceberg.table.refs import MAIN_BRANCH

        metadata = self.table.metadata
        most = int(metadata.properties.get(_MOST, 0))
        there = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
        if not most or len(there) < most or metadata.refs.keys() - {MAIN_BRANCH}:
            return []
        line = []
        found = metadata.current_snapshot()
        while found is not None:
            line.append(found.snapshot_id)
            found = there.get(found.parent_snapshot_id or 0)
        return line[max(most - 1, 1) :][-_EXPIRED_AT_ONCE:]  # the library never lets go of the current one

    def _paths(self, manifest: Manifest) -> list[str]:
        return [f"{manifest.folder}/{file.path}" for file in manifest.files if self.takes(file)]

    @cached_property
    def _optional(self) -> TableMetadata:
        """Return the metadata with no field required: the library compares it with files whose columns are optional."""
        metadata = self.table.metadata
        return metadata.model_copy(update={"schemas": [iceberg_types.optional(metadata.schema())]})

    def _described(self, path: str) -> DataFile:
        from pyiceberg.io.pyarrow import parquet_file_to_data_file

        try:
            return parquet_file_to_data_file(self.table.io, self._optional, f"{self.prefix}{path}")
        except ValueError as error:  # two values of a partition column in one file, or a type that does not fit
            raise Refused(str(error).partition("\n")[0]) from error

    def make_durable(self) -> None:
        """Fsync the current metadata file, its manifest list and its manifests: the library does not."""
        snapshot = self.table.current_snapshot()
        paths = [self.table.metadata_location]
        with iceberg_explained():
            if snapshot is not None:
                paths += [snapshot.manifest_list]
                paths += [manifest.manifest_path for manifest in snapshot.manifests(self.table.io)]
            self.storage.sync([path.removeprefix("file://") for path in paths if path.startswith(("file://", "/"))])


def _transaction(table: IcebergTable) -> Transaction:
    """Open a transaction that shows the metadata as it was before, and that removes no file when it fails.

    The library's own transaction applies its updates to a deep copy of the metadata, with every snapshot, each of the
    17 times that a commit looks at it. Our snapshot and our property do not build on each other, so nobody needs that.

    The library's own also removes the files that it wrote when it hears of a conflict. A commit that was sent twice,
    because the first reply was lost, conflicts with itself: that would remove files that the table now refers to. An
    orphan is better.
    """
    from pyiceberg.table import Transaction

    class Careful(Transaction):
        @property
        def table_metadata(self) -> TableMetadata:
            return self._table.metadata

        def _register_snapshot_producer(self, producer: object) -> None:
            """Register nothing, so that nothing is removed."""

    return Careful(table)


def _newer(version: str) -> str:
    return f"format-version {version} cannot be honoured here; expected {' or '.join(_VERSIONS)}"


def _no_number(properties: Mapping[str, str]) -> str | None:
    """Say that the table's limit of snapshots is no number; None if it is one, or is not set."""
    found = properties.get(_MOST, "0")
    return None if found.isascii() and found.isdigit() else f"property {_MOST}: expected a number, found {found!r}"
