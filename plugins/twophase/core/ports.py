"""The ports of the protocol: what the coordinator and its steps ask of a record, of sinks and of sources.

The rules are in the steps. A record only keeps rows and moves them conditionally, all or nothing per transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from twophase.core.checkpoint import (
    Base,
    Input,
    InputFile,
    Json,
    Key,
    Known,
    Output,
    Participant,
    Position,
    Revision,
    Run,
)
from twophase.core.claims import Claim, Claims, Holder
from twophase.core.hindrances import Hindrance
from twophase.core.states import State


class Outcome(StrEnum):
    """How a call of `promote` or `find` ended."""

    #: This call made the staged output visible, and read its marker back.
    PROMOTED = "promoted"
    #: The marker of this revision was there already: this call was repeated, or came late.
    ALREADY_PROMOTED = "already promoted"
    #: The sink cannot do it now (down, locked): nothing changed, ask again.
    RETRY_LATER = "retry later"
    #: It needs a person, for the reason given; the sink read the marker again before it said so.
    FAILED = "failed"
    #: The reply was lost: only the marker can tell.
    UNKNOWN = "unknown"


#: The outcomes that mean: the output and its marker are there.
VISIBLE = frozenset({Outcome.PROMOTED, Outcome.ALREADY_PROMOTED})


@dataclass(frozen=True)
class Promotion:
    """A sink's answer to `promote` or `find`."""

    outcome: Outcome
    reason: str | None = None
    #: If it failed, what stands in the way; None: the coordinator asks `find` whether the output is still staged.
    hindrance: Hindrance | None = None
    #: The attempt that the marker in the sink names, and its manifest's summary (R10).
    attempt: int | None = None
    manifest: Json | None = None


