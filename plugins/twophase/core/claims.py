"""What a slot has for its own: the place that each read and each write of it comes to.

Two slots that come to one place would commit its records twice, or write over each other. So a checkpoint claims in the
record, at begin, what its slot resolves to; nobody else of the pipeline gets it until the checkpoint is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from twophase.core.slots import Slot


class Claim(NamedTuple):
    """One place in a read or a write, or of that place what lies in a stretch of time."""

    #: Below what all slots share, so that a moved table or folder is still the same; empty: there is one place only.
    place: str
    #: Half-open; None: all of the place.
    start: datetime | None = None
    end: datetime | None = None

    def __str__(self) -> str:
        """Read as the place, or as the times in it."""
        if self.start is None or self.end is None:
            return self.place
        times = " to ".join(moment.astimezone(UTC).isoformat() for moment in (self.start, self.end))
        return f"{self.place} from {times}" if self.place else f"the times from {times}"


#: By what the place is of: `read words`, `write lake`.
Claims = Mapping[str, Claim]


class Holder(NamedTuple):
    """Who has a claim that stands in the way."""

    part: str
    claim: Claim
    checkpoint_id: int
    slot: str
    #: Whether anything of it is decided: then it is there for good.
    decided: bool


def refusal(pipeline: str, slot: str, holder: Holder) -> str:
    """Say who has what a slot comes to, and what to do."""
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
    """Say whether two slots are about different times."""
    if one.start is None or other.start is None:
        return False
    return (one.end or one.start) <= other.start or (other.end or other.start) <= one.start != other.start
