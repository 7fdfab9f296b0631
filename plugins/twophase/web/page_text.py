"""Format values of the record for the pages, with the words and colours of the command line and times in UTC."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from twophase.cli.output import STYLES, size
from twophase.core.slots import Slot

#: Largest first: (seconds, singular).
_UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
_SECONDS = 60
_HOURS = 48
#: The type of an error, and whose it is.
_WHOSE = re.compile(r"^(\w+: )checkpoint \S+ r\d+: (?:attempt \d+: )?")


def colour(state: str) -> str:
    """Return a state's colour on the command line; the style sheet has a class of that name."""
    return STYLES[state]


def number(value: int | None) -> str:
    """Return a number with separated thousands."""
    return "" if value is None else f"{value:,}"


def moment(value: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return "" if value is None else f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def ago(value: timedelta | None) -> str:
    """Return how long ago something was, in the largest unit that fits."""
    if value is None:
        return ""
    seconds = max(value.total_seconds(), 0)
    length, unit = next((found for found in _UNITS if seconds >= found[0]), _UNITS[-1])
    count = int(seconds // length)
    return "just now" if seconds < 1 else f"{count} {unit}{'' if count == 1 else 's'} ago"


def slot(value: str | None) -> list[str]:
    """Return a slot as short parts for lines; an interval without what its start already says."""
    if not value:
        return []
    parsed = Slot.parse(value)
    start, end = parsed.start, parsed.end
    if start is None or end is None:
        return [value]
    if start.time() == end.time() == time():
        return [f"{start:%Y-%m-%d} →", f"{end:%Y-%m-%d}"]
    clock = "%H:%M:%S" if start.second or end.second else "%H:%M"
    whole = f"%Y-%m-%d {clock}"
    return [f"{start:{whole}} →", f"{end:{clock if start.date() == end.date() else whole}}"]


def segment(value: str) -> str:
    """Return a text as one part of a path."""
    return quote(value, safe="")


def took(row: Mapping[str, Any]) -> str:
    """Return how long it took from begin until everybody could see the output."""
    if row["committed_at"] is None or row["revision"] == 0:
        return ""
    seconds = max((row["committed_at"] - row["created_at"]).total_seconds(), 0)
    if seconds < _SECONDS:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= _HOURS:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def cause(error: str | None) -> str:
    """Return an error without the checkpoint and attempt, which the page shows already."""
    return _WHOSE.sub(r"\1", error or "")


def code(value: object) -> Markup:
    """Return a text as HTML, with quoted commands marked as code."""
    parts = str(value).split("`")
    return Markup("").join(Markup("<code>{}</code>").format(p) if n % 2 else p for n, p in enumerate(parts))


FILTERS = {
    "cause": cause,
    "code": code,
    "colour": colour,
    "number": number,
    "moment": moment,
    "ago": ago,
    "slot": slot,
    "segment": segment,
    "took": took,
    "size": size,
}
