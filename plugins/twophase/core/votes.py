"""An attempt, from its votes to the commit point or to its abort; the coordinator's callers call it.

The commit point is in `decide` of `core.steps`: one transaction, alone or together with the votes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

from twophase.core import record_behind
from twophase.core.checkpoint import Json, Key, Participant, Revision
from twophase.core.errors import (
    IllegalTransition,
    RecordBehind,
    SinkUnavailable,
    TooManyPending,
)
from twophase.core.failpoints import hit
from twophase.core.finish import Finish
from twophase.core.isolation import alone
from twophase.core.ports import Opened, Transaction
from twophase.core.record_behind import check_known
from twophase.core.restage import Restaging
from twophase.core.states import State
from twophase.core.steps import Decided


class Votes(Finish):
    """The part of the coordinator that is about attempts: open, vote, commit, restage, abort."""

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
        held = record_behind.ask(self)
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

    def restage(self, key: Key, why: str, sinks: Collection[str] = ()) -> Revision:
        """Open an attempt for some sinks of a decided revision: those named, or those that lost their staged output."""
        return Restaging(self, key).open(why, sinks)

    def is_promoted(self, attempt: Revision, participant: Participant, manifest: Json) -> bool:
        """Return True if the sink already holds an attempt of this revision; the record then names that one (R10)."""
        return Restaging(self, attempt.key).is_promoted(attempt, participant, manifest)

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
                    self.sinks[participant.name].discard(participant.output(revision))
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
