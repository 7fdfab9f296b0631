"""Which state a revision starts from, and when a pipeline with state may go on (S1, S2, S4, R20); `steps` calls it.

The state that a checkpoint reads is what the standing revision of the checkpoint before it left. Standing is the newest
decided one, promoted or not. It is part of the revision's fixed input, and the commit point requires that it still
stands. So two heads can never grow from one state: a zombie that staged on an older one is refused.

A replay replaces checkpoint after checkpoint, from one of them through the latest. Until it has come to the end, what
is decided after it was computed from a state that no longer stands. So it holds the regular lane meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twophase.core.checkpoint import Base, Json, Key, Revision
from twophase.core.errors import Busy, ConfigError, IllegalTransition
from twophase.core.states import UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twophase.core.ports import Lane, Transaction


@dataclass(frozen=True)
class Lineage:
    """The rules of one pipeline with state."""

    pipeline: str

    # --- begin, under the pipeline's lock ----------------------------------------------------------------------------

    def check_regular(self, tx: Transaction) -> None:
        """Raise Busy while a replay holds the regular lane, or a state is being replaced."""
        why = self._held_up(tx.lane(self.pipeline))
        for other in tx.unfinished(self.pipeline) if why is None else ():
            if not other.in_order and other.state in UNDECIDED:
                why = f"{other.key} replaces a state that the next one would read"
        if why is not None:
            msg = f"pipeline {self.pipeline!r}: {why}; nothing was begun"
            raise Busy(msg)

    def check_replay(self, tx: Transaction, checkpoint_id: int, backfill: str | None) -> None:
        """Refuse a replacement that would not start from the state that stands, or that does not hold the lane."""
        which = f"checkpoint {self.pipeline}/{checkpoint_id}"
        self.check_idle(tx, which)
        if why := self._refusal(tx.lane(self.pipeline), checkpoint_id, backfill):
            msg = f"{which}: {why}"
            raise ConfigError(msg)
        self.check_kept(tx, checkpoint_id)

    def check_kept(self, tx: Transaction, checkpoint_id: int) -> None:
        """Refuse a replay from a checkpoint if the state before it is not kept any more."""
        if not tx.standing_base(self.pipeline, checkpoint_id).swept:
            return
        oldest = tx.oldest_state(self.pipeline)
        possible = "no state is kept" if oldest is None else f"a replay can start from {oldest + 1} at the earliest"
        msg = (
            f"pipeline {self.pipeline!r}: the state before checkpoint {checkpoint_id} is not kept any more; {possible}"
        )
        raise ConfigError(msg)

    def check_idle(self, tx: Transaction, which: str) -> None:
        """Raise Busy while a regular revision is undecided, or waits for its promotion (S4).

        A replay asks before it takes the lane, too: otherwise it would refuse the commit of a run that goes on.
        """
        for other in tx.unfinished(self.pipeline):
            if other.in_order:
                msg = f"{which}: {other.key} is {other.state.lower()}; a replay begins when it is done"
                raise Busy(msg)

    def check_restage(self, tx: Transaction, key: Key) -> None:
        """Refuse to stage a state again while a later revision is live or decided, which may have read it."""
        tx.lock(self.pipeline)
        live = [other.key for other in tx.unfinished(self.pipeline) if other.checkpoint_id > key.checkpoint_id]
        if live or not tx.is_latest(self.pipeline, key.checkpoint_id):
            later = live[0] if live else "a later checkpoint"
            msg = (
                f"checkpoint {key}: {later} was computed from its state, so that cannot be staged again; bring its"
                f" files back, or abort what is undecided and `twophase backfill {self.pipeline} --checkpoints"
                f" {key.checkpoint_id}..latest` once the rest of it is promoted"
            )
            raise ConfigError(msg)

    def fix(self, tx: Transaction, key: Key) -> None:
        """Record the state that a new revision reads."""
        tx.fix_base(key, tx.standing_base(self.pipeline, key.checkpoint_id).base)

    def read(self, tx: Transaction, key: Key) -> Mapping[str, Json]:
        """Return the manifests of the state that a revision reads."""
        return tx.states(self.pipeline, tx.base(key) or Base())

    # --- the commit point --------------------------------------------------------------------------------------------

    def decide(self, tx: Transaction, held: Revision, *, replaced: bool) -> None:
        """Refuse a revision whose state no longer stands (S1); note what a replacement makes stale."""
        key = held.key
        mine, stands = tx.base(key), tx.standing_base(self.pipeline, key.checkpoint_id).base
        if mine != stands:
            msg = (
                f"checkpoint {key}: it was computed from the state of {mine or Base()}, but that of {stands} stands"
                " now; abort it, and its next revision starts from that one"
            )
            raise IllegalTransition(msg)
        lane = tx.lane(self.pipeline)
        why = self._refusal(lane, key.checkpoint_id, held.backfill) if replaced else self._held_up(lane)
        if why is not None:
            msg = f"checkpoint {key}: {why}; abort it, its input stays its own"
            raise IllegalTransition(msg)
        if replaced:
            tx.mark_stale(self.pipeline, key.checkpoint_id)

    def _held_up(self, lane: Lane) -> str | None:
        """Say why the regular lane has to wait; None: it need not."""
        if lane.replay is None and lane.stale_from is None:
            return None
        return f"its state is being replayed; {self._way(lane)} ends that"

    def _refusal(self, lane: Lane, checkpoint_id: int, backfill: str | None) -> str | None:
        """Say why a replacement may not come now; None: it may."""
        if lane.replay is not None and lane.replay != backfill:
            return f"replay {lane.replay} from checkpoint {lane.first} on holds the pipeline; {self._way(lane)} ends it"
        if backfill is not None and lane.replay is None:
            return f"replay {backfill} was given up; start it again"
        if lane.stale_from is not None and checkpoint_id > lane.stale_from:
            return f"checkpoint {lane.stale_from} reads a state that was replaced, and comes first: {self._way(lane)}"
        return None

    def _way(self, lane: Lane) -> str:
        first = lane.stale_from if lane.replay is None else lane.first
        return f"`twophase backfill {self.pipeline} --checkpoints {first}..latest`"
