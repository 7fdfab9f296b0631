"""The output of a continuous query: rows, or the changes of its result, in the mode that is asked for.

`query` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twophase.spark.continuous.catalyst import CHANGE
from twophase.spark.continuous.parts import OLD
from twophase.spark.continuous.shape import refuse

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from twophase.spark.continuous.query import CompiledQuery

#: What an output can be: rows that are never changed, changes with the rows taken back, or the newest row of each key.
MODES = ("append", "retract", "upsert")
MEANING = {
    "append": "rows that never change",
    "retract": f"changes, with the rows that are taken back; {CHANGE} says +I, -U, +U or -D",
    "upsert": f"the newest row of each group; {CHANGE} says +I, +U, or -D for one that is gone",
}
#: What `_change` says of a row that is there from now on, and of one that no longer is.
ADDED = ("+I", "+U")
TAKEN_BACK = ("-U", "-D")


def mode_of(query: CompiledQuery, wanted: str | None) -> str:
    """Return the mode of a query's output; raise ConfigError if it cannot have the one that is wanted."""
    if wanted is not None and wanted not in MODES:
        refuse(f"mode {wanted!r}", f"expected {', '.join(MODES)}, or None for what the query gives by itself")
    if query.emit == "final":
        return wanted or "append"
    hidden = [group for group in query.groups if not query.shown(group)]
    if query.shape.groups is None or (query.shape.distinct and not query.retracts):
        usual = "retract" if query.retracts else "append"
    else:
        usual = "retract" if hidden else "upsert"
    if wanted == "append" and usual != "append":
        what = "its input takes rows back" if query.retracts else "a group changes whenever rows of it come"
        refuse("mode 'append'", f"{what}; use 'retract' or 'upsert'")
    if wanted == "upsert" and query.shape.groups is None:
        refuse("mode 'upsert'", "without an aggregate the rows have no key; use 'append' or 'retract'")
    if wanted == "upsert" and hidden:
        what = ", ".join(str(group.expression.sql()) for group in hidden if group.expression is not None)
        refuse(
            "mode 'upsert'", f"rows are found by what they are grouped by; add {what} to the SELECT, or use 'retract'"
        )
    return wanted or usual


def weight(query: CompiledQuery) -> Column:
    """Return +1 for an input row that is added, -1 for one that is taken back; any other change fails the attempt."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    change = query.catalyst.column(query.shape.change)
    told = F.concat(F.lit(f"sql: column {CHANGE}: expected {', '.join(ADDED + TAKEN_BACK)}, found "), change)
    strange = F.raise_error(F.coalesce(told, F.lit(f"sql: column {CHANGE} is null"))).cast("int")
    return F.when(change.isin(*ADDED), 1).when(change.isin(*TAKEN_BACK), -1).otherwise(strange)


def never_below_zero(rows: Column, keys: list[Column]) -> Column:
    """Return the number of a group's rows; the attempt fails if more of them were taken back than were added."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    group = F.concat_ws(", ", *(F.coalesce(key.cast("string"), F.lit("null")) for key in keys))
    told = F.concat(F.lit("sql: more rows are taken back than were added; the group is "), group)
    return F.when(rows >= 0, rows).otherwise(F.raise_error(told).cast("bigint"))


def of_rows(query: CompiledQuery) -> DataFrame:
    """Return the output of a query without an aggregate; changes of the input are changes of the output."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    catalyst = query.catalyst
    columns = [catalyst.column(one).alias(name) for name, one in query.shape.outputs]
    if query.mode == "retract":
        change = F.lit("+I") if query.shape.change is None else catalyst.column(query.shape.change)
        columns.append(change.alias(CHANGE))
    return query.rows().select(*columns)


def of_groups(query: CompiledQuery, merged: DataFrame) -> DataFrame:
    """Return the changes of the result: of each group in the batch the row before and the row after it."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    names = [name for name, _ in query.shape.outputs]
    columns, is_there = query.result("")
    old_columns, was_there = query.result(OLD)
    after, before = _row(columns), _row(old_columns)
    said = merged.select(after.alias("after"), before.alias("before"), is_there.alias("is"), was_there.alias("was"))
    is_there, was_there = F.col("is"), F.col("was")
    if query.mode == "append":
        return _spread(said.where(is_there & ~was_there), "after", names)
    same = F.lit(False) if any("map<" in kind for kind in query.types.values()) else F.expr("before <=> after")  # noqa: FBT003
    changed = said.where((is_there | was_there) & ~(is_there & was_there & same))
    added = F.when(was_there, "+U").otherwise("+I")
    if query.mode == "upsert":
        newest = F.when(is_there, F.col("after")).otherwise(F.col("before"))
        told = changed.select(newest.alias("row"), F.when(is_there, added).otherwise("-D").alias(CHANGE))
        return _spread(told, "row", names, CHANGE)
    both = F.array_compact(
        F.array(
            F.when(
                was_there,
                F.struct(F.when(is_there, "-U").otherwise("-D").alias(CHANGE), F.col("before").alias("row")),
            ),
            F.when(is_there, F.struct(added.alias(CHANGE), F.col("after").alias("row"))),
        )
    )
    return _spread(changed.select(F.inline(both)), "row", names, CHANGE)


def _row(columns: list[Column]) -> Column:
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    return F.struct(*(column.alias(f"c{number}") for number, column in enumerate(columns)))


def _spread(frame: DataFrame, row: str, names: list[str], *others: str) -> DataFrame:
    """Return the columns inside a row under their own names, two of which may be equal."""
    from pyspark.sql import functions as F  # noqa: N812 - as everywhere

    columns = [F.col(f"{row}.c{number}").alias(name) for number, name in enumerate(names)]
    return frame.select(*columns, *others)
