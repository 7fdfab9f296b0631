"""What to do next about a revision; pages, listings and errors all ask `advise`.

An abort is advised only when the revision's run is known to have ended: otherwise that run may still go on with it. The
command line cannot know this of an Airflow run; the pages in Airflow can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from twophase.core import hindrances
from twophase.core.checkpoint import Key, Run
from twophase.core.states import UNDECIDED, State

#: The name of the participant that is a person's approval.
APPROVAL = "approval"


class Advice(NamedTuple):
    """What a person may do: in words, and as a command if there is one."""

    words: str
    command: str | None = None

    def __str__(self) -> str:
        """Read as one line, with the command last unless the words name it already."""
        return f"{self.words} `{self.command}`" if self.command and self.command not in self.words else self.words


@dataclass(frozen=True)
class Standing:
    """How a revision stands: all that the advice depends on."""

    key: Key
    state: State
    run: Run | None = None
    #: Whether a run holds a lease on it.
    leased: bool = False
    #: Whether its run is over; None: unknown here.
    run_ended: bool | None = None
    #: Participants of the newest attempt that have not voted.
    awaits: tuple[str, ...] = ()
    parked: bool = False
    #: If it is parked: sink → its hindrance.
    hindrances: Mapping[str, str] = field(default_factory=dict)
    #: Aborted, and its checkpoint has no committed and no later revision.
    failed: bool = False
    #: Made from a revision of another pipeline that was replaced since.
    stale: bool = False


def is_left(found: Standing) -> bool:
    """Return True if nobody goes on with an undecided revision: it has no lease, and its run has ended."""
    return found.state in UNDECIDED and not found.leased and bool(found.run_ended)


def advise(found: Standing) -> Advice | None:
    """Say what a person can do about a revision, or who goes on with it; None: nothing has to be done."""
    if found.parked:  # before the lease is looked at: that of the run that parked it may not have run out yet
        of = (found.key.pipeline, found.key.checkpoint_id, found.hindrances)
        words = f"It is decided, and cannot be promoted without a person: {hindrances.ways_out(*of)}."
        return Advice(words, hindrances.command(*of))
    if found.leased:
        return Advice(f"Run {found.run} works on it.")
    return _undecided(found) if found.state in UNDECIDED else _decided(found)


def _decided(found: Standing) -> Advice | None:
    pipeline, number, _ = found.key
    match found.state:
        case State.COMMITTING:
            return Advice("It is decided. The next run promotes it, and so does", f"twophase recover {pipeline}")
        case State.ABORTING:
            return Advice("It is being aborted. The next run ends that, and so does", f"twophase recover {pipeline}")
        case State.ABORTED if found.failed:
            release = f"twophase release {pipeline} {number} --reason …"
            return Advice("The next run takes its input again. To free the input for a later checkpoint,", release)
        case State.COMMITTED if found.stale:
            again = f"twophase backfill {pipeline} --checkpoints {number}"
            return Advice("What it was made from was replaced since. To make it again,", again)
        case _:
            return None


def _undecided(found: Standing) -> Advice:
    pipeline, number, _ = found.key
    if is_left(found):
        if found.state is State.PRECOMMITTED:
            commit = f"twophase commit {pipeline} {number} --reason …"
            return Advice("Everybody voted yes, and its run has ended. Recovery would abort it; to commit it,", commit)
        abort = f"twophase abort {pipeline} {number} --reason …"
        return Advice("Its run has ended. The next run takes its input again; to end it now,", abort)
    if found.awaits == (APPROVAL,):
        return Advice(f"A person is asked to approve it: answer in Airflow, in run {found.run}.")
    if found.run_ended is None:
        return Advice(
            f"It waits for run {found.run}, which goes on with it; should Airflow say that the run has ended,"
            " twophase_recover aborts it."
        )
    return Advice(f"It waits for run {found.run}, which goes on with it.")
