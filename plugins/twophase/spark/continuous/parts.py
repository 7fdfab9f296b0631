"""The parts of an aggregate: what is kept of it as state, how a batch gives them, how two merge, what they mean.

`query` makes one `Aggregate` for each different aggregate of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twophase.spark.continuous.catalyst import Catalyst, Node, below, items, kind_of, option, replaced
from twophase.spark.continuous.shape import refuse

if TYPE_CHECKING:
    from pyspark.sql import Column

#: The part that every state has: how many input rows a group has.
ROWS = "rows"
#: Added to a part's name: its value in the state before the checkpoint.
OLD = "old_"
#: The column of a batch that says +1 for a row that is added and -1 for one that is taken back.
WEIGHT = "_weight"

INTEGERS = frozenset({"tinyint", "smallint", "int", "bigint"})
FLOATS = frozenset({"float", "double"})

_CHAIN = "give the distinct rows a pipeline of their own (SELECT DISTINCT), and aggregate its changes"


@dataclass(frozen=True)
class Part:
    """One column of the state."""

    name: str
    #: As Spark writes it.
    type: str
    #: `sum`, `count`, `min` or `max`: how values of it are merged.
    merged_by: str

    def merged(self, catalyst: Catalyst) -> Column:
        """Return the value after a checkpoint, from that before and that of its batch."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        old, new = F.col(OLD + self.name), F.col(self.name)
        if self.merged_by in {"min", "max"}:
            return F.least(old, new) if self.merged_by == "min" else F.greatest(old, new)
        if self.type.startswith("decimal"):
            both = catalyst.decimal_sum(f"`{OLD}{self.name}`", f"`{self.name}`", self.type)
        else:
            both = old + new
        return F.when(F.col(OLD + ROWS).isNull(), new).otherwise(both)


@dataclass(frozen=True)
class Aggregate:
    """One aggregate of a text, and its parts."""

    #: The whole expression of the analysed plan.
    expression: Node
    #: The function that it comes down to.
    function: Node
    #: The column of a batch with the values that count: null where they do not.
    argument: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """Return the aggregate as SQL."""
        return str(self.expression.sql())

    def values(self, catalyst: Catalyst) -> Column:
        """Return the values of the input rows that count: null where FILTER leaves a row out."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        given = [catalyst.column(one) for one in below(self.function)]
        found = given[0]
        if kind_of(self.function) == "Count":
            there = F.lit(True)  # noqa: FBT003 - Spark's own
            for one in given:
                there &= one.isNotNull()
            found = F.when(there, F.lit(1))
        chosen = option(self.expression.filter())
        return found if chosen is None else F.when(catalyst.column(chosen), found)

    def of_batch(self, *, retracts: bool) -> list[Column]:
        """Return the parts of the rows of one batch, as aggregates over them."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        value = F.col(self.argument)
        made = []
        for part in self.parts:
            if part.merged_by == "count":
                weighed = F.sum(F.when(value.isNull(), 0).otherwise(F.col(WEIGHT)))
                column = F.coalesce(weighed, F.lit(0).cast("bigint")) if retracts else F.count(value)
            elif part.merged_by == "sum":
                typed = value if part.type.startswith("decimal") else value.cast(part.type)
                signed = F.when(F.col(WEIGHT) > 0, typed).otherwise(-typed) if retracts else typed
                column = F.when(F.count(value) == 0, F.lit(0).cast(part.type)).otherwise(F.sum(signed))
            else:
                column = F.min(value) if part.merged_by == "min" else F.max(value)
            made.append(column.alias(part.name))
        return made

    def result(self, catalyst: Catalyst, prefix: str) -> Node:
        """Return the aggregate's value as an expression over its parts, whose names begin with `prefix`."""
        names = [f"`{prefix}{part.name}`" for part in self.parts]
        kind = kind_of(self.function)
        if kind == "Sum":
            return catalyst.parsed(f"if({names[1]} = 0, null, {names[0]})")
        if kind == "Average":
            kept = [one.exprId().id() for one in items(self.function.aggBufferAttributes())]
            by = dict(zip(kept, map(catalyst.parsed, names), strict=True))
            return replaced(self.function.evaluateExpression(), by, catalyst)
        return catalyst.parsed(names[0] if names else f"`{prefix}{ROWS}`")


def aggregate_of(catalyst: Catalyst, expression: Node, number: int, *, retracts: bool) -> Aggregate:
    """Return an aggregate with its parts; raise ConfigError for one that cannot be merged."""
    function = expression.aggregateFunction()
    while catalyst.is_replaced(function):
        function = function.replacement()
    text, kind = str(expression.sql()), kind_of(function)
    if kind not in {"Sum", "Count", "Average", "Min", "Max"} or str(function.prettyName()).startswith("try_"):
        refuse(text, "it has no parts that can be kept and merged; there is sum, count, avg, min, max")
    if expression.isDistinct() and kind not in {"Min", "Max"}:
        refuse(text, f"distinct values of all input would have to be kept; {_CHAIN}")
    parts = _parts(function, kind, text, number)
    if retracts and kind in {"Min", "Max"}:
        refuse(text, "a row that is taken back may have been the only such value; its input must only add rows")
    if retracts and any(part.merged_by == "sum" for part in parts) and _argument(function) in FLOATS:
        refuse(text, f"a {_argument(function)} that is taken back leaves a rest of rounding; cast it to a decimal")
    return Aggregate(expression, function, f"_value_{number}", parts)


def _argument(function: Node) -> str:
    return str(below(function)[0].dataType().catalogString())


def _parts(function: Node, kind: str, text: str, number: int) -> tuple[Part, ...]:
    """Return the parts of a function, a sum first and then its count; none where the rows of a group are its value."""
    given = below(function)
    if kind == "Count":
        plain = len(given) == 1 and given[0].foldable() and not given[0].nullable()
        return () if plain and " FILTER " not in text else (Part(f"count_{number}", "bigint", "count"),)
    found = _argument(function)
    if kind in {"Min", "Max"}:
        return (Part(f"{kind.lower()}_{number}", found, kind.lower()),)
    if found not in INTEGERS | FLOATS and not found.startswith("decimal"):
        refuse(text, f"a sum of {found} is not supported; expected a number")
    if kind == "Sum":
        summed = str(function.dataType().catalogString())
    else:
        summed = str(items(function.aggBufferAttributes())[0].dataType().catalogString())
    return Part(f"sum_{number}", summed, "sum"), Part(f"count_{number}", "bigint", "count")


def find(aggregates: Sequence[Aggregate], expression: Node) -> Aggregate | None:
    """Return the aggregate that an expression is."""
    return next((one for one in aggregates if one.expression.semanticEquals(expression)), None)
