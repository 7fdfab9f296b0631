"""The base class of the sinks `Delta` and `Iceberg`: stages Parquet files, which the table takes in where they lie.

    <home>/00000018.r1.a3.7c1e09ab/dt=2026-11-15/part-….parquet     staged, then in the table, until it is replaced
    <home>/manifests/00000018.r1.a3.json                             the manifest, durable before the vote

Nothing is moved or copied. Readers see a file only once a commit of the table names it. Files that a replacement took
out stay readable by the record until their retention is over. The table's own clean-up never looks into this folder;
ours goes by the record (R11). `sinks/base.py` says who calls the methods, `commits.py` promotes.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from twophase.core.checkpoint import Json, Key, Output
from twophase.core.errors import ConfigError, ManifestMismatch, Retryable
from twophase.core.manifest import Column, Manifest, Schema, widest
from twophase.core.ports import Promotion
from twophase.core.settings import data_path
from twophase.formats import log_columns, parquet_schema, spark_types, table_rules
from twophase.formats.log_errors import Trouble
from twophase.row_queries.duckdb_rows import DuckDBRows
from twophase.sinks import modes
from twophase.sinks.base import Attempt, Sink, Superseded
from twophase.sinks.log_tables.commits import LogTable, LogTablePaths, LogTablePromoter, disturbed, foreign
from twophase.sinks.staged_files import manifest_check, owner, seal
from twophase.sinks.staged_files.layout import ATTEMPT, Marker
from twophase.sinks.staged_files.receipts import Receipts
from twophase.sinks.staged_files.seal import Written
from twophase.storage import disk, listing
from twophase.storage.base import FileFacts, Storage, Target, storage_of


class LogTableSink(Sink):
    """A log table. Subclasses open and create it, and say how Spark lays out the files."""

    copies = False
    ordered = True

    def __init__(
        self,
        path: str,
        conn_id: str | None,
        partition_by: Iterable[str],
        options: Json | None,
        properties: Mapping[str, str] | None,
    ) -> None:
        """Declare where the files are, and the connection that reaches them if they are not on a disk.

        `options` go to Spark's Parquet writer, `properties` to a table that the first promotion makes.
        """
        self.path = str(path)
        self.conn_id = conn_id
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self.options = dict(options or {})
        self.properties = {name: str(value) for name, value in (properties or {}).items()}
        self._seen: LogTable | None = None
        #: The rules that the table has for its rows, as `prepare` found them.
        self._rules: dict[str, Any] = {}
        self._check_arguments()

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal sink."""
        return {
            "path": self.location(),
            "conn_id": self.conn_id,
            **({"mode": self.mode} if self.mode != "append" else {}),
            "partition_by": self.partition_by,
            "options": self.options,
            "properties": self.properties,
        }

    def _check_arguments(self) -> None:
        modes.check_declared(self._who, type(self).__name__, self.mode)
        self.storage.check_options(self._who, self.options)
        log_columns.check_partitions(self._who, self.partition_by)

    @property
    @abstractmethod
    def _who(self) -> str:
        """Return how errors name this sink."""

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the files, which follows from the path."""
        return storage_of(self._who, self.path, self.conn_id)

    @property
    @abstractmethod
    def _home(self) -> str:
        """Return the folder of staged output and manifests."""

    @property
    @abstractmethod
    def _in_folders(self) -> list[str]:
        """Return the columns whose values are in the names of folders only, not in the files."""

    @property
    def _staged_by(self) -> list[str]:
        """Return the columns that staged files are split by."""
        return self.partition_by

    @property
    def _unruled(self) -> str | None:
        """Return the condition, in Spark's SQL, for staged rows that do not become rows of the table; None: all do."""
        return None

    @abstractmethod
    def app(self, pipeline: str, handle: Json) -> str:
        """Return the name of the high-water mark in the table: one per pipeline and write."""

    @abstractmethod
    def open(self, handle: Json) -> LogTable | None:
        """Open the table of a handle; None if there is none yet; Trouble if nobody can tell."""

    @abstractmethod
    def create(self, handle: Json, schema: Schema) -> None:
        """Create the table, empty; Conflict if somebody else just did."""

    @abstractmethod
    def _handle(self) -> dict[str, Any]:
        """Return the part of a handle that says which table it is."""

    @abstractmethod
    def _kind(self, kind: spark_types.SparkType) -> object:
        """Return a type as this format has it; ValueError if the format does not have it."""

    def visible(self, schema: Schema) -> Schema:
        """Return the columns of staged rows that the table gets."""
        return schema

    def location(self) -> str:
        """Return the table's folder."""
        return self.path if "://" in self.path else str(data_path(self.path))

    def connections(self) -> tuple[str, ...]:
        """Return the connections that staging needs."""
        return self.storage.connections()

    # --- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, slot: str | None = None) -> None:  # noqa: ARG002 - a slot has no place of its own
        """Create the folders, and check that the table, if there is one, has nothing that we cannot honour."""
        self.storage.prepare(self._who, self.location(), self._home, f"{self._home}/manifests")
        table = self._opened()
        self._claim(table)
        if table is not None and (objection := table.objection()):
            msg = f"{self._who}: {objection}"
            raise ConfigError(msg)
        self._rules = table_rules.placed(table.schema(), table.rules()) if table is not None else {}

    def _expect(self, library: str, extra: str) -> None:
        """Raise ConfigError unless the library of the format is installed."""
        if find_spec(library) is None:
            msg = f"{self._who}: it needs {library}, which {sys.executable} lacks; install twophase[{extra}] there"
            raise ConfigError(msg)

    def _claim(self, table: LogTable | None) -> None:
        """Make the pipeline that declares the sink the owner of the table; ConfigError if it has another."""
        if self.pipeline is None:
            return
        if theirs := foreign(table, self.storage, self._home, self.pipeline):
            msg = f"{self._who}: {theirs}"
            raise ConfigError(msg)
        owner.claim(self.storage, self._home, self._who, self.pipeline)

    def owner(self) -> str | None:
        """Return the pipeline that the owner file names, or another one that has markers in the table."""
        found = owner.owner_of(self.storage, self._home)
        table = self._opened()
        others = (table.writers() if table is not None else frozenset()) - {found}
        return min(others) if others else found

    def hand_over(self, to: str) -> None:
        """Let the table belong to another pipeline, as long as it has no checkpoint."""
        if why := owner.hand_over(self.storage, self._home, to):
            self._refuse(why)

    def _opened(self) -> LogTable | None:
        """Open the declared table; Retryable if that fails."""
        try:
            return self.open(self._handle())
        except Trouble as error:
            msg = f"{self._who}: {error}"
            raise Retryable(msg) from error

    def _current(self) -> LogTable | None:
        """Return the table as it is now; if it has not changed, the handle from before, with what that has listed."""
        table = self._opened()
        if table is None or self._seen is None or self._seen.version != table.version:
            self._seen = table
        return self._seen

    def _standing(self) -> Mapping[str, frozenset[str]]:
        """Return our attempts that are in the table now, with their files."""
        table = self._current()
        return table.standing() if table is not None else {}

    # --- stage -------------------------------------------------------------------------------------------------------

    def place(
        self,
        key: Key,
        attempt: int,
        token: str,
        *,
        slot: str | None = None,  # noqa: ARG002 - a slot has no place of its own
        older: Output | None = None,
    ) -> Json:
        """Name a staging folder; an older revision is replaced only if it was promoted to this same table."""
        place = {
            **self._handle(),
            "home": self._home,
            "name": f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}",
            **({"rules": self._rules} if self._rules else {}),
        }
        if older is not None and older.handle["home"] == place["home"]:
            place["replaces"] = str(Marker(older.key.revision, older.attempt, older.manifest["digest"]))
        return place

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Let Spark write the frame, then seal what it wrote."""
        schema = tuple(Column(field.name, field.dataType.simpleString()) for field in frame.schema.fields)
        self._check_schema(output, schema)
        rows = modes.rows(output.which, self.mode, frame)
        target = Target(
            self.staging_path(output),
            seal.prefix(output),
            "parquet",
            self.options,
            self._staged_by,
            bool(self._in_folders),
        )
        guarded = table_rules.held(output.which, rows, output.handle, self._unruled)
        with table_rules.told(output.which):
            known = self.storage.save(guarded, target)
        return self.seal(output, schema, known)

    def _place(self, key: Key, handle: Json) -> LogTablePaths:
        return LogTablePaths(key, handle, self.storage)

    def _check_schema(self, output: Output, schema: Schema) -> None:
        """Refuse, before anything is written, columns that this format cannot have."""
        log_columns.check(output.which, self.visible(schema), self.partition_by, self._kind)

    def seal(self, output: Output, schema: Schema, known: Mapping[str, FileFacts] | None = None) -> Json:
        """Make the staged files durable, and write their manifest."""
        place = self._place(output.key, output.handle)
        return seal.seal(place, output, Written(schema, "parquet", self.options, place.name), known)

    def staging_path(self, output: Output) -> str:
        """Return the staging folder: the output path for a Spark job of the user's own."""
        return self._place(output.key, output.handle).staged

    def inspect(self, output: Output) -> Json:
        """Seal what a user's own job wrote into the staging folder; files and partition folders give the schema."""
        place = self._place(output.key, output.handle)
        if rules := output.handle.get("rules"):
            name = rules["rules"][0][0]
            which = f"checkpoint {output.key}: {self._who}"
            msg = f"{which}: the table has {name}, which only a transform's output is held to"
            raise ConfigError(msg)
        seal.expect_output(place, output)
        with suppress(FileNotFoundError):  # sealed before by a task that died since
            content = self.storage.read(place.manifest(output.attempt))
            found = Manifest.loads(content)
            if found.folder == place.name:
                seal.make_durable(place, output.attempt)
                return found.summary(disk.digest(content))
        written = self._columns(place.staged)
        known = {name for name, _ in written}
        table = self._opened()
        kinds = dict(table.schema()) if table is not None else {}
        given = [Column(name, kinds.get(name, "string")) for name in self._in_folders if name not in known]
        schema = (*written, *given)
        modes.check_columns(output.which, self.mode, schema)
        self._check_schema(output, schema)
        return self.seal(output, schema)

    def _columns(self, folder: str) -> Schema:
        """Return the columns of the newest file in a folder."""
        data = [(stat.st_mtime_ns, path) for path, stat in self.storage.walk(folder) if listing.is_data(path)]
        if not data:
            return ()
        with self.storage.open(f"{folder}/{max(data)[1]}") as file:
            return parquet_schema.columns(file)

    def check(self, output: Output) -> None:
        """Compare the staged folder with its manifest before the vote, and check that the table can take it in."""
        key, place = output.key, self._place(output.key, output.handle)
        table = self._opened()
        if theirs := foreign(table, self.storage, place.side, key.pipeline):
            msg = f"checkpoint {key}: {self._who}: {theirs}"
            raise ConfigError(msg)
        found = self._manifest(output)
        if not place.holds(found):
            msg = f"checkpoint {key}: staged folder {place.staged} is gone; stage it again"
            raise ManifestMismatch(msg)
        manifest_check.check(place.staged, found, self.storage)
        if table is None:
            return
        problem = table.objection(self.visible(found.schema))
        if problem is None and (rule := table_rules.unmet(output.handle, table.rules())):
            problem = f"the table has got {rule} since the attempt began; run again"
        older = place.older()
        if problem is None and older is not None and (changed := disturbed(table, older)):
            path, how = changed[0]
            problem = f"it replaces {older.key}, whose file {path} {how}"
        if problem is None and key.revision > 1:  # a first revision has none before it, or the marker shows it
            problem = self._staying(table, key, older)
        if problem:
            msg = f"checkpoint {key}: {self._who}: {problem}"
            raise ManifestMismatch(msg)

    def _staying(self, table: LogTable, key: Key, older: Manifest | None) -> str | None:
        """Say which other revision of the checkpoint would stay in the table: its rows would be there twice.

        This record does not know that revision: its write had another name or place then, or the record is older than
        the table.
        """
        for match in filter(None, map(ATTEMPT.fullmatch, table.standing())):
            name, number, revision, attempt = match[0], *map(int, match.groups())
            if number != key.checkpoint_id or revision == key.revision or (older and older.folder == name):
                continue
            before = LogTablePaths(key._replace(revision=revision), {"home": self._home, "name": name}, self.storage)
            with suppress(FileNotFoundError):
                if Manifest.loads(self.storage.read(before.manifest(attempt))).key.pipeline != key.pipeline:
                    continue  # it belongs to a pipeline that owned the table before
            return f"{before.staged} is in the table, of the same checkpoint, and in this record it is not replaced"
        return None

    # --- promote -----------------------------------------------------------------------------------------------------

    def find(self, output: Output) -> Promotion:
        """Say whether the output is promoted, staged or lost; change nothing."""
        return LogTablePromoter(self, output).find()

    def promote(self, output: Output) -> Promotion:
        """Let the table take the staged files in, in one commit that carries the marker."""
        return LogTablePromoter(self, output).promote()

    def discard(self, output: Output) -> None:
        """Remove what any attempt of an aborted revision staged."""
        for left in self._attempts(output.handle["home"]):
            if left[:2] == output.key[1:]:
                self.remove(left)

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> Iterator[Attempt]:
        """List the folders of all attempts, in the table or not, and the manifests."""
        yield from self._attempts(self._home)

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List all attempts, but only if there are revisions to look for: those in the table lie in the same folder."""
        return self.attempts() if revisions else iter(())

    def remove(self, left: Attempt) -> None:
        """Remove one leftover, unless its files are in the table: then another record knows of it."""
        home, _, name = left.path.rpartition("/")
        if left.manifest:
            try:
                name = Manifest.loads(self.storage.read(left.path)).folder or ""
            except FileNotFoundError:
                return
            home = home.rpartition("/")[0]
        if name not in self._standing():
            self.storage.remove(left.path, home)

    def _attempts(self, home: str, *, manifests: bool = True) -> Iterator[Attempt]:
        for folder in (home, f"{home}/manifests")[: 2 if manifests else 1]:
            for name, path in self.storage.entries(folder):
                if match := ATTEMPT.fullmatch(name):
                    yield Attempt(int(match[1]), int(match[2]), int(match[3]), path, manifest=folder != home)

    def superseded(self) -> Iterator[Superseded]:
        """List the folders that are not in the table; the record knows which of them are superseded revisions."""
        standing = self._standing()
        for left in self._attempts(self._home):
            if not left.manifest and _name(left.path) not in standing:
                yield Superseded(left.checkpoint_id, left.revision, left.path)

    def forget(self, old: Superseded) -> None:
        """Remove one superseded revision, unless it is in the table; the record said that its retention is over."""
        if _name(old.path) not in self._standing():
            self.storage.remove(old.path, self._home)

    # --- for a record that is older than the table -------------------------------------------------------------------

    def newest(self, pipeline: str) -> int | None:
        """Return the commit_seq of the newest receipt; without receipts, that of the table's own marker."""
        found = Receipts(self.storage, self._home).newest(pipeline)
        if found is None:
            table, handle = self._opened(), {**self._handle(), "home": self._home}
            found = table.marker(self.app(pipeline, handle)) if table is not None else 0
        return found or 0

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:
        """Yield the receipts that are kept beside the manifests."""
        yield from Receipts(self.storage, self._home).since(pipeline, since)

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:
        """Yield the pipeline's revisions whose files are in the table; if others rewrote them, only receipts tell."""
        for match in filter(None, map(ATTEMPT.fullmatch, sorted(self._standing()))):
            name, checkpoint_id, revision, attempt = match[0], *map(int, match.groups())
            place = self._place(Key(pipeline, checkpoint_id, revision), {"home": self._home, "name": name})
            with suppress(FileNotFoundError):
                if Manifest.loads(self.storage.read(place.manifest(attempt))).key.pipeline != pipeline:
                    continue  # it belongs to a pipeline that owned the table before
            yield checkpoint_id, revision

    # --- verify, read ------------------------------------------------------------------------------------------------

    def _manifest(self, output: Output) -> Manifest:
        return manifest_check.load(self._place(output.key, output.handle), output.attempt, output.manifest["digest"])

    def _lying(self, output: Output) -> tuple[LogTablePaths, Manifest]:
        """Return where a decided revision lies: its manifest says it, for the handle may name a restage that lost."""
        found = self._manifest(output)
        return self._place(output.key, {**output.handle, "name": found.folder or ""}), found

    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with the table: every file has to be in it, byte by byte as it was staged."""
        try:
            place, found = self._lying(output)
        except ManifestMismatch as error:
            yield str(error)
            return
        yield from manifest_check.damages(place.staged, found, self.storage)
        table = self._current()
        gone = [(file.path, "is not in the table: there is none any more") for file in found.files]
        for path, how in disturbed(table, found) if table is not None else gone:
            yield f"{place.staged}/{path} {how}"

    def strangers(self, known: Iterable[Output]) -> Iterator[str]:
        """Yield our attempts in the table that no committed checkpoint owns; files of other writers do not count."""
        keys = {output.key[1:] for output in known}
        found: dict[tuple[int, int], str] = {}
        for name in sorted(self._standing()):
            match = ATTEMPT.fullmatch(name)
            key = (int(match[1]), int(match[2])) if match else (0, 0)
            if key not in keys:
                yield f"{self._home}/{name} is in the table, but no committed checkpoint's"
            elif key in found:
                yield f"{self._home}/{name} is in the table beside {found[key]}, another attempt of the same revision"
            found[key] = name

    def stands(self, output: Output) -> bool:
        """Say whether a decided revision's files are there, in the table or kept after their replacement."""
        try:
            place, found = self._lying(output)
        except ManifestMismatch:
            return False
        return place.holds(found)

    def files(self, output: Output) -> list[str]:
        """List the files of a decided revision, from its manifest."""
        place, found = self._lying(output)
        if not place.holds(found):
            msg = f"checkpoint {output.key}: its folder {place.staged} is gone"
            raise ManifestMismatch(msg)
        return [f"{place.staged}/{file.path}" for file in found.files]

    def staged(self, output: Output) -> DuckDBRows:
        """Return the rows that an attempt staged, for audits and comparisons."""
        return self._relation(output, "staged")

    def committed(self, output: Output) -> DuckDBRows:
        """Return the rows of a decided revision, for comparisons."""
        return self._relation(output, "committed")

    def _relation(self, output: Output, name: str) -> DuckDBRows:
        schema = output.manifest["schema"]
        return DuckDBRows(
            self.files(output), schema, partition_by=self._in_folders, name=name, at_hand=self.storage.at_hand
        )

    def read(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return a frame over decided revisions: the columns of the widest schema, and the checkpoint's number."""
        schema = widest(output.manifest["schema"] for output in outputs)
        files = [path for output in outputs for path in self.files(output)]
        return self.storage.load(spark, files, schema, self._in_folders)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
