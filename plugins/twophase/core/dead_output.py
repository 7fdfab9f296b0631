"""Say which staged output is dead, by the record alone, never by the age of a file (R10, R11); `sweep` calls it."""

from __future__ import annotations

from twophase.core.checkpoint import Revision
from twophase.core.states import State


def why_dead(  # noqa: PLR0911 - one return per rule
    attempt: int, revision: Revision, voted: int | None, *, manifest: bool, copies: bool
) -> str | None:
    """Say why what an attempt left on storage is dead; None: it may still be needed.

    `voted` is the attempt that the record names for this sink. `manifest` says whether the leftover is a manifest.
    `copies` says whether the sink's promotion leaves nothing of use in staging. Where it takes staged files in as they
    lie, an attempt that was voted for before a restage may still get into the table, so none is dead before COMMITTED.
    Dead output stays dead: a COMMITTED revision names the attempt that the sink holds (R10), and no other one is ever
    promoted.
    """
    match revision.state:
        case State.ABORTING | State.ABORTED:
            return "its revision was aborted"
        case State.OPEN | State.PRECOMMITTED if attempt < revision.epoch:
            return f"attempt {revision.epoch} took its place"
        case State.COMMITTING if attempt < revision.epoch and attempt != voted and not manifest and copies:
            return f"attempt {voted} was voted for"
        case State.SUPERSEDED if manifest and revision.swept:
            return "a later revision took its place, its retention is over"
        case State.COMMITTED | State.SUPERSEDED if attempt != voted and attempt <= revision.epoch:
            return f"attempt {voted} was committed"
        case State.COMMITTED | State.SUPERSEDED if not manifest and copies:
            return f"attempt {voted} was committed"
        case _:
            return None
