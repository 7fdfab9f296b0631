"""Converts columns and types to the JSON of Delta's log, and reads the rules in it. For the Delta sink."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from twophase.core.manifest import Column, Schema
from twophase.formats import spark_types
from twophase.formats.table_rules import Rule, TypePart
from twophase.storage.spark_paths import quoted

#: The metadata in which Spark keeps the declared length of a column; in the log its type is string.
_LENGTH = "__CHAR_VARCHAR_TYPE_STRING"
_LIMIT = re.compile(r"(?:var)?char\((\d+)\)")
_NAMES = {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}


def schema_of(schema: Schema) -> Any:  # noqa: ANN401 - a schema of deltalake's
    """Return columns as a schema of deltalake."""
    from deltalake import Schema as DeltaSchema

    return DeltaSchema.from_json(json.dumps({"type": "struct", "fields": [field_of(column) for column in schema]}))


def field_of(column: Column) -> dict[str, Any]:
    """Return a column as Delta's JSON."""
    return {"name": column.name, "type": type_of(spark_types.parse(column.type)), "nullable": True, "metadata": {}}


def type_of(kind: spark_types.SparkType) -> str | dict[str, Any]:
    """Return a type as Delta's JSON."""
    parts = dict(kind.parts)
    match kind.name:
        case "array":
            return {"type": "array", "elementType": type_of(parts["element"]), "containsNull": True}
        case "map":
            key, value = type_of(parts["key"]), type_of(parts["value"])
            return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
        case "struct":
            fields = [
                {"name": name, "type": type_of(part), "nullable": True, "metadata": {}} for name, part in kind.parts
            ]
            return {"type": "struct", "fields": fields}
        case "decimal":
            return f"decimal({','.join(map(str, kind.numbers))})"
        case name:
            return _NAMES.get(name, name)


# --- the rules in the log --------------------------------------------------------------------------------------------


def part_of(field: dict[str, Any]) -> TypePart:
    """Return a field of Delta's JSON as a part of a row or a struct."""
    return TypePart(field["name"], field["type"], not field["nullable"])


def parts_of(kind: Any) -> Iterator[TypePart]:  # noqa: ANN401 - a type of Delta's JSON
    """Yield the parts of a type: fields, elements, keys, values."""
    if not isinstance(kind, dict):
        return
    match kind["type"]:
        case "struct":
            yield from map(part_of, kind["fields"])
        case "array":
            yield TypePart("element", kind["elementType"], not kind["containsNull"], "")
        case "map":
            yield TypePart("key", kind["keyType"], required=False, array="map_keys")
            yield TypePart("value", kind["valueType"], not kind["valueContainsNull"], "map_values")


def rules_of(field: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules that a column's metadata has for its values."""
    name, said = field["name"], field["metadata"]
    column = quoted(name)
    if expression := said.get("delta.generationExpression"):
        yield Rule(f"generated column {name} ({expression})", f"{column} <=> ({expression})")
    if invariant := said.get("delta.invariants"):
        expression = json.loads(invariant)["expression"]["expression"]
        yield Rule(f"invariant of {name} ({expression})", expression)
    if limit := _LIMIT.fullmatch(said.get(_LENGTH, "")):
        yield Rule(f"length of {name} ({limit[0]})", f"{column} IS NULL OR length({column}) <= {limit[1]}")
