"""The rows that a slot owns by the value of a column (`slot_column`), in a target that is replaced slot by slot.

Called by the sink, its checks and the promotion. An interval owns the rows whose column lies in it, its start included
and its end not. A date counts as midnight UTC, a time without zone as UTC. A partition key owns the rows whose column
equals it. So two slots must not overlap. The second one is refused: before its vote if the first is promoted by then,
else by its promotion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.core.checkpoint import Json, Key
from twophase.core.claims import Claim
from twophase.core.errors import BadValue, ConfigError
from twophase.core.slots import Slot
from twophase.sinks.postgres import history, staging_table
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable

_TIMES = re.compile(r"date|timestamp(\(\d\))? with(out)? time zone")
#: A partition key that is a time stands for that moment only.
_MOMENT = timedelta(microseconds=1)


class SlotRows(NamedTuple):
    """The rows of one slot, as a column tells."""

    column: str
    slot: Slot

    @classmethod
    def of(cls, handle: Json) -> SlotRows | None:
        """Read column and slot from a handle; None if the sink has no `slot_column`."""
        column = handle.get("slot_column")
        return None if column is None else cls(column, Slot.parse(handle["slot"]))

    def condition(self, kind: str, equals: Mapping[str, Composable]) -> Composable:
        """Return the condition for these rows, given the column's type and the operators that compare values.

        Intervals are written in UTC, so date and both timestamp types read the same moments from them.
        """
        from psycopg2 import sql

        column, slot = sql.Identifier(self.column), self.slot
        if slot.start is not None and slot.end is not None:
            between = map(sql.Literal, (slot.start.isoformat(), slot.end.isoformat()))
            return sql.SQL("{0} >= {1} AND {0} < {2}").format(column, *between)
        moment = slot.start.isoformat() if slot.start and _TIMES.fullmatch(kind) else slot.text
        return sql.SQL("{} {} {}").format(column, equals.get(self.column, sql.SQL("=")), sql.Literal(moment))

    def where(self, cursor: Any, table: TableName) -> Composable:  # noqa: ANN401 - a cursor
        """Return the condition for these rows of an existing table."""
        from psycopg2 import sql

        kind = (database.columns_of(cursor, table) or {}).get(self.column, "")
        return sql.SQL("WHERE {}").format(self.condition(kind, staging_table.equals(cursor, table)))

    @property
    def claim(self) -> Claim:
        """Return the slot's claim on the table: a stretch of time, or its key."""
        span = _span(self.slot)
        return Claim(self.slot.text) if span is None else Claim("", *span)

    # --- before the vote ---------------------------------------------------------------------------------------------

    def objection(self, cursor: Any, kind: str) -> str | None:  # noqa: ANN401 - a cursor
        """Say why a column of this type cannot tell whether a row belongs to the slot; None if it can."""
        return self._misfit(kind) if _TIMES.fullmatch(kind) or self.slot.end else self._misspelt(cursor, kind)

    def _misfit(self, kind: str) -> str | None:
        if not _TIMES.fullmatch(kind):
            return "expected a date or a timestamp for an interval"
        if self.slot.start is None:
            return "expected a date, a time or an interval"
        moments = [moment for moment in (self.slot.start, self.slot.end) if moment]
        if kind == "date" and any(moment.time() != time() for moment in moments):
            return "expected midnight in UTC for a date; choose a timestamp, or an interval of whole days"
        return None

    def _misspelt(self, cursor: Any, kind: str) -> str | None:  # noqa: ANN401 - a cursor
        """Say that the key is not spelt as the column spells it: another key could mean the same value; else None."""
        import psycopg2
        from psycopg2 import sql

        read = sql.SQL("SELECT CAST({0} AS {1})::text, CAST({0} AS {1}) = CAST({0} AS {1})")
        cursor.execute("SAVEPOINT spelt")
        try:
            cursor.execute(read.format(sql.Literal(self.slot.text), sql.SQL(kind)))
        except (psycopg2.DataError, psycopg2.ProgrammingError) as error:
            cursor.execute("ROLLBACK TO SAVEPOINT spelt")
            return str(error).partition("\n")[0]
        found = cursor.fetchone()[0]
        return None if found == self.slot.text else f"expected a key as the column spells it, {found!r}"

    def check_staged(self, cursor: Any, which: str, table: TableName, kind: str) -> None:  # noqa: ANN401 - a cursor
        """Raise BadValue if a staged row does not belong to the slot: a later run of the slot would not replace it."""
        from psycopg2 import sql

        outside = sql.SQL("SELECT {0}::text, count(*) OVER () FROM {1} WHERE ({2}) IS NOT TRUE ORDER BY {0} LIMIT 1")
        condition = self.condition(kind, staging_table.equals(cursor, table))
        cursor.execute("SET LOCAL TIME ZONE 'UTC'")
        cursor.execute(outside.format(sql.Identifier(self.column), table.sql, condition))
        if row := cursor.fetchone():
            found, count = "null" if row[0] is None else row[0][:100], row[1]
            msg = (
                f"{which}: column {self.column!r}: expected {self.expected}, found {found} in {count} rows that are"
                " not the slot's; filter them out in the transform"
            )
            raise BadValue(msg)

    @property
    def expected(self) -> str:
        """Return which values belong to the slot, in words."""
        slot = self.slot
        if slot.start is None or slot.end is None:
            return repr(slot.text)
        return f"{slot.start.isoformat()} or later, before {slot.end.isoformat()}"

    # --- beside other slots ------------------------------------------------------------------------------------------

    def shared(self, cursor: Any, markers: TableName, key: Key, target: TableName) -> str | None:  # noqa: ANN401 - a cursor
        """Say which promoted slot overlaps this one; None if none does.

        Promoted slots do not overlap each other, so it is enough to look at the last one that begins before this one's
        end.
        """
        from psycopg2 import sql

        mine = _span(self.slot)
        kind = (database.columns_of(cursor, target) or {}).get(self.column, "")
        if mine is None or not _TIMES.fullmatch(kind):
            return None  # the target is new, or the slot is a key: the record lets one checkpoint have it
        before = (
            "SELECT slot_order FROM {} WHERE pipeline = %s AND target = %s AND checkpoint_id <> %s AND slot_order < %s"
            " ORDER BY slot_order DESC LIMIT 1"
        )
        values = (key.pipeline, str(target), key.checkpoint_id, mine[1].isoformat())
        cursor.execute(sql.SQL(before).format(markers.sql), values)
        row = cursor.fetchone()
        other = Slot.parse(row[0].partition(" ")[2] or row[0]) if row else None
        theirs = _span(other) if other else None
        if other is None or theirs is None or theirs[1] <= mine[0]:
            return None
        return f"slot {self.slot.text!r} overlaps {other.text!r}, which is in {target}; a row must be one slot's"

    def lock(self, cursor: Any, key: Key, target: TableName) -> None:  # noqa: ANN401 - a cursor
        """Let one promotion at a time look for overlaps and commit; rows are applied in parallel before that."""
        history.lock(cursor, "slots", key.pipeline, target)


def by_checkpoint(mode: str, handle: Json) -> bool:
    """Say whether a checkpoint's rows are found by the checkpoint's number that they carry."""
    return mode == "append" or ("slot" in handle and "slot_column" not in handle)


def check_column(cursor: Any, which: str, column: str, kind: str | None, slot: str | None) -> None:  # noqa: ANN401 - a cursor
    """Raise ConfigError unless the column is there and, once the slot is known, its type can tell the slot's rows."""
    msg = f"{which}: slot_column {column!r}"
    if kind is None:
        msg = f"{msg}: there is no such column; expected one that says which slot a row belongs to"
        raise ConfigError(msg)
    if slot is not None and (why := SlotRows(column, Slot.parse(slot)).objection(cursor, kind)):
        msg = f"{msg} is {kind}, and the slot is {slot!r}: {why}"
        raise ConfigError(msg)


def _span(slot: Slot) -> tuple[datetime, datetime] | None:
    return None if slot.start is None else (slot.start, slot.end or slot.start + _MOMENT)
