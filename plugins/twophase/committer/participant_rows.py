"""Participants as rows of the record and as entries of receipts: the one place that converts them.

What a restage adds to a participant is in the column `handle` beside what the sink's `place` named: `earlier`, and
`standing`, which is what was voted for before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twophase.committer.tables import participant
from twophase.core.checkpoint import RESERVED, Json, Key, Output, Participant

p = participant.c

#: The columns that a participant is made of, beside the key of its revision.
COLUMNS = (p.name, p.kind, p.attempt, p.vote, p.handle, p.manifest, p.reason)
#: The attempt that was voted for before a restage; NULL: there is none, or the new attempt has its vote.
STANDING = p.handle["standing"]["attempt"].as_integer()


def to_row(participant: Participant) -> dict[str, Any]:
    """Return a participant as a row."""
    return {
        "name": participant.name,
        "kind": participant.kind,
        "attempt": participant.attempt,
        "vote": participant.vote,
        "handle": _handle(participant),
        "manifest": dict(participant.manifest),
        "reason": participant.reason,
    }


def _handle(participant: Participant) -> dict[str, Any]:
    handle = dict(participant.handle)
    if participant.earlier:
        handle["earlier"] = list(participant.earlier)
    if (voted := participant.voted) is not None:
        handle["standing"] = {
            "attempt": voted.attempt,
            "handle": _handle(voted),
            "manifest": dict(voted.manifest),
        }
    return handle


def place(handle: Json) -> Json:
    """Return what the sink's `place` named, from the column `handle`."""
    return {name: value for name, value in handle.items() if name not in RESERVED}


def of_row(row: Mapping[Any, Any]) -> Participant:
    """Return the participant of a row."""
    handle = row["handle"]
    standing = handle.get("standing")
    voted = None if standing is None else of_row({**row, **standing, "vote": True})
    return Participant(**{**row, "handle": place(handle)}, earlier=tuple(handle.get("earlier", ())), voted=voted)


def output(key: Key, row: Mapping[Any, Any], commit_seq: int | None = None) -> Output:
    """Return what a decided revision put into a sink, from the row of that participant."""
    found = of_row({column.name: row[column.name] for column in COLUMNS})
    return Output(
        key, found.attempt, found.handle, found.manifest, commit_seq=commit_seq, sink=found.name, earlier=found.earlier
    )
