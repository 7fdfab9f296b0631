"""The promoter of the PostgreSQL sink: one transaction in the target database applies the rows and sets the marker.

marker row ── already there? ─→ nothing to do          the primary key decides between two promoters
│
check that the staging table is ours alone (seal.py)
delete the rows of the older revision (a replacement), or of the slot
insert the staged rows, or attach the staging table; by key: keep what they overwrite (history.py)
drop the staging table
│
COMMIT ── reply lost? ─→ unknown: the marker tells
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twophase.changelog import CHANGE
from twophase.core.checkpoint import Json, Output
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance, Refused
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.postgres import history, owner, receipts, seal, staging_table, swallowed_rows, target
from twophase.sinks.postgres.changes import Changes
from twophase.sinks.postgres.history import History, Order
from twophase.sinks.postgres.slot_rows import SlotRows
from twophase.sinks.postgres.staging_table import CHECKPOINT
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable

#: The table of markers.
MARKERS = TableName(history.SCHEMA, "promoted")
#: Checkpoint and revision in the name of a staging table.
_STAGED = re.compile(r"s_[0-9a-f]{8}_(\d+)_r(\d+)_")
#: `kept`: the history has what the checkpoint overwrote; `slot_order`: its place among slots, if it is a slot.
_CREATE_MARKERS = (
    """CREATE TABLE IF NOT EXISTS {} (pipeline text, target text, checkpoint_id bigint, revision integer,
        attempt integer NOT NULL, manifest jsonb NOT NULL, promoted_at timestamptz NOT NULL DEFAULT now(),
        slot_order text COLLATE "C", kept boolean NOT NULL, PRIMARY KEY (pipeline, target, checkpoint_id, revision))""",
    "CREATE INDEX IF NOT EXISTS promoted_by_slot ON {} (pipeline, target, slot_order)",
    "CREATE INDEX IF NOT EXISTS promoted_kept ON {} (pipeline, target, checkpoint_id) WHERE kept",
)


class NotThere(Refused):
    """Rows to be retracted are not in the target."""


@dataclass(frozen=True)
class Mode:
    """How staged rows get into the target."""

    name: str
    key: tuple[str, ...] = ()
    create: bool = False
    attach: bool = False
    #: Of how many checkpoints the history is kept, the latest ones; None: of all.
    history: int | None = None

    @property
    def keeps(self) -> bool:
        """Say whether overwritten rows are kept in a history."""
        return bool(self.key) and self.history != 0


def create_markers(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Create the table of markers, unless it is there."""
    from psycopg2 import sql

    cursor.execute("SELECT to_regclass(%s)", (str(MARKERS),))
    if cursor.fetchone()[0] is None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('twophase_sinks'))")
        cursor.execute("SELECT to_regnamespace(%s)", (MARKERS.schema,))
        if cursor.fetchone()[0] is None:  # no IF NOT EXISTS: that asks for the right to create even if it is there
            cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(MARKERS.schema)))
        for statement in _CREATE_MARKERS:
            cursor.execute(sql.SQL(statement).format(MARKERS.sql))


