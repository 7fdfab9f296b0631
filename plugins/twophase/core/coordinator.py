"""The coordinator takes one pipeline's checkpoints through the two-phase protocol, each exactly once.

The runner, Airflow's tasks and the commands call it; `wiring` builds it.

    begin        take a checkpoint, fix its input (the barrier)                      state     epoch
      │                                                                              OPEN      0
    attempt      bump the epoch, name a staging place per participant                OPEN      1, 2, 3 …
      │            ┌──────────── Spark writes there, invisibly ────────────┐
    vote         one durable yes per participant, for this attempt                   PRECOMMITTED
      │
    commit ───── one transaction: votes, commit_seq, positions ── THE COMMIT POINT ─ COMMITTING
      │            promote each sink: atomic, with its marker; row in `committed`
      │            one transaction: supersede the older revision                     COMMITTED
      │
    abort        before the commit point only; then discard                          ABORTING, ABORTED

The steps are functions of an open transaction (`core.steps`, `core.begin`); the coordinator composes them. It is told
in three modules, each on top of the one before: `core.finish` what follows a decision, `core.votes` an attempt up to
the decision or its abort, and this one how a checkpoint begins and how recovery goes on with what was left. Where one
process takes several in a row they share a transaction: begin and attempt, votes and commit point, the rows of all
sinks and COMMITTED.

Every step may be repeated, may come late from a process that was stopped meanwhile, and may lose its reply. So each
step is a compare-and-set on (state, epoch) in one transaction. When a reply is lost the step runs again, and changes
nothing if it was done. No lock outlives a transaction. Safety does not depend on the lease, which only keeps processes
out of each other's way.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from twophase.core import record_behind, recovery
from twophase.core.begin import Begin, written_again
from twophase.core.checkpoint import Input, Key, Revision, Run
from twophase.core.errors import (
    Fenced,
    InputChanged,
    Parked,
    PromotionPending,
    SinkUnavailable,
)
from twophase.core.failpoints import hit
from twophase.core.ports import Look, Opened, Outlook, Transaction
from twophase.core.record_behind import check_known
from twophase.core.recovery import Decision, Leave, Park, RollBack, RollForward
from twophase.core.states import DECIDED, UNDECIDED, State
from twophase.core.votes import Votes

log = logging.getLogger("twophase")


class Coordinator(Votes):
    """Takes one pipeline's checkpoints through the protocol."""

    # --- begin -------------------------------------------------------------------------------------------------------

    def begin(self, run: Run, *, slot: str | None = None, kind: str = "regular") -> Revision | None:
        """Begin the next checkpoint, or the slot's; None when there is no new input.

        Decided revisions are finished first. The input is in the record before anything reads it, and never changes.
        If the slot is decided already, its revision is returned as it is: a second run has nothing to do.
        """
        return self._begin(Begin(self.steps, run, kind), slot)

    def replace(self, run: Run, checkpoint_id: int, *, kind: str = "backfill", backfill: str | None = None) -> Revision:
        """Begin the next revision of a committed checkpoint; the committed one stays until this one is promoted."""
        return self._replace(Begin(self.steps, run, kind, backfill=backfill), checkpoint_id)

    def open(
        self,
        run: Run,
        *,
        slot: str | None = None,
        checkpoint_id: int | None = None,
        kind: str = "regular",
        backfill: str | None = None,
    ) -> Revision | Opened | None:
        """Begin, or replace a committed checkpoint, and open the attempt in the same transaction.

        Return a plain Revision if no attempt was opened with it: it is decided, it was taken over, or it is a slot's,
        whose place in the sinks has to be looked at first. `attempt` opens one for the last two.
        """
        begin = Begin(self.steps, run, kind, secrets.token_hex(4), backfill)
        if checkpoint_id is not None:
            taken: Revision | None = self._replace(begin, checkpoint_id)
        else:
            taken = self._begin(begin, slot)
        return self._opened(begin, taken)

    def open_for_task(
        self,
        run: Run,
        *,
        slot: str | None = None,
        checkpoint_id: int | None = None,
        kind: str = "regular",
        reprocess: bool = False,
    ) -> Revision | Opened | None:
        """Begin what an Airflow run has to work on, or find what it worked on before; None when there is no new input.

        With `checkpoint_id` or `reprocess` a committed checkpoint gets another revision. The attempt of a new revision
        is opened in the same transaction.
        """
        begin = Begin(self.steps, run, kind, secrets.token_hex(4))
        taken = self._begin_for_task(begin, slot, checkpoint_id, reprocess=reprocess)
        return self._opened(begin, taken)

    @staticmethod
    def _opened(begin: Begin, taken: Revision | None) -> Revision | Opened | None:
        """Return the attempt that was opened at begin, or what was taken without one."""
        if begin.opened is None:
            return taken
        hit("attempt.after")
        return begin.opened

    def _begin(self, begin: Begin, slot: str | None) -> Revision | None:
        outlook = self._recovered(slot)
        hit("begin.before")
        newest, look = outlook.newest, outlook.look
        ended = self._ended(newest)
        taken = None
        if newest is not None and (newest.state in UNDECIDED or slot is not None):
            taken = self.transact(lambda tx: begin.go_on(tx, slot, ended))
        if taken is None:
            found = {name: self._discover(name, slot, look) for name in self.sources}
            go = partial(begin.begin, slot=slot, ended=ended, found=found, looked=look.at)
            try:
                taken = self.transact(go)
            except InputChanged as changed:
                self._let_pass(changed)
                taken = self.transact(go)
        if taken is not None and taken.state in UNDECIDED:
            self._adopt(taken)
        hit("begin.after")
        return taken

    def _recovered(self, slot: str | None) -> Outlook:
        """Finish decided revisions and aborts that are under way; return the outlook to begin from."""
        hit("recover.before")
        held = record_behind.ask(self)
        outlook = self.transact(lambda tx: tx.outlook(self.pipeline, slot), reads=True)
        record_behind.check(self, held, outlook.reach)
        if self._recover(outlook.unfinished, decided_only=True):
            outlook = self.transact(lambda tx: tx.outlook(self.pipeline, slot))
        return outlook

    def _replace(self, begin: Begin, checkpoint_id: int) -> Revision:
        self.recover(decided_only=True)
        hit("begin.before")

        def look(tx: Transaction) -> tuple[str | None, Revision | None]:
            return tx.slot(self.pipeline, checkpoint_id), tx.live_revision(self.pipeline, checkpoint_id)

        slot, live = self.transact(look)
        ended = self._ended(live)
        found = {name: source.discover(slot) for name, source in self.sources.items() if source.per_revision}
        objections = {latest: self.objection(latest=latest) for latest in (True, False)}
        taken = self.transact(lambda tx: begin.replace(tx, checkpoint_id, slot, ended, found, objections))
        hit("begin.after")
        return taken

    def _begin_for_task(
        self, begin: Begin, slot: str | None, checkpoint_id: int | None, *, reprocess: bool
    ) -> Revision | None:
        """Begin what an Airflow run has to work on; a retried or cleared run finds its own revision again.

        A decided revision of this run is returned as it is until the run has acknowledged it. Clearing a run that
        acknowledged it asks for another revision. Clearing one that failed before it could acknowledge it does not.
        """

        def look(tx: Transaction) -> tuple[Revision | None, Revision | None]:
            mine = tx.newest_of_run(self.pipeline, begin.run, checkpoint_id)
            return mine, mine and tx.committed_revision(self.pipeline, mine.checkpoint_id)

        mine, committed = self.transact(look)
        if mine is None:
            return self._begin_first(begin, slot, checkpoint_id, reprocess=reprocess)
        if mine.state in DECIDED:
            return self._replace(begin, mine.checkpoint_id) if mine.acknowledged else mine
        if committed is None or committed.revision == 0:
            return self._begin(begin, slot)
        if mine.state not in UNDECIDED and committed.revision > mine.revision:
            return committed  # this run's revision was aborted, and another run has committed a later one
        return self._replace(begin, mine.checkpoint_id)

    def _begin_first(
        self, begin: Begin, slot: str | None, checkpoint_id: int | None, *, reprocess: bool
    ) -> Revision | None:
        """Begin what is asked of a run that has not worked on anything yet."""
        if checkpoint_id is not None:
            return self._replace(begin, checkpoint_id)
        taken = self._begin(begin, slot)
        if taken is not None and reprocess and taken.state in DECIDED:
            return self._replace(begin, taken.checkpoint_id)
        return taken

    def _ended(self, left: Revision | None) -> Run | None:
        """Return the run of an undecided revision if that run is over, else None."""
        if left and left.state in UNDECIDED and self.run_ended(left.run):
            return left.run
        return None

    def _discover(self, name: str, slot: str | None, look: Look) -> object:
        """Let a source look for input, given what it remembered at its last look, and how far it has been read."""
        return self.sources[name].discover(slot, look.known.get(name), look.positions.get(name, {}))

    def _let_pass(self, changed: InputChanged) -> None:
        """Record the new times of known files if their bytes are the same as before; raise InputChanged otherwise.

        The files are read outside any transaction, so nothing is locked meanwhile.
        """
        if not changed.rewritten:
            raise changed
        for (source, checkpoint_id), said in changed.rewritten.items():
            fixed = Input(files=tuple(said), checkpoint_id=checkpoint_id)
            again = self.sources[source].written_again(fixed)
            same = {file.path for file in again}
            for file, why in said.items():
                if file.path not in same:
                    raise InputChanged(why) from changed
            self.transact(partial(written_again, self.pipeline, checkpoint_id, source, again))

    def _adopt(self, taken: Revision) -> None:
        """Record what was in the slot's place before its first revision as revision 0, before anything is staged."""
        slot = taken.slot
        if slot is None:
            return
        if self.transact(lambda tx: tx.committed_revision(self.pipeline, taken.checkpoint_id)) is not None:
            return
        key = Key(self.pipeline, taken.checkpoint_id, 0)
        found = {name: sink.adopt(key, slot) for name, sink in self.sinks.items()}
        outputs = {name: output for name, output in found.items() if output is not None}
        if outputs:
            hit("adopt.before")
            self.transact(lambda tx: tx.add_adopted(key, slot, outputs))
            hit("adopt.after")

    # --- recovery ----------------------------------------------------------------------------------------------------

    def recover(
        self, *, decided_only: bool = False, aborting: Callable[[Revision], None] = lambda _: None
    ) -> list[tuple[Revision, Decision]]:
        """Take every unfinished revision as far as it can go without a person; return what was done with each.

        With `decided_only` the undecided ones are left alone, and leases do not matter: several processes may promote
        one decided revision at once. `aborting` is called with each revision that is about to be aborted.
        """
        hit("recover.before")
        check_known(self)
        unfinished = self.transact(lambda tx: tx.unfinished(self.pipeline))
        return self._recover(unfinished, decided_only=decided_only, aborting=aborting)

    def _recover(
        self,
        unfinished: Sequence[Revision],
        *,
        decided_only: bool,
        aborting: Callable[[Revision], None] = lambda _: None,
    ) -> list[tuple[Revision, Decision]]:
        decisions: list[tuple[Revision, Decision]] = []
        for found in unfinished:
            if decided_only and found.state in UNDECIDED:
                continue
            revision = dataclasses.replace(found, lease_left=None) if decided_only else found
            ended = self.run_ended(revision.run) if revision.state in UNDECIDED else None
            decision = recovery.decide(revision, run_ended=ended)
            if isinstance(decision, RollBack):
                aborting(revision)
            decisions.append((revision, self._execute(revision, decision)))
        self.settle()
        return decisions

    def _execute(self, revision: Revision, decision: Decision) -> Decision:
        """Act on a decision; it becomes Leave or Park if another process was faster or a sink could not go on."""
        try:
            match decision:
                case RollForward():
                    self.finish(revision.key)
                case RollBack() if revision.state is State.ABORTING:
                    self.finish_abort(revision)
                case RollBack(why):
                    self.abort(revision, f"recovery: {why}", unleased=True)
                case Leave() | Park():
                    pass
        except Parked as error:
            decision = self._parked(revision, error)
        except (Fenced, PromotionPending) as error:
            decision = Leave(str(error))
        except SinkUnavailable as error:
            decision = Leave(str(error), failed=True)
        recovery.tell(revision, decision)
        return decision

    def _parked(self, revision: Revision, error: Parked) -> Decision:
        """Return Park if it was parked just now; Leave if it was parked before, or waits behind a parked one."""
        reason = self.transact(lambda tx: tx.revision(revision.key)).parked_reason
        if reason is None:
            return Leave(str(error))
        return Leave(f"it is parked: {reason}") if reason == revision.parked_reason else Park(reason)
