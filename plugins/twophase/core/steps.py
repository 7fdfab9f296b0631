"""The steps of the protocol, each a function of an open transaction; the coordinator calls them.

Each step is a compare-and-set on (state, epoch). A step that is called again after it was done changes nothing. So one
process may call several in one transaction: all of them happen, or none. How a revision begins is in `core.begin`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from twophase.core.checkpoint import RESERVED, Input, Json, Key, Participant, Revision
from twophase.core.claims import Claim
from twophase.core.errors import ConfigError, Fenced, IllegalTransition, TooManyPending
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance
from twophase.core.lineage import Lineage
from twophase.core.ports import Opened, Promotion, Sink, Source, Transaction, moves_of
from twophase.core.states import DECIDED, UNDECIDED, State

#: Of each sink that cannot promote: why, and what kind of hindrance it is.
Failed = Mapping[str, tuple[str, Hindrance]]


class Decided(NamedTuple):
    """A decided revision, and all that is needed to promote it."""

    revision: Revision
    participants: Sequence[Participant]
    #: The sinks whose rows are in `committed` already.
    done: Collection[str]
    #: What the record knows of the decision; each sink keeps a copy.
    receipt: Json
    #: The other revisions that are decided and not promoted yet, in every lane.
    others: Sequence[Revision] = ()


@dataclass(frozen=True)
class Steps:
    """The steps of one pipeline; the coordinator builds one from the pipeline's parts."""

    pipeline: str
    sources: Mapping[str, Source]
    sinks: Mapping[str, Sink]
    audits: Sequence[str]
    approvals: Sequence[str]
    #: The sinks that bad records go to; their rows do not count as output.
    quarantines: Collection[str]
    lease: float
    max_pending: int
    #: The participants that keep the pipeline's state.
    states: Collection[str] = ()

    @property
    def lineage(self) -> Lineage | None:
        """Return the rules of a pipeline with state; None: it has none."""
        return Lineage(self.pipeline) if self.states else None

    def claims(self, slot: str) -> dict[str, Claim]:
        """Return the places that belong to a slot alone, one for each of its reads and writes that has such a place."""
        parts = [("read", name, source.claim) for name, source in self.sources.items()]
        parts += [("write", name, sink.claim) for name, sink in self.sinks.items()]
        found = {f"{kind} {name}": claim(slot) for kind, name, claim in parts}
        return {part: claim for part, claim in found.items() if claim is not None}

    # --- an attempt --------------------------------------------------------------------------------------------------

    def open_attempt(self, tx: Transaction, revision: Revision, token: str, held: Revision | None = None) -> Revision:
        """Open the next attempt for all participants at once: a new epoch, no votes, private staging places (R7).

        `held` is the revision, if this transaction holds its row already.
        """
        hit("attempt.before")
        key, epoch = revision.key, revision.epoch + 1
        held = held or tx.hold(key)
        if held.epoch == epoch and self.is_opened(tx, held, token):
            return held  # an earlier call opened it, and its reply was lost
        if held.run != revision.run:  # another run took it over; that does not change the epoch
            raise Fenced(fenced("attempt", revision, held))
        places = self.places(tx, held, epoch, token)
        kinds = dict.fromkeys(self.states, "state")
        sinks = [Participant(name, kinds.get(name, "sink"), epoch, handle=place) for name, place in places.items()]
        audits = [Participant(name, "audit", epoch) for name in self.audits]
        approvals = [Participant(name, "approval", epoch) for name in self.approvals]
        mine = [*sinks, *audits, *approvals]
        tx.open_attempt(key, mine, epoch=revision.epoch, why=f"attempt {epoch}", lease=self.lease)
        return tx.revision(key)

    def is_opened(self, tx: Transaction, held: Revision, token: str) -> bool:
        """Return True if the newest attempt was opened with this token."""
        if held.epoch == 0:
            return False
        handles = {p.name: p.handle for p in tx.participants(held.key) if p.stages}
        return handles == self.places(tx, held, held.epoch, token)

    def places(self, tx: Transaction, revision: Revision, epoch: int, token: str) -> dict[str, Json]:
        """Name the staging place of each sink, and the committed output that it replaces.

        That output cannot change meanwhile: at most one revision of a checkpoint is live (R5).
        """
        key, slot = revision.key, revision.slot
        committed = self._committed(tx, revision)
        older = {p.name: p for p in tx.participants(committed.key)} if committed else {}

        def place(name: str, sink: Sink) -> Json:
            was = older.get(name)
            output = was.output(committed) if committed and was else None
            handle = sink.place(key, epoch, token, slot=slot, older=output)
            if taken := RESERVED & handle.keys():
                msg = f"sink {name!r}: place() returned the key {min(taken)!r}, which the record uses itself; rename it"
                raise ConfigError(msg)
            return handle

        return {name: place(name, sink) for name, sink in self.sinks.items()}

    def _committed(self, tx: Transaction, revision: Revision) -> Revision | None:
        """Return the COMMITTED revision that this one replaces, or None.

        A first revision can replace something only in a slot: the folder that was there before, adopted as revision 0.
        """
        if revision.revision == 1 and revision.slot is None:
            return None
        return tx.committed_revision(self.pipeline, revision.checkpoint_id)

    def opened(self, tx: Transaction, attempt: Revision, inputs: Mapping[str, Input] | None = None) -> Opened:
        """Return all that is needed to stage an attempt; its `inputs` are read from the record unless given."""
        sinks = [p for p in tx.participants(attempt.key) if p.stages]
        fixed = tx.inputs(attempt.key) if inputs is None else inputs
        schemas = tx.last_schemas(self.pipeline, list(self.sinks))
        first = attempt.revision == 1  # it began in the transaction that added its checkpoint
        began = attempt.created_at if first else tx.began(self.pipeline, attempt.checkpoint_id)
        states = self.lineage.read(tx, attempt.key) if self.lineage else {}
        return Opened(attempt, sinks, fixed, schemas, began, states)

    def vote(
        self, tx: Transaction, attempt: Revision, votes: Sequence[Participant], beside: Sequence[Participant] = ()
    ) -> State:
        """Record votes for one attempt; the last yes makes it PRECOMMITTED.

        `beside` are audits of a restage. They are recorded together with its votes, because until then the old attempt
        counts, and they say nothing about that one.
        """
        held = tx.hold(attempt.key)
        there = {p.name: p for p in tx.participants(attempt.key)}
        new = []
        for vote in votes:
            mine = there.get(vote.name)
            if held.epoch != attempt.epoch or mine is None or mine.attempt != attempt.epoch:
                raise Fenced(fenced("vote", attempt, held))
            if mine.vote is not None and mine.vote == vote.vote:
                continue  # this vote is recorded already; its reply was lost
            if held.state not in {State.OPEN, State.COMMITTING} or mine.vote is not None:
                raise Fenced(fenced("vote", attempt, held))
            before = None if vote.vote else mine.voted  # a yes takes the place of the vote before a restage
            new.append(replace(mine, vote=vote.vote, manifest=vote.manifest, reason=vote.reason, voted=before))
        if new:
            tx.put_votes(attempt.key, [*beside, *new], epoch=attempt.epoch)
            there |= {p.name: p for p in new}
        state = held.state
        if state is State.OPEN and all(p.vote for p in there.values()):
            tx.move(attempt.key, State.PRECOMMITTED, epoch=attempt.epoch, why="every participant voted yes")
            state = State.PRECOMMITTED
        hit("vote.inside")
        return state

    # --- the commit point --------------------------------------------------------------------------------------------

    def decide(self, tx: Transaction, attempt: Revision, why: str, overtaken: str | None) -> Decided:
        """Pass the commit point: check the votes, take a commit_seq, move the positions.

        The caller has locked the pipeline. `overtaken` says why a sink cannot replace a committed checkpoint once a
        later one is decided; None: every sink can.
        """
        key = attempt.key
        held = tx.hold(key)
        if held.state in DECIDED and held.epoch == attempt.epoch:
            return self.decided(tx, key)
        participants = tx.participants(key)
        if not participants or any(not p.vote or p.attempt != attempt.epoch for p in participants):  # R7
            raise Fenced(fenced("commit", attempt, held))
        unfinished = tx.unfinished(self.pipeline)
        self.check_pending(unfinished, held)
        committed = self._committed(tx, held)
        replaces = committed if committed is not None and committed.revision > 0 else None
        if overtaken and replaces is not None and not self.is_last(tx, key.checkpoint_id, held.backfill):
            msg = f"checkpoint {key}: it cannot be committed any more: {overtaken}; abort it"
            raise IllegalTransition(msg)
        if self.lineage:
            self.lineage.decide(tx, held, replaced=replaces is not None)
        tx.move(
            key,
            State.COMMITTING,
            epoch=attempt.epoch,
            why=why,
            numbered=True,
            **totals(participants, {*self.quarantines, *self.states}),
            error=None,  # an earlier failure no longer matters: this try succeeded
            lease=self.lease,
        )
        decided = tx.revision(key)
        receipt = tx.receipt(decided, participants)
        if replaces is None:  # a first commit; an adopted revision 0 has moved no positions either
            self._advance(tx, key)
        hit("commit.inside")
        others = [r for r in unfinished if r.state is State.COMMITTING and r.key != key]
        return Decided(decided, participants, (), receipt, others)

    def decided(self, tx: Transaction, key: Key) -> Decided:
        """Return a decided revision and all that is needed to promote it."""
        revision, participants = tx.revision(key), tx.participants(key)
        return Decided(revision, participants, tx.committed(key), tx.receipt(revision, participants))

    def is_last(self, tx: Transaction, checkpoint_id: int, backfill: str | None) -> bool:
        """Return True if no later checkpoint would keep output computed from the old revision.

        Slots are unordered, so always true for them. Also true in a backfill through the latest checkpoint, because it
        replaces the later ones too.
        """
        return (
            tx.slot(self.pipeline, checkpoint_id) is not None
            or tx.is_latest(self.pipeline, checkpoint_id)
            or (backfill is not None and tx.is_replayed(self.pipeline, checkpoint_id, backfill))
        )

    def check_pending(self, unfinished: Sequence[Revision], mine: Revision) -> None:
        """Raise TooManyPending while `max_pending` other revisions of the lane wait for promotion (R13)."""
        waiting = [r for r in in_lane(unfinished, mine) if r.key != mine.key]
        if len(waiting) >= self.max_pending:
            msg = (
                f"checkpoint {mine.key}: {len(waiting)} decided before it still wait for promotion"
                f" ({', '.join(str(r.key) for r in waiting)}), at most {self.max_pending} may; it stays pre-committed"
            )
            raise TooManyPending(msg)

    def _advance(self, tx: Transaction, key: Key) -> None:
        """Move the positions over this checkpoint's input, if they are still where it starts (R4)."""
        moves = moves_of(tx.ranges(self.pipeline, key.checkpoint_id))
        for move in tx.advance(self.pipeline, moves) if moves else ():
            where = f"source {move.source!r} partition {move.partition}"
            msg = f"checkpoint {key}: {where} is no longer at {move.start}; refused"
            raise IllegalTransition(msg)
        for source, (fixed, owned) in tx.claims(self.pipeline, key.checkpoint_id).items():
            if fixed != owned:
                msg = f"checkpoint {key}: source {source!r}: expected {fixed} files of its own, found {owned}; refused"
                raise IllegalTransition(msg)

    # --- after the commit point --------------------------------------------------------------------------------------

    def committed_up_to(self, tx: Transaction, source: str) -> dict[str, int]:
        """Return how far each partition of a source is COMMITTED; a position is ahead of that while a sink waits."""
        offsets = dict(tx.position(self.pipeline, source))
        for revision in tx.unfinished(self.pipeline):
            if revision.state is State.COMMITTING and revision.in_order:
                fixed = tx.ranges(self.pipeline, revision.checkpoint_id).get(source, Input())
                offsets |= {name: min(start, offsets.get(name, start)) for name, (start, _) in fixed.ranges.items()}
        return offsets

    def queue(self, tx: Transaction, mine: Revision) -> list[Revision]:
        """Return the decided revisions to promote together with this one, itself included, by commit_seq (R12).

        They are those of its lane, or of all lanes if a sink needs the order of commit_seq over all of them.
        """
        unfinished = tx.unfinished(self.pipeline)
        if any(sink.ordered for sink in self.sinks.values()):
            return [r for r in unfinished if r.state is State.COMMITTING]
        return in_lane(unfinished, mine)

    def record_promotion(self, tx: Transaction, key: Key, promoted: Sequence[tuple[Participant, Promotion]]) -> bool:
        """Add the rows of sinks to `committed`; from then on the record names the attempt that the marker names (R10).

        Return False and change nothing if the revision is not COMMITTING: another process finished it, and it may even
        be replaced by now.
        """
        held = tx.hold(key)
        if held.state is not State.COMMITTING:
            return False
        attempts = {one.name: promotion.attempt or one.attempt for one, promotion in promoted}
        new = tx.mark_promoted(key, attempts, epoch=held.epoch) if attempts else set()
        for participant, promotion in promoted:
            # The revision was restaged: the sink may hold another attempt than the one the record names.
            restaged = (held.epoch, promotion.attempt) != (participant.attempt, participant.attempt)
            if participant.name in new and restaged:
                self._name_promoted(tx, key, participant, promotion)
            hit("promote.inside")
        return True

    def _name_promoted(self, tx: Transaction, key: Key, promoted: Participant, promotion: Promotion) -> None:
        """Let the record name the attempt that the sink holds (R10).

        A restage may have changed the participant since this promoter read it.
        """
        attempt, manifest = promotion.attempt, promotion.manifest or promoted.manifest
        now = next(p for p in tx.participants(key) if p.name == promoted.name)
        if attempt is not None and (now.attempt, now.manifest.get("digest")) != (attempt, manifest["digest"]):
            tx.put_participant(key, replace(promoted, attempt=attempt, manifest=manifest, vote=True, voted=None))
            tx.note(key, "attempt found", f"{promoted.name}: attempt {attempt} is what the sink holds")

    def park(self, tx: Transaction, key: Key, failed: Failed) -> bool:
        """Park a revision; return False if another process has finished it, so that it may be replaced or swept."""
        if tx.hold(key).state is not State.COMMITTING:
            return False
        tx.park(key, *parking(failed))
        return True

    def finish(self, tx: Transaction, key: Key) -> Revision:
        """Write COMMITTED, superseding the older revision first (R14); every sink has its row in `committed`."""
        held = tx.hold(key)
        if held.state is State.COMMITTING:
            older = self._committed(tx, held)
            if older is not None:
                tx.move(older.key, State.SUPERSEDED, epoch=older.epoch, why=f"revision {key.revision}")
            # A restage may have changed the number of rows.
            found = totals(tx.participants(key), {*self.quarantines, *self.states}) if held.epoch > 1 else {}
            clear: dict[str, Any] = {"parked_reason": None, "hindrances": None, "lease": None}
            tx.move(key, State.COMMITTED, epoch=held.epoch, why="every sink promoted", **clear, **found)
            hit("finish.inside")
        return tx.revision(key)

    # --- abort -------------------------------------------------------------------------------------------------------

    def abort(self, tx: Transaction, revision: Revision, why: str, *, unleased: bool = False) -> Revision:
        """Move a revision to ABORTING before its commit point; after the commit point change nothing."""
        held = tx.hold(revision.key)
        if held.state in UNDECIDED and held.run != revision.run:  # another run took it over (R15)
            raise Fenced(fenced("abort", revision, held))
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

    def release(self, tx: Transaction, checkpoint_id: int, why: str) -> None:
        """Free the input of an aborted checkpoint, so that a later one may read it; its number is not used again."""
        tx.lock(self.pipeline)
        if not tx.release(self.pipeline, checkpoint_id, why):
            msg = (
                f"checkpoint {self.pipeline}/{checkpoint_id}: only one whose revisions are all aborted can be"
                " released; abort it first"
            )
            raise IllegalTransition(msg)


