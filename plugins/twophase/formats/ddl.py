"""Parses columns in Spark's DDL (`word string, frequency bigint`) without Spark. For declarations with a schema."""

from __future__ import annotations

import re

from twophase.core.manifest import Column, Schema
from twophase.formats.spark_types import check_name, parse, split

#: Other names that Spark has for a type.
_ALIASES = {
    "byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "real": "float", "dec": "decimal",
    "numeric": "decimal", "timestamp_ltz": "timestamp",
}  # fmt: skip
#: A name, quoted or not, and its type; Spark allows a colon between them.
_COLUMN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|(\w+))\s*:?\s+(.+)", re.DOTALL)
_FIELD = re.compile(r"\s*(?:`((?:[^`]|``)+)`|(\w+))\s*[:\s]\s*(.+)", re.DOTALL)
_DECIMAL = re.compile(r"decimal(?:\((\d+)(?:,(\d+))?\))?")
#: The most digits that a decimal has.
_DIGITS = 38


def columns(text: str) -> Schema:
    """Return the columns of a DDL text, each with Spark's short name of its type; ValueError says what is wrong."""
    return tuple(_column(part) for part in split(text))


def _column(text: str) -> Column:
    found = _COLUMN.fullmatch(text)
    if found is None:
        msg = f"column {text.strip()!r}: expected a name and a type"
        raise ValueError(msg)
    return Column(_name(found), kind(found[3]))


def _name(found: re.Match[str]) -> str:
    return check_name(found[1].replace("``", "`") if found[1] else found[2])


def kind(text: str) -> str:
    """Return a type by the name that Spark gives it in `simpleString`."""
    text = text.strip()
    head, bracket, rest = text.partition("<")
    head = head.strip().lower()
    if bracket and rest.endswith(">"):
        inner = split(rest[:-1])
        if head == "struct":
            fields = [_FIELD.fullmatch(one) for one in inner]
            if None not in fields:
                return _known(f"struct<{','.join(f'{_name(one)}:{kind(one[3])}' for one in fields if one)}>")
        return _known(f"{head}<{','.join(map(kind, inner))}>")
    plain = re.sub(r"\s+", "", head) if "(" in head else head
    first = re.split(r"[^\w]", plain, maxsplit=1)[0]
    plain = _ALIASES.get(first, first) + plain[len(first) :]
    if found := _DECIMAL.fullmatch(plain):
        plain = f"decimal({found[1] or 10},{found[2] or 0})"
        if not int(found[2] or 0) <= int(found[1] or 10) <= _DIGITS or found[1] == "0":
            msg = f"type {text}"
            raise ValueError(msg)
    return _known(plain)


def _known(text: str) -> str:
    """Return a type that Spark and Arrow both have; ValueError names any other."""
    parse(text)
    return text
