"""The two-phase protocol: one checkpoint, exactly once.

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

Every step may be repeated, may come late from a process that was stopped meanwhile, and may lose its reply. So each one
is a compare-and-set on (state, epoch) in one transaction; a step whose reply was lost is simply run again and finds
itself done. No lock outlives a transaction, and no safety comes from the lease: it only keeps processes from getting in
each other's way.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from twophase.core.begin import Taking
from twophase.core.checkpoint import InputFile, Json, Key, Output, Participant, Revision, Run
from twophase.core.claims import Claim
from twophase.core.errors import (
    Fenced,
    IllegalTransition,
    Parked,
    PromotionPending,
    SinkUnavailable,
    StoreUnavailable,
    TooManyPending,
)
from twophase.core.failpoints import hit
from twophase.core.forgotten import check_known
from twophase.core.hindrances import Hindrance, ways_out
from twophase.core.isolation import alone
from twophase.core.ports import VISIBLE, Outcome, Promotion, Record, Sink, Source, Transaction
from twophase.core.restage import Restaging, voted_for
from twophase.core.states import DECIDED, UNDECIDED, State

log = logging.getLogger("twophase")

T = TypeVar("T")
#: A sink, and whose turn it keeps: that of all revisions, of the regular lane, or of one checkpoint.
Queue = tuple[str, str | int]

#: Of each sink that cannot promote: why, and what kind of hindrance it is.
Failed = Mapping[str, tuple[str, Hindrance]]
#: Seconds to wait before asking a store again that went away: about half a minute in all.
PATIENCE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)


def script_run_ended(run: Run | None) -> str | bool | None:
    """Say whether a run is over: a script's run ends with its lease; of an Airflow run only Airflow knows."""
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
        """Bring together a record, a pipeline's sources, its sinks, and the names of those who vote besides.

        `quarantines` are those of the sinks that bad records go to: what they hold is no output.
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

    # --- begin -------------------------------------------------------------------------------------------------------

    def begin(self, run: Run, *, slot: str | None = None, kind: str = "regular") -> Revision | None:
        """Take the checkpoint that is next, or the slot's; None when there is no new input.

        What is decided is finished first. The input is in the record before anything reads it, and never changes.
        """
        return Taking(self, run, kind).begin(slot)

    def replace(self, run: Run, checkpoint_id: int, *, kind: str = "backfill", campaign: str | None = None) -> Revision:
        """Take the next revision of a committed checkpoint; the committed one stands until this one is promoted."""
        return Taking(self, run, kind).replace(checkpoint_id, campaign)

    def take(
        self,
        run: Run,
        *,
        slot: str | None = None,
        checkpoint_id: int | None = None,
        kind: str = "regular",
        reprocess: bool = False,
    ) -> Revision | None:
        """Take what an Airflow run has to work on, or find again what it worked on; None when there is no new input.

        With `checkpoint_id` or `reprocess` what is committed gets another revision.
        """
        return Taking(self, run, kind).take(slot, checkpoint_id, reprocess=reprocess)

    def claims(self, slot: str) -> dict[str, Claim]:
        """Return what a slot has for its own: where each read and each write of it comes to."""
        parts = [("read", name, source.claim) for name, source in self.sources.items()]
        parts += [("write", name, sink.claim) for name, sink in self.sinks.items()]
        found = {f"{kind} {name}": claim(slot) for kind, name, claim in parts}
        return {part: claim for part, claim in found.items() if claim is not None}

    # --- attempt and votes -------------------------------------------------------------------------------------------

    def attempt(self, revision: Revision) -> Revision:
        """Open the next attempt for all participants at once: a new epoch, no votes, private staging places (R7)."""
        hit("attempt.before")
        token = secrets.token_hex(4)
        epoch = revision.epoch + 1

        def step(tx: Transaction) -> Revision:
            if not self._opened(tx, revision.key, epoch, token):
                held = tx.revision(revision.key)
                if held.run != revision.run:  # another run took it over, which leaves the epoch alone
                    raise Fenced(_fenced("attempt", revision, held))
                tx.move(
                    revision.key, State.OPEN, epoch=revision.epoch, why=f"attempt {epoch}", bump=True, lease=self.lease
                )
                places = self.places(tx, revision.key, epoch, token)
                sinks = [Participant(name, "sink", epoch, handle=place) for name, place in places.items()]
                audits = [Participant(name, "audit", epoch) for name in self.audits]
                approvals = [Participant(name, "approval", epoch) for name in self.approvals]
                tx.replace_participants(revision.key, [*sinks, *audits, *approvals])
            return tx.revision(revision.key)

        opened = self.transact(step)
        hit("attempt.after")
        return opened

    def _opened(self, tx: Transaction, key: Key, epoch: int, token: str) -> bool:
        """Say whether this very attempt is open already: the reply to opening it was lost."""
        if tx.hold(key).epoch != epoch:
            return False
        handles = {p.name: p.handle for p in tx.participants(key) if p.kind == "sink"}
        return handles == self.places(tx, key, epoch, token)

    def places(self, tx: Transaction, key: Key, epoch: int, token: str) -> dict[str, Json]:
        """Name the staging place of each sink, and what is replaced there: live is one, so that stays what it is."""
        slot = tx.slot(self.pipeline, key.checkpoint_id)
        committed = tx.committed_revision(self.pipeline, key.checkpoint_id)
        older = {p.name: p for p in tx.participants(committed.key)} if committed else {}

        def place(name: str, sink: Sink) -> Json:
            was = older.get(name)
            output = Output(committed.key, was.attempt, was.handle, was.manifest) if committed and was else None
            return sink.place(key, epoch, token, slot=slot, older=output)

        return {name: place(name, sink) for name, sink in self.sinks.items()}

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

        Of a restage, nothing earlier can be promoted by then any more; if it was, that counts, and there is no vote.
        The `audits` of what is staged again are recorded with its vote, for they say nothing of what stood before.
        """
        restaged = yes and revision.state is State.COMMITTING
        if restaged and Restaging(self, revision.key).is_superfluous(revision, name, manifest or {}):
            return revision.state

        def step(tx: Transaction) -> State:
            held = tx.hold(revision.key)
            mine = next((p for p in tx.participants(revision.key) if p.name == name), None)
            if held.epoch != revision.epoch or mine is None or mine.attempt != revision.epoch:
                raise Fenced(_fenced("vote", revision, held))
            if mine.vote is not None and mine.vote == yes:
                return held.state  # said already: the reply was lost
            if held.state not in {State.OPEN, State.COMMITTING} or mine.vote is not None:
                raise Fenced(_fenced("vote", revision, held))
            handle = voted_for(mine.handle) if yes else mine.handle
            voted = replace(mine, vote=yes, handle=handle, manifest=manifest or {}, reason=reason)
            for one in (*audits, voted):
                tx.put_participant(revision.key, one)
                said = f"{one.name} a{revision.epoch} {one.reason or ''}".strip()
                tx.note(revision.key, f"voted {'yes' if one.vote else 'no'}", said)
            if held.state is State.OPEN and all(p.vote for p in tx.participants(revision.key)):
                tx.move(revision.key, State.PRECOMMITTED, epoch=revision.epoch, why="every participant voted yes")
            hit("vote.inside")
            return tx.revision(revision.key).state

        state = self.transact(step)
        hit("vote.after")
        return state

    def fail(self, revision: Revision, why: str) -> bool:
        """Keep why a try failed: whoever ends the revision takes it over as its error. Another's is left alone."""
        return self.transact(lambda tx: tx.fail(revision.key, epoch=revision.epoch, run=revision.run, why=why))

    def rest(self, revision: Revision) -> None:
        """Give up the lease of a revision that now waits for another task of its run."""
        self.transact(lambda tx: tx.renew(revision.key, epoch=revision.epoch, lease=None))

    # --- commit ------------------------------------------------------------------------------------------------------

    def commit(self, revision: Revision, why: str = "the commit point") -> Revision:
        """Decide, then promote. Once decided it can only go forward, by whoever comes next."""
        try:
            self.decide_commit(revision, why)
        except TooManyPending:
            self._promote_pending(revision)
            self.decide_commit(revision, why)
        return self.finish(revision.key)

    def decide_commit(self, revision: Revision, why: str = "the commit point") -> None:
        """Pass the commit point in one transaction: votes checked, commit_seq taken, positions moved."""
        hit("commit.before")
        # Before the lock is taken, for a sink may have to look; only a replacement has an older revision.
        overtaken = self.objection(latest=False) if revision.revision > 1 else None

        def step(tx: Transaction) -> None:
            tx.lock(self.pipeline)
            held = tx.hold(revision.key)
            if held.state in DECIDED and held.epoch == revision.epoch:
                return
            participants = tx.participants(revision.key)
            if not participants or any(not p.vote or p.attempt != revision.epoch for p in participants):  # R7
                raise Fenced(_fenced("commit", revision, held))
            self._check_pending(tx, held)
            committed = tx.committed_revision(self.pipeline, revision.checkpoint_id)
            replaces = committed if committed is not None and committed.revision > 0 else None
            if overtaken and replaces is not None and not self.is_last(tx, revision.checkpoint_id, held.run):
                msg = f"checkpoint {revision.key}: it cannot be committed any more: {overtaken}; abort it"
                raise IllegalTransition(msg)
            tx.move(
                revision.key,
                State.COMMITTING,
                epoch=revision.epoch,
                why=why,
                commit_seq=tx.take_commit_seq(self.pipeline),
                **_totals(participants, self.quarantines),
                error=None,  # what failed before was tried again, and did not fail
                lease=self.lease,
            )
            if replaces is None:  # what was there before us has read nothing
                self._advance(tx, revision.key)
            hit("commit.inside")

        self.transact(step)
        hit("commit.after")

    def objection(self, *, latest: bool) -> str | None:
        """Say which sink could not take a committed checkpoint back, and why; None: all can."""
        for name, sink in self.sinks.items():
            if why := sink.objection(latest=latest):
                return f"sink {name!r}: {why}"
        return None

    def is_last(self, tx: Transaction, checkpoint_id: int, run: Run | None) -> bool:
        """Say whether nothing that stays as it is came after a checkpoint: slots do not come after each other."""
        return (
            tx.slot(self.pipeline, checkpoint_id) is not None
            or tx.is_latest(self.pipeline, checkpoint_id)
            or (run is not None and tx.is_replayed(self.pipeline, checkpoint_id, run))
        )

    def _check_pending(self, tx: Transaction, revision: Revision) -> None:
        """Refuse the commit point while `max_pending` others of the lane wait for promotion (R13)."""
        waiting = [r for r in self._committing(tx, revision) if r.key != revision.key]
        if len(waiting) >= self.max_pending:
            msg = (
                f"checkpoint {revision.key}: {len(waiting)} decided before it still wait for promotion"
                f" ({', '.join(str(r.key) for r in waiting)}), at most {self.max_pending} may; it stays pre-committed"
            )
            raise TooManyPending(msg)

    def _committing(self, tx: Transaction, mine: Revision) -> list[Revision]:
        """Return the decided, unpromoted revisions of a lane, by commit_seq.

        Checkpoints that follow each other share the regular lane; a slot and a replacement have one of their own.
        """
        unfinished = [r for r in tx.unfinished(self.pipeline) if r.state is State.COMMITTING]
        if mine.in_order:
            return [r for r in unfinished if r.in_order]
        return [r for r in unfinished if r.checkpoint_id == mine.checkpoint_id]

    def _advance(self, tx: Transaction, key: Key) -> None:
        """Move the positions over this checkpoint's input, if they are still where it starts (R4)."""
        for source, partitions in tx.ranges(self.pipeline, key.checkpoint_id).items():
            for partition, (start, end) in partitions.items():
                if start != end and not tx.advance(self.pipeline, source, partition, start, end):
                    msg = f"checkpoint {key}: source {source!r} partition {partition} is no longer at {start}; refused"
                    raise IllegalTransition(msg)
        for source, (fixed, owned) in tx.claims(self.pipeline, key.checkpoint_id).items():
            if fixed != owned:
                msg = f"checkpoint {key}: source {source!r}: expected {fixed} files of its own, found {owned}; refused"
                raise IllegalTransition(msg)

    def finish(self, key: Key) -> Revision:
        """Promote what is decided and mark it COMMITTED; anybody may do this, at any time, any number of times."""
        revision = self.transact(lambda tx: tx.revision(key))
        if revision.state is State.COMMITTING:
            self._promote_pending(revision, upto=revision.commit_seq)
        self.settle()
        return self.transact(lambda tx: tx.revision(key))

    def _promote_pending(self, mine: Revision, upto: int | None = None) -> None:
        """Promote the decided revisions of a lane, each sink in commit_seq order (R13).

        A sink that cannot go on holds up itself in what comes later, and no other sink.
        """
        behind: dict[Queue, Key] = {}
        trouble: PromotionPending | Parked | None = None
        for revision in self.transact(lambda tx: self._queue(tx, mine)):
            if upto is None or (revision.commit_seq or 0) <= upto:
                try:
                    self._promote(revision, behind)
                except (PromotionPending, Parked) as error:
                    trouble = trouble or error
        if trouble is not None:
            raise trouble

    def _queue(self, tx: Transaction, mine: Revision) -> list[Revision]:
        """Return what has to be promoted with a revision; a sink that keeps the order knows no lanes (R12)."""
        if any(sink.ordered for sink in self.sinks.values()):
            return [r for r in tx.unfinished(self.pipeline) if r.state is State.COMMITTING]
        return self._committing(tx, mine)

    def _promote(self, revision: Revision, behind: dict[Queue, Key]) -> None:
        """Promote each sink without a row in `committed`, then mark COMMITTED; one that is down delays only itself."""
        key = revision.key
        done, receipt = self.transact(lambda tx: (tx.committed(key), tx.receipt(key)))
        waiting: list[str] = []
        failed: dict[str, tuple[str, Hindrance]] = {}
        for participant in self.transact(lambda tx: tx.participants(key)):
            if participant.kind != "sink" or participant.name in done:
                continue
            queue = self._queue_of(revision, participant)
            if queue in behind:
                waiting.append(f"{participant.name}: {behind[queue]} comes first")
                continue
            hit("promote.before")
            promotion = self._promote_sink(revision, participant, receipt)
            if promotion.outcome in VISIBLE:
                self.record_promotion(key, participant.standing or participant, promotion)
                continue
            behind[queue] = key
            if promotion.outcome is Outcome.FAILED:
                failed[participant.name] = hindered(promotion)
            else:
                waiting.append(f"{participant.name}: {promotion.reason or promotion.outcome}")
        if failed:
            if not self.transact(lambda tx: self.park(tx, key, failed)):
                return
            reason, kinds = parking(failed)
            ways = ways_out(key.pipeline, key.checkpoint_id, kinds)
            msg = f"checkpoint {key}: decided, but it cannot be promoted ({reason}); parked: {ways}"
            raise Parked(msg)
        if waiting:
            msg = f"checkpoint {key}: decided, not promoted yet ({'; '.join(waiting)}); recovery will finish it"
            raise PromotionPending(msg)
        self._mark_committed(key)

    def _queue_of(self, revision: Revision, participant: Participant) -> Queue:
        """Return where an output waits its turn: behind all others of its sink, or those of its lane."""
        if self.sinks[participant.name].ordered:
            return participant.name, "all"
        return participant.name, "regular" if revision.in_order else revision.checkpoint_id

    def park(self, tx: Transaction, key: Key, failed: Failed) -> bool:
        """Park a revision, unless somebody has finished it meanwhile: then it may be replaced and swept by now."""
        if tx.hold(key).state is not State.COMMITTING:
            return False
        tx.park(key, *parking(failed))
        return True

    def _promote_sink(self, revision: Revision, participant: Participant, receipt: Json) -> Promotion:
        """Promote what one sink voted for; an unknown outcome is settled by its marker."""
        voted = participant.standing
        if voted is None:
            return _unvoted(revision, participant)
        sink, handle = self.sinks[participant.name], {**_decided(revision, voted), "receipt": receipt}
        promotion = _asked(revision.key, voted, lambda: sink.promote(revision.key, handle, voted.manifest))
        if promotion.outcome is Outcome.UNKNOWN:
            promotion = self.find(revision, voted)
        if promotion.outcome is Outcome.FAILED and voted is not participant and revision.leased:
            return _unvoted(revision, participant)
        if promotion.outcome is Outcome.FAILED and promotion.hindrance is None:  # a sink that tells no kinds
            staged = self.find(revision, voted).outcome is not Outcome.FAILED
            return replace(promotion, hindrance=Hindrance.REFUSED if staged else Hindrance.LOST)
        return promotion

    def find(self, revision: Revision, participant: Participant) -> Promotion:
        """Say where a decided revision's output stands in one sink; changes nothing."""
        voted = participant.standing
        if voted is None:
            return _unvoted(revision, participant)
        sink, handle = self.sinks[participant.name], _decided(revision, voted)
        return _asked(revision.key, voted, lambda: sink.find(revision.key, handle, voted.manifest))

    def record_promotion(self, key: Key, participant: Participant, promotion: Promotion) -> None:
        """Add the sink's row to `committed`; the record adopts the attempt that the marker names (R10)."""

        def step(tx: Transaction) -> None:
            held = tx.hold(key)
            if held.state is State.COMMITTING and participant.name not in tx.committed(key):
                tx.mark_committed(key, participant.name)
                self._adopt_promoted(tx, key, participant, promotion)
                tx.note(key, "promoted", f"{participant.name} a{promotion.attempt or participant.attempt}")
            hit("promote.inside")

        self.transact(step)
        hit("promote.after")

    def _adopt_promoted(self, tx: Transaction, key: Key, promoted: Participant, promotion: Promotion) -> None:
        """Let the record say what the sink holds: a restage may have replaced what this promoter read (R10)."""
        attempt, manifest = promotion.attempt, promotion.manifest or promoted.manifest
        now = next(p for p in tx.participants(key) if p.name == promoted.name)
        if attempt is not None and (now.attempt, now.manifest.get("digest")) != (attempt, manifest["digest"]):
            tx.put_participant(key, replace(promoted, attempt=attempt, manifest=manifest, vote=True))
            tx.note(key, "adopted", f"{promoted.name}: attempt {attempt} is what the sink holds")

    def _mark_committed(self, key: Key) -> None:
        """Write COMMITTED in one transaction, superseding the older revision first (R14)."""
        hit("finish.before")

        def step(tx: Transaction) -> None:
            held = tx.hold(key)
            if held.state is not State.COMMITTING:
                return  # somebody finished it, and may have replaced it since: touch nothing
            older = tx.committed_revision(self.pipeline, key.checkpoint_id)
            if older is not None:
                tx.move(older.key, State.SUPERSEDED, epoch=older.epoch, why=f"revision {key.revision}")
            tx.move(
                key,
                State.COMMITTED,
                epoch=held.epoch,
                why="every sink promoted",
                parked_reason=None,
                hindrances=None,
                lease=None,
                **(
                    _totals(tx.participants(key), self.quarantines) if held.epoch > 1 else {}
                ),  # a restage may have brought other rows
            )
            hit("finish.inside")

        self.transact(step)
        hit("finish.after")

    def restage(self, key: Key, why: str, sinks: Collection[str] = ()) -> Revision:
        """Open an attempt for some sinks of a decided revision: those named, or those that lost their staged output."""
        return Restaging(self, key).open(why, sinks)

    def is_promoted(self, attempt: Revision, participant: Participant, manifest: Json) -> bool:
        """Say whether an attempt before a restage is promoted after all; then the record names it (R10)."""
        return Restaging(self, attempt.key).is_promoted(attempt, participant, manifest)

    # --- abort -------------------------------------------------------------------------------------------------------

    def abort(self, revision: Revision, why: str, *, unleased: bool = False) -> Revision:
        """End a revision before its commit point and discard what it staged; after the commit point change nothing."""
        hit("abort.before")
        check_known(self)

        def step(tx: Transaction) -> Revision:
            held = tx.hold(revision.key)
            if held.state in UNDECIDED and held.run != revision.run:  # another run took it over (R15)
                raise Fenced(_fenced("abort", revision, held))
            if held.state in UNDECIDED or held.epoch != revision.epoch:
                tx.move(
                    revision.key,
                    State.ABORTING,
                    epoch=revision.epoch,
                    why=why,
                    unleased=unleased,
                    error=_cause(tx, held, why)[:1000],
                    lease=self.lease,
                )
                hit("abort.inside")
            return tx.revision(revision.key)

        current = self.transact(step)
        hit("abort.after")
        return self.finish_abort(current) if current.state is State.ABORTING else current

    def finish_abort(self, revision: Revision) -> Revision:
        """Discard a dead revision's staged output and mark it ABORTED; deletes only after the move to ABORTING."""
        key = revision.key
        problems: list[str] = []
        for participant in self.transact(lambda tx: tx.participants(key)):
            if participant.kind == "sink" and participant.name in self.sinks:
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
        """Free the input of an aborted checkpoint, so that a later one may take it; its number is not used again."""

        def step(tx: Transaction) -> None:
            tx.lock(self.pipeline)
            if not tx.release(self.pipeline, checkpoint_id, why):
                msg = (
                    f"checkpoint {self.pipeline}/{checkpoint_id}: only one whose revisions are all aborted can be"
                    " released; abort it first"
                )
                raise IllegalTransition(msg)

        self.transact(step)

    # --- after the commit --------------------------------------------------------------------------------------------

    def settle(self) -> list[str]:
        """Do what `after_commit` asks with the files of COMMITTED checkpoints (R18); return what could not be done.

        A source that cannot now is asked again by whoever comes next: nothing that is committed depends on it.
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

    def acknowledge(self, revision: Revision, run: Run) -> None:
        """Note that the run whose revision it is has seen it committed."""
        self.transact(lambda tx: tx.acknowledge(revision.key, run))

    # --- the store ---------------------------------------------------------------------------------------------------

    def transact(self, step: Callable[[Transaction], T]) -> T:
        """Run a step in one transaction; when the store goes away, run it again: each step finds itself done."""
        for pause in (*self.patience, None):
            try:
                with self.record.transaction() as tx:
                    return step(tx)
            except StoreUnavailable:
                if pause is None:
                    raise
                threading.Event().wait(pause)
        raise AssertionError  # the last pause is None: it returned or raised


def hindered(promotion: Promotion) -> tuple[str, Hindrance]:
    """Return why a sink cannot promote; what has no kind was said by `find`, which knows of lost output alone."""
    return promotion.reason or "no reason given", promotion.hindrance or Hindrance.LOST


def parking(failed: Failed) -> tuple[str, dict[str, Hindrance]]:
    """Return what the record keeps of a parked revision: its reason in words, and the kind for each sink."""
    reason = "; ".join(f"{sink}: {why}" for sink, (why, _) in failed.items())
    return reason, {sink: kind for sink, (_, kind) in failed.items()}


def _asked(key: Key, participant: Participant, question: Callable[[], Promotion]) -> Promotion:
    """Ask a sink, which may be anybody's: one that fails in any way cannot tell now, and holds up only itself."""
    which, problems = f"checkpoint {key}: sink {participant.name!r}", list[str]()
    with alone(which, problems):
        return question()
    return Promotion(Outcome.RETRY_LATER, problems[0].removeprefix(f"{which}: "))  # who tells it names the sink


