"""Hindrances: what keeps a decided output from its promotion until a person acts, and the ways out.

Sinks name the hindrance; pages, commands and errors say the way out. A decision is final, so a parked revision can only
be promoted in the end. What a person has to do first depends on the hindrance of each sink. Only this module says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Hindrance(StrEnum):
    """Why a sink cannot promote what was decided."""

    #: Its staged output is gone, or is not what was voted for.
    LOST = "lost"
    #: Its target does not take the rows: a constraint, a type, another writer's change.
    REFUSED = "refused"
    #: It holds something in this revision's place that this record knows no vote for.
    FOREIGN = "foreign"
    #: Another writer rewrote the rows that this revision replaces, so they cannot be told from other rows.
    REWRITTEN = "rewritten"


class Refused(Exception):
    """A table or database cannot take the staged output until a person changes something.

    Promoters raise it before they change anything. The hindrance decides which way out is shown.
    """

    def __init__(self, message: str, hindrance: Hindrance = Hindrance.REFUSED) -> None:
        """Say why, and what kind of hindrance that is."""
        super().__init__(message)
        self.hindrance = hindrance


_MENDING = {
    Hindrance.LOST: "put back what is missing",
    Hindrance.REFUSED: "alter the target of {sinks} so that it takes the rows",
    Hindrance.FOREIGN: (
        "move away what {sinks} holds in its place (was the record restored? `twophase reconcile {pipeline}` shows it)"
    ),
    Hindrance.REWRITTEN: (
        "restore the table of {sinks} to before another writer rewrote what is replaced, with the rows that came later"
    ),
}


def ways_out(pipeline: str, checkpoint_id: int, hindrances: Mapping[str, str]) -> str:
    """Say in one line what a person can do about a parked revision.

    Revisions that were parked by an early version have no hindrances; they are treated as lost output.
    """
    by_kind: dict[Hindrance, list[str]] = {}
    for sink, kind in sorted(hindrances.items()):
        by_kind.setdefault(Hindrance(kind), []).append(sink)
    found = by_kind or {Hindrance.LOST: []}
    mending = " and ".join(
        _MENDING[kind].format(pipeline=pipeline, sinks=", ".join(sinks)) for kind, sinks in sorted(found.items())
    )
    said = f"{mending}, then `twophase recover {pipeline}`"
    if command := restaging(pipeline, checkpoint_id, hindrances):
        first = "mend the transform and " if Hindrance.REFUSED in found else ""
        said += f"; or {first}stage again: `{command}`"
    return said


def restaging(pipeline: str, checkpoint_id: int, hindrances: Mapping[str, str]) -> str | None:
    """Return the `twophase restage` command for a parked revision; None: a restage would not help."""
    kinds = set(hindrances.values()) or {Hindrance.LOST}
    if kinds & {Hindrance.FOREIGN, Hindrance.REWRITTEN}:
        return None
    refused = [sink for sink, kind in sorted(hindrances.items()) if kind == Hindrance.REFUSED]
    sinks = "".join(f" --sink {sink}" for sink in (sorted(hindrances) if refused else ()))
    return f"twophase restage {pipeline} {checkpoint_id}{sinks} --reason …"


def command(pipeline: str, checkpoint_id: int, hindrances: Mapping[str, str]) -> str:
    """Return the restage command if that helps, else the command that shows what has to be mended first."""
    shows = "reconcile" if Hindrance.FOREIGN in hindrances.values() else "verify"
    return restaging(pipeline, checkpoint_id, hindrances) or f"twophase {shows} {pipeline}"
