"""Slots: the interval or partition key that a checkpoint stands for, as text; sources and sinks fill patterns from it.

An interval is `start/end` in ISO 8601, in UTC: `2026-11-15T00:00:00+00:00/2026-11-16T00:00:00+00:00`.
Anything else is a partition key; one that is itself a date or a time also has a start.

A pipeline may have a time zone. Then times without an offset are read in that zone, and patterns are filled with times
of that zone. The text of an interval is always in UTC, so it is the same slot in every zone.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from twophase.core.errors import ConfigError

#: The names that a pattern of a declaration may use.
FIELDS = ("start", "end", "key")
#: What a key must not contain, because it becomes part of a path.
_UNSAFE = re.compile(r"[/\\\x00-\x1f]|^\.{0,2}$")
_LONGEST = 200
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Slot:
    """The interval or partition key that one checkpoint stands for."""

    text: str
    start: datetime | None = None
    #: Exclusive; None: a partition key.
    end: datetime | None = None

    @classmethod
    def parse(cls, text: str, zone: tzinfo = UTC) -> Slot:
        """Read a slot, with its times in `zone`; two spellings of one interval give the same slot."""
        first, slash, second = text.partition("/")
        if not slash:
            if not text or len(text) > _LONGEST or _UNSAFE.search(text):
                msg = f"slot {text!r}: expected `start/end` in ISO 8601, or a partition key that can be a folder's name"
                raise ConfigError(msg)
            return cls(text, start=_moment(text, zone))
        start, end = _moment(first, zone), _moment(second, zone)
        if start is None or end is None or start.astimezone(UTC) >= end.astimezone(UTC):
            msg = f"slot {text!r}: expected `start/end` in ISO 8601, the start before the end"
            raise ConfigError(msg)
        return cls.between(start, end)

    @classmethod
    def between(cls, start: datetime, end: datetime) -> Slot:
        """Return the slot of an interval."""
        return cls(f"{start.astimezone(UTC).isoformat()}/{end.astimezone(UTC).isoformat()}", start, end)

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
    """Return the names that a pattern uses; raise ConfigError for one that no slot has."""
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


def zone(name: str | None, who: str) -> tzinfo:
    """Return a time zone by its name; None means UTC. `who` begins the error."""
    if name is None:
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError, TypeError) as error:  # not found, a folder of names, no name at all
        msg = (
            f"{who}: timezone={name!r}: expected the name of a time zone that is known here, such as 'Europe/Berlin'"
            " (the package tzdata brings them all)"
        )
        raise ConfigError(msg) from error


def between(first: datetime, last: datetime, length: timedelta) -> Iterator[Slot]:
    """Yield the intervals of one length whose starts are from `first` to `last`, both included.

    Whole days are days of the zone of `first`: two in a year may have 23 or 25 hours.
    """
    days = length % timedelta(days=1) == timedelta(0)
    start = first
    while start.astimezone(UTC) <= last.astimezone(UTC):
        # Python adds in local clock time, which is right for days and wrong for hours.
        end = start + length if days else (start.astimezone(UTC) + length).astimezone(first.tzinfo)
        yield Slot.between(start, end)
        start = end


def length_of(slot: Slot) -> timedelta | None:
    """Return the length of an interval, whole days counted in its own zone; None: it is a partition key."""
    if slot.start is None or slot.end is None:
        return None
    shown = slot.end.replace(tzinfo=None) - slot.start.replace(tzinfo=None)
    return shown if shown and not shown % timedelta(days=1) else slot.end.astimezone(UTC) - slot.start.astimezone(UTC)


def midnight(moment: datetime) -> date:
    """Return the day that begins at a moment in its zone, or the next day if none begins just then."""
    day = moment.date()
    begins = datetime(day.year, day.month, day.day, tzinfo=moment.tzinfo)
    return day if begins.astimezone(UTC) == moment.astimezone(UTC) else day + timedelta(days=1)


def duration(text: str, what: str) -> timedelta:
    """Read a length of time: `90m`, `36h`, `7d`, `2w`."""
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if not match or int(match[1]) == 0:
        msg = f"{what} {text!r}: expected a length of time such as 90m, 36h, 7d or 2w"
        raise ConfigError(msg)
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def moment(text: str, what: str, zone: tzinfo = UTC) -> datetime:
    """Read a date or a time in ISO 8601; without an offset it is in `zone`."""
    found = _moment(text, zone)
    if found is None:
        msg = f"{what} {text!r}: expected a date or a time in ISO 8601"
        raise ConfigError(msg)
    return found


def _moment(text: str, zone: tzinfo) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=zone) if found.tzinfo is None else found.astimezone(zone)
