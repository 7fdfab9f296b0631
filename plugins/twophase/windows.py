"""Windows by event time, for transforms that keep state: which window a row is in, what is late, what closes.

A transform calls `event_time` once, and gives each row its window by `tumbling`, `hopping` or `session`. The columns
`window_start` and `window_end` belong to the key of its state. In SQL there are `window(…)` and `session_window(…)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.spark.continuous import event_time as times
from twophase.spark.continuous.event_time import DELETED, END, START, Watermarks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["event_time", "hopping", "merge_sessions", "session", "tumbling"]


def event_time(
    state: Any,  # noqa: ANN401 - what the transform was given
    reads: Mapping[str, tuple[DataFrame, str, str]],
    *,
    rows: DataFrame | None = None,
    sessions: bool = False,
) -> Watermarks:
    """Return the watermarks of this checkpoint, with `on_time`, `late`, `final` and `updates`.

    `reads` has for each read its frame, the column of its event time and how long records may be late:
    `{"clicks": (clicks, "at", "10 minutes")}`. The state's manifest keeps them, and with `rows`, which have their
    windows, how many of them are late.
    """
    return times.watermarks(state, reads, rows, sessions=sessions)


def tumbling(frame: DataFrame, column: str, size: str) -> DataFrame:
    """Return the rows with the window that each is in, one after the other; a row without a time has none."""
    return _windowed(frame, column, size, size)


def hopping(frame: DataFrame, column: str, size: str, every: str) -> DataFrame:
    """Return the rows with each window that they are in: a window of `size` begins at `every`."""
    return _windowed(frame, column, size, every)


def session(frame: DataFrame, column: str, gap: str) -> DataFrame:
    """Return each row as a session of its own, which lasts for `gap`; `merge_sessions` joins those that touch."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    microseconds = times.span(gap, "gap") // times.MICROSECOND
    start = F.col(f"`{column}`").cast("timestamp")
    end = F.timestamp_micros(F.unix_micros(start) + microseconds)
    return frame.where(start.isNotNull()).select("*", start.alias(START), end.alias(END))


def merge_sessions(
    state: Any,  # noqa: ANN401 - what the transform was given
    fresh: DataFrame,
    by: Sequence[str],
    parts: Mapping[str, str],
) -> DataFrame:
    """Return the sessions that new rows make with those of the state, for `final` or `updates`.

    `by` tells sessions apart besides their window. `parts` names the value columns, which rows and state both have, and
    how two values become one: `sum`, `min` or `max`. Sessions that became part of another are marked as deleted.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    kept = times.with_same(state.whole(), fresh, by, "left_semi")
    after = times.merged_sessions(fresh, kept, by, parts)
    gone = times.with_same(kept, after, state.key, "left_anti").select(*after.columns)
    marked = F.lit(False), F.lit(True)  # noqa: FBT003 - Spark's own
    return after.withColumn(DELETED, marked[0]).unionByName(gone.withColumn(DELETED, marked[1]))


def _windowed(frame: DataFrame, column: str, size: str, every: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    for text, what in ((size, "size"), (every, "every")):
        times.span(text, what)
    found = frame.select("*", F.window(F.col(f"`{column}`"), size, every).alias("_window"))
    ends = [F.col("_window.start").alias(START), F.col("_window.end").alias(END)]
    return found.select(*(f"`{name}`" for name in frame.columns), *ends)
