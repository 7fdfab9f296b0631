"""Types of Spark and of PostgreSQL: which fits which, and how a column is converted to be loaded and to be read.

Called by the staging table when rows are loaded, and by both readers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Spark's type → the column that is created for it.
_CREATED = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}
#: Postgres' type → Spark's type that is loaded into it as it is.
_LOADED = {postgres: spark for spark, postgres in _CREATED.items() if spark != "tinyint"}
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_NUMBERS = (*_WHOLE, "float", "double")
_TEXTS = re.compile(r"(character varying|character|text)(\(\d+\))?")
_NUMERIC = re.compile(r"numeric(?:\((\d+),(\d+)\))?")
_DECIMAL = re.compile(r"decimal\(\d+,\d+\)")
_JSON = ("json", "jsonb")
_WIDEST = "decimal(38,18)"


class Loading(NamedTuple):
    """How a column of Spark gets into a column of PostgreSQL."""

    #: Spark's type that it is cast to first; None: it is not; `json`: it becomes its JSON text.
    spark: str | None
    #: The type that it is loaded as, if not the column's own: then the staging table converts it.
    staged: str | None = None


def created(spark: str) -> str | None:
    """Return the type of a column that we create for one of Spark's types; None if PostgreSQL has none for it."""
    if spark in _CREATED:
        return _CREATED[spark]
    if _DECIMAL.fullmatch(spark):
        return spark.replace("decimal", "numeric")
    element = _element(spark)
    if element in _CREATED and element != "tinyint":
        return f"{_CREATED[element]}[]"
    return "jsonb" if spark.startswith(("struct<", "map<", "array<")) else None


def loading(spark: str, postgres: str) -> Loading | None:  # noqa: PLR0911 - one return per kind of type
    """Say how a column of Spark gets into one of PostgreSQL; None if it does not fit."""
    nested = spark.startswith(("struct<", "map<", "array<"))
    if postgres in _JSON and (nested or spark == "string"):
        return Loading("json" if nested else None, "json" if postgres == "jsonb" else None)
    if nested:
        element, of = _element(spark), postgres.removesuffix("[]")
        return Loading(None) if postgres.endswith("[]") and _LOADED.get(of) == element else None
    if _TEXTS.fullmatch(postgres):
        return Loading(None) if spark == "string" else None
    if numeric := _NUMERIC.fullmatch(postgres):
        if spark not in _WHOLE and not _DECIMAL.fullmatch(spark):
            return None
        wanted = f"decimal({numeric[1]},{numeric[2]})" if numeric[1] else spark if "(" in spark else _WIDEST
        return Loading(None if wanted == spark else wanted)
    wanted = _LOADED.get(postgres, "")
    if wanted == spark:
        return Loading(None)
    if wanted in _NUMBERS and spark in (_NUMBERS if wanted in {"float", "double"} else _WHOLE):
        return Loading(wanted)
    if not wanted and spark == "string" and not postgres.endswith("[]"):
        return Loading(None, "text")  # uuid, inet, an enum …: the database reads its text
    return None


def _element(spark: str) -> str | None:
    return spark[len("array<") : -1] if spark.startswith("array<") else None


# --- reading ---------------------------------------------------------------------------------------------------------


class Carried(NamedTuple):
    """How a column gets from PostgreSQL to Spark."""

    name: str
    #: Spark's type that it has in the end.
    kind: str
    #: The type that the server casts it to, and Spark's type for that.
    postgres: str
    spark: str


def carried(name: str, kind: str, postgres: str) -> Carried:
    """Say how a column is read: as it is, or as text where Arrow would give it another type."""
    made = created(kind) or "text"
    if kind == "tinyint":
        return Carried(name, kind, "smallint", "smallint")
    if kind.startswith("decimal") or made == "jsonb" or made.endswith("[]") != postgres.endswith("[]"):
        return Carried(name, kind, "text", "string")
    return Carried(name, kind, made, kind)


def restored(column: Carried, found: Column) -> Column:
    """Return a column that was read, with its own name and type again."""
    from pyspark.sql import functions

    if column.kind == column.spark:
        return found.alias(column.name)
    if column.kind.startswith(("struct<", "map<", "array<")):
        return functions.from_json(found, column.kind).alias(column.name)
    return found.cast(column.kind).alias(column.name)
