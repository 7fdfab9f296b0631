"""Slots: the data interval or the partition key that a checkpoint stands for, as text.

An interval is `start/end` in ISO 8601, in UTC: `2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00`.
Anything else is a partition key; one that is itself a date or a time also has a start.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from twophase.core.errors import ConfigError

#: What a pattern of a declaration may name.
FIELDS = ("start", "end", "key")
#: What a key must not bring into a path.
_UNSAFE = re.compile(r"[/\\\x00-\x1f]|^\.{0,2}$")
_LONGEST = 200
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Slot:
    """What one checkpoint of an interval pipeline stands for."""

    text: str
    start: datetime | None = None
    #: Exclusive; None: a partition key.
    end: datetime | None = None

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Read a slot; two spellings of one interval are one slot."""
        first, slash, second = text.partition("/")
        if not slash:
            if not text or len(text) > _LONGEST or _UNSAFE.search(text):
                msg = f"slot {text!r}: expected `start/end` in ISO 8601, or a partition key that can be a folder's name"
                raise ConfigError(msg)
            return cls(text, start=_moment(text))
        start, end = _moment(first), _moment(second)
        if start is None or end is None or start >= end:
            msg = f"slot {text!r}: expected `start/end` in ISO 8601, the start before the end"
            raise ConfigError(msg)
        return cls.between(start, end)

    @classmethod
    def between(cls, start: datetime, end: datetime) -> Slot:
        """Return the slot of an interval."""
        start, end = start.astimezone(UTC), end.astimezone(UTC)
        return cls(f"{start.isoformat()}/{end.isoformat()}", start, end)

    def format(self, pattern: str) -> str:
        """Fill a pattern such as `dt={start:%Y-%m-%d}`."""
        there = {"start": self.start, "end": self.end, "key": self.text if self.end is None else None}
        values = {name: value for name, value in there.items() if value is not None}
        for name in fields(pattern):
            if name not in values:
                msg = f"slot {self.text!r}: it has no {name}, which {pattern!r} asks for; it has {', '.join(values)}"
                raise ConfigError(msg)
        return pattern.format(**values)


def fields(pattern: str) -> list[str]:
    """Return the names that a pattern asks for; ConfigError unless a slot may have them."""
    try:
        found = [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    except ValueError as error:
        msg = f"pattern {pattern!r}: {error}; expected for example `dt={{start:%Y-%m-%d}}`"
        raise ConfigError(msg) from None
    for name in found:
        if name not in FIELDS:
            msg = f"pattern {pattern!r}: unknown {{{name}}}, expected one of {', '.join(FIELDS)}"
            raise ConfigError(msg)
    return found


def between(first: datetime, last: datetime, length: timedelta) -> Iterator[Slot]:
    """Yield the intervals of one length whose starts are from `first` to `last`, the last included."""
    start = first
    while start <= last:
        yield Slot.between(start, start + length)
        start += length


def duration(text: str, what: str) -> timedelta:
    """Read a length of time: `90m`, `36h`, `7d`, `2w`."""
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if not match or int(match[1]) == 0:
        msg = f"{what} {text!r}: expected a length of time such as 90m, 36h, 7d or 2w"
        raise ConfigError(msg)
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def moment(text: str, what: str) -> datetime:
    """Read a date or a time in ISO 8601; without a zone it is UTC."""
    found = _moment(text)
    if found is None:
        msg = f"{what} {text!r}: expected a date or a time in ISO 8601"
        raise ConfigError(msg)
    return found


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
