"""A continuous query, compiled: what it keeps as state, and the changes of its result that a batch makes.

Spark's stage job compiles the text of `twophase.sql` with the frames of its reads, before anything is staged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twophase.spark.continuous import changes, windowed
from twophase.spark.continuous.catalyst import CHANGE, Catalyst, Node, below, kind_of, nodes
from twophase.spark.continuous.parts import OLD, ROWS, WEIGHT, Aggregate, Part, aggregate_of, find
from twophase.spark.continuous.shape import ShapeReader, refuse
from twophase.state.declaration import KEYS, State

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: The key of a state without GROUP BY: it has one row.
TOTAL = "total"
#: What Spark notes at the column of a window.
WINDOWS = {"spark.timeWindow": "window", "spark.sessionWindow": "session_window"}


@dataclass(frozen=True)
class Group:
    """One expression that a query groups by, and the key columns that hold it: two for a window, else one."""

    expression: Node | None
    names: tuple[str, ...]
    types: tuple[str, ...]
    #: `window` or `session_window`; None: no window.
    window: str | None = None

    def values(self, catalyst: Catalyst) -> list[Column]:
        """Return the key columns of a batch's rows."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        if self.expression is None:
            return [F.lit(True).alias(self.names[0])]  # noqa: FBT003 - Spark's own
        found = catalyst.column(self.expression)
        parts = [found.getField(end) for end in ("start", "end")] if self.window else [found]
        return [part.alias(name) for part, name in zip(parts, self.names, strict=True)]

    def result(self, catalyst: Catalyst) -> Node:
        """Return the expression over the key columns."""
        names = [f"`{name}`" for name in self.names]
        return catalyst.parsed(f"named_struct('start', {names[0]}, 'end', {names[1]})" if self.window else names[0])


