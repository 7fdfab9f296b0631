"""How a revision begins; the coordinator calls this inside a transaction.

A run works on a revision that was left undecided, on the next revision of a checkpoint, or on the first of a new one.
The input of a new revision is in the record before anything reads it, and stays: every attempt reads the same records.
Files of a landing folder and ranges of offsets belong to the checkpoint for ever. Files of an interval and commits of
another pipeline belong to the revision, and the next revision looks for them again.

The coordinator looks outside before the transaction: for input, and for whether the earlier run has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Input, InputFile, Known, Position, Revision, Run
from twophase.core.claims import refusal
from twophase.core.errors import Busy, ConfigError, PromotionPending
from twophase.core.failpoints import hit
from twophase.core.states import DECIDED, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from twophase.core.ports import CommittedRange, Opened, Transaction
    from twophase.core.steps import Steps

Found = Mapping[str, Any]


@dataclass
class Begin:
    """How one run begins one revision; with a `token`, the first attempt is opened in the same transaction."""

    steps: Steps
    run: Run
    kind: str
    token: str | None = None
    #: The backfill that it is for.
    backfill: str | None = None
    #: The attempt that the last call opened together with the revision, if it did.
    opened: Opened | None = field(default=None, init=False)

    @property
    def pipeline(self) -> str:
        """Return the pipeline's name."""
        return self.steps.pipeline

    def go_on(self, tx: Transaction, slot: str | None, ended: Run | None) -> Revision | None:
        """Go on with an undecided revision, or return a slot's decided one; None: a revision has to be added."""
        self.opened = None
        tx.lock(self.pipeline)
        return self._go_on(tx, tx.newest(self.pipeline, slot), slot, ended)

    def begin(
        self, tx: Transaction, slot: str | None, ended: Run | None, found: Found, looked: datetime
    ) -> Revision | None:
        """Go on as `go_on` does, or add a revision to an aborted checkpoint or to a new one; None: no new input."""
        self.opened = None
        tx.lock(self.pipeline)
        newest = tx.newest(self.pipeline, slot)
        again = self._go_on(tx, newest, slot, ended)
        if again is not None:
            return again
        tx.begun(self.pipeline, slot)  # rolled back with the rest if a source refuses below
        if self.steps.lineage:
            self.steps.lineage.check_regular(tx)
        if newest is not None and newest.state not in DECIDED:
            # Aborted: the input still belongs to the checkpoint, which gets its next revision.
            return self._next_revision(tx, newest.checkpoint_id, found, opens=slot is None)
        inputs = self._fix(tx, found, {}, looked)
        if slot is None and not any(inputs.values()):
            return None
        owned = {name: Input(ranges=fixed.ranges) if self._anew(name) else fixed for name, fixed in inputs.items()}
        checkpoint_id = tx.add_checkpoint(self.pipeline, slot, owned)
        # Of a slot no attempt is opened yet: the coordinator first looks whether its place has to be adopted.
        return self._add_revision(tx, checkpoint_id, inputs, opens=slot is None, is_new=True)

    def replace(  # noqa: PLR0913, PLR0917 - what was found before the lock was taken
        self,
        tx: Transaction,
        checkpoint_id: int,
        slot: str | None,
        ended: Run | None,
        found: Found,
        objections: Mapping[bool, str | None],
    ) -> Revision:
        """Add the next revision of a committed checkpoint; return the one that the same backfill decided, if any."""
        self.opened = None
        tx.lock(self.pipeline)
        tx.begun(self.pipeline, slot)
        if self.backfill and (done := tx.decided_in(self.pipeline, checkpoint_id, self.backfill)):
            return done
        live = tx.live_revision(self.pipeline, checkpoint_id)
        if live is not None and live.state in UNDECIDED:
            return self._take_over(tx, live, ended)
        if live is not None:
            msg = f"checkpoint {live.key}: it is decided and not promoted yet; it can be replaced once it is"
            raise PromotionPending(msg)
        if tx.committed_revision(self.pipeline, checkpoint_id) is None:
            msg = f"checkpoint {self.pipeline}/{checkpoint_id}: nothing of it is committed, so nothing can be replaced"
            raise ConfigError(msg)
        self._check_replaceable(tx, checkpoint_id, objections)
        if self.steps.lineage:
            self.steps.lineage.check_replay(tx, checkpoint_id, self.backfill)
        return self._next_revision(tx, checkpoint_id, found, opens=True)

    def _check_replaceable(self, tx: Transaction, checkpoint_id: int, objections: Mapping[bool, str | None]) -> None:
        """Raise ConfigError if a sink cannot replace what this checkpoint committed."""
        if any(objections.values()) and (why := objections[self.steps.is_last(tx, checkpoint_id, self.backfill)]):
            msg = f"checkpoint {self.pipeline}/{checkpoint_id}: it cannot be run again: {why}"
            raise ConfigError(msg)

    def _go_on(self, tx: Transaction, newest: Revision | None, slot: str | None, ended: Run | None) -> Revision | None:
        if newest is None:
            return None
        if newest.state in DECIDED and slot is not None:
            tx.begun(self.pipeline, slot)
            return newest
        return self._take_over(tx, newest, ended) if newest.state in UNDECIDED else None

    def _take_over(self, tx: Transaction, left: Revision, ended: Run | None) -> Revision:
        """Go on with this run's own revision at once, with another run's when its lease is out and that run is over."""
        if left.run != self.run and left.leased:
            msg = f"checkpoint {left.key}: run {left.run} works on it, {left.lease_left:.1f} s of lease left"
            raise Busy(msg, lease_left=left.lease_left)
        if left.run not in {self.run, ended}:
            msg = f"checkpoint {left.key}: it waits for run {left.run}, which has not ended"
            raise Busy(msg)
        tx.begun(self.pipeline, left.slot)
        tx.take_over(left.key, epoch=left.epoch, run=self.run, lease=self.steps.lease, backfill=self.backfill)
        taken = tx.revision(left.key)
        if self.token and self.steps.is_opened(tx, taken, self.token):  # an earlier call opened it; its reply was lost
            self.opened = self.steps.opened(tx, taken)
        return taken

    def _anew(self, source: str) -> bool:
        """Return True if a source looks for input again at each revision."""
        return self.steps.sources[source].per_revision

    def _next_revision(self, tx: Transaction, checkpoint_id: int, found: Found, *, opens: bool) -> Revision:
        """Add the next revision of a checkpoint; only sources that look again at each revision fix input."""
        anew = {name: what for name, what in found.items() if self._anew(name)}
        fixed = tx.ranges(self.pipeline, checkpoint_id)
        inputs = self._fix(tx, anew, {name: input_.ranges for name, input_ in fixed.items()})
        return self._add_revision(tx, checkpoint_id, inputs, opens=opens)

    def _add_revision(
        self, tx: Transaction, checkpoint_id: int, inputs: Mapping[str, Input], *, opens: bool, is_new: bool = False
    ) -> Revision:
        taken = tx.add_revision(
            self.pipeline, checkpoint_id, self.kind, self.run, self.steps.lease, backfill=self.backfill
        )
        if taken.slot is not None:
            self._claim(tx, checkpoint_id, taken.slot)
        anew = {name: fixed for name, fixed in inputs.items() if self._anew(name)}
        if anew:
            tx.fix_inputs(taken.key, anew)
        if self.steps.lineage:
            self.steps.lineage.fix(tx, taken.key)
        hit("begin.inside")
        if self.token and opens:
            taken = self.steps.open_attempt(tx, taken, self.token, held=taken)
            self.opened = self.steps.opened(tx, taken, inputs if is_new else None)
        return taken

    def _claim(self, tx: Transaction, checkpoint_id: int, slot: str) -> None:
        """Claim the slot's places; first those of slots that began before claims were recorded."""
        earlier = tx.unclaimed(self.pipeline)
        if earlier:
            tx.claim_earlier(self.pipeline, [(number, self.steps.claims(one)) for number, one in earlier])
        holder = tx.claim(self.pipeline, checkpoint_id, self.steps.claims(slot))
        if holder is not None:
            raise ConfigError(refusal(self.pipeline, slot, holder))

    def _fix(
        self,
        tx: Transaction,
        found: Found,
        ranges: Mapping[str, Mapping[str, tuple[int, int]]],
        looked: datetime | None = None,
    ) -> dict[str, Input]:
        """Let each source choose its input from what it found."""

        def progress(name: str) -> _Progress:
            return _Progress(tx, self.pipeline, name, ranges.get(name, {}), looked)

        return {name: self.steps.sources[name].fix(what, progress(name)) for name, what in found.items()}


