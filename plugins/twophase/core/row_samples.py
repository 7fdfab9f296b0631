"""Samples of users' rows, safe for the record and for a terminal; audits and diffs show them.

Every value becomes JSON, long texts are cut, and each row has a maximum size. PostgreSQL's jsonb takes neither NUL nor
half a surrogate pair, so these are replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from typing import Any

Row = dict[str, Any]

#: How many rows a sample shows, and how many characters of a value.
ROWS = 5
CHARACTERS = 200
#: How many bytes of JSON one row of a sample takes at most.
ROW_BYTES = 1100
_VALUE_BYTES = 700
_NAME_BYTES = 200
_REST_BYTES = 60
_REST = "…"
#: Above this Python refuses to write an integer.
_LARGEST_BITS = 10_000
_EXACT_BITS = 63


def sample(rows: Iterable[object], limit: int = ROWS, size: int = ROW_BYTES) -> list[Row]:
    """Return the first rows, each with as many columns as fit; columns of a plain sequence are numbered."""
    found: list[Row] = []
    for row in rows:
        if len(found) == limit:
            break
        found.append(_row(row, size))
    return found


def line(text: str, size: int) -> str:
    """Return a text as one line that takes at most `size` bytes of JSON."""
    return _fit(" ".join(_clean(text).split()), size)


def plain(value: object) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return a value for JSON: numbers as they are, bytes as hex, everything else as text, cut if long."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() <= _EXACT_BITS:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _fit(cut(_clean(_text(value))), _VALUE_BYTES)


def cut(text: str, characters: int = CHARACTERS) -> str:
    """Cut a text to at most `characters`; if it was longer, the last one is `…`."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _row(row: object, size: int) -> Row:
    found: Row = {}
    used = _REST_BYTES
    columns = _columns(row)
    for name, value in columns:
        key = _fit(_clean(str(name)), _NAME_BYTES)
        cell = plain(value)
        used += _size(key) + _size(cell) + len(": , ")
        if used > size:
            found[_REST] = f"and {len(columns) - len(found)} more columns"
            break
        found[key] = cell
    return found


def _columns(row: object) -> list[tuple[object, object]]:
    if isinstance(row, Mapping):
        return list(row.items())
    if isinstance(row, Sequence) and not isinstance(row, str | bytes | bytearray):
        return list(enumerate(row))
    return [("value", row)]


def _text(value: object) -> str:
    """Return a value as text, of a long one little more than may be shown."""
    match value:
        case str():
            return value[: CHARACTERS + 1]
        case bytes() | bytearray() | memoryview():
            text = bytes(value[: CHARACTERS + 1]).hex()
        case int() if value.bit_length() > _LARGEST_BITS:
            text = f"an integer of {value.bit_length()} bits"
        case date() | time():
            text = value.isoformat()
        case Mapping():
            text = "{" + ", ".join(f"{_inner(key)}: {_inner(item)}" for key, item in _some(value.items())) + "}"
        case Sequence() | set() | frozenset():
            text = "[" + ", ".join(map(_inner, _some(value))) + "]"
        case _:
            text = str(value)
    return text


def _inner(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else cut(_text(value))


def _some(items: Iterable[Any]) -> list[Any]:
    """Return the first items: more than that cannot be shown, because each takes some of the text."""
    return [item for item, _ in zip(items, range(CHARACTERS), strict=False)]


def _clean(text: str) -> str:
    return text.replace("\0", "␀").encode("utf-8", "replace").decode("utf-8")


def _fit(text: str, size: int) -> str:
    """Cut a text until its JSON has at most `size` bytes; a character beyond ASCII takes six or twelve."""
    while _size(text) > size:
        text = cut(text, max(1, min(len(text) - 1, size * len(text) // _size(text))))
    return text


def _size(value: object) -> int:
    return len(json.dumps(value))
