"""Every error that Twophase raises on purpose, sorted by what the caller should do about it.

Messages are one line, lower case: what, which, expected and found, remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from twophase.core.secret_texts import without_secrets

if TYPE_CHECKING:
    from twophase.core.checkpoint import InputFile

    #: (source, checkpoint) → file → the message if its bytes turn out to be different.
    Rewritten = Mapping[tuple[str, int], Mapping[InputFile, str]]

#: How many characters of a failure the record keeps.
_LONGEST = 900


class TwophaseError(Exception):
    """Base of every error Twophase raises on purpose."""


def in_one_line(error: BaseException) -> str:
    """Return an error as the record keeps it: its type, and its message in one line without secrets."""
    line = " ".join(without_secrets(str(error)).split())
    return f"{type(error).__name__}: {line}"[:_LONGEST] if line else type(error).__name__


# --- try again -------------------------------------------------------------------------------------------------------


class Retryable(TwophaseError):
    """Nothing is wrong with the work itself: the same call may succeed later."""


class StoreUnavailable(Retryable):
    """The committer database could not be reached, or went away before it replied.

    The step may or may not have happened: read the record again, delete nothing.
    """


class Busy(Retryable):
    """Another run is working on what this one wants; the message names it."""

    def __init__(self, message: str, *, lease_left: float | None = None) -> None:
        """Keep how many seconds the other run's lease lasts (None: it has no lease, but its run has not ended)."""
        super().__init__(message)
        self.lease_left = lease_left


class PromotionPending(Retryable):
    """The decision stands, but a sink cannot promote yet; recovery will finish it."""


class SinkUnavailable(Retryable):
    """The system behind a sink or a source could not be reached, or went away before anything was decided."""


class NotYet(Retryable):
    """The input of an interval is not there yet, and the source was declared to wait for it."""


class TooManyPending(Retryable):
    """`max_pending` decided revisions wait for promotion; this one stays pre-committed."""


# --- stop ------------------------------------------------------------------------------------------------------------


class Fenced(TwophaseError):
    """A newer attempt owns the revision: stop and touch nothing."""


class AttemptFailed(TwophaseError):
    """The attempt did not produce what it should: its Spark job failed or a participant voted no."""


class SchemaChanged(AttemptFailed):
    """The output's schema does not fit the earlier checkpoints."""


class InputChanged(AttemptFailed):
    """A fixed input is not what it was when the checkpoint took it."""

    def __init__(self, message: str, rewritten: Rewritten | None = None) -> None:
        """Keep in `rewritten` the files that may hold the same bytes as before, only written again."""
        super().__init__(message)
        self.rewritten = rewritten or {}


class BadRecord(AttemptFailed):
    """An input file holds something that its format cannot read."""


class BadValue(AttemptFailed):
    """The output holds something that a sink cannot keep."""


class ManifestMismatch(AttemptFailed):
    """What is on storage is not what the manifest says."""


class AuditFailed(AttemptFailed):
    """An audit of the staged data voted no."""


class NoSpace(AttemptFailed):
    """The storage of a sink is full."""


# --- tell a person ---------------------------------------------------------------------------------------------------


class Parked(TwophaseError):
    """A decided revision cannot be promoted without a person: its staged output is gone or not what was voted for."""


class RecordBehind(TwophaseError):
    """A sink holds decisions that the record does not know: it was restored from a backup; nothing was changed."""


class ConfigError(TwophaseError):
    """The declaration, a setting or an argument is wrong; nothing was changed."""


class Unreachable(ConfigError, StoreUnavailable):
    """Nobody answers where the committer database should be: it is down for now, or the address is wrong."""


class InputMissing(TwophaseError):
    """There is nothing where an interval's input should be; nothing was recorded."""


class IllegalTransition(TwophaseError):
    """The record does not allow this move: there is a bug, or somebody changed the record by hand."""


class NothingCommitted(TwophaseError):
    """There is nothing committed to read at that time."""


class Swept(TwophaseError):
    """The output asked for was replaced, and removed when its retention was over."""
