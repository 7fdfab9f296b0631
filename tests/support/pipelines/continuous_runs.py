"""Continuous queries batch by batch: a state in a frame, looked up by a join, and what changes make of a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - as everywhere

from twophase.spark.continuous.query import CompiledQuery
from twophase.state.declaration import State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = tuple[Any, ...]


def frame(spark: SparkSession, rows: Sequence[Row], schema: str) -> DataFrame:
    """Return rows as constants of a plan: cheaper than rows that a Python worker has to hand over."""
    columns = [column.split(maxsplit=1) for column in re.split(r",\s*(?![^(]*\))", schema)]
    given = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
    empty = f"({', '.join('null' for _ in columns)})"
    names = ", ".join(f"c{number}" for number in range(len(columns)))
    typed = ", ".join(f"cast(c{number} as {kind}) as {name}" for number, (name, kind) in enumerate(columns))
    return spark.sql(f"select {typed} from values {given or empty} as t({names})" + ("" if rows else " where false"))


def _literal(value: object) -> str:
    if value is None or isinstance(value, bool | int | Decimal):
        return "null" if value is None else str(value)
    return f"'{value.isoformat(sep=' ') if isinstance(value, datetime) else value}'"


class JoinedState:
    """What a transform gets as `state`, over the rows of a frame."""

    def __init__(self, spark: SparkSession, declared: State) -> None:
        """Start without rows."""
        self.spark = spark
        self.declared = declared
        self.rows: dict[Row, Row] = {}
        self.watermarks: dict[str, Any] = {}
        self._next: dict[str, Any] = {}

    @property
    def key(self) -> tuple[str, ...]:
        return self.declared.key

    def advance(self, watermarks: Mapping[str, Any]) -> None:
        self._next = dict(watermarks)

    @property
    def schema(self) -> str:
        return ", ".join(f"`{column.name}` {column.type}" for column in self.declared.columns)

    def whole(self) -> DataFrame:
        return frame(self.spark, list(self.rows.values()), self.schema)

    def lookup(self, asked: DataFrame, prefix: str = "") -> DataFrame:
        key = self.declared.key
        values = [F.col(column.name).alias(prefix + column.name) for column in self.declared.values]
        kept = self.whole().select(*(F.col(name).alias(f"_k_{name}") for name in key), *values)
        same = [F.col(f"`{name}`").eqNullSafe(F.col(f"_k_{name}")) for name in key]
        return asked.join(kept, same, "left").drop(*(f"_k_{name}" for name in key))

    def keep(self, new: DataFrame) -> None:
        """Put in the new state's rows."""
        names = [column.name for column in self.declared.columns]
        self.watermarks = self._next
        seen: set[Row] = set()
        for row in new.collect():
            key = tuple(row[name] for name in self.declared.key)
            assert key not in seen, f"two rows of {key}"
            seen.add(key)
            if "_deleted" in new.columns and row["_deleted"]:
                self.rows.pop(key, None)
            else:
                self.rows[key] = tuple(row[name] for name in names)


@dataclass
class Table:
    """A table that outputs of a query are applied to."""

    mode: str
    key: Sequence[int] = ()
    rows: Counter[Row] = field(default_factory=Counter)

    def apply(self, output: Sequence[Row]) -> None:
        """Apply the changes of one checkpoint; a row that is taken back must be there."""
        if self.mode == "append":
            self.rows.update(output)
            return
        for row in sorted(output, key=lambda row: row[-1] not in {"-U", "-D"}):
            change, plain = row[-1], row[:-1]
            assert change in ({"+I", "+U", "-D"} if self.mode == "upsert" else {"+I", "-U", "+U", "-D"})
            if self.mode == "upsert":
                for old in [old for old in self.rows if all(old[n] == plain[n] for n in self.key)]:
                    assert change != "+I", f"{plain} was there as {old}"
                    del self.rows[old]
            if change in {"-U", "-D"} and self.mode == "retract":
                assert self.rows[plain] > 0, f"{plain} is taken back and was never there"
                self.rows[plain] -= 1
            elif change in {"+I", "+U"}:
                self.rows[plain] += 1
        self.rows = +self.rows


def run(
    spark: SparkSession,
    text: str,
    schema: str,
    batches: Sequence[Sequence[Row]],
    *,
    lookups: Mapping[str, DataFrame] | None = None,
    mode: str | None = None,
    read: str = "words",
) -> tuple[Counter[Row], dict[str, str]]:
    """Run a query over batches of one read; return the table that comes out, and its columns' types."""
    state, table, types = None, None, {}
    for batch in batches:
        reads = {read: frame(spark, batch, schema), **(lookups or {})}
        query = CompiledQuery(spark, text, reads, lookups=set(lookups or {}), mode=mode)
        if query.state is None:
            output, new = query.run(), None
        else:
            state = state or JoinedState(spark, query.state)
            output, new = query.run(state)
        table = table or Table(query.mode, key=key_of(query))
        table.apply([tuple(row) for row in output.collect()])
        if state and new is not None:
            state.keep(new)
        types = {name.name: name.dataType.simpleString() for name in output.schema if name.name != "_change"}
    return (table.rows if table else Counter()), types


def key_of(query: CompiledQuery) -> list[int]:
    """Return the places of the groups among the columns of the result."""
    groups = [group.expression for group in query.groups if group.expression is not None]
    return [n for n, (_, one) in enumerate(query.shape.outputs) if any(one.semanticEquals(group) for group in groups)]


def at_once(spark: SparkSession, text: str, frames: Mapping[str, DataFrame]) -> tuple[Counter[Row], dict[str, str]]:
    """Return what Spark makes of a text over all input at once, and the types."""
    for name, frame in frames.items():
        frame.createOrReplaceTempView(name)
    result = spark.sql(text)
    found = Counter(tuple(row) for row in result.collect())
    for name in frames:
        spark.catalog.dropTempView(name)
    return found, {one.name: one.dataType.simpleString() for one in result.schema}
