"""Which revision a run works on: one that was left undecided, a checkpoint's next one, or the first of a new one.

A new revision has its input in the record before anything reads it, and keeps it: every attempt reads the same records.
What a landing folder or a range of offsets gave is the checkpoint's for ever; what an interval or another pipeline's
commits gave is the revision's own, and its next revision looks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Input, InputFile, Key, Known, Revision, Run
from twophase.core.claims import refusal
from twophase.core.errors import Busy, ConfigError, InputChanged, PromotionPending
from twophase.core.failpoints import hit
from twophase.core.recovery import recover
from twophase.core.states import DECIDED, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Committed, Look, Transaction

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Taking:
    """One run takes one revision."""

    coordinator: Coordinator
    run: Run
    kind: str

    @property
    def pipeline(self) -> str:
        """Return the pipeline's name."""
        return self.coordinator.pipeline

    def begin(self, slot: str | None) -> Revision | None:
        """Take the checkpoint that is next, or the slot's; None when there is no new input.

        A slot that is decided already is returned as it is: a second run has nothing to do.
        """
        recover(self.coordinator, decided_only=True)
        hit("begin.before")
        transact = self.coordinator.transact
        ended = self._ended(transact(lambda tx: tx.newest(self.pipeline, slot)))
        taken, look = transact(lambda tx: (self._go_on(tx, slot, ended), tx.look(self.pipeline)))
        if taken is None:
            found = {name: self._discover(name, slot, look) for name in self.coordinator.sources}
            take = partial(self._take, slot=slot, ended=ended, found=found, look=look)
            try:
                taken = transact(take)
            except InputChanged as changed:
                self._let_pass(changed)
                taken = transact(take)
        if taken is not None and taken.state in UNDECIDED:
            self._adopt(taken)
        hit("begin.after")
        return taken

    def replace(self, checkpoint_id: int, campaign: str | None) -> Revision:
        """Take the next revision of a committed checkpoint; the committed one stands until this one is promoted.

        One that was decided in the same campaign, whose name its run begins with, is returned as it is.
        """
        recover(self.coordinator, decided_only=True)
        hit("begin.before")
        transact = self.coordinator.transact
        slot = transact(lambda tx: tx.slot(self.pipeline, checkpoint_id))
        ended = self._ended(transact(lambda tx: tx.live_revision(self.pipeline, checkpoint_id)))
        sources = self.coordinator.sources.items()
        found = {name: source.discover(slot) for name, source in sources if source.per_revision}
        objections = {latest: self.coordinator.objection(latest=latest) for latest in (True, False)}

        def step(tx: Transaction) -> Revision:
            tx.lock(self.pipeline)
            tx.begun(self.pipeline, slot)
            return self._replace(tx, checkpoint_id, campaign, ended, found, objections)

        taken = transact(step)
        hit("begin.after")
        return taken

    def take(self, slot: str | None, checkpoint_id: int | None, *, reprocess: bool) -> Revision | None:
        """Take what a run under Airflow has to work on; a retried or cleared run finds again what was its own.

        What it had decided before is returned as it is, until the run has seen it committed: clearing a run that was
        done asks for another revision, clearing one that only failed to see its end does not.
        """
        transact = self.coordinator.transact
        mine = transact(lambda tx: tx.newest_of_run(self.pipeline, self.run, checkpoint_id))
        if mine is None:
            return self._first(slot, checkpoint_id, reprocess=reprocess)
        committed = transact(lambda tx: tx.committed_revision(self.pipeline, mine.checkpoint_id))
        if mine.state in DECIDED:
            return self.replace(mine.checkpoint_id, None) if mine.acknowledged else mine
        if committed is None or committed.revision == 0:
            return self.begin(slot)
        if mine.state not in UNDECIDED and committed.revision > mine.revision:
            return committed  # aborted, and carried out by another run since
        return self.replace(mine.checkpoint_id, None)

    def _first(self, slot: str | None, checkpoint_id: int | None, *, reprocess: bool) -> Revision | None:
        """Take what a run is asked for that has worked on nothing yet."""
        if checkpoint_id is not None:
            return self.replace(checkpoint_id, None)
        taken = self.begin(slot)
        if taken is not None and reprocess and taken.state in DECIDED:
            return self.replace(taken.checkpoint_id, None)
        return taken

    def _replace(  # noqa: PLR0913, PLR0917 - what was found before the lock was taken
        self,
        tx: Transaction,
        checkpoint_id: int,
        campaign: str | None,
        ended: Run | None,
        found: Found,
        objections: Mapping[bool, str | None],
    ) -> Revision:
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
        return self._next_revision(tx, checkpoint_id, found)

    def _check_replaceable(self, tx: Transaction, checkpoint_id: int, objections: Mapping[bool, str | None]) -> None:
        """Refuse to run a checkpoint again whose output a sink could not take back."""
        if any(objections.values()) and (why := objections[self.coordinator.is_last(tx, checkpoint_id, self.run)]):
            msg = f"checkpoint {self.pipeline}/{checkpoint_id}: it cannot be run again: {why}"
            raise ConfigError(msg)

    def _ended(self, left: Revision | None) -> Run | None:
        """Return the run that left a revision undecided, if that run is over."""
        if left and left.state in UNDECIDED and self.coordinator.run_ended(left.run):
            return left.run
        return None

    def _go_on(self, tx: Transaction, slot: str | None, ended: Run | None) -> Revision | None:
        """Go on with what is undecided, or say that a slot is decided; None: a revision has to be added."""
        tx.lock(self.pipeline)
        newest = tx.newest(self.pipeline, slot)
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
        tx.adopt(left.key, epoch=left.epoch, run=self.run, lease=self.coordinator.lease)
        return tx.revision(left.key)

    def _discover(self, name: str, slot: str | None, look: Look) -> Any:  # noqa: ANN401 - the source's own
        """Let a source look for input; one that remembers something is told."""
        source, known = self.coordinator.sources[name], look.known.get(name)
        return source.discover(slot) if known is None else source.discover(slot, known)

    def _take(self, tx: Transaction, slot: str | None, ended: Run | None, found: Found, look: Look) -> Revision | None:
        """Add a revision: the next one of an aborted checkpoint, or the first one of a new checkpoint."""
        again = self._go_on(tx, slot, ended)
        if again is not None:
            return again
        tx.begun(self.pipeline, slot)  # undone with all the rest, should a source refuse
        newest = tx.newest(self.pipeline, slot)
        if newest is not None and newest.state not in DECIDED:
            # Aborted: the input stays the checkpoint's and is taken again under the same id.
            return self._next_revision(tx, newest.checkpoint_id, found)
        inputs = self._fix(tx, found, {}, look.at)
        if slot is None and not any(inputs.values()):
            return None
        owned = {name: Input(ranges=fixed.ranges) if self._anew(name) else fixed for name, fixed in inputs.items()}
        checkpoint_id = tx.add_checkpoint(self.pipeline, slot, owned)
        return self._add_revision(tx, checkpoint_id, inputs)

    def _let_pass(self, changed: InputChanged) -> None:
        """Record that known files only have another time, for the same bytes were written again; or raise.

        They are read here, where nothing is locked.
        """
        if not changed.rewritten:
            raise changed
        for (source, checkpoint_id), said in changed.rewritten.items():
            fixed = Input(files=tuple(said), checkpoint_id=checkpoint_id)
            again = self.coordinator.sources[source].written_again(fixed)
            same = {file.path for file in again}
            for file, why in said.items():
                if file.path not in same:
                    raise InputChanged(why) from changed
            self.coordinator.transact(partial(written_again, self.pipeline, checkpoint_id, source, again))

    def _anew(self, source: str) -> bool:
        """Say whether a source looks anew for each revision."""
        return self.coordinator.sources[source].per_revision

    def _next_revision(self, tx: Transaction, checkpoint_id: int, found: Found) -> Revision:
        """Add the next revision of a checkpoint; only those sources that look anew each time fix anything."""
        anew = {name: what for name, what in found.items() if self._anew(name)}
        inputs = self._fix(tx, anew, tx.ranges(self.pipeline, checkpoint_id))
        return self._add_revision(tx, checkpoint_id, inputs)

    def _add_revision(self, tx: Transaction, checkpoint_id: int, inputs: Mapping[str, Input]) -> Revision:
        taken = tx.add_revision(self.pipeline, checkpoint_id, self.kind, self.run, self.coordinator.lease)
        if taken.slot is not None:
            self._claim(tx, checkpoint_id, taken.slot)
        anew = {name: fixed for name, fixed in inputs.items() if self._anew(name)}
        if anew:
            tx.fix_inputs(taken.key, anew)
        hit("begin.inside")
        return taken

    def _claim(self, tx: Transaction, checkpoint_id: int, slot: str) -> None:
        """Make the slot's places its own, those of slots that began before there were claims first."""
        earlier = tx.unclaimed(self.pipeline)
        if earlier:
            tx.claim_earlier(self.pipeline, [(number, self.coordinator.claims(one)) for number, one in earlier])
        holder = tx.claim(self.pipeline, checkpoint_id, self.coordinator.claims(slot))
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

        return {name: self.coordinator.sources[name].fix(what, progress(name)) for name, what in found.items()}

    def _adopt(self, taken: Revision) -> None:
        """Take what the slot's place held before us into the record as revision 0, before anything is staged."""
        slot = taken.slot
        if slot is None:
            return
        transact = self.coordinator.transact
        if transact(lambda tx: tx.committed_revision(self.pipeline, taken.checkpoint_id)) is not None:
            return
        key = Key(self.pipeline, taken.checkpoint_id, 0)
        found = {name: sink.adopt(key, slot) for name, sink in self.coordinator.sinks.items()}
        outputs = {name: output for name, output in found.items() if output is not None}
        if outputs:
            hit("adopt.before")
            transact(lambda tx: tx.add_adopted(key, slot, outputs))
            hit("adopt.after")


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
