"""What follows a decision: promote it in each sink, write COMMITTED, settle its input, report how far it is.

The coordinator and recovery call it. Any process may do this at any time, and repeat it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from twophase.core import promotion
from twophase.core.checkpoint import InputFile, Key, Participant, Revision, Run
from twophase.core.errors import (
    Parked,
    PromotionPending,
)
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance, ways_out
from twophase.core.isolation import alone
from twophase.core.parts import Parts
from twophase.core.ports import VISIBLE, Outcome, Promotion, Source, Transaction
from twophase.core.states import State
from twophase.core.steps import Decided, parking

log = logging.getLogger("twophase")

#: A queue of promotions: a sink, and which revisions follow each other there ("all", "regular", or one checkpoint's).
Queue = tuple[str, str | int]


class Finish(Parts):
    """The part of the coordinator that is about decided revisions."""

    def finish(self, key: Key) -> Revision:
        """Promote a decided revision and mark it COMMITTED; any process may do this, at any time, and repeat it."""
        revision = self.transact(lambda tx: tx.revision(key))
        if revision.state is State.COMMITTING:
            self._promote_pending(revision, upto=revision.commit_seq)
            self.report()
        self.settle()
        return self.transact(lambda tx: tx.revision(key))

    def _finish(self, decided: Decided) -> Revision:
        """Promote what was decided just now; if other decided revisions wait for promotion, they come first."""
        if decided.others or decided.revision.state is not State.COMMITTING:
            return self.finish(decided.revision.key)
        done = self._promote(decided, {})
        self.report()
        self.settle()
        return done

    def _promote_pending(self, mine: Revision, upto: int | None = None) -> None:
        """Promote the decided revisions that queue with `mine`, in each sink in commit_seq order (R13).

        A sink that cannot promote one waits with the later ones too; the other sinks go on.
        """
        behind: dict[Queue, Key] = {}
        trouble: PromotionPending | Parked | None = None
        for revision in self.transact(lambda tx: self.steps.queue(tx, mine)):
            if upto is None or (revision.commit_seq or 0) <= upto:
                try:
                    self._promote(self.transact(partial(self._decided, revision.key)), behind)
                except (PromotionPending, Parked) as error:
                    trouble = trouble or error
        if trouble is not None:
            raise trouble

    def _decided(self, key: Key, tx: Transaction) -> Decided:
        return self.steps.decided(tx, key)

    def _promote(self, decided: Decided, behind: dict[Queue, Key]) -> Revision:
        """Promote to each sink that has no row in `committed`, then mark COMMITTED.

        A sink that is down delays only itself. `behind` says which queues wait, and for which revision; it grows here.
        """
        revision, key = decided.revision, decided.revision.key
        waiting: list[str] = []
        failed: dict[str, tuple[str, Hindrance]] = {}
        promoted: list[tuple[Participant, Promotion]] = []
        for participant in decided.participants:
            if not participant.stages or participant.name in decided.done:
                continue
            queue = self._queue_of(revision, participant)
            if queue in behind:
                waiting.append(f"{participant.name}: {behind[queue]} comes first")
                continue
            hit("promote.before")
            found = promotion.promote(self.sinks, revision, participant, decided.receipt)
            if found.outcome in VISIBLE:
                promoted.append((participant.standing or participant, found))
                continue
            behind[queue] = key
            if found.outcome is Outcome.FAILED:
                failed[participant.name] = promotion.hindered(found)
            else:
                waiting.append(f"{participant.name}: {found.reason or found.outcome}")
        if not failed and not waiting:
            return self._record_all(key, promoted)
        if promoted:
            self.transact(lambda tx: self.steps.record_promotion(tx, key, promoted))
            hit("promote.after")
        if failed:
            return self._park(key, failed)
        msg = f"checkpoint {key}: decided, not promoted yet ({'; '.join(waiting)}); recovery will finish it"
        raise PromotionPending(msg)

    def _record_all(self, key: Key, promoted: Sequence[tuple[Participant, Promotion]]) -> Revision:
        """Add the rows of the sinks to `committed` and write COMMITTED, in one transaction."""
        hit("finish.before")

        def step(tx: Transaction) -> Revision:
            self.steps.record_promotion(tx, key, promoted)
            return self.steps.finish(tx, key)

        done = self.transact(step)
        hit("promote.after")
        hit("finish.after")
        return done

    def _park(self, key: Key, failed: Mapping[str, tuple[str, Hindrance]]) -> Revision:
        """Park a revision and raise Parked, which says the ways out; return it if another process has finished it."""
        if not self.transact(lambda tx: self.steps.park(tx, key, failed)):
            return self.transact(lambda tx: tx.revision(key))
        reason, kinds = parking(failed)
        ways = ways_out(key.pipeline, key.checkpoint_id, kinds)
        msg = f"checkpoint {key}: decided, but it cannot be promoted ({reason}); parked: {ways}"
        raise Parked(msg)

    def _queue_of(self, revision: Revision, participant: Participant) -> Queue:
        """Return the queue that an output waits in: of all revisions in its sink, or of its lane there."""
        if self.sinks[participant.name].ordered:
            return participant.name, "all"
        return participant.name, "regular" if revision.in_order else revision.checkpoint_id

    def find(self, revision: Revision, participant: Participant) -> Promotion:
        """Say where a decided revision's output stands in one sink; changes nothing."""
        return promotion.find(self.sinks, revision, participant)

    def record_promotion(self, key: Key, participant: Participant, found: Promotion) -> None:
        """Add a sink's row to `committed`; from then on the record names the attempt that the marker names (R10)."""
        self.transact(lambda tx: self.steps.record_promotion(tx, key, [(participant, found)]))
        hit("promote.after")

    def settle(self) -> list[str]:
        """Archive or delete the input files of COMMITTED checkpoints, as `after_commit` says (R18).

        Return what could not be done. The next call tries that again; nothing that is committed depends on it.
        """
        problems: list[str] = []
        for name, source in self.sources.items():
            if source.settles:
                with alone(f"pipeline {self.pipeline!r}: source {name!r}: input is not settled", problems):
                    self._settle(name, source)
        for problem in problems:
            log.warning("%s", problem)
        return problems

    def _settle(self, name: str, source: Source) -> None:
        for checkpoint_id, files in self.transact(partial(_unsettled, self.pipeline, name)):
            hit("settle.before")
            source.settle(checkpoint_id, files)
            self.transact(partial(_settle, self.pipeline, name, checkpoint_id))
            hit("settle.after")

    def report(self) -> None:
        """Tell the sources that want to know how far they are committed.

        Nothing depends on it, so a failure is a warning. The next call tells everything again.
        """
        problems: list[str] = []
        for name, source in self.sources.items():
            if source.reports:
                hit("report.before")
                with alone(f"pipeline {self.pipeline!r}: source {name!r}: what is committed is not reported", problems):
                    source.report(self.transact(partial(self._committed_up_to, name)))
                hit("report.after")
        for problem in problems:
            log.warning("%s", problem)

    def _committed_up_to(self, source: str, tx: Transaction) -> dict[str, int]:
        return self.steps.committed_up_to(tx, source)

    def acknowledge(self, revision: Revision, run: Run) -> None:
        """Note that a revision's own run has seen it committed."""
        self.transact(lambda tx: tx.acknowledge(revision.key, run))


def _unsettled(pipeline: str, source: str, tx: Transaction) -> list[tuple[int, list[InputFile]]]:
    return tx.unsettled(pipeline, source)


def _settle(pipeline: str, source: str, checkpoint_id: int, tx: Transaction) -> None:
    tx.settle(pipeline, source, checkpoint_id)
