"""Converts Spark's types, as a manifest has them, into Arrow's. For the sorted runs of a state."""

from __future__ import annotations

from typing import Any

from twophase.formats.spark_types import SparkType, parse


def arrow(kind: str) -> Any:  # noqa: ANN401 - a pyarrow type
    """Return Arrow's type for a type by Spark's short name; times of day are kept in UTC."""
    return _arrow(parse(kind))


def _arrow(kind: SparkType) -> Any:  # noqa: ANN401 - a pyarrow type
    import pyarrow as pa

    plain = {
        "boolean": pa.bool_(), "tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64(),
        "float": pa.float32(), "double": pa.float64(), "string": pa.string(), "binary": pa.binary(),
        "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
    }  # fmt: skip
    parts = [(name, _arrow(part)) for name, part in kind.parts]
    match kind.name:
        case "decimal":
            return pa.decimal128(*kind.numbers)
        case "array":
            return pa.list_(pa.field("element", parts[0][1]))
        case "map":
            return pa.map_(parts[0][1], parts[1][1])
        case "struct":
            return pa.struct(parts)
        case name:
            return plain[name]
