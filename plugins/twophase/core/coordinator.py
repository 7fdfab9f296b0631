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

The steps are functions of an open transaction (`core.steps`, `core.begin`); the coordinator composes them. Where one
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
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from twophase.core import forgotten, promotion, recovery
from twophase.core.begin import Begin, written_again
from twophase.core.checkpoint import Input, InputFile, Json, Key, Participant, Revision, Run
from twophase.core.errors import (
    Fenced,
    IllegalTransition,
    InputChanged,
    Parked,
    PromotionPending,
    RecordBehind,
    SinkUnavailable,
    StoreUnavailable,
    TooManyPending,
)
from twophase.core.failpoints import hit
from twophase.core.forgotten import check_known
from twophase.core.hindrances import Hindrance, ways_out
from twophase.core.isolation import alone
from twophase.core.ports import VISIBLE, Look, Opened, Outcome, Outlook, Promotion, Record, Sink, Source, Transaction
from twophase.core.recovery import Decision, Leave, Park, RollBack, RollForward
from twophase.core.restage import Restaging
from twophase.core.states import DECIDED, UNDECIDED, State
from twophase.core.steps import Decided, Steps, parking

log = logging.getLogger("twophase")

T = TypeVar("T")
#: A queue of promotions: a sink, and which revisions follow each other there ("all", "regular", or one checkpoint's).
Queue = tuple[str, str | int]

#: Seconds to wait before each retry when the committer database went away: about half a minute in all.
PATIENCE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)


def script_run_ended(run: Run | None) -> str | bool | None:
    """Return True if a run is over: a script's run ends with its lease. None for an Airflow run: only Airflow knows."""
    return True if run is None or run.dag_id is None else None


