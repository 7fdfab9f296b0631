"""`Interval`, the source that reads one slot: the files of its folder, or the rows of a folder or log table by time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twophase.core import slots
from twophase.core.checkpoint import Input, InputFile, Json, Known, Position
from twophase.core.claims import Claim
from twophase.core.errors import ConfigError, InputMissing, NotYet, SinkUnavailable
from twophase.core.hindrances import Refused
from twophase.core.ports import Progress
from twophase.core.slots import Slot
from twophase.sources.bad_record_scan import declared_types
from twophase.sources.fixed_files import FixedFiles
from twophase.sources.quarantine import Quarantine
from twophase.storage.base import DISK, Storage, Within, storage_of
from twophase.storage.disk import identity
from twophase.storage.listing import check_name, finished, unfinished, unreadable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from twophase.formats.table_versions import Version

ON_MISSING = ("error", "wait", "empty")
#: Log tables.
TABLES = ("delta", "iceberg")
TIMES = ("timestamp", "timestamp_ltz", "timestamp_ntz", "date")


class Interval(FixedFiles):
    """The files of one slot: below a folder that a pattern names, or rows of a folder's files by a column, or both.

    Each revision lists the files again and fixes that list. A file may be read for any number of slots. Of a Delta or
    Iceberg table the revision fixes the newest version, which all its attempts then read.
    """

    identity = ("format", "timezone")
    fixed_while_pending = ("path", "catalog")

    slotted = True
    per_revision = True
    kind = "interval source"
    to_correct = "correct the file and run the interval again"
    to_restore = "run the interval again, which lists its files anew"

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        path: str | Path,
        format: str,  # noqa: A002 - the word that Spark's readers use
        *,
        column: str | None = None,
        timezone: str | None = None,
        catalog: str | Mapping[str, str] | None = None,
        conn_id: str | None = None,
        schema: str | None = None,
        options: Mapping[str, Any] | None = None,
        on_missing: str = "error",
        on_bad_record: str = "fail",
        bad_record_limit: float | None = None,
        quarantine_path: str | Path | None = None,
    ) -> None:
        """Declare the folder, with `{start:…}`, `{end:…}` or `{key}` in it, or the column that has the time.

        Rows with start <= column < end are read. Folders, dates, and times that have no zone go by the clock of
        `timezone`, such as `Europe/Berlin`; without, by UTC. `on_missing` says what it means that there is no
        file: an error, to wait for it, or an interval without records.

        `format` may be `delta`, with the table's folder, or `iceberg`, with its name, and `catalog` as `sinks.Iceberg`
        has it. The files of a table may be in an object store that the Airflow connection `conn_id` leads to.
        """
        bad = Quarantine(on_bad_record, bad_record_limit, None if quarantine_path is None else str(quarantine_path))
        self.table_format = format if format in TABLES else None
        super().__init__(path, "parquet" if self.table_format else format, schema, options, bad)
        self.column = column
        self.timezone = timezone
        self._zone = slots.zone(timezone, self.who)
        self.catalog = catalog
        self.conn_id = conn_id
        self.on_missing = on_missing
        self.expect_one_of("on_missing", on_missing, ON_MISSING)
        self._check_table()
        self._check_pattern()
        self._check_column()
        self.zoned = column is not None or bool({"start", "end"} & set(slots.fields(self.path)))
        if on_missing == "empty" and not schema and format != "text":
            msg = f"{self.who}: on_missing='empty': without files there is no schema to go by; declare schema=…"
            raise ConfigError(msg)

    def _check_table(self) -> None:
        if (self.catalog is not None) != (self.table_format == "iceberg"):
            msg = f"{self.who}: catalog={self.catalog!r}: expected one with format='iceberg', and only there"
            raise ConfigError(msg)
        if self.table_format is None:
            if self.conn_id is not None or "://" in self.path:
                msg = f"{self.who}: in an object store only tables are read: format='delta' or 'iceberg'"
                raise ConfigError(msg)
            return
        if self.column is None or slots.fields(self.path):
            msg = f"{self.who}: a {self.table_format} table is read by column=…, not by fields in its path"
            raise ConfigError(msg)
        if self.schema or self.on_missing == "empty":
            msg = f"{self.who}: a table has its own columns, also without rows; leave out schema and on_missing='empty'"
            raise ConfigError(msg)
        if self.catalog is not None:
            from twophase.formats import iceberg_catalogs

            self.catalog = iceberg_catalogs.declared(self.who, self.path, self.catalog)
        if self.storage is not DISK and self.options:
            msg = f"{self.who}: option {min(self.options)!r}: reading from an object store has none; leave it out"
            raise ConfigError(msg)

    def _check_pattern(self) -> None:
        if "{{" in self.path or "}}" in self.path:
            msg = f"{self.who}: expected braces around start, end or key only, found double ones"
            raise ConfigError(msg)
        if not slots.fields(self.path) and self.column is None:
            msg = (
                f"{self.who}: every slot would read the same; put a field into the path, for example "
                f"dt={{start:%Y-%m-%d}}, or name the column that has the time by column=…"
            )
            raise ConfigError(msg)
        if self.catalog is None and not self.place.strip("/"):
            msg = f"{self.who}: expected a folder before the first field, for example landing/{{key}}"
            raise ConfigError(msg)
        if ".." in self._pattern.split("/"):
            msg = f"{self.who}: a pattern cannot lead out of its folder by '..'; name the folder itself"
            raise ConfigError(msg)
        try:
            self.path.format(start=datetime.now(UTC), end=datetime.now(UTC), key="key")
        except ValueError as error:
            msg = f"{self.who}: {error}; expected for example dt={{start:%Y-%m-%d}} or {{key}}"
            raise ConfigError(msg) from error

    def _check_column(self) -> None:
        if self.column is None:
            return
        if self.bad.wanted:
            msg = (
                f"{self.who}: on_bad_record='quarantine': a bad record has no {self.column} to go by, so every "
                f"interval would set it aside again; give each interval a folder of its own instead of column=…"
            )
            raise ConfigError(msg)
        types = {name.lower(): kind for name, kind in declared_types(self.schema or "").items()}
        if types and types.get(self.column.lower()) not in TIMES:
            found = types.get(self.column.lower(), "none in the schema")
            msg = f"{self.who}: column {self.column!r}: expected a date or a timestamp, found {found}"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments; the path in full, so that it means the same everywhere."""
        return {
            "path": self.path if self.catalog or self.conn_id else f"{self.folder}/{self._pattern}".rstrip("/"),
            "format": self.table_format or self.format,
            "column": self.column,
            **({"timezone": self.timezone} if self.timezone else {}),
            **({"catalog": self.catalog} if self.catalog else {}),
            **({"conn_id": self.conn_id} if self.conn_id else {}),
            "schema": self.schema,
            "options": self.options,
            "on_missing": self.on_missing,
            **self.bad.config(),
        }

    @property
    def place(self) -> str:
        """Return the folder before the first part with a field, as it was declared; with a catalog it is `/`."""
        if self.catalog is not None:
            return "/"
        before, brace, _ = self.path.partition("{")
        return before.rpartition("/")[0] if brace else self.path

    @property
    def _pattern(self) -> str:
        """Return the rest of the path, which has the fields."""
        return "" if self.catalog is not None else self.path[len(self.place) :].strip("/")

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of the files: by the path, or with a catalog by the connection."""
        if self.catalog is None:
            return storage_of(self.who, self.path, self.conn_id)
        from twophase.storage.s3 import S3

        return DISK if self.conn_id is None else S3(self.who, None, self.conn_id)

    @property
    def root(self) -> str:
        """Return the prefix of a file's full path, without the `/`."""
        if self.storage is DISK:
            return super().root
        return "s3:/" if self.catalog is not None else self.path

    def folders(self) -> tuple[str, ...]:
        """Return the folder that the files are in; none with a catalog, whose files may be anywhere."""
        if self.catalog is not None:
            return ()
        return super().folders() if self.storage is DISK else (self.path,)

    def connections(self, fixed: Input) -> tuple[str, ...]:  # noqa: ARG002 - whatever is read
        """Return the connection that reads the files; the catalog's own is needed only at begin."""
        return self.storage.connections()

    # --- at begin ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check that the folder can be listed if it exists; `discover` looks for the slot's own folder."""
        if self.storage is not DISK:
            if self.catalog is None:
                self.storage.prepare(self.who, self.path)
            return
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            msg = f"{self.who}: {folder} is a file, expected a folder"
            raise ConfigError(msg)
        if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
            raise unreadable(folder, self.who)

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,  # noqa: ARG002 - nothing is remembered
        position: Mapping[str, Position] | None = None,  # noqa: ARG002 - has no offsets
    ) -> Input:
        """List the finished files of a slot, sorted by name, or those of a table's newest version."""
        if slot is None:
            msg = f"{self.who}: it goes by slots, found none; say which one: an interval `start/end`, or a key"
            raise ConfigError(msg)
        asked = Slot.parse(slot, self._zone)
        if self.column is not None:
            self._bounds(asked)
        if self.table_format is not None:
            return self._at_version(asked)
        below = self._below(asked)
        found = sorted(self._list(below))
        if found or self.on_missing == "empty":
            return Input(files=tuple(found))
        where = self.folder / below
        there = "none" if where.exists() else "no such folder"
        msg = f"{self.who}: slot {slot}: expected finished files in {where}, found {there}"
        raise self._nothing(msg)

    def claim(self, slot: str) -> Claim:
        """Return the slot's folder, with the slot's times if rows are chosen by column."""
        asked = Slot.parse(slot, self._zone)
        return Claim(self._below(asked), *(self._bounds(asked) if self.column is not None else ()))

    def _nothing(self, msg: str) -> NotYet | InputMissing:
        """Return the error for missing input: NotYet if the source is declared to wait, else InputMissing."""
        if self.on_missing == "wait":
            return NotYet(f"{msg}; run it again when they have landed")
        return InputMissing(f"{msg}; land them, or declare on_missing='wait' or 'empty'")

    def _at_version(self, slot: Slot) -> Input:
        """Fix the newest version of the table; if it is partitioned by the column, only the interval's days."""
        found = self._newest()
        if found is None:
            msg = f"{self.who}: slot {slot.text}: expected a {self.table_format} table, found none"
            raise self._nothing(msg)
        kinds = {name.lower(): kind for name, kind in found.schema}
        if kinds.get(str(self.column).lower()) not in TIMES:
            kind = kinds.get(str(self.column).lower(), "no such column")
            msg = f"{self.who}: column {self.column!r}: expected a date or a timestamp, found {kind}"
            raise ConfigError(msg)
        by = [name.lower() for name in found.partition_by]
        if str(self.column).lower() in by:
            at = by.index(str(self.column).lower())
            first, last = (slots.midnight(moment).isoformat() for moment in self._bounds(slot))
            found = found._replace(files=[one for one in found.files if first <= (one[1][at] or "") < last])
        return found.fixed(self.who, self.root, self.storage)

    def _newest(self) -> Version | None:
        """Return the newest version in the table's log; None: there is no table."""
        from twophase.formats import iceberg_catalogs, table_versions
        from twophase.formats.log_errors import Conflict, Trouble

        try:
            if self.catalog is None:
                return table_versions.delta(self.root, self.storage, self.who)
            look_up = partial(iceberg_catalogs.client, self.who, self.catalog, self.storage)
            return table_versions.iceberg(look_up, self.path, self.storage, self.who)
        except Refused as error:
            msg = f"{self.who}: {error}"
            raise ConfigError(msg) from error
        except (Conflict, Trouble) as error:
            msg = f"{self.who}: {error}"
            raise SinkUnavailable(msg) from error

    def _below(self, slot: Slot) -> str:
        """Return a slot's folder, relative to the folder that all slots share."""
        below = slot.format(self._pattern)
        for part in below.split("/") if below else ():
            if not part or unfinished(part):
                msg = (
                    f"{self.who}: slot {slot.text}: its folder would be {below!r}, of which {part!r} is the name of "
                    f"something unfinished, or leads elsewhere; use another key"
                )
                raise ConfigError(msg)
        return below

    def _list(self, below: str) -> list[InputFile]:
        """List the finished files of a slot; refuse symbolic links to folders on the way."""
        root, path = str(self.folder), self.folder
        for part in below.split("/") if below else ():
            path /= part
            if path.is_symlink() and path.is_dir():
                msg = f"{self.who}: {path} is a symbolic link, which is not followed; put a folder in its place"
                raise ConfigError(msg)
        if below and path.is_file():
            check_name(root, below, self.who)
            there = identity(path)
            return [] if there is None else [InputFile(below, *there)]
        try:
            return finished(root, f"{below}/" if below else "", self.who)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def fix(self, found: Input, progress: Progress) -> Input:  # noqa: ARG002 - no file is owned
        """Take all that was found, as this revision's list."""
        return found

    # --- in Spark ----------------------------------------------------------------------------------------------------

    def reader_options(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return Spark's options; with a column, times without a zone are read in this source's time zone."""
        options = super().reader_options(paths)
        if self.column is not None and "timezone" not in {name.lower() for name in options}:
            options["timeZone"] = self.timezone or "UTC"
        return options

    def read(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> DataFrame:
        """Return the rows of the slot from exactly these files."""
        if self.column is None:
            return super().read(spark, fixed)
        bounds = self._bounds(Slot.parse(slot or "", self._zone))
        frame = (
            super().read(spark, fixed) if fixed.table is None else self._of_version(spark, fixed, fixed.table, bounds)
        )
        return frame.where(self._within(frame, self.column, *bounds))

    def _of_version(
        self, spark: SparkSession, fixed: Input, table: Json, bounds: tuple[datetime, datetime]
    ) -> DataFrame:
        """Return the rows of a table's files, with the columns of its version."""
        from twophase.formats.table_versions import values_of

        root = self.root

        def value(at: int) -> Callable[[str], str | None]:
            return lambda path: values_of(table, path.removeprefix(f"{root}/"))[at]

        given = {name: value(at) for at, name in enumerate(table["partition_by"])}
        column = next(name for name, _ in table["schema"] if name.lower() == str(self.column).lower())
        paths, options = self.paths(fixed), self.reader_options(self.paths(fixed))
        # Statistics exclude files without rows of the interval; a day to spare covers any zone of the times in them.
        spare = timedelta(days=1 if self.timezone else 0)
        within = Within(column, bounds[0] - spare, bounds[1] + spare)
        return cast("DataFrame", self.storage.listed(spark, paths, table["schema"], given, options, within))

    def _bounds(self, slot: Slot) -> tuple[datetime, datetime]:
        """Return the start and end that the column is compared with."""
        if slot.start is None or slot.end is None:
            msg = f"{self.who}: slot {slot.text}: column {self.column!r} needs an interval, expected `start/end`"
            raise ConfigError(msg)
        return slot.start, slot.end

    def _within(self, frame: DataFrame, name: str, start: datetime, end: datetime) -> Column:
        from pyspark.sql import functions as F  # noqa: N812 - its usual name

        kinds = {field.name.lower(): field.dataType.simpleString() for field in frame.schema.fields}
        kind = kinds.get(name.lower())
        if kind not in TIMES:
            found = f"no such column among {', '.join(frame.columns)}" if kind is None else kind
            msg = f"{self.who}: column {name!r}: expected a date or a timestamp, found {found}; declare schema=…"
            raise ConfigError(msg)
        column = F.col(f"`{name.replace('`', '``')}`")
        if kind == "timestamp_ntz" and self.timezone:  # gives one moment each, also in an hour that comes twice
            column = F.convert_timezone(F.lit(self.timezone), F.lit("UTC"), column)
        first, last = (F.expr(_literal(kind, moment)) for moment in (start, end))
        return (column >= first) & (column < last)


def _literal(kind: str, moment: datetime) -> str:
    """Return a moment as a SQL literal that does not depend on the session's time zone; a date is in its own zone."""
    if kind == "date":
        return f"DATE '{slots.midnight(moment).isoformat()}'"
    if kind == "timestamp_ntz":
        return f"TIMESTAMP_NTZ '{moment.astimezone(UTC).replace(tzinfo=None).isoformat()}'"
    return f"TIMESTAMP_LTZ '{moment.isoformat()}'"