class PostgresPromoter:
    """Promotes the staged output of one attempt, or says whether it is promoted."""

    def __init__(self, conn_id: str, mode: Mode, output: Output) -> None:
        """Name the output, and how it gets into the target."""
        self.conn_id = conn_id
        self.mode = mode
        self.output = output
        self.key = output.key
        self.manifest = output.manifest
        self.target = TableName(*output.handle["target"])
        self.staged = TableName(*output.handle["staging"])
        self.slot_rows = SlotRows.of(output.handle)

    # --- looking -----------------------------------------------------------------------------------------------------

    def find(self) -> Promotion:
        """Say whether the output is promoted, staged or lost."""
        import psycopg2

        try:
            with database.session(self.conn_id) as session, session.cursor() as cursor:
                return self._find(cursor)
        except psycopg2.Error as error:
            return Promotion(Outcome.RETRY_LATER, database.one_line(error))

    def _find(self, cursor: Any) -> Promotion:  # noqa: ANN401 - a cursor
        """Look at the staging table, then at the marker: a promoter that drops the table sets the marker with it."""
        strange = seal.seal(cursor, self.staged, self.target)
        found = None if strange else staging_table.look(cursor, self.staged)
        marker = self.marker(cursor)
        if marker is not None:
            return self._already(*marker)
        if strange:
            return Promotion(Outcome.FAILED, strange, Hindrance.LOST)
        if found is None:
            why = f"staging table {self.staged} is gone and no marker is there"
            return Promotion(Outcome.FAILED, why, Hindrance.LOST)
        if found.digest(self.staged) != self.manifest["digest"]:
            why = f"staging table {self.staged} is not what was voted for"
            return Promotion(Outcome.FAILED, why, Hindrance.LOST)
        return Promotion(Outcome.RETRY_LATER, "staged")

    def marker(self, cursor: Any) -> tuple[int, Json] | None:  # noqa: ANN401 - a cursor
        """Return the attempt and the manifest that the marker names; None if there is no marker."""
        from psycopg2 import sql

        query = (
            "SELECT attempt, manifest FROM {}"
            " WHERE pipeline = %s AND target = %s AND checkpoint_id = %s AND revision = %s"
        )
        cursor.execute(sql.SQL(query).format(MARKERS.sql), (self.key[0], str(self.target), *self.key[1:]))
        row = cursor.fetchone()
        return (row[0], row[1]) if row else None

    def _already(self, attempt: int, manifest: Json) -> Promotion:
        """Return ALREADY_PROMOTED if this record has ever voted for what the marker names (R10), else FAILED."""
        if manifest["digest"] not in {self.manifest["digest"], *self.output.earlier}:
            why = f"the target has the marker of another {self.key}, which this record did not vote for"
            return Promotion(Outcome.FAILED, why, Hindrance.FOREIGN)
        return Promotion(Outcome.ALREADY_PROMOTED, attempt=attempt, manifest=manifest)

    # --- promoting ---------------------------------------------------------------------------------------------------

    def promote(self) -> Promotion:  # noqa: PLR0911 - one return per outcome
        """Apply the staged rows in one transaction with the marker."""
        import psycopg2

        committing = False
        try:
            with database.session(self.conn_id) as session, session.cursor() as cursor:
                found = self._find(cursor)
                if found.outcome is not Outcome.RETRY_LATER:
                    return found
                session.rollback()  # an open read would keep another promoter from dropping the staging table
                database.commit_durably(cursor)
                if not self._mark(cursor):
                    session.rollback()
                    return self._find(cursor)
                hit("promote.marked")
                receipts.keep(cursor, self.target, self.output.receipt)
                self._apply(cursor)
                hit("promote.applied")
                committing = True
                session.commit()
                hit("promote.durable")
                return Promotion(Outcome.PROMOTED, attempt=self.output.attempt, manifest=self.manifest)
        except Refused as error:
            return Promotion(Outcome.FAILED, str(error), error.hindrance)
        except psycopg2.Error as error:
            if committing and not error.pgcode:
                return Promotion(Outcome.UNKNOWN, database.one_line(error))
            if database.passes(error):
                return Promotion(Outcome.RETRY_LATER, database.one_line(error))
            return self._failed(error)

    @property
    def numbers(self) -> bool:
        """Say whether rows get the checkpoint's number, provided that the target has a column for it."""
        return self.mode.name == "append" or self.slot_rows is not None

    @property
    def order(self) -> Order:
        """Return the checkpoint's place in the order of changes by key."""
        found: Order = self.output.handle.get("order", self.key.checkpoint_id)
        return found

    def _failed(self, error: Exception) -> Promotion:
        """Read the marker once more before saying that a person has to act: another promoter may have been faster."""
        found = self.find()
        settled = found.outcome in {Outcome.ALREADY_PROMOTED, Outcome.FAILED}
        return found if settled else Promotion(Outcome.FAILED, database.one_line(error), Hindrance.REFUSED)

    def _mark(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Insert the marker; False if another promoter has."""
        from psycopg2 import sql

        query = (
            "INSERT INTO {} (pipeline, target, checkpoint_id, revision, attempt, manifest, slot_order, kept)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
        )
        slot = self.order if isinstance(self.order, str) else None
        manifest = json.dumps(dict(self.manifest), ensure_ascii=False)  # its columns' names fit the database's encoding
        values = (self.key[0], str(self.target), *self.key[1:], self.output.attempt, manifest, slot, self.mode.keeps)
        cursor.execute(sql.SQL(query).format(MARKERS.sql), values)
        return int(cursor.rowcount) == 1

    def try_out(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Promote without the marker, in a transaction to be rolled back; a trigger can see it by `twophase.trial`."""
        cursor.execute("SET LOCAL twophase.trial = 'on'")
        self._apply(cursor)
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def try_making(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Run only the promotion's CREATE, ALTER and DROP, without any row; to be rolled back, too."""
        cursor.execute("SET LOCAL twophase.trial = 'on'")
        if self.mode.create:
            self._create(cursor, self._columns(cursor))
        staging_table.drop(cursor, self.staged)

    def _columns(self, cursor: Any) -> dict[str, str]:  # noqa: ANN401 - a cursor
        """Return the staged columns that the target gets, with their types."""
        found = database.columns_of(cursor, self.staged) or {}
        return {name: kind for name, kind in found.items() if name not in {CHECKPOINT, CHANGE}}

    def _apply(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        if strange := seal.seal(cursor, self.staged, self.target):
            raise Refused(strange, Hindrance.LOST)
        if theirs := self.foreign(cursor):
            raise Refused(theirs, Hindrance.REFUSED)
        if later := self.later(cursor):
            raise Refused(later, Hindrance.FOREIGN)
        columns = self._columns(cursor)
        if self.mode.create:
            self._create(cursor, columns)
        if self.mode.attach or self.mode.key:
            self._expect(swallowed_rows.count(cursor, self.staged), f"in staging table {self.staged}")
        if self.mode.attach:
            target.attach(cursor, self.target, self.staged, self.key)
            return
        target.lock(cursor, self.target)
        if self.mode.key:
            self._change(cursor, columns)
        else:
            self._put(cursor, list(columns))
        staging_table.drop(cursor, self.staged)

    def _create(self, cursor: Any, columns: dict[str, str]) -> None:  # noqa: ANN401 - a cursor
        """Create the target, or add the columns that are new."""
        if self.mode.name == "append":
            columns = {**columns, CHECKPOINT: "bigint NOT NULL"}
        made = target.Made(columns, self.mode.key)
        if self.mode.attach:
            made = made._replace(partitioned_by=CHECKPOINT)
        elif self.slot_rows:
            made = made._replace(indexed=self.slot_rows.column)
        elif self.mode.name == "append":
            made = made._replace(indexed=CHECKPOINT)
        target.create(cursor, self.target, made)

    def _put(self, cursor: Any, columns: list[str]) -> None:  # noqa: ANN401 - a cursor
        """Insert the rows in place of those of the older revision, of the slot, or of the whole table."""
        from psycopg2 import sql

        if not self._make_room(cursor):
            return  # a later checkpoint has replaced the whole table already: a replay
        names = [sql.Identifier(name) for name in columns]
        values: list[Any] = list(names)
        there = database.columns_of(cursor, self.target) or {}
        if self.numbers and CHECKPOINT in there:
            names.append(sql.Identifier(CHECKPOINT))
            values.append(sql.Literal(self.key.checkpoint_id))
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}")
        cursor.execute(insert.format(self.target.sql, *map(sql.SQL(", ").join, (names, values)), self.staged.sql))
        moved = int(cursor.rowcount)
        if swallowed_rows.is_watched(cursor, self.target):
            moved = swallowed_rows.count(cursor, self.target, self._mine(cursor))
        self._expect(moved, f"of the checkpoint in {self.target}; let no trigger or rule of it swallow or add rows")
        if self.slot_rows:
            self.slot_rows.lock(cursor, self.key, self.target)
            if why := self.shared(cursor):
                raise Refused(why)

    def _make_room(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Delete the rows that are replaced; False if a later checkpoint has replaced the whole table since."""
        from psycopg2 import sql

        mine = self._mine(cursor)
        if mine is None and self._overtaken(cursor):
            return False
        if self.mode.name == "append" and self._older(cursor) is None:  # by its marker: its write may have been renamed
            return True
        cursor.execute(sql.SQL("DELETE FROM {} {}").format(self.target.sql, mine or sql.SQL("")))
        return True

    def foreign(self, cursor: Any) -> str | None:  # noqa: ANN401 - a cursor
        """Say that the target belongs to another pipeline; else None, and this one owns it from now on."""
        return owner.claim(cursor, self.key.pipeline, self.target, MARKERS)

    def _mine(self, cursor: Any) -> Composable | None:  # noqa: ANN401 - a cursor
        """Return the condition for the checkpoint's rows; None if all rows of the table are."""
        if self.slot_rows:
            return self.slot_rows.where(cursor, self.target)
        return staging_table.of_checkpoint(self.key.checkpoint_id) if self.mode.name == "append" else None

    def _expect(self, found: int, where: str) -> None:
        """Raise Refused unless there are as many rows as were voted for."""
        if found != self.manifest["rows"]:
            msg = f"expected {self.manifest['rows']} rows, found {found} {where}"
            raise Refused(msg)

    def shared(self, cursor: Any) -> str | None:  # noqa: ANN401 - a cursor
        """Say which other slot overlaps this one; None if none does."""
        return self.slot_rows.shared(cursor, MARKERS, self.key, self.target) if self.slot_rows else None

    # --- by key ------------------------------------------------------------------------------------------------------

    def is_in_order(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Say whether the output replaces nothing, and no checkpoint that comes later is promoted."""
        return self._older(cursor) is None and not self._overtaken(cursor)

    def comes_after_staged(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Say whether another output is staged that may be promoted before this one, and change what it finds."""
        from psycopg2 import sql

        names = staging_table.tables(cursor, self.staged.schema, self.staged.name[: len("s_01234567_")])
        found = {tuple(map(int, match.groups())) for match in map(_STAGED.match, names) if match}
        others = {one for one in found if one[0] != self.key.checkpoint_id}
        if isinstance(self.order, int):
            others = {one for one in others if one[0] < self.key.checkpoint_id}
        query = sql.SQL(
            "SELECT checkpoint_id, revision FROM {} WHERE pipeline = %s AND target = %s AND checkpoint_id = ANY(%s)"
        )
        cursor.execute(query.format(MARKERS.sql), (self.key.pipeline, str(self.target), [one for one, _ in others]))
        return bool(others - set(cursor.fetchall()))

    def check_there(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Raise NotThere if a retracted row is not in the target; for a replacement the history tells that later."""
        from psycopg2 import sql

        if self.mode.name == "retract" and self.is_in_order(cursor):
            changes = self._changes(cursor, database.columns_of(cursor, self.staged) or {})
            is_made = database.columns_of(cursor, self.target) is not None
            self._refuse_missing(changes.missing(cursor, changes.there if is_made else sql.SQL("SELECT WHERE false")))

    def deletes(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Say whether the staged rows of an upsert may delete keys."""
        return self.mode.name == "upsert" and staging_table.has_changes(cursor, self.staged)

    def _changes(self, cursor: Any, columns: Mapping[str, str]) -> Changes:  # noqa: ANN401 - a cursor
        mine = {name: kind for name, kind in columns.items() if name != CHANGE}
        retracts, equals = self.mode.name == "retract", staging_table.equals(cursor, self.target)
        deletes = self.deletes(cursor)
        return Changes(self.target, self.staged, self.mode.key, mine, retracts, deletes, equals)

    def _change(self, cursor: Any, columns: dict[str, str]) -> None:  # noqa: ANN401 - a cursor
        """Change rows by key as if all checkpoints had come in their order; refuse to retract what is not there."""
        changes = self._changes(cursor, columns)
        if not self.mode.keeps:
            self._refuse_missing(changes.missing(cursor, changes.there))
            changes.read_in_order(cursor)
            changes.apply(cursor)
            self._refuse_swallowed(cursor, changes, changes.rows, changes.others)
            return
        history.lock(cursor, "history", self.key.pipeline, self.target)
        chain = History(cursor, self.key.pipeline, changes, self.order)
        older = self._older(cursor)
        if older is None and not self._overtaken(cursor):
            self._refuse_missing(changes.missing(cursor, changes.there))
            changes.read_in_order(cursor)
            chain.add()
            changes.apply(cursor)
            self._refuse_swallowed(cursor, changes, changes.rows, changes.others)
        else:
            self._refuse_forgotten(cursor)
            chain.insert()
            self._refuse_missing(chain.missing())
            changed = {*changes.others, *(older or ())} - {*self.mode.key, CHANGE}
            self._refuse_swallowed(cursor, changes, *chain.replace(changed))
            for later, columns_there in self._narrower(cursor, changed):
                chain.carry(later, changed - columns_there)
            chain.forget()
        if self.mode.history is not None:
            self._limit(cursor, chain, self.mode.history)

    def _refuse_missing(self, count: int) -> None:
        if count:
            msg = f"{count} rows are retracted from {self.target} that are not there"
            raise NotThere(msg)

    def _refuse_swallowed(self, cursor: Any, changes: Changes, rows: Composable, columns: list[str]) -> None:  # noqa: ANN401 - a cursor
        if swallowed_rows.is_watched(cursor, self.target) and (
            count := swallowed_rows.swallowed(cursor, changes, rows, columns)
        ):
            msg = f"{count} rows of the checkpoint are not in {self.target} as they were staged; let no trigger of it"
            msg = f"{msg} swallow or bring back rows"
            raise Refused(msg)

    def _refuse_forgotten(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        if why := self.forgotten(cursor):
            raise Refused(why)

    def has_no_place(self, cursor: Any) -> str | None:  # noqa: ANN401 - a cursor
        """Say why the history has no place for the checkpoint; None if it has: then it keeps it while it is staged.

        `_limit` drops nothing that a staged output may need.
        """
        if not self.mode.keeps:
            return None
        history.lock(cursor, "limit", self.key.pipeline, self.target, shared=True)
        return self.forgotten(cursor)

    def kept(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Say whether the history has the rows that this revision overwrote."""
        return bool(
            self._ask(cursor, "SELECT 1 FROM {markers} WHERE {order} = {at} AND revision = {revision} AND kept")
        )

    def forgotten(self, cursor: Any) -> str | None:  # noqa: ANN401 - a cursor
        """Say why the checkpoint has no place in the history any more; None if it has one, or comes last."""
        (found,) = self._ask(cursor, "SELECT min(checkpoint_id) FROM {markers} WHERE {order} >= {at} AND NOT kept")[0]
        if found is None:
            return None
        return (
            f"what checkpoint {found} overwrote in {self.target} is not kept, so nothing that comes before it can be"
            " changed any more"
        )

    def later(self, cursor: Any) -> str | None:  # noqa: ANN401 - a cursor
        """Say that a later revision of the checkpoint is in the target already, by another record; else None."""
        query = "SELECT max(revision) FROM {markers} WHERE checkpoint_id = {checkpoint} AND revision > {revision}"
        ((found,),) = self._ask(cursor, query, checkpoint=self.key.checkpoint_id)
        if found is None:
            return None
        return f"table {self.target} has its revision {found} already; it is not in this record"

    def _older(self, cursor: Any) -> list[str] | None:  # noqa: ANN401 - a cursor
        """Return the columns of the revision that is replaced; None if there is none."""
        query = "SELECT manifest->'schema' FROM {markers} WHERE {order} = {at} AND revision < {revision}"
        found = self._ask(cursor, query, "ORDER BY revision DESC LIMIT 1")
        return [name for name, _ in found[0][0]] if found else None

    def _overtaken(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Say whether a checkpoint that comes later is promoted."""
        return bool(self._ask(cursor, "SELECT 1 FROM {markers} WHERE {order} > {at}", "LIMIT 1"))

    def _narrower(self, cursor: Any, columns: set[str]) -> list[tuple[Order, set[str]]]:  # noqa: ANN401 - a cursor
        """Return the later checkpoints that lack some of these columns, in order, each with the columns that it has."""
        query = (
            "SELECT DISTINCT ON ({order}) {order}, ARRAY(SELECT c->>0 FROM jsonb_array_elements(manifest->'schema') c)"
            " FROM {markers} WHERE {order} > {at}"
        )
        found = self._ask(cursor, query, "ORDER BY {order}, revision DESC")
        return [(order, set(names)) for order, names in found if not columns <= set(names)]

    def _limit(self, cursor: Any, chain: History, most: int) -> None:  # noqa: ANN401 - a cursor
        """Keep the entries of the latest checkpoints only, unless another output is staged that may need older ones.

        An attempt looks for its place after it has staged (`has_no_place`), and waits there for this lock.
        """
        history.lock(cursor, "limit", self.key.pipeline, self.target)
        cursor.execute(
            "SELECT 1 FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)"
            " AND NOT starts_with(tablename, %s) LIMIT 1",
            (self.staged.schema, self.staged.name[: len("s_01234567_")], self.staged.name),
        )
        if cursor.fetchone():
            return
        last = f"ORDER BY 1 DESC OFFSET {most - 1} LIMIT 1"
        if found := self._ask(cursor, "SELECT DISTINCT {order} FROM {markers} WHERE true", last):
            ((first,),) = found
            chain.drop(first)
            self._ask(cursor, "UPDATE {markers} SET kept = false WHERE kept AND {order} < {first}", first=first)

    def _ask(self, cursor: Any, query: str, then: str = "", **more: Any) -> list[tuple[Any, ...]]:  # noqa: ANN401 - a cursor
        """Run a query over the markers of this pipeline in this target."""
        from psycopg2 import sql

        mine = sql.SQL(f"{query} AND pipeline = {{pipeline}} AND target = {{target}} {then}")
        values = {
            "pipeline": self.key.pipeline,
            "target": str(self.target),
            "revision": self.key.revision,
            "at": self.order,
            **more,
        }
        order = sql.Identifier("checkpoint_id" if isinstance(self.order, int) else "slot_order")
        literals = {name: sql.Literal(value) for name, value in values.items()}
        cursor.execute(mine.format(markers=MARKERS.sql, order=order, **literals))
        return list(cursor.fetchall()) if cursor.description else []
