"""Which revision a run works on: one that was left undecided, a checkpoint's next one, or the first of a new one.

A new revision has its input in the record before anything reads it, and keeps it: every attempt reads the same records.
What a landing folder or a range of offsets gave is the checkpoint's for ever; what an interval or another pipeline's
commits gave is the revision's own, and its next revision looks again.

All of it happens in an open transaction. What has to be looked for outside is found before by the coordinator: the
input, and whether the run that left something has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Input, InputFile, Known, Revision, Run
from twophase.core.claims import refusal
from twophase.core.errors import Busy, ConfigError, PromotionPending
from twophase.core.failpoints import hit
from twophase.core.states import DECIDED, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from twophase.core.ports import Committed, Opened, Transaction
    from twophase.core.steps import Steps

Found = Mapping[str, Any]


@dataclass
class Begin:
    """One run takes one revision; with a token, the first attempt of a new one is opened in the same transaction."""

    steps: Steps
    run: Run
    kind: str
    token: str | None = None
    #: The attempt that was opened with the revision, by the last of the calls.
    opened: Opened | None = field(default=None, init=False)

    @property
    def pipeline(self) -> str:
        """Return the pipeline's name."""
        return self.steps.pipeline

    def go_on(self, tx: Transaction, slot: str | None, ended: Run | None) -> Revision | None:
        """Go on with what is undecided, or say that a slot is decided; None: a revision has to be added."""
        self.opened = None
        tx.lock(self.pipeline)
        return self._go_on(tx, tx.newest(self.pipeline, slot), slot, ended)

    def take(
        self, tx: Transaction, slot: str | None, ended: Run | None, found: Found, looked: datetime
    ) -> Revision | None:
        """Add a revision, if there is nothing to go on with: of an aborted checkpoint, or of a new one.

        None: there is no new input.
        """
        self.opened = None
        tx.lock(self.pipeline)
        newest = tx.newest(self.pipeline, slot)
        again = self._go_on(tx, newest, slot, ended)
        if again is not None:
            return again
        tx.begun(self.pipeline, slot)  # undone with all the rest, should a source refuse
        if newest is not None and newest.state not in DECIDED:
            # Aborted: the input stays the checkpoint's and is taken again under the same id.
            return self._next_revision(tx, newest.checkpoint_id, found, opens=slot is None)
        inputs = self._fix(tx, found, {}, looked)
        if slot is None and not any(inputs.values()):
            return None
        owned = {name: Input(ranges=fixed.ranges) if self._anew(name) else fixed for name, fixed in inputs.items()}
        checkpoint_id = tx.add_checkpoint(self.pipeline, slot, owned)
        # Before a slot is staged, what is in its place has to be looked at.
        return self._add_revision(tx, checkpoint_id, inputs, opens=slot is None, is_new=True)

    def replace(  # noqa: PLR0913, PLR0917 - what was found before the lock was taken
        self,
        tx: Transaction,
        checkpoint_id: int,
        slot: str | None,
        campaign: str | None,
        ended: Run | None,
        found: Found,
        objections: Mapping[bool, str | None],
    ) -> Revision:
        """Add the next revision of a committed checkpoint; one that the same campaign decided is returned as it is."""
        self.opened = None
        tx.lock(self.pipeline)
        tx.begun(self.pipeline, slot)
        if campaign and (done := tx.decided_in(self.pipeline, checkpoint_id, campaign)):
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
        return self._next_revision(tx, checkpoint_id, found, opens=True)

    def _check_replaceable(self, tx: Transaction, checkpoint_id: int, objections: Mapping[bool, str | None]) -> None:
        """Refuse to run a checkpoint again whose output a sink could not take back."""
        if any(objections.values()) and (why := objections[self.steps.is_last(tx, checkpoint_id, self.run)]):
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
        """Go on with this run's own revision at once, with another's once its lease is out and its run is over."""
        if left.run != self.run and left.leased:
            msg = f"checkpoint {left.key}: run {left.run} works on it, {left.lease_left:.1f} s of lease left"
            raise Busy(msg, lease_left=left.lease_left)
        if left.run not in {self.run, ended}:
            msg = f"checkpoint {left.key}: it waits for run {left.run}, which has not ended"
            raise Busy(msg)
        tx.begun(self.pipeline, left.slot)
        tx.adopt(left.key, epoch=left.epoch, run=self.run, lease=self.steps.lease)
        taken = tx.revision(left.key)
        if self.token and self.steps.is_opened(tx, taken, self.token):  # the reply to opening it was lost
            self.opened = self.steps.opened(tx, taken)
        return taken

    def _anew(self, source: str) -> bool:
        """Say whether a source looks anew for each revision."""
        return self.steps.sources[source].per_revision

    def _next_revision(self, tx: Transaction, checkpoint_id: int, found: Found, *, opens: bool) -> Revision:
        """Add the next revision of a checkpoint; only those sources that look anew each time fix anything."""
        anew = {name: what for name, what in found.items() if self._anew(name)}
        inputs = self._fix(tx, anew, tx.ranges(self.pipeline, checkpoint_id))
        return self._add_revision(tx, checkpoint_id, inputs, opens=opens)

    def _add_revision(
        self, tx: Transaction, checkpoint_id: int, inputs: Mapping[str, Input], *, opens: bool, is_new: bool = False
    ) -> Revision:
        taken = tx.add_revision(self.pipeline, checkpoint_id, self.kind, self.run, self.steps.lease)
        if taken.slot is not None:
            self._claim(tx, checkpoint_id, taken.slot)
        anew = {name: fixed for name, fixed in inputs.items() if self._anew(name)}
        if anew:
            tx.fix_inputs(taken.key, anew)
        hit("begin.inside")
        if self.token and opens:
            taken = self.steps.open_attempt(tx, taken, self.token, held=taken)
            self.opened = self.steps.opened(tx, taken, inputs if is_new else None)
        return taken

    def _claim(self, tx: Transaction, checkpoint_id: int, slot: str) -> None:
        """Make the slot's places its own, those of slots that began before there were claims first."""
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
        """Let each source choose its input out of what was found."""

        def progress(name: str) -> _Progress:
            return _Progress(tx, self.pipeline, name, ranges.get(name, {}), looked)

        return {name: self.steps.sources[name].fix(what, progress(name)) for name, what in found.items()}


def written_again(pipeline: str, checkpoint_id: int, source: str, files: Sequence[InputFile], tx: Transaction) -> None:
    """Keep how files look now that were written again with the same bytes, and say so in the story of their reader."""
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

    def fixed(self) -> Mapping[str, tuple[int, int]]:
        return self._ranges

    def committed(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> Committed:
        return self._tx.committed_range(pipeline, sink, start, end, limit)
