"""The sink `Files`: a table of files, one folder per checkpoint or slot, made visible by one rename.

Pipelines declare it; `sinks/base.py` says who calls its methods, `staged_files/layout.py` draws its folders. The
quarantine and the write-ahead sink stage with it, too.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from twophase.core import slots
from twophase.core.checkpoint import Json, Key, Output
from twophase.core.claims import Claim
from twophase.core.errors import ConfigError, ManifestMismatch
from twophase.core.manifest import Column, Manifest, widens, widest
from twophase.core.ports import Promotion
from twophase.core.settings import data_path
from twophase.core.slots import Slot
from twophase.sinks import modes
from twophase.sinks.base import Attempt, Sink, Superseded, until_gone
from twophase.sinks.files.leftovers import Leftovers
from twophase.sinks.files.promotion import TRIES, FilesPromoter
from twophase.sinks.staged_files import manifest_check, owner, seal
from twophase.sinks.staged_files.layout import CHECKPOINT, SIDES, FilesPaths, Marker, markers, side
from twophase.sinks.staged_files.receipts import Receipts
from twophase.sinks.staged_files.seal import Written
from twophase.storage import disk, spark_frames, spark_paths
from twophase.storage.base import DISK, writer_options
from twophase.storage.row_counts import COMPRESSIONS, FORMATS
from twophase.storage.spark_frames import Columns, RevisionFiles

if TYPE_CHECKING:
    from twophase.row_queries.duckdb_rows import DuckDBRows

#: Without these options Spark would trim spaces off a value, and read a value with a line break as two rows.
CSV = {"header": True, "ignoreLeadingWhiteSpace": False, "ignoreTrailingWhiteSpace": False, "multiLine": True}


class Files(Sink):
    """A folder of Parquet, JSON or CSV files; each checkpoint, or each slot, is a folder in it."""

    identity = ("format", "timezone", "partition_by", "slot_folder", "mode")
    fixed_while_pending = ("path",)

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        path: str,
        *,
        mode: str = "append",
        format: str = "parquet",  # noqa: A002 - Spark's own word for it
        partition_by: Iterable[str] = (),
        options: Json | None = None,
        slot_folder: str | None = None,
        timezone: str | None = None,
        adopt: bool = False,
    ) -> None:
        """Declare a table at a path; `options` go to Spark's writer.

        With `mode="retract"` its rows are a changelog: the column `_change` says +I, -U, +U or -D.

        With `slot_folder`, such as `dt={start:%Y-%m-%d}`, a slot owns one folder of a Hive-style table; times in its
        name are those of `timezone`, such as `Europe/Berlin`, or of UTC. A folder that is there already and is not ours
        is an error, unless `adopt=True` makes it revision 0 of its slot.
        """
        self.path = str(path)
        self.mode = mode
        self.format = format
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        self.options = dict(options or {})
        self.slot_folder = slot_folder
        self.timezone = timezone
        self.adopts = adopt
        self._check_arguments()

    def _check_arguments(self) -> None:
        if re.match(r"[a-z][a-z0-9+.-]*://", self.path):
            msg = f"sinks.Files {self.path!r}: it needs atomic folder rename; on object stores use Delta or Iceberg"
            raise ConfigError(msg)
        modes.check_declared(f"sinks.Files {self.path!r}", "Files", self.mode)
        if self.format not in FORMATS:
            msg = f"sinks.Files {self.path!r}: unknown format {self.format!r}, expected {', '.join(FORMATS)}"
            raise ConfigError(msg)
        compression = self.options.get("compression", "none")
        if self.format != "parquet" and compression not in COMPRESSIONS:
            msg = f"sinks.Files {self.path!r}: compression {compression!r}, expected {', '.join(COMPRESSIONS)}"
            raise ConfigError(msg)
        if self.slot_folder is None:
            if self.adopts:
                msg = f"sinks.Files {self.path!r}: adopt=True is for slot folders; declare slot_folder="
                raise ConfigError(msg)
            if self.timezone is not None:
                msg = f"sinks.Files {self.path!r}: timezone={self.timezone!r} is for slot folders; declare slot_folder="
                raise ConfigError(msg)
            return
        slots.zone(self.timezone, f"sinks.Files {self.path!r}")
        self.zoned = bool({"start", "end"} & set(slots.fields(self.slot_folder)))
        parts = self.slot_folder.split("/")
        if not slots.fields(self.slot_folder) or any(part in {"", ".", ".."} for part in parts):
            msg = (
                f"sinks.Files {self.path!r}: slot_folder {self.slot_folder!r}: expected a folder's name that a slot"
                " fills, such as `dt={start:%Y-%m-%d}`"
            )
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {
            "path": self.location(),
            **({"mode": self.mode} if self.mode != "append" else {}),
            "format": self.format,
            "partition_by": self.partition_by,
            "options": self.options,
            "slot_folder": self.slot_folder,
            **({"timezone": self.timezone} if self.timezone else {}),
            "adopt": self.adopts,
        }

    def location(self) -> str:
        """Return the table's folder."""
        return str(data_path(self.path))

    def folders(self) -> tuple[str, ...]:
        """Return the table's folder, and the one beside it."""
        return (self.location(), f"{self.location()}.twophase")

    def by_position(self) -> bool:
        """Say whether the format is CSV, whose readers know columns by position."""
        return self.format == "csv"

    def widens(self, before: str, after: str) -> bool:
        """Allow wider types in JSON and CSV; readers of Parquet take the types of one file for those of all."""
        return self.format != "parquet" and widens(before, after)

    @property
    def slotted(self) -> bool:
        """Say whether a slot owns a folder of its own."""
        return self.slot_folder is not None

    def prepare(self, slot: str | None = None) -> None:
        """Create the table's folder and the one beside it, on one file system, so that a rename is atomic."""
        table = Path(self.location())
        beside = side(table)
        if table.is_symlink():  # each of its names would have another folder beside it
            real = os.path.realpath(table)  # for links in a circle this is one of them
            msg = f"sinks.Files {self.path!r}: {table} is a link; name {real} itself, and move {beside.name} beside it"
            raise ConfigError(msg)
        if slot is not None and (foreign := self._foreign(slot)) is not None and not self.adopts:
            raise self._not_ours(foreign)
        try:
            for folder in (table, beside, *(beside / name for name in SIDES)):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    disk.fsync_folder(folder.parent)
        except OSError as error:
            msg = f"sinks.Files {self.path!r}: folder {error.filename} cannot be made: {error.strerror}"
            raise ConfigError(msg) from error
        if not os.access(table, os.W_OK | os.X_OK) or not os.access(beside, os.W_OK | os.X_OK):
            msg = f"sinks.Files {self.path!r}: folder {table} or {beside.name} beside it is not writable"
            raise ConfigError(msg)
        if table.stat().st_dev != beside.stat().st_dev:
            msg = f"sinks.Files {self.path!r}: {table} and {beside.name} beside it must be on one file system"
            raise ConfigError(msg)
        owner.claim(DISK, str(beside), f"sinks.Files {self.path!r}", self.pipeline)

    def owner(self) -> str | None:
        """Return the pipeline that the file beside the table names."""
        return owner.owner_of(DISK, str(side(Path(self.location()))))

    def hand_over(self, to: str) -> None:
        """Let the table belong to another pipeline, as long as it has no checkpoint."""
        if why := owner.hand_over(DISK, str(side(Path(self.location()))), to):
            self._refuse(why)

    # --- slots -------------------------------------------------------------------------------------------------------

    def _folder(self, slot: str | None) -> str | None:
        """Return the name of a slot's folder; None if the table has one folder per checkpoint."""
        if self.slot_folder is None:
            return None
        if slot is None:
            msg = f"sinks.Files {self.path!r}: it has slot folders; run it with a slot"
            raise ConfigError(msg)
        zone = slots.zone(self.timezone, f"sinks.Files {self.path!r}")
        name = Slot.parse(slot, zone).format(self.slot_folder)
        if any(part in {"", ".", ".."} for part in name.split("/")) or name.count("/") != self.slot_folder.count("/"):
            msg = f"sinks.Files {self.path!r}: slot {slot!r} gives the folder {name!r}, which is no name of one"
            raise ConfigError(msg)
        return name

    def claim(self, slot: str) -> Claim | None:
        """Return the slot's folder."""
        name = self._folder(slot)
        return None if name is None else Claim(name)

    def _foreign(self, slot: str) -> Path | None:
        """Return a slot's folder if it is there without any marker: it was neither promoted nor adopted."""
        name = self._folder(slot)
        if name is None:
            return None
        folder = Path(self.location()) / name
        try:
            return None if markers(folder) else folder
        except FileNotFoundError:
            return None

    def _not_ours(self, folder: Path) -> ConfigError:
        msg = (
            f"sinks.Files {self.path!r}: folder {folder} is there already and not ours; declare adopt=True to take it"
            " in as the slot's revision 0, or move it away"
        )
        return ConfigError(msg)

    def adopt(self, key: Key, slot: str) -> Output | None:
        """Describe an unrecorded folder in a slot's place, and put the marker of revision 0 in; None if there is none.

        The marker goes into the very folder that was described, even if it has been moved meanwhile.
        """
        from twophase.sinks.files import foreign_folder

        name = self._folder(slot)
        if name is None:
            return None
        with foreign_folder.foreign(Path(self.location()) / name) as folder:
            if folder is None:
                return None
            if not self.adopts:
                raise self._not_ours(folder.path)
            found = folder.describe(self.format, self.options)
            if found is None:
                return None  # another run has put a revision in its place meanwhile
            for attempt in itertools.count(1):  # each description gets its own manifest; the record names one of them
                handle = self.place(key, attempt, "adopted", slot=slot)
                manifest = Manifest(key, "", attempt, found.schema, found.files, name)
                marker = Marker(key.revision, attempt, disk.digest(manifest.dumps()))
                try:
                    disk.create(FilesPaths(key, handle).manifest(attempt), manifest.dumps())
                except FileExistsError:
                    continue
                folder.mark(marker)
                return Output(key, attempt, handle, manifest.summary(marker.digest))
        return None

    # --- stage -------------------------------------------------------------------------------------------------------

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        """Name a staging folder beside the table; its token is random, since a restored record may repeat epochs."""
        name = f"{key.checkpoint_id:08d}.r{key.revision}.a{attempt}.{token}"
        place = {"table": self.location(), "name": name}
        if folder := self._folder(slot):
            place["folder"] = folder
        if older is not None:
            place["replaces"] = str(Marker(older.key.revision, older.attempt, older.manifest["digest"]))
        return place

    def _given_names(self) -> list[str]:
        """Return the columns whose values come from folder names; the data cannot have columns of these names."""
        if self.slot_folder is None:
            return ["checkpoint"]
        return [part.partition("=")[0] for part in self.slot_folder.split("/") if "=" in part]

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Let Spark write the frame, then seal what it wrote."""
        for given in self._given_names():
            if any(name.lower() == given.lower() for name in frame.columns):
                msg = f"{output.which}: a column cannot be named {given!r}: the folder's is; rename or drop it"
                raise ConfigError(msg)
        writer = (
            self._rows(frame, output)
            .write.format(self.format)
            .options(
                **{
                    **(CSV if self.format == "csv" else {}),
                    **self.options,
                    **writer_options(seal.prefix(output)),
                },
            )
        )
        writer.partitionBy(*self.partition_by).save(f"file://{self.staging_path(output)}")
        schema = tuple(Column(field.name, field.dataType.simpleString()) for field in frame.schema.fields)
        return self.seal(output, schema)

    def _rows(self, frame: Any, output: Output) -> Any:  # noqa: ANN401 - DataFrames
        """Return the rows to write; ConfigError unless they fit the mode."""
        return modes.rows(output.which, self.mode, frame)

    def seal(self, output: Output, schema: tuple[Column, ...]) -> Json:
        """Make the staged files durable, write their manifest, and put the marker into the staging folder."""
        place = FilesPaths(output.key, output.handle)

        def mark(digest: str) -> None:
            (place.staged / str(Marker(output.key.revision, output.attempt, digest))).touch()

        written = Written(schema, self.format, self.options, output.handle.get("folder"))
        return seal.seal(place, output, written, mark=mark)

    def staging_path(self, output: Output) -> str:
        """Return the staging folder: the output path for a Spark job of the user's own."""
        return str(FilesPaths(output.key, output.handle).staged)

    def inspect(self, output: Output) -> Json:
        """Seal what a user's own job wrote into the staging folder; files and partition folders give the schema."""
        from twophase.sinks.files import foreign_folder

        place, number = FilesPaths(output.key, output.handle), (output.key.revision, output.attempt)
        seal.expect_output(place, output)
        mine = [marker for marker in markers(place.staged) if (marker.revision, marker.attempt) == number]
        if mine:  # sealed before by a task that died since
            seal.make_durable(place, output.attempt)
            return manifest_check.load(place, output.attempt, mine[0].digest).summary(mine[0].digest)
        found = foreign_folder.describe(place.staged, self.format, self.options)
        columns = foreign_folder.schema(place.staged, found, self.format)
        there = {column.name for column in columns}
        given = tuple(Column(name, "string") for name in self.partition_by if columns and name not in there)
        for name in self._given_names():
            if name in there:
                msg = f"{output.which}: a column cannot be named {name!r}: the folder's is"
                raise ConfigError(msg)
        modes.check_columns(output.which, self.mode, columns)
        return self.seal(output, (*columns, *given))

    def check(self, output: Output) -> None:
        """Compare the staged folder with its manifest before the vote, and check that it may take its place."""
        promoter = FilesPromoter(output)
        key, place, marker = output.key, promoter.place, promoter.marker
        if theirs := owner.objection(DISK, str(place.side), key.pipeline):
            msg = f"checkpoint {key}: sinks.Files {self.path!r}: {theirs}"
            raise ConfigError(msg)
        if refusal := promoter.refusal():
            msg = (
                f"checkpoint {key}: {refusal}; leave it there if `twophase verify {key.pipeline}` does not name it:"
                " then it is committed. Only what no record knows may be moved away"
            )
            raise ManifestMismatch(msg)
        if not (place.staged / str(marker)).exists():
            msg = f"checkpoint {key}: staged folder {place.staged} has no marker {marker}; stage it again"
            raise ManifestMismatch(msg)
        manifest_check.check(place.staged, manifest_check.load(place, marker.attempt, marker.digest))

    # --- promote -----------------------------------------------------------------------------------------------------

    def find(self, output: Output) -> Promotion:
        """Say whether the output is promoted, staged or lost; change nothing."""
        return FilesPromoter(output).find()

    def promote(self, output: Output) -> Promotion:
        """Take the staged folder and rename it into the table, or exchange it with what it replaces."""
        return FilesPromoter(output).promote()

    def discard(self, output: Output) -> None:
        """Remove what any attempt of an aborted revision staged."""
        leftovers, number = Leftovers(Path(output.handle["table"]), slotted=self.slotted), output.key[1:]
        for left in list(leftovers.of({number: output.attempt})):
            if left[:2] == number:
                leftovers.remove(left)

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what earlier attempts staged; `.junk` and `.dead` folders stay, since nobody promotes them."""
        leftovers = Leftovers(Path(voted.handle["table"]), slotted=self.slotted)
        until_gone(output, leftovers.promotable, leftovers.remove)

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> Iterator[Attempt]:
        """List what attempts left beside the table."""
        yield from self._leftovers.attempts()

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List staged and taken folders, and the manifests of these revisions: all manifests would be too many."""
        yield from self._leftovers.of(revisions)

    def remove(self, left: Attempt) -> None:
        """Remove one leftover, unless it is the manifest of visible output: then another record knows of it."""
        self._leftovers.remove(left)

    def superseded(self) -> Iterator[Superseded]:
        """List the superseded revisions that are kept."""
        yield from self._leftovers.superseded()

    def forget(self, old: Superseded) -> None:
        """Remove a superseded revision; where folders cannot be exchanged, a tombstone keeps its name for ever (R3)."""
        self._leftovers.forget(old)

    @property
    def _leftovers(self) -> Leftovers:
        return Leftovers(Path(self.location()), slotted=self.slotted)

    # --- for a record that is older than the table -------------------------------------------------------------------

    @property
    def _receipts(self) -> Receipts:
        return Receipts(DISK, side(Path(self.location())))

    def newest(self, pipeline: str) -> int | None:
        """Return the commit_seq of the newest receipt; None without receipts: markers do not say a commit_seq."""
        return self._receipts.newest(pipeline)

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:
        """Yield the receipts that are kept beside the table."""
        yield from self._receipts.since(pipeline, since)

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:
        """Yield the visible revisions of a pipeline; slots are found by their manifests, without revision 0."""
        table = Path(self.location())
        if self.slot_folder is None:
            for name, path in disk.entries(table):
                match = CHECKPOINT.fullmatch(name)
                for marker in markers(Path(path)) if match else ():
                    key = Key(pipeline, int(match[1]) if match else 0, marker.revision)
                    if self._is_of(key, marker.attempt):
                        yield key.checkpoint_id, key.revision
            return
        for left in self._leftovers.attempts():
            if left.manifest and left.revision and self._leftovers.is_visible(left):
                found = Manifest.loads(Path(left.path).read_bytes()).key
                if found.pipeline == pipeline:
                    yield found.checkpoint_id, found.revision

    def _is_of(self, key: Key, attempt: int) -> bool:
        """Say whether a visible revision is this pipeline's, by its manifest; another may have had the table before."""
        try:
            content = FilesPaths(key, {"table": self.location(), "name": ""}).manifest(attempt).read_bytes()
        except FileNotFoundError:
            return True
        return Manifest.loads(content).key.pipeline == key.pipeline

    # --- verify, read ------------------------------------------------------------------------------------------------

    def where(self, output: Output) -> Path | None:
        """Return the folder of a decided revision: in the table, taken, or superseded; None if it is gone."""
        place = FilesPaths(output.key, output.handle)
        marker = str(Marker(output.key.revision, output.attempt, output.manifest["digest"]))
        for _ in range(TRIES):  # it may be moving just now: look in the order in which a replaced revision moves
            before = place.taken_by_others(f"{output.key.checkpoint_id:08d}")
            for folder in (place.visible, *before, place.superseded(output.key.revision)):
                if (folder / marker).exists():
                    return folder
            if (
                place.taken_by_others(f"{output.key.checkpoint_id:08d}") == before
                and not (place.visible / marker).exists()
            ):
                return None
        return None

    def stands(self, output: Output) -> bool:
        """Say whether a decided revision's folder is in the table, or kept after its replacement."""
        return self.where(output) is not None

    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with its folder, byte by byte."""
        place = FilesPaths(output.key, output.handle)
        marker = Marker(output.key.revision, output.attempt, output.manifest["digest"])
        if not (place.visible / str(marker)).exists():
            yield f"{place.visible} has no marker {marker}"
            return
        try:
            expected = manifest_check.load(place, output.attempt, marker.digest)
        except ManifestMismatch as error:
            yield str(error)
            return
        yield from manifest_check.differences(place.visible, expected)

    def strangers(self, known: Iterable[Output]) -> Iterator[str]:
        """Yield what is in the table's folder but belongs to no committed checkpoint.

        A table with slot folders may hold older folders that were not adopted. Only folders with the marker of a
        revision of ours are reported there.
        """
        table = Path(self.location())
        if not table.is_dir():
            yield f"folder {table} is not there"
            return
        expected = {str(FilesPaths(output.key, output.handle).visible) for output in known}
        if self.slot_folder is None:
            yield from (
                f"{path} is no committed checkpoint's" for _, path in disk.entries(table) if path not in expected
            )
            return
        depth = self.slot_folder.strip("/").count("/") + 1
        for folder in table.glob("/".join(["*"] * depth)):
            if folder.is_dir() and str(folder) not in expected and any(marker.revision for marker in markers(folder)):
                yield f"{folder} is no committed slot's"

    def files(self, output: Output) -> list[str]:
        """List the files of a decided revision, from its manifest."""
        found = manifest_check.load(FilesPaths(output.key, output.handle), output.attempt, output.manifest["digest"])
        folder = self._there(output)
        return [f"{folder}/{file.path}" for file in found.files if not file.path.startswith(("_", "."))]

    def _there(self, output: Output) -> Path:
        folder = self.where(output)
        if folder is None:
            msg = f"checkpoint {output.key}: its folder is neither in {self.location()} nor under superseded/"
            raise ManifestMismatch(msg)
        return folder

    def staged_files(self, output: Output) -> list[str]:
        """List the files that an attempt staged, from its manifest."""
        place = FilesPaths(output.key, output.handle)
        found = manifest_check.load(place, output.attempt, output.manifest["digest"])
        return [f"{place.staged}/{file.path}" for file in found.files]

    def staged(self, output: Output) -> DuckDBRows:
        """Return the rows that an attempt staged, for audits and comparisons."""
        return self._relation(self.staged_files(output), output, "staged")

    def committed(self, output: Output) -> DuckDBRows:
        """Return the rows of a decided revision, for comparisons."""
        return self._relation(self.files(output), output, "committed")

    def _relation(self, files: list[str], output: Output, name: str) -> DuckDBRows:
        from twophase.row_queries.duckdb_rows import DuckDBRows

        given = self._given(output) if self.slotted else {}
        return DuckDBRows(
            files,
            output.manifest["schema"],
            format=self.format,
            options=self.options,
            partition_by=self.partition_by,
            constants=given,
            mixed=output.key.revision == 0,
            name=name,
        )

    def read(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return a DataFrame over decided revisions: columns of the widest schema, and those of the folder names."""
        parts = [RevisionFiles(self._there(output), self.files(output), self._given(output)) for output in outputs]
        schema = widest(output.manifest["schema"] for output in outputs)
        given = {name: "bigint" if name == "checkpoint" else "string" for name in self._given_names()}
        reader = spark.read.format(self.format).options(**self.read_options())
        return spark_frames.union(spark, reader, Path(self.location()), parts, Columns(spark_paths.ddl(schema), given))

    def _given(self, output: Output) -> dict[str, Any]:
        """Return the values that the rows of a revision get from the name of its visible folder."""
        if self.slot_folder is None:
            return {"checkpoint": output.key.checkpoint_id}
        parts = (part.partition("=") for part in output.handle["folder"].split("/"))
        return {name: unquote(value) for name, equals, value in parts if equals}

    def read_options(self) -> dict[str, Any]:
        """Return the options that Spark's reader needs for what its writer wrote."""
        return {**CSV, **self.options} if self.format == "csv" else {}
