"""Checks the names and types of a log table's columns. Called by the sinks of log tables, before rows are staged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twophase.core.errors import ConfigError
from twophase.core.manifest import Schema
from twophase.formats import spark_types

#: Types whose values can be in the names of folders, and that every reader reads alike.
PARTITION_TYPES = frozenset({"string", "date", "boolean", "tinyint", "smallint", "int", "bigint"})
#: The column that reads by the record add.
CHECKPOINT = "checkpoint"


def check_partitions(who: str, partition_by: Sequence[str]) -> None:
    """Raise ConfigError for names that a partition column cannot have; called when the sink is declared."""
    for name in partition_by:
        if name.startswith(("_", ".")) or spark_types.FORBIDDEN & set(name) or name == CHECKPOINT:
            msg = f"{who}: partition_by {name!r}: a partition column cannot have this name"
            raise ConfigError(msg)
    if len(set(map(str.lower, partition_by))) != len(partition_by):
        msg = f"{who}: partition_by {partition_by!r}: a column is named twice"
        raise ConfigError(msg)


def check(
    which: str, schema: Schema, partition_by: Sequence[str], kind: Callable[[spark_types.SparkType], object]
) -> None:
    """Raise ConfigError for a schema that a table cannot have; `kind` raises ValueError for a type it does not know."""
    there = dict(schema)
    for column in schema:
        try:
            if column.name.lower() == CHECKPOINT:
                msg = f"name {column.name!r}, which reads by the record give"
                raise ValueError(msg)  # noqa: TRY301 - said in the same words
            spark_types.check_name(column.name)
            kind(spark_types.parse(column.type))
        except ValueError as error:
            msg = f"{which}: column {column.name!r}: the table cannot have the {error}; rename, cast or drop it"
            raise ConfigError(msg) from error
    for name in partition_by:
        if there.get(name) not in PARTITION_TYPES:
            found = there.get(name, "no such column")
            expected = ", ".join(sorted(PARTITION_TYPES))
            msg = f"{which}: partition column {name!r}: expected one of {expected}, found {found}"
            raise ConfigError(msg)
    if len(there) == len(partition_by):
        msg = f"{which}: every column is a partition column; expected at least one besides"
        raise ConfigError(msg)