def _unvoted(revision: Revision, participant: Participant) -> Promotion:
    """Say where a restage stands that has not come to its vote: under way, or ended before it."""
    if revision.leased:
        return Promotion(Outcome.RETRY_LATER, f"attempt {participant.attempt} is being restaged")
    reason = f"attempt {participant.attempt} was never voted for: its restage ended before"
    return Promotion(Outcome.FAILED, reason, Hindrance.LOST)


def _cause(tx: Transaction, ended: Revision, why: str) -> str:
    """Say why a revision ends: first what failed, or who voted no, then how that came to end it."""
    known = ended.error
    if known is None:
        refused = [p for p in tx.participants(ended.key) if p.vote is False]
        known = "; ".join(f"{p.name}: {p.reason or 'voted no'}" for p in refused)
    return f"{known}; {why}" if known and known not in why else why


def _decided(revision: Revision, participant: Participant) -> Json:
    """Return the handle of a decided output: it also says when in its pipeline's order that was decided."""
    began = revision.created_at.isoformat() if revision.created_at else None
    return {**participant.handle, "commit_seq": revision.commit_seq, "timestamp": began}


def _totals(participants: Sequence[Participant], quarantines: Collection[str]) -> dict[str, Any]:
    """Return what the record says of a revision as a whole; what was set aside is no output.

    Each write holds the same rows; only a job of one's own, or a restage, may give one more than another.
    """
    manifests = [p.manifest for p in participants if p.kind == "sink" and p.name not in quarantines]
    rows = max((int(manifest.get("rows", 0)) for manifest in manifests), default=0)
    return {"rows": rows, "bytes": sum(int(manifest.get("bytes", 0)) for manifest in manifests)}


def _unsettled(pipeline: str, source: str, tx: Transaction) -> list[tuple[int, list[InputFile]]]:
    return tx.unsettled(pipeline, source)


def _settle(pipeline: str, source: str, checkpoint_id: int, tx: Transaction) -> None:
    tx.settle(pipeline, source, checkpoint_id)


def _fenced(what: str, mine: Revision, found: Revision) -> str:
    """Say why a process has to stop."""
    return (
        f"checkpoint {mine.key}: {what} for epoch {mine.epoch} refused,"
        f" found {found.state.lower()} at epoch {found.epoch}; nothing was changed"
    )