class Sink(Protocol):
    """What the coordinator asks of a sink. Every call may come twice, late, or after an earlier one died halfway.

    An output's handle comes from `place`. It is in the record before anything is written there, so any process can go
    on. `find` and `promote` get the `commit_seq` of the decision, and `promote` the `receipt` too.
    """

    @property
    def copies(self) -> bool:
        """Return True if promotion moves or copies the staged output, so that nothing of use stays in staging (R11)."""
        ...

    @property
    def ordered(self) -> bool:
        """Return True if promotions must come in commit_seq order over all lanes (R12, R13)."""
        ...

    def objection(self, *, latest: bool) -> str | None:
        """Say why this sink cannot replace a committed checkpoint; None: it can.

        `latest`: no later checkpoint would keep output computed from the old revision.
        """
        ...

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        """Return a handle that names a private staging place and what its promotion replaces; touches nothing."""
        ...

    def claim(self, slot: str) -> Claim | None:
        """Return the place that only this slot may write; None: slots cannot collide here. Touches nothing."""
        ...

    def prepare(self, slot: str | None = None) -> None:
        """Check that it can be written to, and create what must exist; the coordinator calls it for a restage only."""
        ...

    def adopt(self, key: Key, slot: str) -> Output | None:
        """Describe and mark what is in the slot's place without being in the record; None: there is nothing."""
        ...

    def find(self, output: Output) -> Promotion:
        """Say where the output stands without changing it: ALREADY_PROMOTED, RETRY_LATER (staged) or FAILED (lost)."""
        ...

    def promote(self, output: Output) -> Promotion:
        """Make the staged output visible in one atomic step that carries its marker; harmless when repeated or late."""
        ...

    def discard(self, output: Output) -> None:
        """Remove what any attempt of a dead revision staged; called only after the move to ABORTING."""
        ...

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what attempts before `output` staged, so that nobody can promote it; only if the sink `copies`.

        `voted` is the one of them that was voted for last.
        """
        ...

    def newest(self, pipeline: str) -> int | None:
        """Return the highest commit_seq that it was given, 0 for none; None: it keeps no numbers, ask `markers`."""
        ...

    def markers(self, pipeline: str) -> Iterable[tuple[int, int]]:
        """Yield the checkpoint and revision of everything that it shows of a pipeline."""
        ...


class Move(NamedTuple):
    """A position that moves over a fixed range."""

    source: str
    partition: str
    start: int
    end: int
    #: What the source noted about the end.
    mark: Json | None = None


def moves_of(inputs: Mapping[str, Input]) -> list[Move]:
    """Return the moves that the fixed ranges of each source make; empty ranges make none."""
    return [
        Move(source, partition, start, end, fixed.marks.get(partition))
        for source, fixed in inputs.items()
        for partition, (start, end) in fixed.ranges.items()
        if start != end
    ]


class Progress(Protocol):
    """What a source may ask the record while it fixes an input, inside begin's transaction."""

    def new_files(self, found: Sequence[InputFile]) -> list[InputFile]:
        """Return the files that no checkpoint owns; raise InputChanged if an owned one looks different now."""
        ...

    def remember(self, before: Known | None, after: Known) -> None:
        """Keep `after` for the source's next look, unless something else was kept since `before`."""
        ...

    def position(self) -> Mapping[str, int]:
        """Return the decided offset per partition."""
        ...

    def pin(self, positions: Mapping[str, Position]) -> None:
        """Keep where partitions begin, also if nothing is read now; a mark is kept anew if the offset is the same."""
        ...

    def fixed(self) -> Mapping[str, tuple[int, int]]:
        """Return the ranges that this checkpoint has already; empty: the checkpoint is new."""
        ...

    def committed(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> CommittedRange:
        """Return what another pipeline committed to a sink from commit_seq `start` on."""
        ...


class Reach(NamedTuple):
    """Which decisions of a pipeline the record knows."""

    #: The record knows every decision below this number.
    next_commit_seq: int
    #: What was noted about sinks that hold more than that; None: nothing.
    behind: str | None


class CommittedRange(NamedTuple):
    """What a pipeline committed to one sink in a range of its commit_seq."""

    #: The end of the range, exclusive: nothing below it is still COMMITTING.
    end: int
    #: The committed output of each checkpoint first committed in the range; held until the transaction ends.
    outputs: tuple[Output, ...]
    #: The sink's declaration, and the schema of what was last decided there.
    upstream: Json


class Opened(NamedTuple):
    """An open attempt, and all that is needed to stage it."""

    revision: Revision
    #: The sinks, each with its staging place in its handle.
    participants: Sequence[Participant]
    inputs: Mapping[str, Input]
    #: Sink → the columns of what was last decided there; None: nothing was.
    schemas: Mapping[str, list[list[str]] | None]
    #: When its checkpoint first began, the same for every revision and attempt (S5).
    began: datetime | None = None
    #: State → the manifest of what it starts from; empty: nothing is kept yet.
    states: Mapping[str, Json] = {}


class StandingBase(NamedTuple):
    """What the checkpoint before some other one left as state."""

    base: Base
    #: Whether its retention is over, so that files of it may be gone (S3).
    swept: bool = False


class Lane(NamedTuple):
    """Who may go on in a pipeline with state (R20)."""

    #: The first checkpoint whose state was computed from one that was replaced since; None: there is none.
    stale_from: int | None = None
    #: The replay that has not ended, and the first checkpoint of it.
    replay: str | None = None
    first: int | None = None


class Look(NamedTuple):
    """What a pipeline's sources are given before they look for input."""

    #: The time on the record's own clock.
    at: datetime
    known: Mapping[str, Known]
    #: Source → partition → how far it has been read.
    positions: Mapping[str, Mapping[str, Position]]


class Outlook(NamedTuple):
    """What a run reads from the record before it begins."""

    look: Look
    reach: Reach
    #: The revisions that are live or ABORTING, the decided ones first, by commit_seq.
    unfinished: Sequence[Revision]
    #: The revision that counts for the slot's checkpoint, or for the last checkpoint without a slot.
    newest: Revision | None


class Source(Protocol):
    """What the coordinator asks of a source. `discover` looks outside, `fix` chooses under the pipeline's lock."""

    @property
    def per_revision(self) -> bool:
        """Return True if each revision fixes its input again; otherwise the input is the checkpoint's for ever."""
        ...

    @property
    def settles(self) -> bool:
        """Return True if input files are archived or deleted after COMMITTED."""
        ...

    @property
    def reports(self) -> bool:
        """Return True if it is told after COMMITTED how far it has been read."""
        ...

    def claim(self, slot: str) -> Claim | None:
        """Return the place that only this slot may read; None: slots may read the same. Touches nothing."""
        ...

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> Any:  # noqa: ANN401 - only this source's own `fix` looks into it
        """Look for input; may be slow, holds no lock.

        `known` is what this source remembered last time, if anything, and `position` how far each partition was read.
        """
        ...

    def fix(self, found: Any, progress: Progress) -> Input:  # noqa: ANN401 - see discover
        """Choose this checkpoint's input from what was found; fast, without calls outside the record."""
        ...

    def written_again(self, fixed: Input) -> list[InputFile]:
        """Return the files that have another time but the same bytes, as they look now; may be slow."""
        ...

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        """Archive or delete a committed checkpoint's files, as `after_commit` says; repeatable. Then names are free."""
        ...

    def report(self, offsets: Mapping[str, int]) -> None:
        """Tell others how far each partition is committed; for monitoring only, nothing here depends on it."""
        ...


class Transaction(Protocol):
    """The record within one transaction: all of it happens, or none.

    A method with an `epoch` acts only while the revision is at that epoch, and raises Fenced otherwise.
    """

    def lock(self, pipeline: str, holding: Key | None = None) -> Reach:
        """Hold the pipeline's row until the end, so that begins and commit points come one at a time.

        With `holding` the row of a revision is held after it. Return which decisions the record knows.
        """
        ...

    def register(
        self, pipeline: str, declaration: Json, outputs: Mapping[str, str], changes: Callable[[Json, bool], list[str]]
    ) -> None:
        """Put a pipeline's declaration and the locations of its outputs in the record.

        `changes(old, pending)` says in words which changes since the old declaration are not allowed.
        """
        ...

    def link(self, pipeline: str, dag_id: str) -> None:
        """Note that a DAG runs a pipeline."""
        ...

    def begun(self, pipeline: str, slot: str | None) -> None:
        """Delete the note that a slot could not begin; the pipeline must be locked."""
        ...

    def not_begun(self, pipeline: str, slot: str | None, run: Run | None, why: str, *, failed: bool) -> None:
        """Note why a run could not begin: it failed, or waits for its input. No-op if the pipeline is not recorded."""
        ...

    def newest(self, pipeline: str, slot: str | None) -> Revision | None:
        """Return the revision that counts for the slot's checkpoint, or for the last one without a slot.

        That is its newest decided one (an adopted revision 0 does not count), else its newest. None: there is no such
        checkpoint, or it was released.
        """
        ...

    def outlook(self, pipeline: str, slot: str | None) -> Outlook:
        """Return what a run reads from the record before it begins."""
        ...

    def revision(self, key: Key) -> Revision:
        """Return one revision."""
        ...

    def hold(self, key: Key) -> Revision:
        """Return one revision and hold its row until the end."""
        ...

    def unfinished(self, pipeline: str) -> list[Revision]:
        """Return the revisions that are live or ABORTING, the decided ones first, by commit_seq."""
        ...

    def committed_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the COMMITTED revision of a checkpoint, or None."""
        ...

    def is_latest(self, pipeline: str, checkpoint_id: int) -> bool:
        """Return True if no checkpoint with a higher number has a decided revision."""
        ...

    def is_replayed(self, pipeline: str, checkpoint_id: int, backfill: str) -> bool:
        """Return True if a backfill goes through the latest checkpoint, and has reached this one.

        Decisions are final, so a yes at begin is still a yes at the commit point.
        """
        ...

    def live_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the live revision of a checkpoint (undecided, or decided and not promoted everywhere), or None."""
        ...

    def newest_of(self, pipeline: str, checkpoint_id: int) -> Revision:
        """Return the revision of a checkpoint with the highest number; ConfigError if there is none."""
        ...

    def newest_of_run(self, pipeline: str, run: Run, checkpoint_id: int | None) -> Revision | None:
        """Return the newest revision that an Airflow run worked on, of one checkpoint or of any, or None."""
        ...

    def decided_in(self, pipeline: str, checkpoint_id: int, backfill: str) -> Revision | None:
        """Return the newest decided revision of a checkpoint that a backfill made, or None."""
        ...

    def slot(self, pipeline: str, checkpoint_id: int) -> str | None:
        """Return the slot of a checkpoint; ConfigError if there is no such checkpoint."""
        ...

    def add_checkpoint(self, pipeline: str, slot: str | None, inputs: Mapping[str, Input]) -> int:
        """Add the next checkpoint with its fixed input, and make its input files its own; return its number."""
        ...

    def claim(self, pipeline: str, checkpoint_id: int, claims: Claims) -> Holder | None:
        """Give a checkpoint the places of its slot, under the pipeline's lock; return who has one of them already."""
        ...

    def unclaimed(self, pipeline: str) -> list[tuple[int, str]]:
        """Return the checkpoints with slots that began before claims were recorded; none once they have theirs."""
        ...

    def claim_earlier(self, pipeline: str, claims: Iterable[tuple[int, Claims]]) -> None:
        """Give those checkpoints their places; if two have the same, the second one shares it."""
        ...

    def add_revision(  # noqa: PLR0913 - its columns
        self, pipeline: str, checkpoint_id: int, kind: str, run: Run, lease: float, *, backfill: str | None = None
    ) -> Revision:
        """Add the next revision of a checkpoint: OPEN, epoch 0, leased."""
        ...

    def fix_inputs(self, key: Key, inputs: Mapping[str, Input]) -> None:
        """Record the input that belongs to this revision alone."""
        ...

    def add_adopted(self, key: Key, slot: str, outputs: Mapping[str, Output]) -> None:
        """Add an adopted folder as revision 0, COMMITTED as it is; a second call changes nothing."""
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
        numbered: bool = False,
        **changes: Any,  # noqa: ANN401 - columns of the revision
    ) -> bool:
        """Move a revision by compare-and-set on state and epoch, and add the event.

        Return True if it moved now, False if it was in that state at this epoch already (a repeated call). Otherwise
        raise Fenced. With `bump` the epoch goes up by one; only then may a state follow itself. With `unleased` a
        lease that lasts is a reason to raise Fenced too. With `numbered` it takes the next commit_seq of the locked
        pipeline (R12).
        """
        ...

    def take_over(self, key: Key, *, epoch: int, run: Run, lease: float, backfill: str | None = None) -> None:
        """Give an undecided revision to this run and its backfill, unless another run holds a lease on it."""
        ...

    def renew(self, key: Key, *, epoch: int, lease: float | None) -> None:
        """Extend the lease on the record's clock (None: give it up)."""
        ...

    def acknowledge(self, key: Key, run: Run) -> None:
        """Note that a revision's own run has seen it committed; from another run, or again, it changes nothing."""
        ...

    def keep_job(self, key: Key, *, epoch: int, job: Json) -> None:
        """Record what is needed to find the Spark job of an attempt again."""
        ...

    def park(self, key: Key, reason: str, hindrances: Mapping[str, Hindrance]) -> None:
        """Flag a COMMITTING revision as one that needs a person, and record the hindrance of each sink."""
        ...

    def fail(self, key: Key, *, epoch: int, run: Run | None, why: str) -> bool:
        """Record the last failure of an undecided revision if it is still this run's at this epoch; False: it is not.

        False too if the same failure is recorded already.
        """
        ...

    def note(self, key: Key, action: str, why: str = "") -> None:
        """Add an event that is not a transition."""
        ...

    def participants(self, key: Key) -> list[Participant]:
        """Return the participants of a revision."""
        ...

    def open_attempt(
        self, key: Key, participants: Sequence[Participant], *, epoch: int, why: str = "", lease: float | None = None
    ) -> None:
        """Move a revision to OPEN at the epoch after this one, and replace its participants by these (R7)."""
        ...

    def put_participant(self, key: Key, participant: Participant) -> None:
        """Replace the participant of the same name by this one, or add it."""
        ...

    def put_votes(self, key: Key, votes: Sequence[Participant], *, epoch: int) -> None:
        """Replace the participants of these names by these, with one event for each."""
        ...

    def committed(self, key: Key) -> set[str]:
        """Return the names of the sinks whose rows are in `committed`."""
        ...

    def receipt(self, revision: Revision, participants: Sequence[Participant]) -> Json:
        """Return all that the record knows of a decided revision; its sinks keep it."""
        ...

    def reach(self, pipeline: str) -> Reach:
        """Return which decisions of a pipeline the record knows."""
        ...

    def lacks(self, pipeline: str, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of the held checkpoints and revisions that are not decided in the record."""
        ...

    def say_behind(self, pipeline: str, why: str | None) -> None:
        """Note at the pipeline that a sink holds what the record does not know; None: remove the note."""
        ...

    def mark_promoted(self, key: Key, attempts: Mapping[str, int], *, epoch: int) -> set[str]:
        """Add the rows of sinks to `committed`, and tell of each and its attempt in the events; return the new ones."""
        ...

    def take_commit_seq(self, pipeline: str) -> int:
        """Take the next commit_seq from the locked pipeline row (R12)."""
        ...

    def inputs(self, key: Key) -> Mapping[str, Input]:
        """Return the fixed input of a revision, per source."""
        ...

    def began(self, pipeline: str, checkpoint_id: int) -> datetime | None:
        """Return when a checkpoint first began."""
        ...

    def standing_base(self, pipeline: str, checkpoint_id: int) -> StandingBase:
        """Return the state that stands before a checkpoint: of the newest decided revision of the one before it."""
        ...

    def base(self, key: Key) -> Base | None:
        """Return the state that a revision reads; None: its pipeline had no state when it began."""
        ...

    def fix_base(self, key: Key, base: Base) -> None:
        """Record the state that a revision reads."""
        ...

    def states(self, pipeline: str, base: Base) -> Mapping[str, Json]:
        """Return the manifest of each state of a base."""
        ...

    def oldest_state(self, pipeline: str) -> int | None:
        """Return the first checkpoint whose state is still kept; None: there is none."""
        ...

    def lane(self, pipeline: str) -> Lane:
        """Return who may go on in a pipeline with state; the pipeline must be locked."""
        ...

    def mark_stale(self, pipeline: str, checkpoint_id: int) -> None:
        """Record that every decided checkpoint after this one has to be replayed; none after it: nothing has to."""
        ...

    def last_schemas(self, pipeline: str, sinks: Sequence[str]) -> Mapping[str, list[list[str]] | None]:
        """Return the columns of what was last decided in each sink; None: nothing was."""
        ...

    def rows_before(self, key: Key, slot: str | None, sink: str) -> int | None:
        """Return the row count to compare a revision's with: of what it replaces, or else of the commit before it."""
        ...

    def ranges(self, pipeline: str, checkpoint_id: int) -> Mapping[str, Input]:
        """Return what a checkpoint reads by offsets, per source: its ranges and their marks."""
        ...

    def claims(self, pipeline: str, checkpoint_id: int) -> Mapping[str, tuple[int, int]]:
        """Count the input files of a checkpoint per source: how many were fixed at begin, and how many it owns now."""
        ...

    def unsettled(self, pipeline: str, source: str) -> list[tuple[int, list[InputFile]]]:
        """Return the files of COMMITTED checkpoints that are not settled yet, per checkpoint."""
        ...

    def release(self, pipeline: str, checkpoint_id: int, why: str) -> bool:
        """Free the input of a checkpoint if all its revisions are ABORTED; False: they are not."""
        ...

    def settle(self, pipeline: str, source: str, checkpoint_id: int) -> None:
        """Free the names of a committed checkpoint's files."""
        ...

    def position(self, pipeline: str, source: str) -> Mapping[str, int]:
        """Return the decided offset per partition."""
        ...

    def pin(self, pipeline: str, source: str, positions: Mapping[str, Position]) -> None:
        """Add positions that are not there; of those at the same offset, replace the mark."""
        ...

    def reposition(self, pipeline: str, source: str, positions: Mapping[str, Position | None]) -> None:
        """Set positions to where a person wants them, whatever they were; None: forget the partition."""
        ...

    def advance(self, pipeline: str, moves: Sequence[Move]) -> list[Move]:
        """Move each position from start to end, if it is at start (R4); return those that are not."""
        ...

    def remember(
        self, pipeline: str, source: str, before: Known | None, after: Known, since: datetime | None = None
    ) -> None:
        """Replace what a source remembers, unless that changed meanwhile or names were freed `since` it looked."""
        ...

    def new_files(
        self, pipeline: str, source: str, found: Sequence[InputFile], since: datetime | None = None
    ) -> list[InputFile]:
        """Return the files that no checkpoint owns; raise InputChanged if an owned one looks different now.

        A file that was settled `since` the folder was listed is not new, though its name is free.
        """
        ...

    def keep_files(self, pipeline: str, checkpoint_id: int, source: str, files: Sequence[InputFile]) -> None:
        """Record the checksums of fixed files, and the new times of those written again with the same bytes."""
        ...

    def committed_range(
        self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None
    ) -> CommittedRange:
        """Return what a pipeline committed to a sink, up to the lowest commit_seq that is not COMMITTED yet."""
        ...


class Record(Protocol):
    """The record as the coordinator uses it: a source of transactions."""

    def transaction(self, *, reads: bool = False) -> AbstractContextManager[Transaction]:
        """Open one transaction; raise StoreUnavailable if the database went away, also if only its reply was lost.

        With `reads` nothing is changed, and each read sees what is committed by then, as it does anyway.
        """
        ...