class Coordinator:
    """Takes one pipeline's checkpoints through the protocol; holds no state of its own between calls."""

    def __init__(  # noqa: PLR0913 - the parts of the protocol, by name
        self,
        record: Record,
        pipeline: str,
        *,
        sources: Mapping[str, Source],
        sinks: Mapping[str, Sink],
        audits: Sequence[str] = (),
        approvals: Sequence[str] = (),
        quarantines: Collection[str] = (),
        lease: float = 30.0,
        max_pending: int = 1,
        run_ended: Callable[[Run | None], str | bool | None] = script_run_ended,
        patience: Sequence[float] = PATIENCE,
    ) -> None:
        """Bring together a record, a pipeline's sources and sinks, and the names of its audits and approvals.

        `quarantines` names the sinks that bad records go to; their rows do not count as output.
        """
        self.record = record
        self.pipeline = pipeline
        self.sources = sources
        self.sinks = sinks
        self.audits = audits
        self.approvals = approvals
        self.quarantines = quarantines
        self.lease = lease
        self.max_pending = max_pending
        self.run_ended = run_ended
        self.patience = patience

    @property
    def steps(self) -> Steps:
        """Return the steps of the pipeline."""
        return Steps(
            self.pipeline,
            self.sources,
            self.sinks,
            self.audits,
            self.approvals,
            self.quarantines,
            self.lease,
            self.max_pending,
        )

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

    def take(
        self,
        run: Run,
        *,
        slot: str | None = None,
        checkpoint_id: int | None = None,
        kind: str = "regular",
        reprocess: bool = False,
    ) -> Revision | None:
        """Begin what an Airflow run has to work on, or find what it worked on before; None when there is no new input.

        With `checkpoint_id` or `reprocess` a committed checkpoint gets another revision.
        """
        return self._take(Begin(self.steps, run, kind), slot, checkpoint_id, reprocess=reprocess)

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
        """Do what `take` does, and open the attempt of a new revision in the same transaction."""
        begin = Begin(self.steps, run, kind, secrets.token_hex(4))
        taken = self._take(begin, slot, checkpoint_id, reprocess=reprocess)
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
            take = partial(begin.take, slot=slot, ended=ended, found=found, looked=look.at)
            try:
                taken = self.transact(take)
            except InputChanged as changed:
                self._let_pass(changed)
                taken = self.transact(take)
        if taken is not None and taken.state in UNDECIDED:
            self._adopt(taken)
        hit("begin.after")
        return taken

    def _recovered(self, slot: str | None) -> Outlook:
        """Finish decided revisions and aborts that are under way; return the outlook to begin from."""
        hit("recover.before")
        held = forgotten.ask(self)
        outlook = self.transact(lambda tx: tx.outlook(self.pipeline, slot))
        forgotten.check(self, held, outlook.reach)
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

    def _take(self, begin: Begin, slot: str | None, checkpoint_id: int | None, *, reprocess: bool) -> Revision | None:
        """Begin what an Airflow run has to work on; a retried or cleared run finds its own revision again.

        A decided revision of this run is returned as it is until the run has acknowledged it. Clearing a run that
        acknowledged it asks for another revision. Clearing one that failed before it could acknowledge it does not.
        """

        def look(tx: Transaction) -> tuple[Revision | None, Revision | None]:
            mine = tx.newest_of_run(self.pipeline, begin.run, checkpoint_id)
            return mine, mine and tx.committed_revision(self.pipeline, mine.checkpoint_id)

        mine, committed = self.transact(look)
        if mine is None:
            return self._take_first(begin, slot, checkpoint_id, reprocess=reprocess)
        if mine.state in DECIDED:
            return self._replace(begin, mine.checkpoint_id) if mine.acknowledged else mine
        if committed is None or committed.revision == 0:
            return self._begin(begin, slot)
        if mine.state not in UNDECIDED and committed.revision > mine.revision:
            return committed  # this run's revision was aborted, and another run has committed a later one
        return self._replace(begin, mine.checkpoint_id)

    def _take_first(
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

    # --- attempt and votes -------------------------------------------------------------------------------------------

    def attempt(self, revision: Revision) -> Revision:
        """Open the next attempt for all participants at once: a new epoch, no votes, private staging places (R7)."""
        token = secrets.token_hex(4)
        opened = self.transact(lambda tx: self.steps.open_attempt(tx, revision, token))
        hit("attempt.after")
        return opened

    def opened(self, attempt: Revision) -> Opened:
        """Return all that is needed to stage an open attempt."""
        return self.transact(lambda tx: self.steps.opened(tx, attempt))

    def vote(  # noqa: PLR0913 - what is known of a vote, by name
        self,
        revision: Revision,
        name: str,
        *,
        yes: bool,
        manifest: Json | None = None,
        reason: str | None = None,
        audits: Sequence[Participant] = (),
    ) -> State:
        """Record one participant's vote for one attempt; the last yes makes it PRECOMMITTED.

        In a restage, earlier attempts are made unpromotable first. If one of them was promoted already, that one counts
        and no vote is recorded. The `audits` of a restage are recorded together with its vote.
        """
        restaged = yes and revision.state is State.COMMITTING
        if restaged and Restaging(self, revision.key).is_superfluous(revision, name, manifest or {}):
            return revision.state
        mine = Participant(name, "", revision.epoch, yes, manifest=manifest or {}, reason=reason)
        return self.vote_all(revision, [mine], audits)

    def vote_all(
        self,
        attempt: Revision,
        votes: Sequence[Participant],
        beside: Sequence[Participant] = (),
        *,
        rests: bool = False,
    ) -> State:
        """Record the votes of several participants for one attempt, in one transaction.

        With `rests` the lease is given up: the revision now waits for another task of its run.
        """

        def step(tx: Transaction) -> State:
            state = self.steps.vote(tx, attempt, votes, beside)
            if rests:
                tx.renew(attempt.key, epoch=attempt.epoch, lease=None)
            return state

        state = self.transact(step)
        hit("vote.after")
        return state

    def fail(self, revision: Revision, why: str) -> bool:
        """Keep why a try failed; an abort then names it as the error. Another run's revision is left alone."""
        return self.transact(lambda tx: tx.fail(revision.key, epoch=revision.epoch, run=revision.run, why=why))

    def rest(self, revision: Revision) -> None:
        """Give up the lease of a revision that now waits for another task of its run."""
        self.transact(lambda tx: tx.renew(revision.key, epoch=revision.epoch, lease=None))

    # --- commit ------------------------------------------------------------------------------------------------------

    def commit(self, revision: Revision, why: str = "the commit point") -> Revision:
        """Decide, then promote. Once it is decided it can only be promoted, by this process or a later one."""
        try:
            decided = self.decide_commit(revision, why)
        except TooManyPending:
            self._promote_pending(revision)
            decided = self.decide_commit(revision, why)
        return self._finish(decided)

    def vote_and_commit(
        self, attempt: Revision, votes: Sequence[Participant], why: str = "the commit point"
    ) -> Revision:
        """Record all votes and pass the commit point in one transaction, then promote.

        If the decision is refused, the votes are recorded all the same, and the commit is tried by itself.
        """
        hit("commit.before")
        held = forgotten.ask(self)
        overtaken = self._overtaken(attempt)

        def step(tx: Transaction) -> Decided:
            if beyond := held.beyond(tx.lock(self.pipeline, attempt.key)):
                raise RecordBehind(beyond)
            self.steps.vote(tx, attempt, votes)
            return self.steps.decide(tx, attempt, why, overtaken)

        try:
            decided = self.transact(step)
        except RecordBehind:
            check_known(self)  # notes it at the pipeline too
            raise
        except (TooManyPending, IllegalTransition):
            self.vote_all(attempt, votes)
            return self.commit(attempt, why)
        hit("vote.after")
        hit("commit.after")
        return self._finish(decided)

    def decide_commit(self, revision: Revision, why: str = "the commit point") -> Decided:
        """Pass the commit point in one transaction: check the votes, take a commit_seq, move the positions."""
        hit("commit.before")
        overtaken = self._overtaken(revision)

        def step(tx: Transaction) -> Decided:
            tx.lock(self.pipeline, revision.key)
            return self.steps.decide(tx, revision, why, overtaken)

        decided = self.transact(step)
        hit("commit.after")
        return decided

    def _overtaken(self, revision: Revision) -> str | None:
        """Say which sink cannot replace a committed checkpoint once a later one is decided; None: all can.

        The sinks are asked before the pipeline is locked.
        """
        return self.objection(latest=False) if revision.revision > 1 else None

    def objection(self, *, latest: bool) -> str | None:
        """Say which sink cannot replace a committed checkpoint, and why; None: all can."""
        for name, sink in self.sinks.items():
            if why := sink.objection(latest=latest):
                return f"sink {name!r}: {why}"
        return None

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

    def restage(self, key: Key, why: str, sinks: Collection[str] = ()) -> Revision:
        """Open an attempt for some sinks of a decided revision: those named, or those that lost their staged output."""
        return Restaging(self, key).open(why, sinks)

    def is_promoted(self, attempt: Revision, participant: Participant, manifest: Json) -> bool:
        """Return True if the sink already holds an attempt of this revision; the record then names that one (R10)."""
        return Restaging(self, attempt.key).is_promoted(attempt, participant, manifest)

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

    # --- abort -------------------------------------------------------------------------------------------------------

    def abort(self, revision: Revision, why: str, *, unleased: bool = False) -> Revision:
        """End a revision before its commit point and discard what it staged; after the commit point change nothing."""
        hit("abort.before")
        check_known(self)
        current = self.transact(lambda tx: self.steps.abort(tx, revision, why, unleased=unleased))
        hit("abort.after")
        return self.finish_abort(current) if current.state is State.ABORTING else current

    def finish_abort(self, revision: Revision) -> Revision:
        """Discard the staged output of an ABORTING revision and mark it ABORTED."""
        key = revision.key
        problems: list[str] = []
        for participant in self.transact(lambda tx: tx.participants(key)):
            if participant.stages and participant.name in self.sinks:
                with alone(f"sink {participant.name!r}", problems):
                    self.sinks[participant.name].discard(key, participant.handle)
        if problems:
            msg = f"checkpoint {key}: aborting, not discarded yet ({'; '.join(problems)}); recovery will finish it"
            raise SinkUnavailable(msg)
        hit("abort.discarded")
        self.transact(lambda tx: tx.move(key, State.ABORTED, epoch=revision.epoch, why="discarded", lease=None))
        hit("abort.end")
        return self.transact(lambda tx: tx.revision(key))

    def release(self, checkpoint_id: int, why: str) -> None:
        """Free the input of an aborted checkpoint, so that a later one may read it; its number is not used again."""
        self.transact(lambda tx: self.steps.release(tx, checkpoint_id, why))

    # --- after the commit --------------------------------------------------------------------------------------------

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

    # --- the store ---------------------------------------------------------------------------------------------------

    def transact(self, step: Callable[[Transaction], T]) -> T:
        """Run a step in one transaction; when the database goes away, wait and run it again: steps may be repeated."""
        for pause in (*self.patience, None):
            try:
                with self.record.transaction() as tx:
                    return step(tx)
            except StoreUnavailable:
                if pause is None:
                    raise
                threading.Event().wait(pause)
        raise AssertionError  # the last pause is None: it returned or raised


def _unsettled(pipeline: str, source: str, tx: Transaction) -> list[tuple[int, list[InputFile]]]:
    return tx.unsettled(pipeline, source)


def _settle(pipeline: str, source: str, checkpoint_id: int, tx: Transaction) -> None:
    tx.settle(pipeline, source, checkpoint_id)
