"""What keeps a decided output from its promotion until a person acts, and the ways out.

A decision is final, so a parked revision can only be promoted in the end. What has to be done before depends on what
stands in the way of each of its sinks; here, and nowhere else, is said what that is.
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
    #: It holds something in this revision's place that this record did not vote for.
    FOREIGN = "foreign"
    #: What this revision takes the place of was rewritten by another writer, and cannot be told from other rows.
    REWRITTEN = "rewritten"


class Refused(Exception):
    """A table or database cannot take the staged output, for a reason that only a person can mend.

    Promoters raise it before they change anything; its hindrance says which way out there is.
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
    Hindrance.REWRITTEN: "restore the table of {sinks} to before another writer rewrote what is replaced",
}


def ways_out(pipeline: str, checkpoint_id: int, hindrances: Mapping[str, str]) -> str:
    """Say in one line what gets a parked revision further, for whatever stands in its way.

    A record that was parked before the kinds were kept has none: then all that may help is said.
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
    """Return the command that stages again what cannot be promoted; None: that would not help."""
    kinds = set(hindrances.values()) or {Hindrance.LOST}
    if kinds & {Hindrance.FOREIGN, Hindrance.REWRITTEN}:
        return None
    refused = [sink for sink, kind in sorted(hindrances.items()) if kind == Hindrance.REFUSED]
    sinks = "".join(f" --sink {sink}" for sink in (sorted(hindrances) if refused else ()))
    return f"twophase restage {pipeline} {checkpoint_id}{sinks} --reason …"


def command(pipeline: str, checkpoint_id: int, hindrances: Mapping[str, str]) -> str:
    """Return the one command that gets a parked revision further, or shows what is to be mended first."""
    shows = "reconcile" if Hindrance.FOREIGN in hindrances.values() else "verify"
    return restaging(pipeline, checkpoint_id, hindrances) or f"twophase {shows} {pipeline}"
