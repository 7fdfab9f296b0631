"""Converts columns, types and partitions between Spark and Iceberg. For the Iceberg sink and for table versions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from twophase.core.manifest import Schema, widens
from twophase.formats import spark_types
from twophase.formats.table_rules import TypePart

#: Spark's type → Iceberg's; there is none for tinyint and smallint.
_NAMES = {
    "boolean": "boolean", "int": "int", "bigint": "long", "float": "float", "double": "double", "string": "string",
    "binary": "binary", "date": "date", "timestamp": "timestamptz", "timestamp_ntz": "timestamp",
}  # fmt: skip
_FROM = {iceberg: spark for spark, iceberg in _NAMES.items()}


def schema_of(schema: Schema) -> Any:  # noqa: ANN401 - a schema of pyiceberg's
    """Return columns as a schema of pyiceberg."""
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.types import NestedField

    ids = count(1)
    fields = [
        NestedField(next(ids), column.name, type_of(spark_types.parse(column.type), ids), required=False)
        for column in schema
    ]
    return IcebergSchema(*fields)


def spec_of(schema: Any, partition_by: list[str]) -> Any:  # noqa: ANN401 - pyiceberg's
    """Return the partition spec by the values of these columns (identity)."""
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.transforms import IdentityTransform

    fields = [
        PartitionField(
            source_id=schema.find_field(name).field_id, field_id=1000 + number, transform=IdentityTransform(), name=name
        )
        for number, name in enumerate(partition_by)
    ]
    return PartitionSpec(*fields)


def type_of(kind: spark_types.SparkType, ids: Iterator[int]) -> Any:  # noqa: ANN401 - a type of pyiceberg's
    """Return a type of Spark as one of pyiceberg; ids only have to differ, the catalog assigns its own."""
    from pyiceberg import types as iceberg

    parts = dict(kind.parts)
    match kind.name:
        case "array":
            return iceberg.ListType(next(ids), type_of(parts["element"], ids), element_required=False)
        case "map":
            key, value = next(ids), next(ids)
            of = (type_of(parts["key"], ids), type_of(parts["value"], ids))
            return iceberg.MapType(key, of[0], value, of[1], value_required=False)
        case "struct":
            fields = [
                iceberg.NestedField(next(ids), name, type_of(part, ids), required=False) for name, part in kind.parts
            ]
            return iceberg.StructType(*fields)
        case "decimal":
            return iceberg.DecimalType(*kind.numbers)
        case name if name in _NAMES:
            return _primitive(_NAMES[name])
        case name:
            msg = f"type {name}"
            raise ValueError(msg)


def promotes(before: str, after: str) -> bool:
    """Say whether Iceberg lets a column's type become the other, wider one; it has no tinyint and smallint."""
    return {before, after}.isdisjoint({"tinyint", "smallint"}) and widens(before, after)


def _primitive(name: str) -> Any:  # noqa: ANN401 - a type of pyiceberg's
    from pyiceberg import types as iceberg

    return {
        "boolean": iceberg.BooleanType, "int": iceberg.IntegerType, "long": iceberg.LongType,
        "float": iceberg.FloatType, "double": iceberg.DoubleType, "string": iceberg.StringType,
        "binary": iceberg.BinaryType, "date": iceberg.DateType, "timestamptz": iceberg.TimestamptzType,
        "timestamp": iceberg.TimestampType,
    }[name]()  # fmt: skip


def simple(kind: Any) -> str:  # noqa: ANN401 - a type of pyiceberg's
    """Return a type of Iceberg as Spark's short text."""
    from pyiceberg import types as iceberg

    if isinstance(kind, iceberg.ListType):
        return f"array<{simple(kind.element_type)}>"
    if isinstance(kind, iceberg.MapType):
        return f"map<{simple(kind.key_type)},{simple(kind.value_type)}>"
    if isinstance(kind, iceberg.StructType):
        return f"struct<{','.join(f'{field.name}:{simple(field.field_type)}' for field in kind.fields)}>"
    if isinstance(kind, iceberg.DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    return _FROM.get(str(kind), str(kind))


def parts_of(kind: Any) -> Iterator[TypePart]:  # noqa: ANN401 - a type of pyiceberg's
    """Yield the parts of a type, and whether each is required."""
    from pyiceberg import types as iceberg

    match kind:
        case iceberg.StructType():
            yield from (TypePart(field.name, field.field_type, field.required) for field in kind.fields)
        case iceberg.ListType():
            yield TypePart("element", kind.element_type, kind.element_required, "")
        case iceberg.MapType():
            yield TypePart("key", kind.key_type, required=False, array="map_keys")
            yield TypePart("value", kind.value_type, kind.value_required, "map_values")


def optional(schema: Any) -> Any:  # noqa: ANN401 - a schema of pyiceberg's
    """Return the same schema with no field required: Spark's files have all columns as optional."""
    from pyiceberg.schema import Schema as IcebergSchema

    return IcebergSchema(*_optional(schema.as_struct()).fields, schema_id=schema.schema_id)


def _optional(kind: Any) -> Any:  # noqa: ANN401 - a type of pyiceberg's
    from pyiceberg import types as iceberg

    match kind:
        case iceberg.StructType():
            return iceberg.StructType(
                *(
                    iceberg.NestedField(field.field_id, field.name, _optional(field.field_type), required=False)
                    for field in kind.fields
                )
            )
        case iceberg.ListType():
            return iceberg.ListType(kind.element_id, _optional(kind.element_type), element_required=False)
        case iceberg.MapType():
            parts = _optional(kind.key_type), kind.value_id, _optional(kind.value_type)
            return iceberg.MapType(kind.key_id, *parts, value_required=False)
    return kind
