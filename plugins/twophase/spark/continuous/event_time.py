"""Event time: watermarks of the reads, which rows are late, which windows close, sessions that merge.

`windowed` uses it for windows in SQL, and `twophase.windows` gives it to transforms. Nothing here asks a clock. A
record is late by the watermark before its checkpoint, and a window closes by the one after it: both follow from the
fixed input and from the state before, so a replay gives the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: The columns of a window.
START, END = "window_start", "window_end"
#: Beside the watermarks of the reads in a state's manifest: how many rows were late in its checkpoint.
LATE = "_late"
#: The column of a new state that says that a key is deleted.
DELETED = "_deleted"

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_SPAN = re.compile(r"\s*(\d+)\s*([a-z]+?)s?\s*")


def span(text: str, what: str) -> timedelta:
    """Return the length of a time such as `10 minutes`; ConfigError if it is none."""
    found = _SPAN.fullmatch(str(text).lower())
    if not found or found[2] not in _UNITS:
        msg = f"{what}: {text!r}: expected a number and seconds, minutes, hours, days or weeks, such as '10 minutes'"
        raise ConfigError(msg)
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class Watermarks:
    """How far event time has come in one checkpoint: before it and after it, in microseconds since 1970.

    None: a read has brought no record yet, so nothing is late and nothing closes.
    """

    before: int | None = None
    after: int | None = None
    #: Windows are sessions, which take in rows at their very end, and rows from before their start.
    sessions: bool = False

    @property
    def moves(self) -> bool:
        """Return True if windows may close that have no new rows."""
        return self.after is not None and self.after != self.before

    def is_late(self, start: Column, end: Column) -> Column:
        """Return the condition that a row is late: its window is closed, or it may belong to a closed session."""
        if self.before is None:
            return _literal(value=False)
        return _micros(start) < self.before if self.sessions else _micros(end) <= self.before

    def closes(self, end: Column) -> Column:
        """Return the condition that a window closes at the end of this checkpoint."""
        if self.after is None:
            return _literal(value=False)
        return _micros(end) < self.after if self.sessions else _micros(end) <= self.after

    # --- for transforms ----------------------------------------------------------------------------------------------

    def late(self, frame: DataFrame) -> DataFrame:
        """Return the rows of a frame with `window_start` and `window_end` that are late."""
        return frame.where(self.is_late(_column(START), _column(END)))

    def on_time(self, frame: DataFrame) -> DataFrame:
        """Return the rows of a frame with `window_start` and `window_end` that are not late."""
        return frame.where(~self.is_late(_column(START), _column(END)))

    def final(self, state: Any, merged: DataFrame) -> tuple[DataFrame, DataFrame]:  # noqa: ANN401 - a KeptState
        """Return the rows of the windows that close, and the new state without them.

        `merged` has the state's columns for the keys that this checkpoint changed. Other windows close, too.
        """
        every = self._every(state, merged)
        closed = every.where(self.closes(_column(END)) & ~_column(DELETED)).drop(DELETED)
        return closed, self._new_state(every)

    def updates(self, state: Any, merged: DataFrame) -> tuple[DataFrame, DataFrame]:  # noqa: ANN401 - a KeptState
        """Return the rows that this checkpoint changed, and the new state without the windows that close."""
        return merged, self._new_state(self._every(state, merged))

    def _every(self, state: Any, merged: DataFrame) -> DataFrame:  # noqa: ANN401 - a KeptState
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        every = merged if DELETED in merged.columns else merged.withColumn(DELETED, F.lit(False))  # noqa: FBT003 - Spark's
        untouched = untouched_closing(state, self, merged, END)
        return every if untouched is None else every.unionByName(untouched.withColumn(DELETED, F.lit(False)))  # noqa: FBT003

    def _new_state(self, every: DataFrame) -> DataFrame:
        return every.withColumn(DELETED, _column(DELETED) | self.closes(_column(END)))


def untouched_closing(state: Any, marks: Watermarks, merged: DataFrame, end: str) -> DataFrame | None:  # noqa: ANN401 - a KeptState
    """Return the rows of the state whose windows close without a row of `merged`; None: no window can."""
    if not marks.moves:
        return None
    return with_same(state.whole().where(marks.closes(_column(end))), merged, state.key, "left_anti")


def watermarks(
    state: Any,  # noqa: ANN401 - a KeptState
    reads: Mapping[str, tuple[DataFrame, str, str]],
    rows: DataFrame | None = None,
    *,
    window: tuple[Column, Column] | None = None,
    sessions: bool = False,
) -> Watermarks:
    """Return the watermarks of a checkpoint, and tell the state those that its manifest is to keep.

    `reads` has for each read its frame, the column with its event time, and the delay. A read's watermark is its
    greatest event time less the delay, and never goes back; the pipeline's is the least of all reads. `rows` with the
    start and end of their window are counted if they are late.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    known = {name: _number(text) for name, text in state.watermarks.items() if name in reads}
    before = Watermarks(_least(known, reads), None, sessions)
    asked = [
        frame.agg(F.lit(name).alias("name"), F.max(_micros(F.col(column))).alias("value"))
        for name, (frame, column, _) in reads.items()
    ]
    if rows is not None and before.before is not None:
        late = before.is_late(*(window or (_column(START), _column(END))))
        asked.append(rows.where(late).agg(F.lit(LATE).alias("name"), F.count(F.lit(1)).alias("value")))
    found = {row["name"]: row["value"] for row in reduce(lambda one, other: one.unionAll(other), asked).collect()}
    late_rows = found.pop(LATE, 0)
    for name, (_, _, delay) in reads.items():
        if found.get(name) is not None:
            reached = found[name] - span(delay, f"read {name!r}: delay") // MICROSECOND
            known[name] = max(reached, known.get(name, reached))
    state.advance({**{name: _text(value) for name, value in sorted(known.items())}, LATE: late_rows})
    return Watermarks(before.before, _least(known, reads), sessions)


