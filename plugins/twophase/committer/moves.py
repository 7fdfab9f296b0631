"""The moves of revisions from state to state, and what else changes their rows; each with its event.

Only `move` and `open_attempt` change a state. The rules are in `core.steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, delete, func, insert, select, update

from twophase.committer import claims as slot_claims
from twophase.committer import tables as t
from twophase.committer.inputs import Inputs
from twophase.committer.participants import PUT, Participants, as_json
from twophase.committer.revision_rows import COLUMNS, HERE, is_this, r, states, to_revision
from twophase.committer.statement import Statement
from twophase.core.checkpoint import Json, Key, Output, Participant, Revision, Run
from twophase.core.errors import Fenced
from twophase.core.hindrances import Hindrance
from twophase.core.states import ENTERED_FROM, LIVE, UNDECIDED, State

#: State → the column that says when it was entered; both are set together.
ENTERED_AT = {
    State.COMMITTING: "decided_at",
    State.COMMITTED: "committed_at",
    State.SUPERSEDED: "superseded_at",
    State.ABORTING: "aborted_at",
}

#: A lease of so many seconds from now on the database's clock; null: none.
_LEASE = "clock_timestamp() + make_interval(secs => :lease)"
_UNLEASED = "(r.lease_until IS NULL OR r.lease_until <= clock_timestamp())"
#: A revision of the same checkpoint is COMMITTED, other than an adopted one.
_IS_COMMITTED = """EXISTS (SELECT FROM twophase.revision o WHERE o.pipeline = :pipeline
    AND o.checkpoint_id = :checkpoint_id AND o.revision > 0 AND o.state = 'COMMITTED')"""
#: What becomes of a column in a move; any other gets the value of its name.
_SET = {
    "lease": f"lease_until = {_LEASE}",
    "numbered": "commit_seq = (SELECT number FROM took)",
    "failed": f"failed = NOT {_IS_COMMITTED}",
}
#: Takes the next commit_seq from the locked pipeline row (R12).
_TOOK = """took AS (UPDATE twophase.pipeline SET next_commit_seq = next_commit_seq + 1 WHERE name = :pipeline
    RETURNING next_commit_seq - 1 AS number),"""


def _told(change: str, *, before: str = "", beside: str = "") -> Statement:
    """Return a statement that changes one revision, adds the event, and returns the revision as it is then."""
    return Statement(f"""
        WITH {before} changed AS ({change} RETURNING r.*),
        told AS (
            INSERT INTO twophase.event
                (pipeline, checkpoint_id, revision, epoch, who, action, from_state, to_state, why)
            SELECT pipeline, checkpoint_id, revision, epoch, :who, :action, :from_state, :to_state, :why
            FROM changed) {beside}
        SELECT {COLUMNS}, CAST(:slot AS text) AS slot FROM changed r""")  # noqa: S608 - no user's text


_ADD = _told(f"""
    INSERT INTO twophase.revision AS r
        (pipeline, checkpoint_id, revision, state, kind, dag_id, run_id, backfill, lease_until)
    SELECT :pipeline, :checkpoint_id, coalesce(max(o.revision), 0) + 1, :to_state, :kind, :dag_id, :run_id, :backfill,
        {_LEASE}
    FROM twophase.revision o WHERE o.pipeline = :pipeline AND o.checkpoint_id = :checkpoint_id""")  # noqa: S608 - no user's text


@cache
def _move(to: State, columns: tuple[str, ...], *, bump: bool, unleased: bool, opens: bool = False) -> Statement:
    """Return the statement of a move that changes these columns; `opens`: the participants are replaced with it."""
    allowed = ENTERED_FROM[to] - (set() if bump else {to})
    sets = [_SET.get(name, f"{name} = :{name}") for name in columns]
    if to in ENTERED_AT:
        now = f"{ENTERED_AT[to]} = clock_timestamp()"
        sets.append(f"{ENTERED_AT[to]} = coalesce(r.{ENTERED_AT[to]}, clock_timestamp())" if bump else now)
    change = f"""
        UPDATE twophase.revision AS r SET {", ".join(["state = :to_state", f"epoch = r.epoch + {int(bump)}", *sets])}
        WHERE {HERE} AND r.epoch = :epoch AND r.state IN {states(allowed)}{f" AND {_UNLEASED}" if unleased else ""}"""  # noqa: S608 - no user's text
    beside = ""
    if opens:
        beside = f""",
            gone AS (DELETE FROM twophase.participant p USING changed c WHERE (p.pipeline, p.checkpoint_id, p.revision)
                = (c.pipeline, c.checkpoint_id, c.revision) AND p.name <> ALL (CAST(:names AS text[]))),
            put AS ({PUT.format(condition="EXISTS (SELECT FROM changed)")})"""  # noqa: S608 - as above
    return _told(change, before=_TOOK if "numbered" in columns else "", beside=beside)


def _lease_until(lease: float | None) -> ColumnElement[Any] | None:
    return None if lease is None else func.clock_timestamp() + timedelta(seconds=lease)


class Moves(Participants, Inputs):
    """The methods of a transaction that change the rows of revisions."""

    def add_revision(  # noqa: PLR0913 - its columns
        self, pipeline: str, checkpoint_id: int, kind: str, run: Run, lease: float, *, backfill: str | None = None
    ) -> Revision:
        """Add the next revision of a checkpoint: OPEN, epoch 0, leased."""
        mine = {"pipeline": pipeline, "checkpoint_id": checkpoint_id, "kind": kind, **run._asdict(), "lease": lease}
        mine["backfill"] = backfill
        slot = self.slot(pipeline, checkpoint_id)
        added = self._execute(_ADD, mine, "begin", to=State.OPEN, why=f"run {run}", slot=slot)
        if added is None:
            raise AssertionError  # it is added, or refused
        if added.revision > 1:
            earlier = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id) & (r.revision < added.revision)
            self.connection.execute(update(t.revision).where(earlier & r.failed).values(failed=False))
        self._votes[added.key] = []
        return added

    def _execute(  # noqa: PLR0913 - the columns of an event
        self,
        statement: Statement,
        values: Mapping[str, Any],
        action: str,
        *,
        from_: State | None = None,
        to: State,
        why: str,
        slot: str | None,
    ) -> Revision | None:
        """Change one revision and add the event, in one statement; return it as it is now, or None if no row matched.

        This transaction then holds its row. The caller passes the slot, which never changes.
        """
        event = {"who": self.who, "action": action, "from_state": from_, "to_state": to, "why": why[:1000] or None}
        row = statement(self.connection, **values, **event, slot=slot).first()
        if row is None:
            return None
        found = to_revision(row)
        self._held[found.key] = found
        return found

    def move(  # noqa: PLR0913 - the columns of a transition, by name
        self,
        key: Key,
        to: State,
        *,
        epoch: int,
        why: str = "",
        bump: bool = False,
        unleased: bool = False,
        numbered: bool = False,
        **changes: Any,  # noqa: ANN401 - columns of the revision
    ) -> bool:
        """Move a revision by compare-and-set on state and epoch, and add the event.

        Return True if it moved now, False if it was in that state at this epoch already. Otherwise raise Fenced, with
        what was found.
        """
        columns = [*changes, *(["numbered"] if numbered else []), *(["failed"] if to is State.ABORTED else [])]
        statement = _move(to, tuple(sorted(columns)), bump=bump, unleased=unleased)
        return self._moved(statement, key, to, epoch, changes, why=why, bump=bump, unleased=unleased)

    def open_attempt(
        self, key: Key, participants: Sequence[Participant], *, epoch: int, why: str = "", lease: float | None = None
    ) -> None:
        """Move a revision to OPEN at the epoch after this one, and replace its participants by these (R7)."""
        statement = _move(State.OPEN, ("lease",), bump=True, unleased=False, opens=True)
        names = [participant.name for participant in participants]
        changes = {"lease": lease, "names": names, "participants": as_json(participants)}
        self._moved(statement, key, State.OPEN, epoch, changes, why=why, bump=True, unleased=False)
        self._votes[key] = sorted(participants, key=lambda one: one.name)

    def _moved(  # noqa: PLR0913 - as `move`
        self,
        statement: Statement,
        key: Key,
        to: State,
        epoch: int,
        changes: Mapping[str, Any],
        *,
        why: str,
        bump: bool,
        unleased: bool,
    ) -> bool:
        before = self.hold(key)
        action = "attempt" if bump else to.lower()
        values = {**key._asdict(), "epoch": epoch, **changes}
        if self._execute(statement, values, action, from_=before.state, to=to, why=why, slot=before.slot):
            return True
        if before.state is to and before.epoch == epoch and not bump:
            return False
        allowed = ENTERED_FROM[to] - (set() if bump else {to})
        msg = (
            f"checkpoint {key}: expected {' or '.join(sorted(s.lower() for s in allowed if s))} at epoch {epoch},"
            f" found {before.state.lower()} at epoch {before.epoch}"
            f"{' with a lease' if unleased and before.leased else ''}; nothing was changed"
        )
        raise Fenced(msg)

    def add_adopted(self, key: Key, slot: str, outputs: Mapping[str, Output]) -> None:
        """Add an adopted folder as revision 0, COMMITTED as it is; a second call changes nothing."""
        self.lock(key.pipeline)
        mine = (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id)
        if self.connection.execute(select(r.revision).where(mine & r.commit_seq.is_not(None)).limit(1)).first():
            return
        epoch = max(output.attempt for output in outputs.values())
        self.connection.execute(
            insert(t.revision).values(
                **key._asdict(),
                state=State.COMMITTED,
                epoch=epoch,
                commit_seq=self.take_commit_seq(key.pipeline),
                rows=max(output.manifest["rows"] for output in outputs.values()),
                bytes=sum(output.manifest["bytes"] for output in outputs.values()),
                decided_at=func.clock_timestamp(),
                committed_at=func.clock_timestamp(),
            )
        )
        for name, found in outputs.items():
            adopted = Participant(name, "sink", found.attempt, vote=True, handle=found.handle, manifest=found.manifest)
            self.put_participant(key, adopted)
            self.mark_committed(key, name)
        self.event(key, epoch, "adopted", to=State.COMMITTED, why=f"found in the place of slot {slot}")

    def take_over(self, key: Key, *, epoch: int, run: Run, lease: float, backfill: str | None = None) -> None:
        """Give an undecided revision to this run and its backfill, unless another run holds a lease on it."""
        before = self.hold(key)
        free = r.lease_until.is_(None) | (r.lease_until <= func.clock_timestamp())
        own = (r.run_id == run.run_id) & r.dag_id.is_not_distinct_from(run.dag_id)
        here = is_this(key) & (r.epoch == epoch) & r.state.in_(UNDECIDED) & (free | own)
        taken = update(t.revision).where(here)
        values = {**run._asdict(), "backfill": backfill, "lease_until": _lease_until(lease)}
        self._changed(key)
        if not self.connection.execute(taken.values(values)).rowcount:
            msg = f"checkpoint {key}: run {before.run} was faster; nothing was changed"
            raise Fenced(msg)
        if before.run != run:
            self.event(key, epoch, "taken over", why=f"by run {run} from run {before.run}, whose lease ran out")

    def renew(self, key: Key, *, epoch: int, lease: float | None) -> None:
        """Extend the lease of a live revision on the database's clock."""
        self._changed(key)
        here = is_this(key) & (r.epoch == epoch) & r.state.in_(LIVE)
        renewed = self.connection.execute(update(t.revision).where(here).values(lease_until=_lease_until(lease)))
        if not renewed.rowcount and (found := self.revision(key)).epoch != epoch:
            msg = f"checkpoint {key}: expected epoch {epoch}, found {found.epoch}; a newer attempt owns it"
            raise Fenced(msg)

    def acknowledge(self, key: Key, run: Run) -> None:
        """Note that a revision's own run has seen it committed; from another run, or again, it changes nothing."""
        self._changed(key)
        own = (r.dag_id == run.dag_id) & (r.run_id == run.run_id)
        here = is_this(key) & own & r.committed_at.is_not(None) & r.acknowledged_at.is_(None)
        seen = update(t.revision).where(here).values(acknowledged_at=func.clock_timestamp()).returning(r.epoch)
        if (epoch := self.connection.execute(seen).scalar()) is not None:
            self.event(key, epoch, "acknowledged", why=f"by run {run}")

    def keep_job(self, key: Key, *, epoch: int, job: Json) -> None:
        """Record what is needed to find the Spark job of an attempt again."""
        self._changed(key)
        here = is_this(key) & (r.epoch == epoch) & r.state.in_(LIVE)
        if not self.connection.execute(update(t.revision).where(here).values(job=dict(job))).rowcount:
            found = self.revision(key)
            msg = f"checkpoint {key}: expected epoch {epoch}, found {found.epoch}; a newer attempt owns it"
            raise Fenced(msg)

    def park(self, key: Key, reason: str, hindrances: Mapping[str, Hindrance]) -> None:
        """Flag a COMMITTING revision as one that needs a person; the same reason again adds no event."""
        self._changed(key)
        here = is_this(key) & (r.state == State.COMMITTING) & r.parked_reason.is_distinct_from(reason)
        flag = update(t.revision).where(here).values(parked_reason=reason, hindrances=dict(hindrances))
        if self.connection.execute(flag).rowcount:
            self.note(key, "parked", reason)

    def fail(self, key: Key, *, epoch: int, run: Run | None, why: str) -> bool:
        """Record the last failure of an undecided revision if it is still this run's; the same again adds no event."""
        self._changed(key)
        own = r.run_id.is_not_distinct_from(run and run.run_id) & r.dag_id.is_not_distinct_from(run and run.dag_id)
        here = is_this(key) & (r.epoch == epoch) & r.state.in_(UNDECIDED) & own & r.error.is_distinct_from(why)
        if not self.connection.execute(update(t.revision).where(here).values(error=why)).rowcount:
            return False
        self.event(key, epoch, "failed", why=why)
        return True

    def note(self, key: Key, action: str, why: str = "") -> None:
        """Add an event that is not a transition."""
        self.event(key, select(r.epoch).where(is_this(key)).scalar_subquery(), action, why=why)

    def event(  # noqa: PLR0913 - the columns of an event
        self,
        key: Key,
        epoch: int | ScalarSelect[Any],
        action: str,
        *,
        from_: State | None = None,
        to: State | None = None,
        why: str = "",
    ) -> None:
        """Add an event, in the transaction of the change that it is about."""
        self.connection.execute(
            insert(t.event).values(
                **key._asdict(),
                epoch=epoch,
                who=self.who,
                action=action,
                from_state=from_,
                to_state=to,
                why=why[:1000] or None,
            )
        )

    def release(self, pipeline: str, checkpoint_id: int, why: str) -> bool:
        """Free the input of a checkpoint if all its revisions are ABORTED; a second call changes nothing."""
        c, f = t.checkpoint.c, t.input_file.c
        mine = (c.pipeline == pipeline) & (c.checkpoint_id == checkpoint_id)
        states = select(r.revision, r.state).where((r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id))
        found = {row.revision: row.state for row in self.connection.execute(states.with_for_update())}
        if set(found.values()) != {State.ABORTED}:
            return False
        free = update(t.checkpoint).where(mine & c.released_at.is_(None)).values(released_at=func.now())
        if self.connection.execute(free).rowcount:
            claims = (f.pipeline == pipeline) & (f.checkpoint_id == checkpoint_id)
            self.connection.execute(delete(t.input_file).where(claims))
            over = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id) & r.failed
            self.connection.execute(update(t.revision).where(over).values(failed=False))
            slot_claims.free(self.connection, pipeline, checkpoint_id)
            self._forget(pipeline)
            self.note(Key(pipeline, checkpoint_id, max(found)), "released", why)
        return True