def in_lane(unfinished: Sequence[Revision], mine: Revision) -> list[Revision]:
    """Return the decided, unpromoted revisions of the lane that `mine` is in, by commit_seq.

    Regular checkpoints without slots share one lane; each slot and each replacement has its own.
    """
    decided = [r for r in unfinished if r.state is State.COMMITTING]
    if mine.in_order:
        return [r for r in decided if r.in_order]
    return [r for r in decided if r.checkpoint_id == mine.checkpoint_id]


def parking(failed: Failed) -> tuple[str, dict[str, Hindrance]]:
    """Return what the record keeps of a parked revision: the reason in words, and the hindrance of each sink."""
    reason = "; ".join(f"{sink}: {why}" for sink, (why, _) in failed.items())
    return reason, {sink: kind for sink, (_, kind) in failed.items()}


def totals(participants: Sequence[Participant], beside: Collection[str]) -> dict[str, Any]:
    """Return the rows and bytes of a revision as a whole, without what is `beside` its output: quarantines, states.

    Usually every sink holds the same rows. A user's own Spark job or a restage may give one more than another, so the
    highest number counts.
    """
    manifests = [p.manifest for p in participants if p.stages and p.name not in beside]
    rows = max((int(manifest.get("rows", 0)) for manifest in manifests), default=0)
    return {"rows": rows, "bytes": sum(int(manifest.get("bytes", 0)) for manifest in manifests)}


def _cause(tx: Transaction, ended: Revision, why: str) -> str:
    """Say why a revision was aborted: first the failure or the votes against it, then `why`."""
    known = ended.error
    if known is None:
        refused = [p for p in tx.participants(ended.key) if p.vote is False]
        known = "; ".join(f"{p.name}: {p.reason or 'voted no'}" for p in refused)
    return f"{known}; {why}" if known and known not in why else why


def fenced(what: str, mine: Revision, found: Revision) -> str:
    """Return the message of a Fenced error: what was refused, and what was found."""
    return (
        f"checkpoint {mine.key}: {what} for epoch {mine.epoch} refused,"
        f" found {found.state.lower()} at epoch {found.epoch}; nothing was changed"
    )
