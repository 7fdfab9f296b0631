"""What a Parquet file's footer says of its columns, as Delta's log has it: then readers skip files by their predicates.

A bound that is too narrow would hide rows, so whatever is in doubt is left out: readers take that for unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from twophase.core.manifest import Schema

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

#: Of how many columns: what Delta's own writers have by default.
COLUMNS = 32
#: Longer texts are no bounds that anybody looks for.
LETTERS = 32
#: Types whose bounds mean the same to every reader: not floats, among which NaN has a place in Spark and none in Arrow.
_WHOLE = frozenset({"tinyint", "smallint", "int", "bigint"})
_MILLISECOND = timedelta(milliseconds=1)


def of(metadata: FileMetaData, schema: Schema) -> dict[str, Any]:
    """Return the bounds and the numbers of nulls of a file's first columns."""
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
    """Add the bounds of one column, if its type has some."""
    try:
        low, high = min(part.min for part in parts), max(part.max for part in parts)
    except (ValueError, OverflowError):  # a time that Python does not have
        return
    if (least := _least(low, kind)) is not None and (most := _most(high, kind)) is not None:
        found["minValues"][name], found["maxValues"][name] = least, most


def _least(value: Any, kind: str) -> Any:  # noqa: ANN401 - whatever a column has
    """Write a lower bound; None: there is none for this type."""
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
    """Write an upper bound; the log has milliseconds, so a time is rounded up."""
    if isinstance(value, datetime) and value.microsecond % 1000:
        value += _MILLISECOND
    return _least(value, kind)


def _milliseconds(value: datetime, kind: str) -> str:
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return f"{text}Z" if kind == "timestamp" else text
