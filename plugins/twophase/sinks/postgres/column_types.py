"""Which of Postgres' types holds which of Spark's, what a column becomes before it is loaded, and when it is read."""

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
    """How a column gets into a column of Postgres'."""

    #: Spark's type that it is converted to; None: it goes as it is; `json`: its JSON text.
    spark: str | None
    #: The type that it is loaded as, where that differs from the column's own: it is converted in the staging table.
    staged: str | None = None


def created(spark: str) -> str | None:
    """Return the type of a column that is created for one of Spark's types; None: there is none."""
    if spark in _CREATED:
        return _CREATED[spark]
    if _DECIMAL.fullmatch(spark):
        return spark.replace("decimal", "numeric")
    element = _element(spark)
    if element in _CREATED and element != "tinyint":
        return f"{_CREATED[element]}[]"
    return "jsonb" if spark.startswith(("struct<", "map<", "array<")) else None


def loading(spark: str, postgres: str) -> Loading | None:  # noqa: PLR0911 - one return per kind of type
    """Say how a column of Spark's gets into one of Postgres'; None: it does not fit."""
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
    #: Spark's type in the end.
    kind: str
    #: The type that the server gives it, and Spark's type for that.
    postgres: str
    spark: str


def carried(name: str, kind: str, postgres: str) -> Carried:
    """Say how a column is carried: as it is, or as a text where Arrow has another idea of its type."""
    made = created(kind) or "text"
    if kind == "tinyint":
        return Carried(name, kind, "smallint", "smallint")
    if kind.startswith("decimal") or made == "jsonb" or made.endswith("[]") != postgres.endswith("[]"):
        return Carried(name, kind, "text", "string")
    return Carried(name, kind, made, kind)


def restored(column: Carried, found: Column) -> Column:
    """Return a column that was carried with its own name and type again."""
    from pyspark.sql import functions

    if column.kind == column.spark:
        return found.alias(column.name)
    if column.kind.startswith(("struct<", "map<", "array<")):
        return functions.from_json(found, column.kind).alias(column.name)
    return found.cast(column.kind).alias(column.name)
