"""Columns in the words of Delta's log."""

from __future__ import annotations

import json
from typing import Any

from twophase.core.manifest import Column, Schema
from twophase.sinks import types

_NAMES = {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}


def schema_of(schema: Schema) -> Any:  # noqa: ANN401 - a schema of deltalake's
    """Return columns as Delta has them."""
    from deltalake import Schema as DeltaSchema

    return DeltaSchema.from_json(json.dumps({"type": "struct", "fields": [field_of(column) for column in schema]}))


def field_of(column: Column) -> dict[str, Any]:
    """Write a column as Delta's JSON has it."""
    return {"name": column.name, "type": type_of(types.parse(column.type)), "nullable": True, "metadata": {}}


def type_of(kind: types.Kind) -> str | dict[str, Any]:
    """Write a type as Delta's JSON has it."""
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
