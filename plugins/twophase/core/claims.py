"""Claims: the places that belong to one slot, one for each of its reads and writes; `core.begin` records them.

Two slots that resolve to one place would commit its records twice, or write over each other. So a checkpoint claims, at
begin, the places that its slot resolves to. No other checkpoint of the pipeline gets them until it is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from twophase.core.slots import Slot


class Claim(NamedTuple):
    """One place in a read or a write, or the part of it that lies in a stretch of time."""

    #: Relative to what all slots share (a folder, a table), so that moving that changes nothing; empty: all of it.
    place: str
    #: Half-open; None: the whole place.
    start: datetime | None = None
    end: datetime | None = None

    def __str__(self) -> str:
        """Read as the place, or as the times in it."""
        if self.start is None or self.end is None:
            return self.place
        times = " to ".join(moment.astimezone(UTC).isoformat() for moment in (self.start, self.end))
        return f"{self.place} from {times}" if self.place else f"the times from {times}"


#: Read or write → its claim; the names are like `read words`, `write orders`.
Claims = Mapping[str, Claim]


class Holder(NamedTuple):
    """The checkpoint that has a claim already."""

    part: str
    claim: Claim
    checkpoint_id: int
    slot: str
    #: Whether a revision of it is decided: then it cannot be released.
    decided: bool


def refusal(pipeline: str, slot: str, holder: Holder) -> str:
    """Return the message that a slot's place is taken: by which checkpoint, and what to do."""
    return (
        f"pipeline {pipeline!r}: slot {slot!r}: its {holder.part} comes to {holder.claim}, which checkpoint"
        f" {pipeline}/{holder.checkpoint_id} (slot {holder.slot!r}) has; {_remedy(pipeline, slot, holder)}"
    )


def _remedy(pipeline: str, slot: str, holder: Holder) -> str:
    if _apart(Slot.parse(slot), Slot.parse(holder.slot)):
        tell_apart = "that tells such slots apart, for example by %H, in a zone with summer time by %H%z"
        if holder.part.startswith("read"):
            return f"declare a path {tell_apart}"
        return f"give a pipeline of another name a slot_folder {tell_apart}"
    if holder.decided:
        return "run that slot with --reprocess to replace what it holds"
    return (
        f"run that slot, or free what it has: `twophase abort {pipeline} {holder.checkpoint_id}`, then"
        f" `twophase release {pipeline} {holder.checkpoint_id}`"
    )


def _apart(one: Slot, other: Slot) -> bool:
    """Return True if two slots have times that do not overlap."""
    if one.start is None or other.start is None or one.start == other.start:
        return False
    if one.start < other.start:
        return (one.end or one.start) <= other.start
    return (other.end or other.start) <= one.start
