"""What the coordinator needs from the outside: a record, sinks, sources.

The coordinator holds the rules; a record only keeps rows and moves them conditionally, all or nothing per transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Output, Participant, Revision, Run
from twophase.core.claims import Claim, Claims, Holder
from twophase.core.hindrances import Hindrance
from twophase.core.states import State


class Outcome(StrEnum):
    """How an attempt to promote ended."""

    #: This call made the staged output visible, and read its marker back.
    PROMOTED = "promoted"
    #: The marker of this revision was there already: a repeated or a late call.
    ALREADY_PROMOTED = "already promoted"
    #: The sink cannot do it now (down, locked): nothing changed, ask again.
    RETRY_LATER = "retry later"
    #: It cannot be done without a person, for the reason given; the marker was read again before saying so.
    FAILED = "failed"
    #: The reply was lost: only the marker can tell.
    UNKNOWN = "unknown"


#: What says that the output is there, by its marker; anything else does not.
VISIBLE = frozenset({Outcome.PROMOTED, Outcome.ALREADY_PROMOTED})


@dataclass(frozen=True)
class Promotion:
    """What a sink says after `promote` or `find`."""

    outcome: Outcome
    reason: str | None = None
    #: Of a failed one, what stands in the way; None: the coordinator asks `find` whether it is still staged.
    hindrance: Hindrance | None = None
    #: The attempt that the marker in the sink names, and its manifest's summary (R10).
    attempt: int | None = None
    manifest: Json | None = None


class Sink(Protocol):
    """What the coordinator asks of a sink. Every call may come twice, late, or after a crash in the middle of itself.

    `handle` comes from `place` and is in the record before anything is written under it, so any process can go on.
    After the commit point, for `find` and `promote`, it also says `commit_seq`, and `timestamp`: when the revision was
    begun; for `promote` also `receipt`: what the record knows of the decision.
    """

    @property
    def copies(self) -> bool:
        """Say whether promotion moves or copies what is staged, so that nothing of use stays there (R11)."""
        ...

    @property
    def ordered(self) -> bool:
        """Say whether promotions must follow each other by commit_seq over all lanes, for a high-water mark (R12)."""
        ...

    def objection(self, *, latest: bool) -> str | None:
        """Say why a committed checkpoint cannot be run again here; None: it can.

        `latest`: no later checkpoint would keep output that was computed from what is replaced.
        """
        ...

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        """Name a staging place private to this attempt, and what its promotion replaces; touches nothing."""
        ...

    def claim(self, slot: str) -> Claim | None:
        """Return what a slot alone may write here; None: slots do not meet in it. Looks at nothing."""
        ...

    def prepare(self, slot: str | None = None) -> None:
        """Check that it can be written to, and create what must exist; for a restage: a begin's caller has done it."""
        ...

    def adopt(self, key: Key, slot: str) -> Output | None:
        """Describe what is in the slot's place though nobody recorded it, and mark it; None: there is nothing."""
        ...

    def find(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Say where the output stands without changing it: ALREADY_PROMOTED, RETRY_LATER (staged) or FAILED (lost)."""
        ...

    def promote(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Make the staged output visible in one atomic step that carries its marker; harmless when repeated or late."""
        ...

    def discard(self, key: Key, handle: Json) -> None:
        """Remove what the attempts of a dead revision staged; called only after the move to ABORTING."""
        ...

    def discard_earlier(self, key: Key, attempt: int, handle: Json) -> None:
        """Remove what earlier attempts staged, so that nobody can promote it any more; only of a sink that copies."""
        ...

    def newest(self, pipeline: str) -> int | None:
        """Return the highest commit_seq that it was given, 0 for none; None: only `markers` can say what it holds."""
        ...

    def markers(self, pipeline: str) -> Iterable[tuple[int, int]]:
        """Yield checkpoint and revision of all that it shows of a pipeline."""
        ...


#: A position that moves: source, partition, start, end.
Move = tuple[str, str, int, int]


def moves_of(ranges: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[Move]:
    """Return how positions move over fixed ranges: source → partition → [start, end)."""
    return [
        (source, partition, start, end)
        for source, partitions in ranges.items()
        for partition, (start, end) in partitions.items()
        if start != end
    ]


class Progress(Protocol):
    """What a source may ask the record while it fixes an input, inside begin's transaction."""

    def new_files(self, found: Sequence[InputFile]) -> list[InputFile]:
        """Return those that no checkpoint owns; a known path that looks different now raises InputChanged."""
        ...

    def remember(self, before: Known | None, after: Known) -> None:
        """Keep what is known once this transaction is committed, unless another has kept something since."""
        ...

    def position(self) -> Mapping[str, int]:
        """Return the decided offset per partition."""
        ...

    def fixed(self) -> Mapping[str, tuple[int, int]]:
        """Return the ranges that are this checkpoint's already; empty: it is a new one."""
        ...

    def committed(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> Committed:
        """Return what another pipeline committed to a sink from one commit_seq on."""
        ...


class Reach(NamedTuple):
    """How far a record's knowledge of a pipeline goes."""

    #: Every decision below it is recorded.
    next_commit_seq: int
    #: What was said of sinks that hold more than that.
    behind: str | None


class Committed(NamedTuple):
    """What a pipeline committed to one sink in a range of its commit_seq."""

    #: Half-open: everything below it is settled.
    end: int
    #: Of each checkpoint that was first committed in the range, what stands now; held until the transaction ends.
    outputs: tuple[Output, ...]
    #: The sink's declaration, and the schema of what was last decided there.
    upstream: Json


class Opened(NamedTuple):
    """An open attempt, and all that it takes to stage it."""

    revision: Revision
    #: Those that stage output, each with its place.
    participants: Sequence[Participant]
    inputs: Mapping[str, Input]
    #: Of each sink, the columns of what was last decided there; None: nothing was.
    schemas: Mapping[str, list[list[str]] | None]


class Look(NamedTuple):
    """What is told to a pipeline's sources before they look for input."""

    #: The time on the record's own clock.
    at: datetime
    known: Mapping[str, Known]


class Outlook(NamedTuple):
    """What a run looks at before it begins."""

    look: Look
    reach: Reach
    #: What still has to go somewhere, the decided first, by commit_seq.
    unfinished: Sequence[Revision]
    #: What stands for the slot's checkpoint, or the last one.
    newest: Revision | None


class Source(Protocol):
    """What a checkpoint reads. `discover` looks outside, `fix` chooses under the pipeline's lock."""

    @property
    def per_revision(self) -> bool:
        """Say whether each revision fixes its input anew; otherwise it is the checkpoint's for ever."""
        ...

    @property
    def settles(self) -> bool:
        """Say whether there is anything to do with input files after COMMITTED."""
        ...

    def claim(self, slot: str) -> Claim | None:
        """Return what a slot alone may read here; None: slots may read the same. Looks at nothing."""
        ...

    def discover(self, slot: str | None = None, known: Known | None = None) -> Any:  # noqa: ANN401 - only this source's own `fix` looks into it
        """Look for input; may be slow, holds no lock. `known` is what this source had remembered, if it ever does."""
        ...

    def fix(self, found: Any, progress: Progress) -> Input:  # noqa: ANN401 - see discover
        """Choose what this checkpoint reads out of what was found; fast, no outside calls."""
        ...

    def written_again(self, fixed: Input) -> list[InputFile]:
        """Return those of the files that have another time and the same bytes, as they look now; may be slow."""
        ...

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        """Do what `after_commit` asks with a committed checkpoint's files; repeatable. Then their names are free."""
        ...


class Transaction(Protocol):
    """Rows of the record within one transaction: all of it happens, or none.

    A method that names an epoch acts only while the revision is at that epoch and raises Fenced otherwise.
    """

    def lock(self, pipeline: str) -> Reach:
        """Hold the pipeline's row until the end: one begin or commit point at a time; return how far it has come."""
        ...

    def register(
        self, pipeline: str, declaration: Json, outputs: Mapping[str, str], changes: Callable[[Json, bool], list[str]]
    ) -> None:
        """Put a pipeline's declaration and the locations of its outputs in the record.

        `changes(old, pending)` says in words what of it cannot follow what was there.
        """
        ...

    def link(self, pipeline: str, dag_id: str) -> None:
        """Say that a DAG runs a pipeline."""
        ...

    def begun(self, pipeline: str, slot: str | None) -> None:
        """Forget that a slot could not begin; the pipeline must be locked."""
        ...

    def not_begun(self, pipeline: str, slot: str | None, run: Run | None, why: str, *, failed: bool) -> None:
        """Keep why a run could not begin: it failed, or waits for its input; of no pipeline that is not entered yet."""
        ...

    def newest(self, pipeline: str, slot: str | None) -> Revision | None:
        """Return the revision that stands for the slot's checkpoint, or the last one; None: nothing to go on with."""
        ...

    def outlook(self, pipeline: str, slot: str | None) -> Outlook:
        """Return what a run looks at before it begins."""
        ...

    def revision(self, key: Key) -> Revision:
        """Return one revision."""
        ...

    def hold(self, key: Key) -> Revision:
        """Return one revision and hold its row until the end."""
        ...

    def unfinished(self, pipeline: str) -> list[Revision]:
        """Return the revisions that still have to go somewhere (live or ABORTING), the decided first, by commit_seq."""
        ...

    def committed_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the COMMITTED revision of a checkpoint."""
        ...

    def is_latest(self, pipeline: str, checkpoint_id: int) -> bool:
        """Say whether nothing of a checkpoint with a higher number is decided."""
        ...

    def is_replayed(self, pipeline: str, checkpoint_id: int, run: Run) -> bool:
        """Say whether a run's backfill began as one through the latest, and has come to this checkpoint.

        What is decided stays so, so the answer stays yes: it is the same at begin and at the commit point.
        """
        ...

    def live_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the live revision of a checkpoint: undecided, or not promoted yet."""
        ...

    def newest_of(self, pipeline: str, checkpoint_id: int) -> Revision:
        """Return the revision of a checkpoint with the highest number; ConfigError if there is none."""
        ...

    def newest_of_run(self, pipeline: str, run: Run, checkpoint_id: int | None) -> Revision | None:
        """Return the newest revision that an Airflow run worked on, of one checkpoint or of any."""
        ...

    def decided_in(self, pipeline: str, checkpoint_id: int, campaign: str) -> Revision | None:
        """Return the newest decided revision whose run is one of a campaign."""
        ...

    def slot(self, pipeline: str, checkpoint_id: int) -> str | None:
        """Return the slot of a checkpoint; ConfigError if there is no such checkpoint."""
        ...

    def add_checkpoint(self, pipeline: str, slot: str | None, inputs: Mapping[str, Input]) -> int:
        """Add the next checkpoint, its fixed input and its claims; return its number."""
        ...

    def claim(self, pipeline: str, checkpoint_id: int, claims: Claims) -> Holder | None:
        """Give a checkpoint what its slot comes to, under the pipeline's lock; return who has a part of it already."""
        ...

    def unclaimed(self, pipeline: str) -> list[tuple[int, str]]:
        """Return the checkpoints with slots that began before there were claims; none once they have theirs."""
        ...

    def claim_earlier(self, pipeline: str, claims: Iterable[tuple[int, Claims]]) -> None:
        """Give those theirs; what two of them come to the second one shares."""
        ...

    def add_revision(self, pipeline: str, checkpoint_id: int, kind: str, run: Run, lease: float) -> Revision:
        """Add the next revision of a checkpoint: OPEN, epoch 0, leased."""
        ...

    def fix_inputs(self, key: Key, inputs: Mapping[str, Input]) -> None:
        """Keep what this revision alone reads."""
        ...

    def add_adopted(self, key: Key, slot: str, outputs: Mapping[str, Output]) -> None:
        """Add revision 0: what was there before us, COMMITTED as it is; a second time changes nothing."""
        ...

    def move(  # noqa: PLR0913 - the columns of a transition, by name
        self,
        key: Key,
        to: State,
        *,
        epoch: int,
        why: str = "",
        bump: bool = False,
        unleased: bool = False,
        **changes: Any,  # noqa: ANN401 - columns of the revision
    ) -> bool:
        """Move a revision by compare-and-set on state and epoch, with its event.

        True: moved now. False: it was there already, at this epoch (a repeated call). Otherwise Fenced.
        With `bump` the epoch goes up by one; only then may a state follow itself.
        With `unleased` somebody's lease also stands in the way.
        """
        ...

    def adopt(self, key: Key, *, epoch: int, run: Run, lease: float) -> None:
        """Make an undecided revision this run's, if nobody else holds a lease on it."""
        ...

    def renew(self, key: Key, *, epoch: int, lease: float | None) -> None:
        """Extend the lease on the record's clock (None: give it up)."""
        ...

    def acknowledge(self, key: Key, run: Run) -> None:
        """Note that its own run saw a revision committed; another run's, or a second time, changes nothing."""
        ...

    def keep_job(self, key: Key, *, epoch: int, job: Json) -> None:
        """Keep what finds the Spark job of an attempt again."""
        ...

    def park(self, key: Key, reason: str, hindrances: Mapping[str, Hindrance]) -> None:
        """Flag a COMMITTING revision as one that needs a person, and keep what stands in the way of each sink."""
        ...

    def fail(self, key: Key, *, epoch: int, run: Run | None, why: str) -> bool:
        """Keep the last failure of an undecided revision that is still this run's, at this epoch; False: it is not."""
        ...

    def note(self, key: Key, action: str, why: str = "") -> None:
        """Add an event that is not a transition."""
        ...

    def participants(self, key: Key) -> list[Participant]:
        """Return the participants of a revision."""
        ...

    def replace_participants(self, key: Key, participants: Sequence[Participant]) -> None:
        """Put these in the place of all participants that were there."""
        ...

    def put_participant(self, key: Key, participant: Participant) -> None:
        """Put this one in the place of the one with its name."""
        ...

    def put_votes(self, key: Key, votes: Sequence[Participant], *, epoch: int) -> None:
        """Put these in the place of those with their names, and tell of each in the events."""
        ...

    def committed(self, key: Key) -> set[str]:
        """Return the names of the sinks whose rows are in `committed`."""
        ...

    def receipt(self, revision: Revision, participants: Sequence[Participant]) -> Json:
        """Return all that the record knows of a decided revision, for its sinks to keep."""
        ...

    def reach(self, pipeline: str) -> Reach:
        """Return how far the record's knowledge goes."""
        ...

    def lacks(self, pipeline: str, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those checkpoints and revisions that are not decided in the record."""
        ...

    def say_behind(self, pipeline: str, why: str | None) -> None:
        """Say at the pipeline that a sink holds what the record lacks; None: that is over."""
        ...

    def mark_committed(self, key: Key, sink: str) -> bool:
        """Add a sink's row to `committed`; False: it is there already."""
        ...

    def take_commit_seq(self, pipeline: str) -> int:
        """Take the next commit_seq from the locked pipeline row (R12)."""
        ...

    def inputs(self, key: Key) -> Mapping[str, Input]:
        """Return the fixed input of a revision, per source."""
        ...

    def last_schemas(self, pipeline: str, sinks: Sequence[str]) -> Mapping[str, list[list[str]] | None]:
        """Return the columns of what was last decided in each sink; None: nothing was."""
        ...

    def rows_before(self, key: Key, slot: str | None, sink: str) -> int | None:
        """Return the rows that a revision's are held against: those of what it replaces, or of the commit before."""
        ...

    def ranges(self, pipeline: str, checkpoint_id: int) -> Mapping[str, Mapping[str, tuple[int, int]]]:
        """Return the fixed offset ranges of a checkpoint: source → partition → [start, end)."""
        ...

    def claims(self, pipeline: str, checkpoint_id: int) -> Mapping[str, tuple[int, int]]:
        """Count the input files of a checkpoint, per source: how many were fixed at begin, how many are its own now."""
        ...

    def unsettled(self, pipeline: str, source: str) -> list[tuple[int, list[InputFile]]]:
        """Return files of COMMITTED checkpoints whose names are still taken, per checkpoint."""
        ...

    def release(self, pipeline: str, checkpoint_id: int, why: str) -> bool:
        """Free the input of a checkpoint whose revisions are all ABORTED; False: it is not such a one."""
        ...

    def settle(self, pipeline: str, source: str, checkpoint_id: int) -> None:
        """Free the names of a committed checkpoint's files."""
        ...

    def position(self, pipeline: str, source: str) -> Mapping[str, int]:
        """Return the decided offset per partition."""
        ...

    def advance(self, pipeline: str, moves: Sequence[Move]) -> list[Move]:
        """Move each position from start to end, if it is at start (R4); return those that are not."""
        ...

    def look(self, pipeline: str) -> Look:
        """Say what time it is, and what the sources of a pipeline remember."""
        ...

    def remember(
        self, pipeline: str, source: str, before: Known | None, after: Known, since: datetime | None = None
    ) -> None:
        """Keep what a source knows in the place of what it knew, unless names were freed `since` it looked."""
        ...

    def new_files(
        self, pipeline: str, source: str, found: Sequence[InputFile], since: datetime | None = None
    ) -> list[InputFile]:
        """Return those that no checkpoint owns; a known path that looks different now raises InputChanged.

        What has left the folder `since` it was looked at is not new, though its name is free.
        """
        ...

    def keep_files(self, pipeline: str, checkpoint_id: int, source: str, files: Sequence[InputFile]) -> None:
        """Keep the checksums of fixed files, and their new times where the same bytes were written again."""
        ...

    def committed_range(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> Committed:
        """Return what a pipeline committed to a sink, up to the lowest commit_seq that is not COMMITTED yet."""
        ...


class Record(Protocol):
    """Where all of this is kept."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Open one transaction; StoreUnavailable when the store went away, also when only its reply was lost."""
        ...