class CompiledQuery:
    """A text, analysed over its reads."""

    def __init__(  # noqa: PLR0913 - what a query is made of
        self,
        spark: SparkSession,
        text: str,
        reads: Mapping[str, DataFrame],
        *,
        lookups: Collection[str] = (),
        mode: str | None = None,
        event_time: Mapping[str, Sequence[str]] | None = None,
        emit: str | None = None,
    ) -> None:
        """Analyse a text; raise ConfigError with the expression and the reason if it cannot go on."""
        self.text = text
        self.reads = dict(reads)
        self.fresh = frozenset(reads) - frozenset(lookups)
        self.event_time = {name: (told[0], told[1]) for name, told in (event_time or {}).items()}
        self.emit = emit or "updates"
        self.catalyst = Catalyst(spark)
        frames = {
            name: frame.drop(CHANGE) if name not in lookups and CHANGE in frame.columns else frame
            for name, frame in reads.items()
        }
        plan = self.catalyst.analysed(text, frames)
        self.shape = ShapeReader(self.catalyst, self.fresh, lookups).shape(plan)
        self.types = {str(field.name): field.dataType.simpleString() for field in self.catalyst.frame(plan).schema}
        self.groups = tuple(self._groups()) if self.shape.groups is not None else ()
        self.aggregates = self._aggregates()
        windowed.check(self)
        self.mode = changes.mode_of(self, mode)
        self.state = self._state()

    # --- what is kept ------------------------------------------------------------------------------------------------

    @property
    def retracts(self) -> bool:
        """Return True if its input takes rows back."""
        return self.shape.change is not None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the value columns of the state."""
        return Part(ROWS, "bigint", "count"), *(part for one in self.aggregates for part in one.parts)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the key columns of the state."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def window(self) -> Group | None:
        """Return the window that the query groups by."""
        return next((group for group in self.groups if group.window), None)

    def _aggregates(self) -> tuple[Aggregate, ...]:
        found: list[Aggregate] = []
        if self.shape.groups is None:
            return ()
        for expression in (*(one for _, one in self.shape.outputs), *self.shape.conditions):
            for node in nodes(expression):
                if kind_of(node) == "AggregateExpression" and find(found, node) is None:
                    found.append(aggregate_of(self.catalyst, node, len(found) + 1, retracts=self.retracts))
        return tuple(found)

    def _groups(self) -> Iterator[Group]:
        """Yield what is grouped by, under the name that it has in the result if it is there and can be a name."""
        taken = {ROWS, TOTAL}
        for number, expression in enumerate(self.shape.groups or (), 1):
            window = _window(expression)
            kind = str(expression.dataType().catalogString())
            if window is None and kind not in KEYS and not kind.startswith("decimal"):
                refuse(
                    f"GROUP BY {expression.sql()}",
                    f"it is {kind}, whose equal values may differ in their bytes; cast it to string, an integer, a"
                    " decimal, a date or a timestamp",
                )
            shown = [name for name, one in self.shape.outputs if one.semanticEquals(expression)]
            own = [str(expression.name())] if kind_of(expression) == "AttributeReference" else []
            name = next((one for one in [*shown, *own] if _is_a_name(one) and one.lower() not in taken), None)
            name = name or f"group_{number}"
            taken.add(name.lower())
            if window is None:
                yield Group(expression, (name,), (kind,))
            else:
                yield Group(expression, (f"{name}_start", f"{name}_end"), _ends(expression), window)
        if not self.shape.groups:
            yield Group(None, (TOTAL,), ("boolean",))

    def _state(self) -> State | None:
        if self.shape.groups is None:
            return None
        keys = [(name, kind) for group in self.groups for name, kind in zip(group.names, group.types, strict=True)]
        columns = [*keys, *((part.name, part.type) for part in self.parts)]
        return State([name for name, _ in keys], ", ".join(f"`{name}` {kind}" for name, kind in columns))

    # --- one batch ---------------------------------------------------------------------------------------------------

    def run(self, state: Any = None) -> Any:  # noqa: ANN401 - a KeptState; an output, with a state both
        """Return the output of this batch; with a state also its new rows, none for a text without an aggregate."""
        if self.shape.groups is None:
            return changes.of_rows(self) if state is None else (changes.of_rows(self), state.whole().limit(0))
        if self.window is not None:
            return windowed.run(self, self.window, state)
        merged = self.merged(state.lookup(self.batch(self.rows()), prefix=OLD))
        return changes.of_groups(self, merged), self.new_state(merged)

    def rows(self) -> DataFrame:
        """Return the input rows of the aggregate."""
        return self.catalyst.frame(self.shape.rows)

    def batch(self, rows: DataFrame) -> DataFrame:
        """Return the parts of this batch's rows, one row for each group in it."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        values = [one.values(self.catalyst).alias(one.argument) for one in self.aggregates]
        weight = [changes.weight(self).alias(WEIGHT)] if self.retracts else []
        keys = [key for group in self.groups if group.expression is not None for key in group.values(self.catalyst)]
        counted = F.coalesce(F.sum(WEIGHT), F.lit(0).cast("bigint")) if self.retracts else F.count(F.lit(1))
        parts = [part for one in self.aggregates for part in one.of_batch(retracts=self.retracts)]
        given = rows.select(*keys, *values, *weight)
        if self.keys == (TOTAL,):
            return given.agg(counted.alias(ROWS), *parts).withColumn(TOTAL, F.lit(True))  # noqa: FBT003 - Spark's own
        return given.groupBy(*map(_quoted, self.keys)).agg(counted.alias(ROWS), *parts)

    def merged(self, looked_up: DataFrame) -> DataFrame:
        """Return each group of the batch with its parts after the checkpoint, and those before it under OLD."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        keys = [F.col(_quoted(name)) for name in self.keys]
        after = [part.merged(self.catalyst).alias(part.name) for part in self.parts]
        if self.retracts:
            after[0] = changes.never_below_zero(self.parts[0].merged(self.catalyst), keys).alias(ROWS)
        before = [F.col(OLD + part.name) for part in self.parts]
        return looked_up.select(*keys, *after, *before)

    def new_state(self, merged: DataFrame) -> DataFrame:
        """Return the groups with their parts; one whose rows are all taken back is deleted."""
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        kept = merged.select(*map(_quoted, self.keys), *(part.name for part in self.parts))
        if not self.retracts or self.keys == (TOTAL,):
            return kept
        return kept.withColumn("_deleted", F.col(ROWS) == 0)

    # --- the result --------------------------------------------------------------------------------------------------

    def result(self, prefix: str) -> tuple[list[Column], Column]:
        """Return the result's columns over the parts of that prefix, and the condition that its row is there.

        Where it is not there nothing is computed: Spark would not have, and a division might fail.
        """
        from pyspark.sql import functions as F  # noqa: N812 - as everywhere

        rows = F.col(prefix + ROWS)
        there = rows.isNotNull() if self.keys == (TOTAL,) else F.coalesce(rows > 0, F.lit(False))  # noqa: FBT003 - Spark's
        for one in self.shape.conditions:
            condition = self.catalyst.column(self._over_parts(one, prefix))
            there = F.coalesce(F.when(there, condition), F.lit(False))  # noqa: FBT003 - Spark's own
        columns = (self.catalyst.column(self._over_parts(one, prefix)) for _, one in self.shape.outputs)
        return [F.when(there, column) for column in columns], there

    def _over_parts(self, expression: Node, prefix: str) -> Node:
        """Return an expression with groups replaced by key columns, and aggregates by what their parts mean."""
        if kind_of(expression) == "AggregateExpression":
            found = find(self.aggregates, expression)
            return found.result(self.catalyst, prefix) if found else expression
        for group in self.groups:
            if group.expression is not None and group.expression.semanticEquals(expression):
                return group.result(self.catalyst)
        children = below(expression)
        if not children:
            return expression
        made = [self._over_parts(child, prefix) for child in children]
        return expression.withNewChildren(self.catalyst.listed(made))

    def shown(self, group: Group) -> bool:
        """Return True if a column of the result tells the groups of an expression apart."""
        outputs: Sequence[Node] = [one for _, one in self.shape.outputs]
        found = group.expression
        if found is None or any(one.semanticEquals(found) for one in outputs):
            return True
        ends = {
            str(one.name().get())
            for one in outputs
            if kind_of(one) == "GetStructField" and below(one)[0].semanticEquals(found)
        }
        return bool(ends) if group.window == "window" else ends == {"start", "end"}

    # --- for people --------------------------------------------------------------------------------------------------

    def explanation(self) -> dict[str, str]:
        """Say what is kept as state, and what comes out."""
        told = {"reads": ", ".join(f"{name} ({_kind(self, name)})" for name in sorted(self.reads))}
        if self.state is None:
            told["state"] = "none: each row is worked on by itself"
        else:
            told["key"] = ", ".join(f"{name} {kind}" for name, kind in self.state.keys)
            told["state"] = ", ".join(f"{part.name} {part.type}" for part in self.parts)
            for one in self.aggregates:
                told[", ".join(part.name for part in one.parts) or ROWS] = one.text
        if self.event_time:
            reads = ", ".join(f"{name} by {column}, {delay} late" for name, (column, delay) in self.event_time.items())
            told["watermark"] = f"{reads}; the least of them closes windows"
        told["mode"] = f"{self.mode}: {changes.MEANING[self.mode]}"
        columns = {**self.types, **({} if self.mode == "append" else {CHANGE: "string"})}
        told["result"] = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        return told


def _kind(query: CompiledQuery, read: str) -> str:
    return "new input" if read in query.fresh else "lookup table"


def _window(expression: Node) -> str | None:
    if kind_of(expression) != "AttributeReference":
        return None
    return next((name for mark, name in WINDOWS.items() if expression.metadata().contains(mark)), None)


def _ends(expression: Node) -> tuple[str, str]:
    kinds = [str(field.dataType().catalogString()) for field in expression.dataType().fields()]
    return kinds[0], kinds[1]


def _is_a_name(text: str) -> bool:
    """Return True if a state's column can have that name, which must not be one of a part."""
    return text.isidentifier() and not text.startswith(("_", OLD, "sum_", "count_", "min_", "max_"))


def _quoted(name: str) -> str:
    return f"`{name}`"
