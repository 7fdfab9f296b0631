"""A continuous query with a window: rows that are late are left out, and windows that close leave the state.

`query` calls it for a text that groups by `window(…)` or `session_window(…)`.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from twophase.spark.continuous import changes
from twophase.spark.continuous.catalyst import CHANGE
from twophase.spark.continuous.event_time import (
    DELETED,
    Watermarks,
    merged_sessions,
    untouched_closing,
    watermarks,
    with_same,
)
from twophase.spark.continuous.parts import OLD, ROWS
from twophase.spark.continuous.shape import refuse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from twophase.spark.continuous.query import CompiledQuery, Group

#: What comes out of windows: their rows once, when they close, or each change of them.
EMITS = ("final", "updates")
#: The types of event time.
TIMES = ("timestamp", "timestamp_ntz", "date")


def check(query: CompiledQuery) -> None:
    """Raise ConfigError if event time and the text do not go together."""
    window, told = query.window, query.event_time
    if query.emit not in EMITS:
        refuse(f"emit {query.emit!r}", f"expected {' or '.join(EMITS)}")
    if window is not None and window.window == "session_window" and query.retracts:
        refuse("session_window", "a row that is taken back may have joined two sessions; its input must only add rows")
    if not told:
        if query.emit == "final":
            refuse("emit 'final'", "a window closes by the watermark; give event_time={read: (column, delay)}")
        return
    if window is None:
        refuse("event_time", "there is no window(…) or session_window(…) in the GROUP BY, so nothing is ever late")
    if unknown := sorted(set(told) - query.fresh):
        refuse(f"event_time of {unknown[0]!r}", f"expected reads with new input: {', '.join(sorted(query.fresh))}")
    if missing := sorted(query.fresh - set(told)):
        refuse("event_time", f"read {missing[0]!r} has none; the watermark is the least of all reads, so give each one")
    for name, (column, _) in told.items():
        kinds = {field.name: field.dataType.simpleString() for field in query.reads[name].schema.fields}
        if kinds.get(column) not in TIMES:
            found = kinds.get(column, f"no such column; there is {', '.join(kinds)}")
            refuse(f"event_time of {name!r}: column {column!r}", f"expected a {' or '.join(TIMES)}, found {found}")


def run(query: CompiledQuery, window: Group, state: Any) -> tuple[DataFrame, DataFrame]:  # noqa: ANN401 - a KeptState
    """Return the output of a batch and the new state."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    rows = query.rows()
    start, end = window.values(query.catalyst)
    marks = _watermarks(query, window, state, rows)
    fresh = query.batch(rows.where(~marks.is_late(start, end)))
    merged = _sessions(query, window, fresh, state) if marks.sessions else query.merged(state.lookup(fresh, prefix=OLD))
    columns = [_quoted(name) for name in (*query.keys, *(part.name for part in query.parts))]
    every = merged.select(*columns)
    untouched = untouched_closing(state, marks, merged, window.names[1])
    if untouched is not None:
        every = every.unionByName(untouched.select(*columns))
    closes = marks.closes(F.col(_quoted(window.names[1])))
    gone = F.coalesce(F.col(ROWS) <= 0, F.lit(True))  # noqa: FBT003 - Spark's own
    output = _final(query, every.where(closes)) if query.emit == "final" else changes.of_groups(query, merged)
    return output, every.withColumn(DELETED, closes | gone)


def _watermarks(query: CompiledQuery, window: Group, state: Any, rows: DataFrame) -> Watermarks:  # noqa: ANN401 - a KeptState
    sessions = window.window == "session_window"
    if not query.event_time:
        return Watermarks(sessions=sessions)
    reads = {name: (query.reads[name], *told) for name, told in query.event_time.items()}
    start, end = window.values(query.catalyst)
    return watermarks(state, reads, rows, window=(start, end), sessions=sessions)


def _final(query: CompiledQuery, closed: DataFrame) -> DataFrame:
    """Return the rows of windows that are closed."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    columns, there = query.result("")
    named = [column.alias(name) for column, (name, _) in zip(columns, query.shape.outputs, strict=True)]
    told = [] if query.mode == "append" else [F.lit("+I").alias(CHANGE)]
    return closed.where(there).select(*named, *told)


def _sessions(query: CompiledQuery, window: Group, fresh: DataFrame, state: Any) -> DataFrame:  # noqa: ANN401 - a KeptState
    """Return the sessions after this batch beside those before it; one that another took in has no rows after."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    by = [name for name in query.keys if name not in window.names]
    kept = with_same(state.whole(), fresh, by, "left_semi")
    how = {part.name: "sum" if part.merged_by == "count" else part.merged_by for part in query.parts}
    after = merged_sessions(fresh, kept, by, how, ends=(window.names[0], window.names[1]))
    before = kept.select(
        *(F.col(_quoted(name)).alias(f"_k_{name}") for name in query.keys),
        *(F.col(part.name).alias(OLD + part.name) for part in query.parts),
    )
    same = [F.col(_quoted(name)).eqNullSafe(F.col(_quoted(f"_k_{name}"))) for name in query.keys]
    both = after.join(before, reduce(lambda one, more: one & more, same), "full_outer")
    there = F.col(ROWS).isNotNull()
    keys = [
        F.when(there, F.col(_quoted(name))).otherwise(F.col(_quoted(f"_k_{name}"))).alias(name) for name in query.keys
    ]
    parts = [F.col(part.name).cast(part.type).alias(part.name) for part in query.parts]
    return both.select(*keys, *parts, *(OLD + part.name for part in query.parts))


def _quoted(name: str) -> str:
    return f"`{name}`"
