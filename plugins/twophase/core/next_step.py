"""What to do next about a revision: decided here, for pages, listings and errors alike.

Nothing is advised that would throw away what somebody may still go on with: an abort only once the run is known to have
ended. Of an Airflow run the command line does not know that; Airflow's own pages do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from twophase.core import hindrances
from twophase.core.checkpoint import Key, Run
from twophase.core.states import UNDECIDED, State

#: The name under which a person takes part.
APPROVAL = "approval"


class Advice(NamedTuple):
    """What a person may do: in words, and as a command if there is one that fits."""

    words: str
    command: str | None = None

    def __str__(self) -> str:
        """Read as one line, with the command last, unless it is among the words."""
        return f"{self.words} `{self.command}`" if self.command and self.command not in self.words else self.words


@dataclass(frozen=True)
class Standing:
    """How a revision stands: all that what to do next depends on."""

    key: Key
    state: State
    run: Run | None = None
    #: Whether somebody works on it right now.
    leased: bool = False
    #: Whether its run is over; None: nobody here can say.
    run_ended: bool | None = None
    #: Participants of the newest attempt that have not voted.
    awaits: tuple[str, ...] = ()
    parked: bool = False
    #: Of a parked one: sink → what stands in its way.
    hindrances: Mapping[str, str] = field(default_factory=dict)
    #: Aborted, with nothing of its checkpoint committed or begun since.
    failed: bool = False
    #: Made from what was replaced since.
    stale: bool = False


def advise(found: Standing) -> Advice | None:
    """Say what gets a revision further; None: there is nothing to do about it."""
    if found.parked:  # also while the lease of the run that parked it has not run out yet
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
    if found.run_ended:
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
