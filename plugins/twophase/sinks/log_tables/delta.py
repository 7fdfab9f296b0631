"""The sink `Delta`: a promotion is one entry of the table's log, which names the staged files and carries the marker.

    <table>/_delta_log/00000000000000000042.json        one entry: files in, files out, and `txn`: the marker
    <table>/_twophase/00000018.r1.a3.7c1e09ab/…         see `base.py`; in no entry until it is promoted

Readers of Delta go by the log. Its vacuum leaves alone what is below a folder that starts with `_`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from twophase.changelog import CHANGE, DELETE
from twophase.core.checkpoint import Json, Output
from twophase.core.errors import ConfigError
from twophase.core.manifest import Column, Manifest, Schema, StagedFile
from twophase.formats import delta_types, parquet_schema, parquet_statistics, spark_types, table_rules
from twophase.formats.log_errors import Conflict, Trouble, delta_explained, delta_line
from twophase.formats.table_rules import Rule
from twophase.sinks import modes
from twophase.sinks.base import Attempt
from twophase.sinks.log_tables import delta_merge
from twophase.sinks.log_tables.base import LogTableSink
from twophase.sinks.log_tables.commits import Change, LogTable
from twophase.sinks.log_tables.delta_merge import MergedRows
from twophase.storage.base import THREADS, Storage
from twophase.storage.partition_folders import partition_values

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties

    from twophase.row_queries.duckdb_rows import DuckDBRows

HOME = "_twophase"
#: Where the log says which revision a commit promoted.
_NOTE = "twophase"
#: Properties of a table that we create: opening it reads the log since its last checkpoint, so these come often.
_PROPERTIES = {"delta.checkpointInterval": "10"}
#: Only every so many commits look for expired entries of the log: looking goes through all entries.
_CLEANUP_INTERVAL = 100
#: The table features that we accept: they ask nothing of a writer who only adds and removes whole files.
_FEATURES = frozenset({"appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed"}) | {
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_CONSTRAINT = "delta.constraints."
#: What an entry of the log says of a merge: pipeline, checkpoint, revision.
_MERGED = re.compile(r"(\w+)/(\d+) r(\d+) a\d+ ")


class Delta(LogTableSink):
    """A Delta table on a shared disk or in S3; the first promotion creates it unless it is there."""

    identity = ("partition_by", "mode")
    fixed_while_pending = ("path", "key")

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        path: str,
        *,
        conn_id: str | None = None,
        mode: str = "append",
        key: Iterable[str] = (),
        partition_by: Iterable[str] = (),
        options: Json | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Declare a table at a path; `options` go to Spark's Parquet writer, `properties` to a table made here.

        A path `s3://bucket/…` is reached by the Airflow connection `conn_id`. With `mode="retract"` its rows are a
        changelog: the column `_change` says +I, -U, +U or -D. With `mode="upsert"` rows are merged by `key`; if they
        have a column `_change`, -D deletes the row, and -U is left out.
        """
        self.mode = mode
        self.key = [key] if isinstance(key, str) else list(key)
        super().__init__(path, conn_id, partition_by, options, properties)
        problem = _cannot(self.properties) or _undeclarable(self.properties)
        if bool(self.key) != (mode == "upsert"):
            problem = f"mode {mode!r} with{'' if self.key else 'out'} a key; an upsert needs key=[…], and nothing else"
        if problem:
            msg = f"{self._who}: {problem}"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal sink."""
        return {**super().config(), **({"key": self.key} if self.key else {})}

    @property
    def _who(self) -> str:
        return f"sinks.Delta {self.path!r}"

    @property
    def _home(self) -> str:
        return f"{self.location()}/{HOME}"

    @property
    def _in_folders(self) -> list[str]:
        return self._staged_by

    @property
    def _staged_by(self) -> list[str]:
        return [] if self.key else self.partition_by

    @property
    def _unruled(self) -> str | None:
        return f"{CHANGE} = '{DELETE}'" if self.key else None

    @property
    def copies(self) -> bool:  # type: ignore[override]
        """Say whether staged files are dead once they are promoted: a merge writes the rows into files of its own."""
        return bool(self.key)

    def visible(self, schema: Schema) -> Schema:
        """Return the columns that the table gets: `_change` of an upsert is none of them."""
        return delta_merge.visible(schema) if self.key else schema

    def join(self, pipeline: str, name: str, *, slotted: bool = False) -> None:
        """Refuse an upsert by slots: it goes by the order of checkpoints, and what it overwrites is not kept."""
        if self.key and slotted:
            self._refuse(modes.NO_SLOTS)
        super().join(pipeline, name, slotted=slotted)

    def folders(self) -> tuple[str, ...]:
        """Return the table's folder."""
        return (self.location(),)

    def prepare(self, slot: str | None = None) -> None:
        """Check that deltalake is installed, that the folder is a Delta table or empty, and what `base.py` checks."""
        self._expect("deltalake", "delta")
        table = self.location()
        there = {name for name, _ in self.storage.entries(table)}
        strange = sorted(there - {HOME, "_delta_log"})
        if strange and "_delta_log" not in there:
            msg = (
                f"{self._who}: {table} has {strange[0]} in it and no Delta log; give it an empty folder, or convert it"
            )
            raise ConfigError(msg)
        super().prepare(slot)

    def objection(self, *, latest: bool) -> str | None:  # noqa: ARG002 - any checkpoint can be replaced, or none
        """Refuse to run a checkpoint again in an append-only table, and after an upsert: nothing can be taken out."""
        if self.key:
            return f"{self._who}: what an upsert has overwritten is not kept; sinks.Postgres keeps it"
        table = self._opened()
        if isinstance(table, DeltaLog) and table.append_only:
            return f"{self._who}: the table is append-only (delta.appendOnly)"
        return None

    def app(self, pipeline: str, handle: Json) -> str:  # noqa: ARG002 - a table has one write of one pipeline
        """Return the app id of the log's `txn` actions, which are the marker."""
        return f"twophase/{pipeline}"

    def _kind(self, kind: spark_types.SparkType) -> object:
        return delta_types.type_of(kind)

    def _handle(self) -> dict[str, Any]:
        return {"table": self.location()}

    def open(self, handle: Json) -> LogTable | None:
        """Open the table of a handle at its newest version."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        path = handle["table"]
        if not self.storage.reachable(path):
            msg = f"folder {path} is not there; is it mounted?"
            raise Trouble(msg)
        try:
            with delta_explained():
                table = DeltaTable(path, storage_options=self.storage.for_delta())
                return DeltaLog(path, table, self.partition_by, self.storage, self.key)
        except TableNotFoundError:
            return None

    # --- upsert ------------------------------------------------------------------------------------------------------

    def _check_schema(self, output: Output, schema: Schema) -> None:
        super()._check_schema(output, schema)
        if self.key:
            delta_merge.check_key(output.which, self.key, schema)

    def check(self, output: Output) -> None:
        """Check what `base.py` checks; of an upsert, also that each key is there once, and that a merge would work."""
        super().check(output)
        if not self.key:
            return
        modes.check_keys(output.which, self.key, self.staged(output))
        table = self._opened()
        if isinstance(table, DeltaLog) and table.rules() and (files := self.files(output)):
            MergedRows(self.key, files, self._manifest(output), self.storage).try_out(output.which, table.table)

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what earlier attempts staged; then let an empty entry of the log fail any merge that is under way.

        In this order: a promoter that comes by later finds no files, and one that has read them is not the next entry.
        """
        super().discard_earlier(output, voted)
        table = self._opened() if self.key else None
        if isinstance(table, DeltaLog):
            table.fence()

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List what attempts left; what was merged lies there, too, and is dead whichever revision it is of."""
        if revisions or not self.key:
            return super().left_by(revisions)
        return self._attempts(self._home, manifests=False)

    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with the table; of an upsert only the marker can tell."""
        if not self.key:
            yield from super().verify(output)
            return
        table, app = self._current(), self.app(output.key.pipeline, output.handle)
        found = table.marker(app) or 0 if table is not None else None
        if found is None or found < (output.commit_seq or 0):
            what = "the table is not there" if found is None else f"found {found}"
            yield f"{self.location()}: marker {app}: expected {output.commit_seq} or more, {what}"

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:
        """Yield the pipeline's revisions that are in the table; merged ones as far as its history goes back."""
        table = self._current() if self.key else None
        if table is None:
            yield from super().markers(pipeline)
            return
        for match in filter(None, map(_MERGED.match, table.notes())):
            if match[1] == pipeline:
                yield int(match[2]), int(match[3])

    def check_readable(self, outputs: Sequence[Output] = ()) -> None:
        """Raise ConfigError for an upsert: which rows are whose is not known any more."""
        if self.key:
            self._refuse("rows of an upsert do not say whose they are; read the table itself")
        super().check_readable(outputs)

    def committed(self, output: Output) -> DuckDBRows:
        """Return the rows of a decided revision, for comparisons."""
        if self.key:
            self._refuse("what a checkpoint of mode 'upsert' changed is not told apart once it is committed")
        return super().committed(output)

    # --- the table ---------------------------------------------------------------------------------------------------

    def create(self, handle: Json, schema: Schema) -> None:
        """Create the table, empty; of several who try at once one succeeds, the others get Conflict."""
        from deltalake import CommitProperties, DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            with delta_explained():
                DeltaTable.create(
                    handle["table"],
                    delta_types.schema_of(schema),
                    mode="error",
                    partition_by=self.partition_by,
                    configuration={**_PROPERTIES, **self.properties},
                    commit_properties=CommitProperties(max_commit_retries=0),
                    storage_options=self.storage.for_delta(),
                )
        except Trouble as error:
            if isinstance(error.__cause__, DeltaError) and self.open(handle) is not None:
                raise Conflict(str(error)) from error
            raise


