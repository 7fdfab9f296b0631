"""Reads the columns of a Parquet file, with Spark's types. For sinks that take in files, and for table versions."""

from __future__ import annotations

import json
from typing import Any

from twophase.core.manifest import Column, Schema

#: The metadata in which Spark's own writer leaves its schema.
_SPARK = b"org.apache.spark.sql.parquet.row.metadata"
_ARROW = {
    "bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "float": "float",
    "double": "double", "string": "string", "large_string": "string", "binary": "binary", "date32[day]": "date",
}  # fmt: skip


def columns(file: Any) -> Schema:  # noqa: ANN401 - a path, or an open file
    """Return the columns of a Parquet file: as Spark's writer says if it wrote the file, else from Arrow's types."""
    import pyarrow.parquet as pq

    found = pq.read_schema(file)
    spark = (found.metadata or {}).get(_SPARK)
    if spark is not None:
        return tuple(Column(field["name"], simple(field["type"])) for field in json.loads(spark)["fields"])
    return tuple(Column(field.name, _from_arrow(field.type)) for field in found)


def simple(kind: Any) -> str:  # noqa: ANN401 - Spark's JSON: a name, or an object
    """Return a type of Spark's JSON, which Delta uses too, as Spark's short text."""
    if isinstance(kind, str):
        return {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}.get(kind, kind)
    match kind["type"]:
        case "array":
            return f"array<{simple(kind['elementType'])}>"
        case "map":
            return f"map<{simple(kind['keyType'])},{simple(kind['valueType'])}>"
        case "struct":
            parts = ",".join(f"{field['name']}:{simple(field['type'])}" for field in kind["fields"])
            return f"struct<{parts}>"
        case other:
            return str(other)


def _from_arrow(kind: Any) -> str:  # noqa: ANN401 - a pyarrow type
    """Return a type of Arrow as the type that Spark reads from Parquet."""
    import pyarrow.types as is_

    if is_.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if is_.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None and kind.unit != "ns" else "timestamp"
    if is_.is_list(kind) or is_.is_large_list(kind):
        return f"array<{_from_arrow(kind.value_type)}>"
    if is_.is_map(kind):
        return f"map<{_from_arrow(kind.key_type)},{_from_arrow(kind.item_type)}>"
    if is_.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{_from_arrow(field.type)}' for field in kind)}>"
    return _ARROW.get(str(kind), str(kind))
