"""What is dead, by the record alone: never by the age of a file (R10, R11)."""

from __future__ import annotations

from twophase.core.checkpoint import Revision
from twophase.core.states import State


def why_dead(  # noqa: PLR0911 - one return per rule
    attempt: int, revision: Revision, voted: int | None, *, manifest: bool, copies: bool
) -> str | None:
    """Say why what an attempt left on storage is dead; None: it may still be needed.

    `voted` is the attempt that the record names for this sink, `manifest` whether the leftover is a manifest, and
    `copies` whether the sink's promotion leaves nothing of use in staging. Where it adopts what is staged, an attempt
    that was voted for before a restage may still be taken into the table, so none is dead before COMMITTED. Each answer
    stays true for ever: what is COMMITTED names the attempt that the sink holds (R10), so no other one will ever be
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
