"""Reads column statistics from a Parquet footer, for Delta's log: by them readers skip files. For the Delta sink.

A bound that is too narrow would hide rows, so whatever is in doubt is left out: readers take it as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from twophase.core.manifest import Schema

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

#: The number of columns that get statistics: the default of Delta's own writers.
COLUMNS = 32
#: The longest text that is used as a bound: longer ones are of no use to readers.
LETTERS = 32
#: Number types whose bounds mean the same to every reader; not floats: Spark orders NaN, Arrow leaves it out.
_WHOLE = frozenset({"tinyint", "smallint", "int", "bigint"})
_MILLISECOND = timedelta(milliseconds=1)


def of(metadata: FileMetaData, schema: Schema) -> dict[str, Any]:
    """Return the bounds and the null counts of a file's first columns."""
    places = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}
    found: dict[str, Any] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for name, kind in schema[:COLUMNS]:
        if name not in places:
            continue  # nested, or only in the names of folders
        parts = [metadata.row_group(group).column(places[name]).statistics for group in range(metadata.num_row_groups)]
        if not all(part is not None and part.has_null_count for part in parts):
            continue
        found["nullCount"][name] = sum(part.null_count for part in parts)
        filled = [part for part in parts if part.num_values]
        if filled and all(part.has_min_max for part in filled):
            _bound(found, name, kind, filled)
    return found


def _bound(found: dict[str, Any], name: str, kind: str, parts: Iterable[Any]) -> None:
    """Add the bounds of one column, if its type can have them."""
    try:
        low, high = min(part.min for part in parts), max(part.max for part in parts)
    except (ValueError, OverflowError):  # a time outside of Python's range
        return
    if (least := _least(low, kind)) is not None and (most := _most(high, kind)) is not None:
        found["minValues"][name], found["maxValues"][name] = least, most


def _least(value: Any, kind: str) -> Any:  # noqa: ANN401 - whatever a column has
    """Return a lower bound as the log has it; None if there is none for this type or value."""
    if kind in _WHOLE and isinstance(value, int):
        return value
    if kind == "string" and isinstance(value, str) and len(value) <= LETTERS:
        return value
    if kind in {"timestamp", "timestamp_ntz"} and isinstance(value, datetime):
        return _milliseconds(value, kind)
    if kind == "date" and isinstance(value, date):
        return value.isoformat()
    return None


def _most(value: Any, kind: str) -> Any:  # noqa: ANN401 - likewise
    """Return an upper bound as the log has it; the log has milliseconds, so a time is rounded up."""
    if isinstance(value, datetime) and value.microsecond % 1000:
        value += _MILLISECOND
    return _least(value, kind)


def _milliseconds(value: datetime, kind: str) -> str:
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return f"{text}Z" if kind == "timestamp" else text
