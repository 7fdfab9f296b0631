"""The sink `Postgres`: stages rows in a table of their own, and promotes them in one transaction with the marker.

Pipelines declare it; `sinks/base.py` says who calls its methods.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from twophase.changelog import CHANGE
from twophase.core.checkpoint import Json, Key, Output
from twophase.core.claims import Claim
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable, Swept
from twophase.core.failpoints import hit
from twophase.core.manifest import Column, Schema, widens
from twophase.core.ports import Promotion
from twophase.core.slots import Slot
from twophase.row_queries.base import RowSet
from twophase.row_queries.postgres_rows import PostgresRows, RowSelection
from twophase.sinks import modes
from twophase.sinks.base import Attempt, Sink, two_owners
from twophase.sinks.postgres import owner, promotion, receipts, seal, slot_rows, staging_table, target_check
from twophase.sinks.postgres.acceptance import Acceptance
from twophase.sinks.postgres.changes import OURS
from twophase.sinks.postgres.history import order_of
from twophase.sinks.postgres.promotion import Mode, PostgresPromoter
from twophase.sinks.postgres.slot_rows import SlotRows, by_checkpoint
from twophase.sinks.postgres.staging_table import CHECKPOINT, Columns
from twophase.sinks.postgres.target_check import BY_KEY, TargetCheck
from twophase.sinks.postgres.verification import Held
from twophase.storage import database
from twophase.storage.database import TableName

_AN = {"upsert": "an upsert", "retract": "a retract"}
STAGING = "twophase_staging"
_LEFT = re.compile(r"s_[0-9a-f]{8}_(\d{8,})_r(\d+)_a(\d+)_[0-9a-z]+")


class Postgres(Sink):
    """A table of a PostgreSQL database: append, upsert or retract by key, or replace as a whole."""

    identity = ("slot_column",)
    fixed_while_pending = ("table", "mode", "key", "attach", "staging_schema")

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        table: str,
        *,
        conn_id: str,
        mode: str = "append",
        key: Iterable[str] = (),
        create: bool = False,
        attach: bool = False,
        history: int | None = None,
        slot_column: str | None = None,
        staging_conn_id: str | None = None,
        staging_schema: str = STAGING,
    ) -> None:
        """Declare a table (`name` or `schema.name`) in the database of an Airflow connection.

        `mode` says what a checkpoint does to the table. `append` adds rows, which carry their checkpoint in
        `_checkpoint`. `upsert` changes or adds rows by `key`; if they have a column `_change`, -D deletes the row, and
        -U is left out. `retract` applies a changelog by `key`, whose column `_change` says +I, -U, +U or -D. `replace`
        replaces the whole table; in a pipeline with slots it replaces the slot's rows: those of its checkpoint, or with
        `slot_column` all rows whose column lies in the slot.
        `create` makes the target, and adds columns that are new. With `attach` the target is partitioned by
        `_checkpoint`, and the staging table of a checkpoint becomes a partition as it is.
        Rows that `upsert` and `retract` overwrite are kept, so that a checkpoint can be run again or come late.
        `history` says for how many of the latest checkpoints: None for all, 0 for none.
        `staging_conn_id` is the connection of an account that may only stage.
        """
        self.table = str(table)
        self.conn_id = conn_id
        self.mode = mode
        self.key = [key] if isinstance(key, str) else list(key)
        self.create = create
        self.attach = attach
        self.history = history
        self.slot_column = slot_column
        self._by_slots = False
        self.staging_conn_id = staging_conn_id
        self.staging_schema = staging_schema
        self.target = TableName.parse(self.table)
        target_check.check_declared(self._named, conn_id, self._mode, slot_column, staging_schema)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal sink: connections by their ids."""
        return {
            "table": str(self.target),
            "conn_id": self.conn_id,
            "mode": self.mode,
            "key": self.key,
            "create": self.create,
            "attach": self.attach,
            "history": self.history,
            "slot_column": self.slot_column,
            "staging_conn_id": self.staging_conn_id,
            "staging_schema": self.staging_schema,
        }

    @property
    def _named(self) -> str:
        return f"sinks.Postgres {self.table!r}"

    def location(self) -> str:
        """Return connection and table."""
        return f"postgres:{self.conn_id}:{self.target}"

    def connections(self) -> tuple[str, ...]:
        """Return the connection that stages rows."""
        return (self._staging_conn_id,)

    @property
    def _staging_conn_id(self) -> str:
        return self.staging_conn_id or self.conn_id

    def join(self, pipeline: str, name: str, *, slotted: bool = False) -> None:
        """Take note of whether the pipeline goes by slots: then `replace` replaces the slot's rows."""
        super().join(pipeline, name, slotted=slotted)
        self._by_slots = slotted

    def claim(self, slot: str) -> Claim | None:
        """Return the slot's claim by `slot_column`; None without one."""
        return None if self.slot_column is None else SlotRows(self.slot_column, Slot.parse(slot)).claim

    def widens(self, before: str, after: str) -> bool:
        """Allow wider types: the target's column keeps its type, and each staged value has to fit into it."""
        return widens(before, after)

    @property
    def slotted(self) -> bool:
        """Say whether a slot owns rows by `slot_column`."""
        return self.slot_column is not None

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """Say whether a later checkpoint overwrites an earlier one; appended rows and slots do not touch each other."""
        return self.mode in BY_KEY or (self.mode == "replace" and not (self._by_slots or self.slotted))

    def objection(self, *, latest: bool) -> str | None:
        """Refuse a new revision whose older one cannot be undone, or that later checkpoints have built upon."""
        if self.mode in BY_KEY and self.history == 0:
            return f"what {_AN[self.mode]} has overwritten is not kept, with history=0"
        if self.mode in BY_KEY and not latest:
            return (
                f"{_AN[self.mode]} comes after what was there before, and later checkpoints came after this one;"
                " run them again with it: `twophase backfill` from this one through the latest"
            )
        if self.mode == "replace" and not latest:
            return "a later checkpoint has taken the place of the whole table"
        return None

    # --- before anything is recorded ---------------------------------------------------------------------------------

    def prepare(self, slot: str | None = None) -> None:
        """Check that the target fits; create the schema for staging, and the tables of markers and receipts."""
        import psycopg2

        if slot is not None and self.mode in BY_KEY and not self._mode.keeps:
            msg = f"{self._named}: with history=0 there is no order between slots; keep some, or append"
            raise ConfigError(msg)
        by_slots = self._by_slots or slot is not None
        target = TargetCheck(self._named, self.target, self._mode, self.slot_column, by_slots=by_slots)
        try:
            stager = self._stager()
            with database.transaction(self.conn_id) as cursor:
                target.check_writable(cursor)
                target.check(cursor, slot)
                target.create_schema(cursor)
                promotion.create_markers(cursor)
                receipts.create(cursor)
                target.check_rights(cursor)
                staging_table.create_schema(cursor, self.staging_schema, stager)
                schemas = (self.staging_schema, promotion.MARKERS.schema)
                seal.check_accounts(cursor, self._named, stager, self.target, schemas=schemas)
                self._claim(cursor)
        except psycopg2.Error as error:
            msg = f"{self._named}: connection {self.conn_id}: {database.one_line(error)}"
            raise (SinkUnavailable if database.passes(error) else ConfigError)(msg) from None

    def _claim(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Make the pipeline that declares the sink the owner of the target; ConfigError if it has another."""
        if self.pipeline is not None:
            theirs = owner.claim(cursor, self.pipeline, self.target, promotion.MARKERS)
            if theirs:
                msg = f"{self._named}: {theirs}"
                raise ConfigError(msg)

    def owner(self) -> str | None:
        """Return the pipeline that the target's database names as its owner."""
        with self._looking() as cursor:
            return owner.owner_of(cursor, self.target)

    def hand_over(self, to: str) -> None:
        """Make another pipeline the owner of the target, unless its rows carry checkpoints of this one."""
        with self._looking() as cursor:
            if owner.carries_checkpoints(cursor, self.target):
                self._refuse(
                    f"its rows carry checkpoints of pipeline {self.pipeline!r}, whose numbers would be those of {to!r},"
                    f" too; rename the column {CHECKPOINT} and add a new one, or write to another table"
                )
            other = owner.hand_over(cursor, self.target, str(self.pipeline), to)
        if other is not None:
            self._refuse(two_owners("it", other))

    def _stager(self) -> str:
        """Return the account that stages rows, as the server knows it."""
        with database.transaction(self._staging_conn_id) as cursor:
            cursor.execute("SELECT current_user")
            found: str = cursor.fetchone()[0]
        return found

    # --- stage -------------------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        """Return the prefix of this sink's staging tables; it stands for the target, which no other sink writes to."""
        return f"s_{hashlib.blake2s(self.location().encode(), digest_size=4).hexdigest()}"

    def place(
        self,
        key: Key,
        attempt: int,
        token: str,
        *,
        slot: str | None = None,
        older: Output | None = None,  # noqa: ARG002 - the markers say what it replaces
    ) -> Json:
        """Name a staging table; its token is random, since a restored record may repeat epochs."""
        name = f"{self._prefix}_{key.checkpoint_id:08d}_r{key.revision}_a{attempt}_{token}"
        place: dict[str, Any] = {
            "staging": [self.staging_schema, name],
            "target": list(self.target),
        }
        place |= self._slot_place(slot)
        if self.key or self.slot_column is not None:
            place["order"] = order_of(key.checkpoint_id, slot)
        return place

    def _slot_place(self, slot: str | None) -> dict[str, Any]:
        """Return the slot, and the slot column if there is one, for a handle that replaces the slot's rows; else {}."""
        if slot is None and self.slot_column is not None:
            msg = f"{self._named}: slot_column={self.slot_column!r}, but there is no slot; give it one"
            raise ConfigError(msg)
        if slot is None or self.mode != "replace":
            return {}
        return {"slot": slot} if self.slot_column is None else {"slot": slot, "slot_column": self.slot_column}

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Let the executors load the rows into the staging table."""
        schema = staging_table.schema_of(frame)
        columns = self.open(output, schema)
        ready = staging_table.converted(frame, columns, upserts=self.mode == "upsert")
        staging_table.load(output.which, ready, self._staging_conn_id, TableName(*output.handle["staging"]))
        return self.seal(output, schema, columns)

    def open(self, output: Output, schema: Schema) -> Columns:
        """Create the staging table, with the target's types; ConfigError if a column does not fit."""
        which, handle = output.which, output.handle
        modes.check_columns(which, self.mode, schema)
        if self.key and (ours := [column.name for column in schema if column.name.startswith(OURS)]):
            msg = f"{which}: a column cannot be named {ours[0]!r}: the history's are; rename or drop it"
            raise ConfigError(msg)
        with database.transaction(self._staging_conn_id) as cursor:
            asked = target_check.asked_of(cursor, self.target)
            columns = self._plan(cursor, which, schema)
            numbered = [CHECKPOINT] if self._promoter(output).numbers else []
            target_check.check_columns(which, asked, [*columns, *numbered], self._mode)
            if rows := SlotRows.of(handle):
                kind = columns[rows.column][0] if rows.column in columns else None
                slot_rows.check_column(cursor, which, rows.column, kind, rows.slot.text)
            checkpoint = output.key.checkpoint_id if self.attach else None
            staging_table.create(cursor, TableName(*handle["staging"]), columns, checkpoint)
        return columns

    def seal(self, output: Output, schema: Schema, columns: Columns) -> Json:
        """Convert and check what was loaded: types, keys, the slot's rows; return the manifest's summary."""
        which, table = output.which, TableName(*output.handle["staging"])
        hit("stage.written")
        with database.transaction(self._staging_conn_id) as cursor:
            planned, retracts = bool(self.key) or self.attach, self.mode == "retract"
            staging_table.finish(cursor, which, table, columns, self.key, planned=planned, retracts=retracts)
            if rows := SlotRows.of(output.handle):
                rows.check_staged(cursor, which, table, columns[rows.column][0])
            found = staging_table.look(cursor, table)
            cursor.execute("SELECT pg_total_relation_size(%s)", (f'"{table.schema}"."{table.name}"',))
            size = cursor.fetchone()[0]
        if found is None:
            msg = f"{which}: staging table {table} is gone; stage it again"
            raise ManifestMismatch(msg)
        hit("stage.durable")
        return {
            "digest": found.digest(table),
            "files": len(found.parts),
            "rows": found.rows,
            "bytes": size,
            "schema": [list(column) for column in schema],
        }

    def check(self, output: Output) -> None:
        """Seal the staging table, compare it with the manifest, and check that the target will accept it."""
        key, manifest, table = output.key, output.manifest, TableName(*output.handle["staging"])
        with self._looking() as cursor:
            database.make_durable(cursor)
            if strange := seal.seal(cursor, table, self.target, self._expected(cursor, output)):
                msg = f"checkpoint {key}: {strange}"
                raise ManifestMismatch(msg)
            found = staging_table.look(cursor, table)
            promoter = self._promoter(output)
            marker = promoter.marker(cursor)
            later = promoter.later(cursor)
            forgotten = promoter.has_no_place(cursor)
            shared = promoter.foreign(cursor) or promoter.shared(cursor)
        if marker is None and later:
            msg = f"checkpoint {key}: {later}"
            raise ManifestMismatch(msg)
        if forgotten or shared:
            why = shared or f"{forgotten}; a longer history= keeps more from now on"
            msg = f"checkpoint {key}: {why}"
            raise ConfigError(msg)
        if marker is not None and marker[1]["digest"] not in output.earlier:
            msg = f"checkpoint {key}: table {self.target} has its marker already; it is not in this record"
            raise ManifestMismatch(msg)
        if found is None or found.digest(table) != manifest["digest"]:
            what = "is not there" if found is None else f"has {found.rows} rows, expected {manifest['rows']}"
            msg = f"checkpoint {key}: staging table {table} {what}; stage it again"
            raise ManifestMismatch(msg)
        Acceptance(promoter).check()

    def _expected(self, cursor: Any, output: Output) -> dict[str, str]:  # noqa: ANN401 - a cursor
        """Return the columns that the staging table must have, with their types, from the manifest and the target."""
        schema = tuple(Column(*column) for column in output.manifest["schema"])
        plan = self._plan(cursor, f"checkpoint {output.key}", schema)
        marked = {CHECKPOINT: "bigint"} if self.attach else {}
        return {name: postgres for name, (postgres, _) in plan.items()} | marked

    def _plan(self, cursor: Any, which: str, schema: Schema) -> Columns:  # noqa: ANN401 - a cursor
        """Return for each column its type in the target, and how it gets there."""
        there, bases = database.columns_of(cursor, self.target), target_check.domains_of(cursor, self.target)
        changes = self.mode in BY_KEY and any(column.name == CHANGE for column in schema)
        return staging_table.plan(which, schema, there, create=self.create, changes=changes, bases=bases)

    def staged(self, output: Output) -> RowSet:
        """Return the rows that an attempt staged; for a changelog, the changes themselves."""
        return PostgresRows(self.conn_id, RowSelection(TableName(*output.handle["staging"])), output.manifest["schema"])

    def changing(self, output: Output) -> tuple[RowSet, RowSet] | None:
        """Return the rows of the staged keys, or of the slot: as they are now, and as they would be after promotion."""
        table, rows, then = TableName(*output.handle["staging"]), SlotRows.of(output.handle), None
        if rows is None and self.mode not in BY_KEY:
            return None
        schema = [column for column in output.manifest["schema"] if column[0] != CHANGE]
        with self._looking() as cursor:
            there = database.columns_of(cursor, self.target)
            if rows is not None:
                now = rows.where(cursor, self.target)
            else:
                names = [name for name, _ in schema]
                now, then = staging_table.changing(
                    cursor, table, self.target, key=self.key, columns=names, mode=self.mode
                )
        after = PostgresRows(self.conn_id, RowSelection(table, instead=then), schema, "after")
        if there is None:
            return after.nothing(), after
        known = [column for column in schema if column[0] in there]
        return PostgresRows(self.conn_id, RowSelection(self.target, where=now), known, "before"), after

    # --- promote -----------------------------------------------------------------------------------------------------

    def _promoter(self, output: Output) -> PostgresPromoter:
        mode = self._mode
        if by_checkpoint(self.mode, output.handle):  # replacing a slot's rows means appending its next revision
            mode = replace(mode, name="append")
        return PostgresPromoter(self.conn_id, mode, output)

    @property
    def _mode(self) -> Mode:
        return Mode(self.mode, tuple(self.key), create=self.create, attach=self.attach, history=self.history)

    def find(self, output: Output) -> Promotion:
        """Say whether the output is promoted, staged or lost; change no row."""
        return self._promoter(output).find()

    def promote(self, output: Output) -> Promotion:
        """Apply the staged rows in one transaction with the marker."""
        return self._promoter(output).promote()

    def discard(self, output: Output) -> None:
        """Remove what any attempt of an aborted revision staged."""
        for left in self.attempts():
            if left[:2] == output.key[1:]:
                self.remove(left)

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> Iterator[Attempt]:
        """List the staging tables of this sink."""
        with self._looking() as cursor:
            names = staging_table.tables(cursor, self.staging_schema, f"{self._prefix}_")
        for name in names:
            if match := _LEFT.fullmatch(name):
                yield Attempt(int(match[1]), int(match[2]), int(match[3]), name)

    def remove(self, left: Attempt) -> None:
        """Drop one staging table."""
        with self._looking() as cursor:
            staging_table.drop(cursor, TableName(self.staging_schema, left.path))

    @contextmanager
    def _looking(self) -> Iterator[Any]:
        """Hand out a cursor in the target database, in one transaction; name the sink in errors."""
        import psycopg2

        try:
            with database.transaction(self.conn_id) as cursor:
                yield cursor
        except psycopg2.Error as error:
            msg = f"{self.location()}: {database.one_line(error)}"
            raise (SinkUnavailable if database.passes(error) else ConfigError)(msg) from None

    # --- for a record that is older than the table -------------------------------------------------------------------

    def newest(self, pipeline: str) -> int | None:
        """Return the commit_seq of the newest receipt; None without receipts: markers do not say a commit_seq."""
        with self._looking() as cursor:
            return receipts.newest(cursor, self.target, pipeline)

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:
        """Yield the receipts that are kept beside the markers."""
        with self._looking() as cursor:
            yield from receipts.since(cursor, self.target, pipeline, since)

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:
        """Yield checkpoint and revision of every marker."""
        with self._looking() as cursor:
            yield from receipts.marked(cursor, promotion.MARKERS, self.target, pipeline)

    # --- verify, read ------------------------------------------------------------------------------------------------

    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with its marker, and with its rows: by their count, or upserted ones by key."""
        promoter = self._promoter(output)
        with self._looking() as cursor:
            yield from self._held(cursor).differences(output, promoter)

    def strangers(self, known: Iterable[Output]) -> Iterator[str]:
        """Yield the checkpoints that rows carry though none of them is committed."""
        known = list(known)
        if self.mode == "append" or any(by_checkpoint(self.mode, output.handle) for output in known):
            with self._looking() as cursor:
                yield from self._held(cursor).strangers(known)

    def stands(self, output: Output) -> bool:
        """Say whether a revision's rows are still in the target: no later revision has replaced them."""
        with self._looking() as cursor:
            held = self._held(cursor)
            return held.keeps(output) if self.mode in BY_KEY else held.stands(output)

    def _held(self, cursor: Any) -> Held:  # noqa: ANN401 - a cursor
        return Held(cursor, self.target, self._mode)

    def committed(self, output: Output) -> RowSet:
        """Return the rows of a decided revision; Swept if a later one has replaced them."""
        if self.mode in BY_KEY:
            self._refuse(f"what a checkpoint of mode {self.mode!r} changed is not told apart once it is committed")
        if not self.stands(output):
            msg = f"checkpoint {output.key}: its rows in {self.target} were replaced since and are not kept"
            raise Swept(msg)
        with self._looking() as cursor:
            mine = self._held(cursor).mine(output)
        return PostgresRows(self.conn_id, RowSelection(self.target, where=mine), output.manifest["schema"], "committed")

    def check_readable(self, outputs: Sequence[Output] = ()) -> None:
        """Raise ConfigError unless rows say which checkpoint they belong to."""
        whole = self.mode == "replace" and not all("slot" in output.handle for output in outputs)
        if self.mode in BY_KEY or whole:
            self._refuse(f"rows of mode {self.mode!r} do not say whose they are; read the table itself")
        if self.slot_column is not None:
            with self._looking() as cursor:
                columns = database.columns_of(cursor, self.target) or {}
            if CHECKPOINT not in columns:
                self._refuse(
                    f"rows do not say whose they are; read the table itself, or add a column {CHECKPOINT} bigint"
                )

    def check_changes(self, outputs: Sequence[Output]) -> None:
        """Raise ConfigError unless these revisions can be read as a changelog: by key, the history has to have them."""
        if self.mode not in BY_KEY:
            super().check_changes(outputs)
            return
        for output in outputs:
            if isinstance(output.handle["order"], str):
                self._refuse("what slots change by key depends on their order; read the table itself")
            if not self.stands(output):
                self._refuse(
                    f"what checkpoint {output.key} changed is not kept any more; a longer history= keeps more from now"
                    " on, and `twophase positions` moves past it"
                )

    def read_changes(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return decided revisions as a changelog; by key, what they changed is in the history and the target."""
        from twophase.sinks.postgres import changes_read

        if self.mode not in BY_KEY:
            return super().read_changes(spark, outputs)
        self.check_changes(outputs)
        return changes_read.frame(spark, self.conn_id, self.target, self.key, outputs)

    def reading_connections(self) -> tuple[str, ...]:
        """Return the connection that reads rows."""
        return (self.conn_id,)

    def read(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return a DataFrame over decided revisions; ManifestMismatch if a later one has replaced the rows of one."""
        from twophase.sinks.postgres import row_read

        self.check_readable(outputs)
        for output in outputs:
            if not self.stands(output):
                msg = f"checkpoint {output.key}: its rows in {self.target} were replaced since and are not kept"
                raise ManifestMismatch(msg)
        return row_read.frame(spark, self.conn_id, self.target, outputs)
