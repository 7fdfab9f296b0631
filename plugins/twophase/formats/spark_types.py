"""Parses Spark's types, as a manifest has them, into trees: for conversion into the types of Delta and Iceberg."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Types without parts.
PLAIN = frozenset({
    *("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary"),
    *("date", "timestamp", "timestamp_ntz"),
})  # fmt: skip
#: Letters that a name cannot have: table formats refuse most of them, and `:<>` are used in the text of a type.
FORBIDDEN = frozenset(" ,;{}()\n\t=:<>")

_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


class SparkType(NamedTuple):
    """A type: its name, precision and scale of a decimal, and its parts, each with a name."""

    name: str
    numbers: tuple[int, ...] = ()
    parts: tuple[tuple[str, SparkType], ...] = ()


def parse(text: str) -> SparkType:
    """Parse a type as Spark writes it; ValueError names a type that no table format has."""
    if text in PLAIN:
        return SparkType(text)
    if match := _DECIMAL.fullmatch(text):
        return SparkType("decimal", (int(match[1]), int(match[2])))
    head, _, rest = text.partition("<")
    inner = split(rest[:-1]) if rest.endswith(">") else []
    if head == "array" and len(inner) == 1:
        return SparkType("array", parts=(("element", parse(inner[0])),))
    if head == "map" and len(inner) == 2:  # noqa: PLR2004 - a key and a value
        return SparkType("map", parts=(("key", parse(inner[0])), ("value", parse(inner[1]))))
    if head == "struct" and inner:
        fields = [field.partition(":") for field in inner]
        return SparkType("struct", parts=tuple((check_name(name), parse(kind)) for name, _, kind in fields))
    msg = f"type {text}"
    raise ValueError(msg)


def check_name(name: str) -> str:
    """Return a column's name; ValueError if it has a letter that names cannot have."""
    if not name or FORBIDDEN & set(name):
        msg = f"name {name!r}"
        raise ValueError(msg)
    return name


def split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found