class DeltaLog(LogTable):
    """A Delta table at one version."""

    def __init__(
        self, path: str, table: DeltaTable, partition_by: list[str], storage: Storage, key: Sequence[str] = ()
    ) -> None:
        """Wrap an open table; `partition_by` is what the sink declares, and `key` if rows are merged into it."""
        self.key = key
        self.path = path
        self.storage = storage
        self.table = table
        self.partition_by = partition_by

    @property
    def version(self) -> object:
        """Return the table's own id, and its version."""
        with delta_explained():
            return str(self.table.metadata().id), self.table.version()

    def marker(self, app: str) -> int | None:
        """Return the version of an app's last transaction, as of this handle's version of the table."""
        with delta_explained():
            return self.table.transaction_version(app)

    @cached_property
    def _fields(self) -> list[dict[str, Any]]:
        with delta_explained():
            found: list[dict[str, Any]] = json.loads(self.table.schema().to_json())["fields"]
        return found

    def schema(self) -> Schema:
        """Return the table's columns, with Spark's types."""
        return tuple(Column(field["name"], parquet_schema.simple(field["type"])) for field in self._fields)

    @property
    def append_only(self) -> bool:
        """Say whether files may not be taken out."""
        with delta_explained():
            return str(self.table.metadata().configuration.get("delta.appendOnly")).lower() == "true"

    def standing(self) -> Mapping[str, frozenset[str]]:
        """Return our attempts whose files are in the table, by its log."""
        return self._attempts

    @cached_property
    def _attempts(self) -> dict[str, frozenset[str]]:
        home = f"{self.path}/{HOME}/"
        found: dict[str, set[str]] = {}
        with delta_explained():
            uris = self.table.file_uris()
        for uri in uris:
            path = uri.removeprefix("file://")
            if path.startswith(home):
                name, _, file = path.removeprefix(home).partition("/")
                found.setdefault(name, set()).add(file)
        return {name: frozenset(files) for name, files in found.items()}

    def notes(self) -> Iterator[str]:
        """Yield what the log's entries say of our commits; they are kept for `delta.logRetentionDuration`."""
        with delta_explained():
            yield from (str(entry[_NOTE]) for entry in self.table.history() if _NOTE in entry)

    def objection(self, schema: Schema | None = None) -> str | None:
        """Say which feature, partition or type of the table we cannot honour; None if there is none."""
        with delta_explained():
            metadata, protocol = self.table.metadata(), self.table.protocol()
        asked = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        if problem := _cannot(metadata.configuration):
            return problem
        if unknown := sorted(asked - _FEATURES):
            return (
                f"the table has the feature {unknown[0]}, which cannot be honoured here; drop it or use another table"
            )
        if metadata.partition_columns != self.partition_by:
            expected, found = self.partition_by or "none", metadata.partition_columns or "none"
            return f"partition columns: expected {expected}, found {found} in the table"
        return self._unmakeable() or self.misfit(schema or ())

    def _unmakeable(self) -> str | None:
        """Say which column has values that cannot be made here; None if there is none."""
        if self.key and self.append_only:
            return "the table is append-only (delta.appendOnly), and an upsert changes rows; use another table"
        for field in self._fields:
            if self.key and "delta.generationExpression" in field["metadata"]:
                return f"column {field['name']!r} is generated, which an upsert cannot honour; use another table"
            if "delta.identity.start" in field["metadata"]:
                return f"column {field['name']!r} is an identity, whose values cannot be made here; use another table"
        return None

    def rules(self) -> Sequence[Rule]:
        """Return NOT NULL, lengths, invariants, generated columns and constraints."""
        with delta_explained():
            properties = self.table.metadata().configuration
        return [
            *table_rules.not_null(map(delta_types.part_of, self._fields), delta_types.parts_of),
            *(rule for field in self._fields for rule in delta_types.rules_of(field)),
            *(
                Rule(f"constraint {name.removeprefix(_CONSTRAINT)} ({condition})", condition)
                for name, condition in properties.items()
                if name.startswith(_CONSTRAINT)
            ),
        ]

    def widen(self, schema: Schema) -> bool:
        """Add the columns that the table lacks: an entry of its own, which adds no rows."""
        from deltalake import Field

        there = {name for name, _ in self.schema()}
        new = [
            Field.from_json(json.dumps(delta_types.field_of(column))) for column in schema if column.name not in there
        ]
        if new:
            with delta_explained():
                self.table.alter.add_columns(new)
        return bool(new)

    def commit(self, change: Change) -> None:
        """Write one entry of the log, on top of the marker that this handle has read.

        If other entries came meanwhile, the library retries behind them, unless one of them has our marker. It would
        retry even if one of them removed or rewrote files that ours takes out. So a commit that takes files out gets no
        retries: it has to be the very next entry.
        """
        from deltalake import CommitProperties, PostCommitHookProperties, Transaction

        # None leaves it to the table's own properties whether expired entries are removed.
        cleanup = None if (self.table.version() + 1) % _CLEANUP_INTERVAL == 0 else False
        remove = self._removals(change.remove) if change.remove else []
        entry = CommitProperties(
            app_transactions=[Transaction(change.app, change.seq)],
            custom_metadata={_NOTE: change.note},
            max_commit_retries=0 if remove or self.key else None,
        )
        hooks = PostCommitHookProperties(cleanup_expired_logs=cleanup)
        with delta_explained():
            if self.key and change.add.files:
                files = [f"{self.path}/{HOME}/{change.add.folder}/{file.path}" for file in change.add.files]
                MergedRows(self.key, files, change.add, self.storage).merge(self.table, entry, hooks)
            if not self.key or (self.marker(change.app) or 0) < change.seq:  # a merge that changes nothing writes none
                actions = [] if self.key else [*remove, *self._additions(change.add)]
                self._write(actions, entry, hooks)
        self.__dict__.pop("_attempts", None)
        self.__dict__.pop("_fields", None)

    def _write(self, actions: list[Any], entry: CommitProperties, hooks: PostCommitHookProperties | None) -> None:
        """Write one entry of the log."""
        self.table.create_write_transaction(
            actions,
            "append",
            self.table.schema(),
            self.partition_by,
            commit_properties=entry,
            post_commithook_properties=hooks,
        )
        self.table.update_incremental()

    def fence(self) -> None:
        """Write an empty entry, so that no merge which is under way on an earlier version can be the next one."""
        from deltalake import CommitProperties

        with delta_explained():
            self._write([], CommitProperties(custom_metadata={_NOTE: "restage"}), None)

    def _additions(self, manifest: Manifest) -> list[Any]:
        from deltalake.transaction import AddAction

        with ThreadPoolExecutor(THREADS) as pool:
            described = list(pool.map(lambda file: self._statistics(manifest, file), manifest.files))
        return [
            AddAction(
                f"{HOME}/{manifest.folder}/{file.path}",
                file.size,
                self._values(file.path),
                file.mtime_ns // 1_000_000,
                True,  # noqa: FBT003 - data_change
                json.dumps({"numRecords": file.rows, **found}),
            )
            for file, found in zip(manifest.files, described, strict=True)
        ]

    def _statistics(self, manifest: Manifest, file: StagedFile) -> dict[str, Any]:
        """Read the column statistics in the footer of a staged file."""
        from pyarrow import ArrowException, parquet

        try:
            with self.storage.open(f"{self.path}/{HOME}/{manifest.folder}/{file.path}") as opened:
                return parquet_statistics.of(parquet.read_metadata(opened), manifest.schema)
        except ArrowException as error:
            raise Trouble(delta_line(error)) from error

    def _removals(self, manifest: Manifest) -> list[Any]:
        from deltalake.transaction import RemoveAction

        now = int(time.time() * 1000)
        return [
            RemoveAction(f"{HOME}/{manifest.folder}/{file.path}", True, now, file.size, self._values(file.path))  # noqa: FBT003 - data_change
            for file in manifest.files
        ]

    def _values(self, path: str) -> dict[str, str | None]:
        return dict(zip(self.partition_by, partition_values(path, self.partition_by), strict=True))

    def make_durable(self) -> None:
        """Fsync the log from its last checkpoint on: the library does not, and other writers may not either."""
        found = {name: path for name, path in self.storage.entries(f"{self.path}/_delta_log") if name[0] != "."}
        last = max((name[:20] for name in found if ".checkpoint" in name), default="")
        log = [path for name, path in found.items() if name[:20] >= last]  # `_last_checkpoint`, too
        if self.key:  # first what the entries name
            entries = [path for path in log if path.endswith(".json")]
            self.storage.sync(delta_merge.merged_files(self.table, self.storage, self.path, entries, "twophase/"))
        self.storage.sync([*log, f"{self.path}/_delta_log"])


def _cannot(properties: Mapping[str, str]) -> str | None:
    """Say which of a table's properties we cannot honour; None if there is none."""
    refused = {
        "delta.enableDeletionVectors": "false",
        "delta.columnMapping.mode": "none",
        "delta.enableRowTracking": "false",
    }
    for name, value in properties.items():
        # A marker that expires would let a late promoter in.
        expires = name == "delta.setTransactionRetentionDuration"
        if expires or str(value).lower() != refused.get(name, str(value).lower()):
            return f"property {name}={value} cannot be honoured here; drop it or use another table"
    return None


def _undeclarable(properties: Mapping[str, str]) -> str | None:
    """Say which property cannot be declared: a constraint is added to a table that is there."""
    found = next((name for name in properties if name.startswith(_CONSTRAINT)), None)
    return found and f"property {found}: add the constraint to the table, once it is there"