def _least(known: Mapping[str, int], reads: Mapping[str, Any]) -> int | None:
    """Return the pipeline's watermark; None while a read has brought nothing."""
    return min(known.values()) if known and known.keys() == reads.keys() else None


def merged_sessions(
    fresh: DataFrame,
    kept: DataFrame,
    by: Sequence[str],
    parts: Mapping[str, str],
    *,
    ends: tuple[str, str] = (START, END),
) -> DataFrame:
    """Return the sessions that new rows and kept sessions make together: `by`, start, end, and the merged parts.

    `parts` says how the values of two sessions become one: by `sum`, `min` or `max`. Every row is a session of its own
    at first, and those that touch become one; a late-comer may bridge two that were kept.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    start, end = (f"`{name}`" for name in ends)
    both = fresh.select(*map(_quoted, (*by, *ends, *parts))).unionByName(
        kept.select(*map(_quoted, (*by, *ends, *parts)))
    )
    micros = f"cast(unix_micros(cast({end} as timestamp)) - unix_micros(cast({start} as timestamp)) as decimal(18,0))"
    gap = F.expr(f"make_interval(0, 0, 0, 0, 0, 0, cast({micros} * 0.000001BD as decimal(18,6)))")
    merge = {"sum": F.sum, "min": F.min, "max": F.max}
    values = [merge[how](_quoted(name)).alias(name) for name, how in parts.items()]
    joined = both.groupBy(*map(_quoted, by), F.session_window(F.col(start), gap).alias("_session")).agg(*values)
    bounds = [F.col("_session.start").alias(ends[0]), F.col("_session.end").alias(ends[1])]
    return joined.select(*map(_quoted, by), *bounds, *map(_quoted, parts))


def with_same(frame: DataFrame, other: DataFrame, names: Sequence[str], how: str) -> DataFrame:
    """Join two frames by columns of the same names, null equal to null; `how` is left_semi or left_anti."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    asked = other.select(*(F.col(_quoted(name)).alias(f"_k_{name}") for name in names), F.lit(1).alias("_there"))
    same = [F.col(_quoted(name)).eqNullSafe(F.col(_quoted(f"_k_{name}"))) for name in names]
    return frame.join(asked, reduce(lambda one, more: one & more, same, F.lit(True)), how)  # noqa: FBT003 - Spark's own


def _micros(moment: Column) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    return F.unix_micros(moment.cast("timestamp"))


def _literal(*, value: bool) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    return F.lit(value)


def _number(text: str) -> int:
    return (datetime.fromisoformat(text) - _BEGIN) // MICROSECOND


def _text(number: int) -> str:
    return (_BEGIN + number * MICROSECOND).isoformat()


def _column(name: str) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    return F.col(_quoted(name))


def _quoted(name: str) -> str:
    return f"`{name}`"
