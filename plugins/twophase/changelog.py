"""Changelogs, the rows that say how a table changed: made, converted and applied. Transforms call these functions.

A changelog is a DataFrame with the table's columns and one more, `_change`:

    +I   the row has come                 -D   the row has gone
    -U   the row as it was, and           +U   the row as it is now; both in one checkpoint

In a **retract** changelog everything that is taken back is there, as it was: its rows can be counted up and down, in
any order. An **upsert** changelog has one row per key, with what the key has now, or -D; of a -D only the key counts.
An **append** changelog has nothing but new rows, and no `_change`.

Rows that come from several checkpoints have `_checkpoint`, its number, which says their order. The functions look at
it and leave it out of what they return: that is the changelog of one checkpoint. They start no Spark job. What is wrong
with a row stops the job that evaluates it, with an error that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ConfigError
from twophase.storage import spark_task_errors
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: The column that says what a row of a changelog means, and its values.
CHANGE = "_change"
INSERT, BEFORE, AFTER, DELETE = "+I", "-U", "+U", "-D"
ADDED, TAKEN_BACK = (INSERT, AFTER), (BEFORE, DELETE)
KINDS = (INSERT, BEFORE, AFTER, DELETE)
#: The column that says which checkpoint a row is of, where there are several: their order.
CHECKPOINT = "_checkpoint"

#: Types whose values Spark cannot compare, or not by all of their bytes.
_INCOMPARABLE = re.compile(r"\b(map<|variant\b|collate\b|geometry\b|geography\b)", re.IGNORECASE)
#: The place of a table's rows in the order: before every checkpoint.
_FIRST = -1
#: Helper columns; the columns of a table may have any other name.
_SIGN, _SEQ, _TIMES, _ROWS = "_twophase_sign", "_twophase_seq", "_twophase_times", "_twophase_rows"
_GONE, _ADDED, _EARLIEST, _LATEST = "_twophase_gone", "_twophase_added", "_twophase_earliest", "_twophase_latest"
#: How many +U a checkpoint has for a key beyond its -U, and how many -U that take something from it.
_UPDATES, _TAKES = "_twophase_updates", "_twophase_takes"


def changelog(before: DataFrame, after: DataFrame, key: str | Iterable[str]) -> DataFrame:
    """Return how a table came from one state to another: a retract changelog. Each key has one row in each at most."""
    from pyspark.sql import functions as f

    names, keys = _names("changelog", before, key, without=()), _listed(key)
    _same("changelog", "before", before, "after", after)
    row, sign = f.struct(*map(_column, names)), f.col(_SIGN)
    sides = [frame.select(*map(_column, names), f.lit(side).alias(_SIGN)) for side, frame in ((-1, before), (1, after))]
    found = (
        sides[0]
        .union(sides[1])
        .groupBy(*map(_column, keys))
        .agg(
            f.sum(f.when(sign < 0, 1).otherwise(0)).alias(_TAKES),
            f.sum(f.when(sign > 0, 1).otherwise(0)).alias(_ROWS),
            f.first(f.when(sign < 0, row), ignorenulls=True).alias(_GONE),
            f.first(f.when(sign > 0, row), ignorenulls=True).alias(_ADDED),
        )
    )
    for count, name in ((_TAKES, "before"), (_ROWS, "after")):
        said = f"changelog: several rows of {name} have "
        found = _guarded(found, f.col(count) > 1, said, _shown(keys), "; keep one row per key")
    return _retracting(found.select(_GONE, _ADDED))


def to_append(changes: DataFrame, key: str | Iterable[str]) -> DataFrame:
    """Return the rows of a changelog without `_change`; one that is no +I stops the job, with its key."""
    from pyspark.sql import functions as f

    _names("to_append", changes, key)
    said = f.concat(f.lit("to_append: "), f.coalesce(f.col(CHANGE), f.lit("null")), f.lit(" of "), _shown(_listed(key)))
    why = ": an append holds new rows only; write it with mode='retract' or 'upsert'"
    bad = ~f.coalesce(f.col(CHANGE) == INSERT, f.lit(False))  # noqa: FBT003 - a value
    return _guarded(changes, bad, "", said, why).drop(CHANGE, CHECKPOINT)


def to_retract(changes: DataFrame, key: str | Iterable[str]) -> DataFrame:
    """Return a changelog with what cancels out left out: per key +I, -D, or -U and +U.

    It has to be a retract changelog: a +U without its -U stops the job. `changelog(table, apply(table, …), …)` makes
    one from an upsert changelog.
    """
    from pyspark.sql import functions as f

    found = _net("to_retract", changes, key)
    said = f.concat(f.lit("to_retract: +U of "), _shown(_listed(key)))
    why = " without its -U: what it takes the place of is not known; changelog(before, apply(before, …)) finds it out"
    found = _guarded(found, f.col(f"{_EARLIEST}.{_UPDATES}") > 0, "", said, why)
    return _retracting(found.select(f"{_EARLIEST}.{_GONE}", f"{_LATEST}.{_ADDED}"))


def to_upsert(changes: DataFrame, key: str | Iterable[str]) -> DataFrame:
    """Return an upsert changelog: per key one +I or +U with its row as it is now, or one -D."""
    from pyspark.sql import functions as f

    there, stays = _was_there(), f.col(f"{_LATEST}.{_ADDED}").isNotNull()
    kind = f.when(~stays, DELETE).when(there, AFTER).otherwise(INSERT)
    rows = _net("to_upsert", changes, key).where(stays | there)
    row = f.coalesce(f"{_LATEST}.{_ADDED}", f"{_LATEST}.{_GONE}")
    return rows.select(row.alias(_ADDED), kind.alias(CHANGE)).select(f"{_ADDED}.*", CHANGE)


def apply(table: DataFrame, changes: DataFrame, key: str | Iterable[str]) -> DataFrame:
    """Return a table as a retract or upsert changelog leaves it; `table` has one row per key.

    A -U of a key that the table lacks stops the job; a -D of one changes nothing.
    """
    from pyspark.sql import functions as f

    names = _names("apply", changes, key)
    _same("apply", "table", table, "changes", changes)
    order = f.col(CHECKPOINT).cast("bigint") if CHECKPOINT in changes.columns else f.lit(0).cast("bigint")
    log = changes.select(*map(_column, names), CHANGE, order.alias(CHECKPOINT))
    kept = table.select(
        *map(_column, names), f.lit(INSERT).alias(CHANGE), f.lit(_FIRST).cast("bigint").alias(CHECKPOINT)
    )
    found = _net("apply", kept.union(log), key)
    said = f.concat(f.lit("apply: -U of "), _shown(_listed(key)))
    found = _guarded(found, f.col(f"{_EARLIEST}.{_TAKES}") > 0, "", said, ", which is not in the table")
    return found.where(f.col(f"{_LATEST}.{_ADDED}").isNotNull()).select(f"{_LATEST}.{_ADDED}.*")


# --- the net result of a changelog -----------------------------------------------------------------------------------


def _net(who: str, changes: DataFrame, key: str | Iterable[str]) -> DataFrame:
    """Return one row per key that is changed, with the earliest and the latest checkpoint that changes it.

    Each of the two says what the checkpoint takes from the key, and what it gives it. Whatever is added and taken back
    in one checkpoint cancels out.
    """
    from pyspark.sql import functions as f

    names, keys = _names(who, changes, key), _listed(key)
    row, kind, times = f.struct(*map(_column, names)), f.col(CHANGE), f.col(_TIMES)
    order = f.col(CHECKPOINT).cast("bigint") if CHECKPOINT in changes.columns else f.lit(0).cast("bigint")
    known = f.coalesce(kind.isin(*KINDS), f.lit(False))  # noqa: FBT003 - a value
    said = f.concat(
        f.lit(f"{who}: column {CHANGE}: found "), f.coalesce(kind, f.lit("null")), f.lit(" of "), _shown(keys)
    )
    told = _guarded(changes, ~known, "", said, f", expected {', '.join(KINDS)}").select(
        *map(_column, names),
        order.alias(_SEQ),
        f.when(kind.isin(*ADDED), 1).otherwise(-1).alias(_SIGN),
        f.when(kind == AFTER, 1).when(kind == BEFORE, -1).otherwise(0).alias(_UPDATES),
    )
    # Partitioned by key once, so that none of the three groupings moves rows again.
    counted = told.repartition(*map(_column, keys)).groupBy(*map(_column, names), _SEQ)
    rows = counted.agg(
        f.sum(_SIGN).alias(_TIMES),
        f.sum(_UPDATES).alias(_UPDATES),
        f.sum(f.when(f.col(_UPDATES) < 0, 1).otherwise(0)).alias(_TAKES),
    )
    checkpoints = (
        rows.groupBy(*map(_column, keys), _SEQ)
        .agg(
            f.sum(f.greatest(times, f.lit(0))).alias(_ROWS),
            f.first(f.when(times > 0, row), ignorenulls=True).alias(_ADDED),
            f.first(f.when(times < 0, row), ignorenulls=True).alias(_GONE),
            f.sum(_UPDATES).alias(_UPDATES),
            f.sum(f.when(times < 0, f.col(_TAKES)).otherwise(0)).alias(_TAKES),
        )
        .where(f"{_ADDED} IS NOT NULL OR {_GONE} IS NOT NULL")
    )
    twice = f.concat(f.lit(f"{who}: "), f.col(_ROWS).cast("string"), f.lit(" rows are left of "), _shown(keys))
    single = _guarded(checkpoints, f.col(_ROWS) > 1, "", twice, "; take back all but one")
    what = f.struct(_GONE, _ADDED, _UPDATES, _TAKES)
    return single.groupBy(*map(_column, keys)).agg(
        f.min_by(what, f.col(_SEQ)).alias(_EARLIEST), f.max_by(what, f.col(_SEQ)).alias(_LATEST)
    )


def _was_there() -> Column:
    """Return the condition that a key had a row before its first change."""
    from pyspark.sql import functions as f

    return f.col(f"{_EARLIEST}.{_GONE}").isNotNull() | (f.col(f"{_EARLIEST}.{_UPDATES}") > 0)


def _retracting(found: DataFrame) -> DataFrame:
    """Return the changes from _GONE to _ADDED, for each row of a frame that has these two."""
    from pyspark.sql import functions as f

    gone, added = f.col(_GONE), f.col(_ADDED)

    def change(kind: str, row: Column) -> Any:  # noqa: ANN401 - a Column
        return f.struct(row.alias(_ADDED), f.lit(kind).alias(CHANGE))

    changes = (
        f.when(added.isNull(), f.array(change(DELETE, gone)))
        .when(gone.isNull(), f.array(change(INSERT, added)))
        .otherwise(f.array(change(BEFORE, gone), change(AFTER, added)))
    )
    told = found.where(~gone.eqNullSafe(added)).select(f.explode(changes).alias(_ROWS))
    return told.select(f"{_ROWS}.{_ADDED}.*", f"{_ROWS}.{CHANGE}")


# --- columns and errors ----------------------------------------------------------------------------------------------


def _listed(key: str | Iterable[str]) -> list[str]:
    return [key] if isinstance(key, str) else list(key)


def _column(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.col(quoted(name))


def _names(
    who: str, frame: DataFrame, key: str | Iterable[str], without: Sequence[str] = (CHANGE, CHECKPOINT)
) -> list[str]:
    """Return the columns of the table; ConfigError unless they can be compared, and the key is one of them or some."""
    kinds, keys = dict(frame.dtypes), _listed(key)
    if CHANGE in without and kinds.get(CHANGE) != "string":
        found = kinds.get(CHANGE, "none")
        msg = f"{who}: expected a column {CHANGE} string, found {found}; changelog(before, after, key) makes one"
        raise ConfigError(msg)
    names = [name for name in frame.columns if name not in without]
    if not keys or (missing := [name for name in keys if name not in names]):
        found = ", ".join(names)
        msg = f"{who}: key {missing[0] if keys else keys!r}: expected columns of the table, found {found}"
        raise ConfigError(msg)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        msg = f"{who}: column {twice!r} is there twice; rename one"
        raise ConfigError(msg)
    if strange := next((name for name in names if _INCOMPARABLE.search(kinds[name])), None):
        msg = f"{who}: column {strange!r} is {kinds[strange]}, whose values cannot be compared; cast or drop it"
        raise ConfigError(msg)
    return names


def _same(who: str, one: str, first: DataFrame, other: str, second: DataFrame) -> None:
    """Raise ConfigError unless two frames have the same columns, besides those of a changelog."""
    ours = (CHANGE, CHECKPOINT)
    mine, theirs = ({name: kind for name, kind in frame.dtypes if name not in ours} for frame in (first, second))
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            found = f"{mine.get(name, 'none')} in {one} and {theirs.get(name, 'none')} in {other}"
            msg = f"{who}: column {name!r}: expected the same type in both, found {found}; cast or add it"
            raise ConfigError(msg)


def _shown(keys: Sequence[str]) -> Column:
    """Return the text of a row's key, for errors."""
    from pyspark.sql import functions as f

    parts = []
    for number, name in enumerate(keys):
        parts += [f.lit(f"{', ' if number else ''}{name} "), f.coalesce(_column(name).cast("string"), f.lit("null"))]
    return f.concat(*parts)


def _guarded(frame: DataFrame, bad: Column, before: str, value: Column, after: str) -> DataFrame:
    """Return the frame; a row that is bad stops the job that evaluates it, with a text that names its key."""
    from pyspark.sql import functions as f

    stop = spark_task_errors.stop(before, value, after).cast("boolean")
    return frame.where(f.when(bad, stop).otherwise(f.lit(True)))  # noqa: FBT003 - a value
