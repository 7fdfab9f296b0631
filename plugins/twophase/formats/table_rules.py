"""The rules that a log table has for its rows (NOT NULL, constraints): Spark checks them while rows are staged.

Called by the sinks of log tables. The libraries that commit to Delta and Iceberg tables do not look at rows. So Spark
does, in the very job that writes them: a row that breaks a rule stops the job, and nothing is voted for. The handle
keeps the rules that were checked. If the table has another rule by the time of the vote or of the promotion, it does
not get the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from twophase.core.errors import BadValue, ConfigError
from twophase.storage import spark_task_errors
from twophase.storage.spark_paths import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from twophase.core.checkpoint import Json
    from twophase.core.manifest import Schema

T = TypeVar("T")
#: How much of a row an error shows.
_SHOWN = 300


class Rule(NamedTuple):
    """One rule: its name in the table, and the condition for each row, in Spark's SQL."""

    name: str
    condition: str


class TypePart(NamedTuple):
    """A part of a type: a field, or the elements, keys or values of a collection."""

    name: str
    of: Any
    required: bool
    #: The SQL function that returns these parts of a collection as an array, "" for an array; None: it is a field.
    array: str | None = None


def not_null(parts: Iterable[TypePart], parts_of: Callable[[Any], Iterable[TypePart]]) -> Iterator[Rule]:
    """Yield a rule for each column, or part of one, that must not be null."""
    for part in parts:
        for path, condition in _required(part, quoted(part.name), parts_of):
            yield Rule(f"NOT NULL of {path}", condition)


def _required(
    part: TypePart, value: str, parts_of: Callable[[Any], Iterable[TypePart]], depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the path of each part of a value that must not be null, with the condition that it is not."""
    if part.required:
        yield part.name, f"{value} IS NOT NULL"
    for inner in parts_of(part.of):
        element = f"x{depth}"
        below = f"{value}.{quoted(inner.name)}" if inner.array is None else element
        for path, condition in _required(inner, below, parts_of, depth + 1):
            holds = condition if inner.array is None else f"forall({inner.array}({value}), {element} -> {condition})"
            yield f"{part.name}.{path}", f"({value} IS NULL OR {holds})"


def placed(schema: Schema, rules: Iterable[Rule]) -> dict[str, Any]:
    """Return a table's rules, and its columns, for the handle; empty if there are no rules."""
    found = [list(rule) for rule in rules]
    return {"rules": found, "columns": [list(column) for column in schema]} if found else {}


def unmet(handle: Json, rules: Iterable[Rule]) -> str | None:
    """Return the name of a rule that the staged rows were not checked by; None if there is none."""
    met = {Rule(*rule) for rule in handle.get("rules", {}).get("rules", ())}
    return next((rule.name for rule in rules if rule not in met), None)


def held(which: str, frame: DataFrame, handle: Json, unless: str | None = None) -> DataFrame:
    """Return the DataFrame with the rules' checks in it: a row that breaks a rule stops the job that writes it.

    Rows for which the condition `unless` holds are held to no rule: they do not become rows of the table. A column that
    the table has and the DataFrame lacks counts as null in every row, as it will be in the table.
    """
    from pyspark.sql import functions

    rules = [Rule(*rule) for rule in handle.get("rules", {}).get("rules", ())]
    if not rules:
        return frame
    there = {name.lower() for name in frame.columns}
    absent = [
        functions.lit(None).cast(kind).alias(name)
        for name, kind in handle["rules"]["columns"]
        if name.lower() not in there
    ]
    first, *others = (functions.col(quoted(name)) for name in frame.columns)
    row = functions.to_json(functions.struct("*"))
    guard: Any = functions
    for rule in rules:
        condition = f"({rule.condition})" if unless is None else f"({unless}) OR ({rule.condition})"
        broken = ~functions.coalesce(functions.expr(condition), functions.lit(False))  # noqa: FBT003 - a value
        stop = spark_task_errors.stop(f"{rule.name}: row ", functions.substring(row, 1, _SHOWN))
        guard = guard.when(broken, stop.cast(frame.schema[0].dataType))
    with _explained(which):
        return frame.select("*", *absent).select(guard.otherwise(first).alias(frame.columns[0]), *others)


@contextmanager
def _explained(which: str) -> Iterator[None]:
    """Raise ConfigError if Spark cannot parse a rule: another engine may have written it."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        said = str(error).strip().partition("\n")[0]
        msg = f"{which}: the table has a rule that Spark cannot read: {said}; write it in Spark's SQL, or drop it"
        raise ConfigError(msg) from error


@contextmanager
def told(which: str) -> Iterator[None]:
    """Raise BadValue if a broken rule stopped the job."""
    try:
        yield
    except Exception as error:
        if said := spark_task_errors.heard(str(error)):
            msg = f"{which}: the table refuses a row by its rule {said}; correct it in the transform"
            raise BadValue(msg) from error
        raise