def written_again(pipeline: str, checkpoint_id: int, source: str, files: Sequence[InputFile], tx: Transaction) -> None:
    """Record the new times of files that were written again with the same bytes, with an event at the revision.

    That revision is the live one of the checkpoint that reads them, or else its committed one.
    """
    tx.lock(pipeline)
    tx.keep_files(pipeline, checkpoint_id, source, files)
    reader = tx.live_revision(pipeline, checkpoint_id) or tx.committed_revision(pipeline, checkpoint_id)
    if reader is not None:
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        tx.note(reader.key, "input written again", f"{source}: {files[0].path}{others}: the same bytes")


class _Progress:
    """What a source may ask the record while it fixes an input."""

    def __init__(
        self,
        tx: Transaction,
        pipeline: str,
        source: str,
        ranges: Mapping[str, tuple[int, int]],
        looked: datetime | None,
    ) -> None:
        self._tx, self._pipeline, self._source, self._ranges, self._looked = tx, pipeline, source, ranges, looked

    def new_files(self, found: Sequence[InputFile]) -> list[InputFile]:
        return self._tx.new_files(self._pipeline, self._source, found, self._looked)

    def remember(self, before: Known | None, after: Known) -> None:
        self._tx.remember(self._pipeline, self._source, before, after, self._looked)

    def position(self) -> Mapping[str, int]:
        return self._tx.position(self._pipeline, self._source)

    def pin(self, positions: Mapping[str, Position]) -> None:
        if positions:
            self._tx.pin(self._pipeline, self._source, positions)
            hit("begin.pinned")

    def fixed(self) -> Mapping[str, tuple[int, int]]:
        return self._ranges

    def committed(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> CommittedRange:
        return self._tx.committed_range(pipeline, sink, start, end, limit)
