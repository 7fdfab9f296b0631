"""`PostgresRecord`, the record of the protocol in PostgreSQL: the coordinator and its steps call its transactions.

The rules are in `core.steps`; this module says each primitive of `core.ports` in SQL. Only `move` changes a state.
"""

from __future__ import annotations

import getpass
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg2
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    ScalarSelect,
    Text,
    column,
    create_engine,
    delete,
    exists,
    func,
    insert,
    literal,
    make_url,
    select,
    union_all,
    update,
    values,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, InternalError, OperationalError

from twophase.committer import backfills, receipts, registry
from twophase.committer import claims as slot_claims
from twophase.committer import tables as t
from twophase.committer import upgrade as versions
from twophase.committer.inputs import Inputs
from twophase.core.checkpoint import Json, Key, Known, Output, Participant, Position, Revision, Run
from twophase.core.errors import ConfigError, Fenced, IllegalTransition, StoreUnavailable, Unreachable
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Look, Outlook, Reach
from twophase.core.states import DECIDED, ENTERED_FROM, LIVE, UNDECIDED, State

#: Waiting for a lock is not a failure, but it must end. A stopped process must not hold a row for ever (R18).
#: With this search_path a name without a schema is PostgreSQL's own, whatever others have created elsewhere.
SESSION = (
    "-c lock_timeout=20s -c idle_in_transaction_session_timeout=10s -c timezone=UTC"
    " -c search_path=pg_catalog,pg_temp -c row_security=off"
)

#: State → the column that says when it was entered; both are set together.
ENTERED_AT = {
    State.COMMITTING: "decided_at",
    State.COMMITTED: "committed_at",
    State.SUPERSEDED: "superseded_at",
    State.ABORTING: "aborted_at",
}

r = t.revision.c


def connect(dsn: str, *, restart: Callable[[], str] | None = None) -> Engine:
    """Return an engine for a committer database; `restart` brings an embedded one back and says where it is now."""
    arguments = {"connect_timeout": 10, "application_name": "twophase", "options": SESSION, "tcp_user_timeout": 30_000}

    def creator() -> Any:  # noqa: ANN401 - psycopg2's connection
        try:
            return _durable(psycopg2.connect(_libpq(dsn), **arguments))
        except psycopg2.ProgrammingError:  # its text would show the DSN
            msg = "the DSN cannot be read; expected postgresql://user:password@host:port/database"
            raise psycopg2.OperationalError(msg) from None
        except psycopg2.OperationalError:
            if restart is None:
                raise
            return _durable(psycopg2.connect(_libpq(restart()), **arguments))

    return create_engine("postgresql+psycopg2://", creator=creator, pool_size=4, max_overflow=36)


def _durable(session: Any) -> Any:  # noqa: ANN401 - psycopg2's connection
    """Make commits durable in this session, also if the database has synchronous_commit off."""
    with session, session.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    return session


def _libpq(dsn: str) -> str:
    return make_url(dsn).set(drivername="postgresql").render_as_string(hide_password=False)


def whoami() -> str:
    """Return who acts, for the events: `user@host:pid`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


class PostgresRecord:
    """The record of every pipeline in one committer database."""

    def __init__(self, engine: Engine, *, who: str | None = None) -> None:
        """Use an engine from `connect`; `who` is named in the events."""
        self.engine = engine
        self.who = who or whoami()

    @classmethod
    def open(  # noqa: PLR0913 - where it is, who acts, and what may be made
        cls,
        dsn: str,
        *,
        who: str | None = None,
        origin: str = "TWOPHASE_DSN",
        restart: Callable[[], str] | None = None,
        create: bool = False,
        upgrade: bool = False,
    ) -> PostgresRecord:
        """Connect, and check that the record has the version of this code; create or migrate it only if told to.

        `origin` is the setting that named the database, for the error if it does not answer.
        """
        engine = connect(dsn, restart=restart)
        try:
            with engine.connect() as connection:
                found = versions.current(connection)
            if (create and found is None) or (upgrade and found is not None):
                versions.upgrade(engine)
            with engine.connect() as connection:
                versions.check(connection)
        except (OperationalError, UnicodeDecodeError) as error:
            where = make_url(dsn).set(query={}).render_as_string(hide_password=True)
            reason = str(error.orig if isinstance(error, OperationalError) else error).strip().splitlines()[0]
            msg = f"committer database {where}: {reason}; check {origin} and the server"
            raise Unreachable(msg) from None
        return cls(engine, who=who)

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        """Open one transaction; raise StoreUnavailable if the server went away, also if only its reply was lost."""
        try:
            with self.engine.begin() as connection:
                yield PostgresTransaction(connection, self.who)
        except (IntegrityError, InternalError) as error:
            raise IllegalTransition(_one_line(error)) from error
        except (OperationalError, InterfaceError) as error:
            raise StoreUnavailable(_one_line(error)) from error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise StoreUnavailable(_one_line(error)) from error
            raise


def _one_line(error: DBAPIError) -> str:
    """Return the server's own words, without statement and parameters."""
    lines = str(error.orig).strip().splitlines() or [type(error).__name__]
    return f"committer database: {lines[0]}"


def is_this(key: Key) -> ColumnElement[bool]:
    """Return a condition: this revision's row."""
    return (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id) & (r.revision == key.revision)


def _is_committed(key: Key) -> ColumnElement[bool]:
    """Return a condition: a revision of the same checkpoint is COMMITTED, other than an adopted one."""
    other = t.revision.alias("other").c
    mine = (other.pipeline == key.pipeline) & (other.checkpoint_id == key.checkpoint_id)
    return exists().where(mine & (other.revision > 0) & (other.state == State.COMMITTED))


def to_revision(row: Any) -> Revision:  # noqa: ANN401 - a row, whatever else is in it
    """Build a Revision from a row of `REVISION`."""
    return Revision(
        key=Key(row.pipeline, row.checkpoint_id, row.revision),
        state=State(row.state),
        epoch=row.epoch,
        kind=row.kind,
        slot=row.slot,
        run=Run(row.dag_id, row.run_id) if row.run_id else None,
        lease_left=None if row.lease_left is None else float(row.lease_left),
        parked_reason=row.parked_reason,
        hindrances=row.hindrances or {},
        commit_seq=row.commit_seq,
        rows=row.rows,
        bytes=row.bytes,
        error=row.error,
        created_at=row.created_at,
        committed_at=row.committed_at,
        swept=row.swept_at is not None,
        acknowledged=row.acknowledged_at is not None,
        job=row.job,
    )


#: A revision with its slot, and its lease on the database's clock, the only clock in a decision.
REVISION = select(
    t.revision,
    t.checkpoint.c.slot,
    func.extract("epoch", r.lease_until - func.clock_timestamp()).label("lease_left"),
).join(t.checkpoint, (t.checkpoint.c.pipeline == r.pipeline) & (t.checkpoint.c.checkpoint_id == r.checkpoint_id))


def _is_unfinished(pipeline: str) -> ColumnElement[bool]:
    """Return a condition: the revision is live or ABORTING."""
    return (r.pipeline == pipeline) & r.state.in_(LIVE | {State.ABORTING})


def _is_newest(pipeline: str, slot: str | None) -> ColumnElement[bool]:
    """Return a condition: the revision is of the slot's checkpoint, or of the last one without a slot; not released."""
    c = t.checkpoint.alias("last").c
    wanted = (c.slot == slot) if slot is not None else c.slot.is_(None)
    newest = select(c.checkpoint_id).where((c.pipeline == pipeline) & wanted).order_by(c.checkpoint_id.desc()).limit(1)
    mine = (r.pipeline == pipeline) & (r.checkpoint_id == newest.scalar_subquery())
    return mine & t.checkpoint.c.released_at.is_(None)


def _positions(pipeline: str) -> ScalarSelect[Any]:
    """Return a value: all positions of a pipeline, as an array of [source, partition, offset, mark]."""
    c = t.position.c
    row = func.jsonb_build_array(c.source, c.partition, c.off, c.mark)
    return select(func.jsonb_agg(row)).where(c.pipeline == pipeline).scalar_subquery()


def _order(revision: Revision) -> tuple[float, Key]:
    """Return a sort key: decided revisions first, by commit_seq."""
    return (math.inf if revision.commit_seq is None else revision.commit_seq), revision.key


def _standing(revision: Revision) -> tuple[bool, int]:
    """Return a sort key; the highest revision counts for its checkpoint: decided ones before others, then by number.

    An adopted revision 0 is not a decided one here: the slot's input was not read for it.
    """
    return revision.state in DECIDED and revision.revision > 0, revision.revision


def _lease_until(lease: float | None) -> ColumnElement[Any] | None:
    return None if lease is None else func.clock_timestamp() + timedelta(seconds=lease)


class PostgresTransaction(Inputs):
    """The record within one transaction; `core.ports.Transaction` says what each method promises."""

    def __init__(self, connection: Connection, who: str) -> None:
        """Use a connection with an open transaction."""
        self.connection = connection
        self.who = who
        #: The revisions whose rows this transaction holds. Nobody else can change them, so they are not read again.
        self._held: dict[Key, Revision] = {}
        self._votes: dict[Key, list[Participant]] = {}
        self.added = {}
        self.summaries = {}
        self.owned = {}
        #: Whether the locked pipeline has slots that could not begin; mostly not, and then `begun` has nothing to do.
        self._unbegun = False

    # --- revisions ---------------------------------------------------------------------------------------------------

    def lock(self, pipeline: str) -> Reach:
        """Hold the pipeline's row until the end; return which decisions the record knows."""
        p = t.pipeline.c
        unbegun = exists().where(t.unbegun.c.pipeline == p.name)
        row = select(unbegun, p.next_commit_seq, p.behind).where(p.name == pipeline).with_for_update(of=t.pipeline)
        found = self.connection.execute(row).first()
        if found is None:
            msg = f"pipeline {pipeline!r}: it is not in the record"
            raise ConfigError(msg)
        self._unbegun = bool(found[0])
        return Reach(found.next_commit_seq, found.behind)

    def register(
        self, pipeline: str, declaration: Json, outputs: Mapping[str, str], changes: Callable[[Json, bool], list[str]]
    ) -> None:
        """Put a pipeline's declaration and the locations of its outputs in the record."""
        registry.register(self.connection, pipeline, declaration, outputs, changes)

    def link(self, pipeline: str, dag_id: str) -> None:
        """Note that a DAG runs a pipeline."""
        registry.link(self.connection, pipeline, dag_id)

    def begun(self, pipeline: str, slot: str | None) -> None:
        """Delete the note that a slot could not begin; the pipeline must be locked."""
        u = t.unbegun.c
        if self._unbegun:
            self.connection.execute(delete(t.unbegun).where((u.pipeline == pipeline) & u.slot.in_({"", slot or ""})))

    def not_begun(self, pipeline: str, slot: str | None, run: Run | None, why: str, *, failed: bool) -> None:
        """Note why a run could not begin: it failed, or waits for its input. No-op if the pipeline is not recorded."""
        u = t.unbegun.c
        known = select(
            t.pipeline.c.name, literal(slot or ""), literal(why), literal(int(failed)), literal(self.who),
            literal(run and run.dag_id, Text), literal(run and run.run_id, Text),
        ).where(t.pipeline.c.name == pipeline)  # fmt: skip
        columns = ["pipeline", "slot", "why", "failures", "who", "dag_id", "run_id"]
        new = upsert(t.unbegun).from_select(columns, known)
        again: dict[str, Any] = {name: new.excluded[name] for name in ("why", "who", "dag_id", "run_id")}
        again |= {"at": func.clock_timestamp(), "failures": u.failures + 1 if failed else 0}
        self.connection.execute(new.on_conflict_do_update(constraint="unbegun_pkey", set_=again))

    def newest(self, pipeline: str, slot: str | None) -> Revision | None:
        """Return the revision that counts for the slot's checkpoint, or for the last one without a slot."""
        query = REVISION.where(_is_newest(pipeline, slot))
        found = [to_revision(row) for row in self.connection.execute(query)]
        return max(found, key=_standing, default=None)

    def outlook(self, pipeline: str, slot: str | None) -> Outlook:
        """Return what a run reads from the record before it begins."""
        k, p = t.known_files.c, t.pipeline.c
        query = select(
            func.clock_timestamp().label("at"),
            p.next_commit_seq,
            p.behind,
            k.source,
            k.newest,
            k.sums,
            _positions(pipeline).label("positions"),
        ).select_from(t.pipeline.outerjoin(t.known_files, k.pipeline == p.name))
        rows = self.connection.execute(query.where(p.name == pipeline)).all()
        if not rows:
            msg = f"pipeline {pipeline!r}: it is not in the record"
            raise ConfigError(msg)
        known = {row.source: Known(row.newest, bytes(row.sums)) for row in rows if row.source is not None}
        reach = Reach(rows[0].next_commit_seq, rows[0].behind)
        arms = [REVISION.where(_is_unfinished(pipeline)), REVISION.where(_is_newest(pipeline, slot))]
        both = union_all(*(arm.add_columns(literal(number).label("arm")) for number, arm in enumerate(arms)))
        found = [(row.arm, to_revision(row)) for row in self.connection.execute(both)]  # each arm can use its index
        unfinished = sorted((one for arm, one in found if arm == 0), key=_order)
        newest = max((one for arm, one in found if arm == 1), key=_standing, default=None)
        positions: dict[str, dict[str, Position]] = {}
        for source, partition, offset, mark in rows[0].positions or ():
            positions.setdefault(source, {})[partition] = Position(offset, mark)
        return Outlook(Look(rows[0].at, known, positions), reach, unfinished, newest)

    def revision(self, key: Key) -> Revision:
        """Return one revision."""
        return self._held.get(key) or self._one(key, REVISION.where(is_this(key)))

    def hold(self, key: Key) -> Revision:
        """Return one revision and hold its row until the end."""
        if key not in self._held:
            self._held[key] = self._one(key, REVISION.where(is_this(key)).with_for_update(of=t.revision))
        return self._held[key]

    def _changed(self, key: Key) -> None:
        """Forget the copy of a revision that this transaction changes, so that it is read again."""
        self._held.pop(key, None)

    def _one(self, key: Key | str, query: Any) -> Revision:  # noqa: ANN401 - a select over REVISION
        row = self.connection.execute(query).first()
        if row is None:
            msg = f"checkpoint {key}: it is not in the record"
            raise ConfigError(msg)
        return to_revision(row)

    def unfinished(self, pipeline: str) -> list[Revision]:
        """Return the revisions that are live or ABORTING, the decided ones first, by commit_seq."""
        return sorted(map(to_revision, self.connection.execute(REVISION.where(_is_unfinished(pipeline)))), key=_order)

    def committed_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the COMMITTED revision of a checkpoint, or None."""
        return self._of_checkpoint(pipeline, checkpoint_id, {State.COMMITTED})

    def live_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        """Return the live revision of a checkpoint."""
        return self._of_checkpoint(pipeline, checkpoint_id, LIVE)

    def _of_checkpoint(self, pipeline: str, checkpoint_id: int, states: Collection[State]) -> Revision | None:
        mine = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id)
        row = self.connection.execute(REVISION.where(mine & r.state.in_(states))).first()
        return to_revision(row) if row else None

    def newest_of(self, pipeline: str, checkpoint_id: int) -> Revision:
        """Return the revision of a checkpoint with the highest number."""
        mine = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id)
        return self._one(f"{pipeline}/{checkpoint_id}", REVISION.where(mine).order_by(r.revision.desc()).limit(1))

    def newest_of_run(self, pipeline: str, run: Run, checkpoint_id: int | None) -> Revision | None:
        """Return the newest revision that an Airflow run worked on, of one checkpoint or of any."""
        mine = (r.dag_id == run.dag_id) & (r.run_id == run.run_id) & (r.pipeline == pipeline)
        if checkpoint_id is not None:
            mine &= r.checkpoint_id == checkpoint_id
        newest = REVISION.where(mine).order_by(r.checkpoint_id.desc(), r.revision.desc()).limit(1)
        row = self.connection.execute(newest).first()
        return to_revision(row) if row else None

    def is_latest(self, pipeline: str, checkpoint_id: int) -> bool:
        """Return True if no checkpoint with a higher number has a decided revision."""
        later = (r.pipeline == pipeline) & (r.checkpoint_id > checkpoint_id) & r.commit_seq.is_not(None)
        return self.connection.execute(select(r.commit_seq).where(later).limit(1)).first() is None

    def is_replayed(self, pipeline: str, checkpoint_id: int, run: Run) -> bool:
        """Return True if the run's backfill goes through the latest checkpoint, and has reached this one."""
        return run.dag_id is None and backfills.has_come_to(self.connection, pipeline, checkpoint_id, run.run_id)

    def decided_in(self, pipeline: str, checkpoint_id: int, campaign: str) -> Revision | None:
        """Return the newest decided revision of a checkpoint that a backfill made, or None."""
        mine = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id) & r.commit_seq.is_not(None)
        ours = r.dag_id.is_(None) & r.run_id.startswith(f"{campaign}.", autoescape=True)
        row = self.connection.execute(REVISION.where(mine & ours).order_by(r.revision.desc()).limit(1)).first()
        return to_revision(row) if row else None

    def slot(self, pipeline: str, checkpoint_id: int) -> str | None:
        """Return the slot of a checkpoint."""
        if (pipeline, checkpoint_id) in self.added:
            return self.added[pipeline, checkpoint_id]
        c = t.checkpoint.c
        query = select(c.slot).where((c.pipeline == pipeline) & (c.checkpoint_id == checkpoint_id))
        row = self.connection.execute(query).first()
        if row is None:
            msg = f"checkpoint {pipeline}/{checkpoint_id}: it is not in the record"
            raise ConfigError(msg)
        return row.slot  # type: ignore[no-any-return]

    def add_revision(self, pipeline: str, checkpoint_id: int, kind: str, run: Run, lease: float) -> Revision:
        """Add the next revision of a checkpoint: OPEN, epoch 0, leased."""
        mine = (r.pipeline == pipeline) & (r.checkpoint_id == checkpoint_id)
        number = select(func.coalesce(func.max(r.revision), 0) + 1).where(mine).scalar_subquery()
        values = {
            "pipeline": pipeline,
            "checkpoint_id": checkpoint_id,
            "revision": number,
            "state": State.OPEN,
            "kind": kind,
            "dag_id": run.dag_id,
            "run_id": run.run_id,
            "lease_until": _lease_until(lease),
        }
        added = insert(t.revision).values(values)
        slot = self.slot(pipeline, checkpoint_id)
        taken = self._told(added, "begin", to=State.OPEN, why=f"run {run}", slot=slot)
        if taken is None:
            raise AssertionError  # it is added, or refused
        if taken.revision > 1:
            earlier = mine & (r.revision < taken.revision) & r.failed
            self.connection.execute(update(t.revision).where(earlier).values(failed=False))
        self._votes[taken.key] = []
        return taken

    def _told(  # noqa: PLR0913 - the columns of an event
        self,
        change: Any,  # noqa: ANN401 - an INSERT or an UPDATE of one revision
        action: str,
        *,
        from_: State | None = None,
        to: State | None = None,
        why: str = "",
        slot: str | None,
    ) -> Revision | None:
        """Change one revision and add the event, in one statement; return it as it is now, or None if no row matched.

        This transaction then holds its row. The caller passes the slot, which never changes.
        """
        left = func.extract("epoch", r.lease_until - func.clock_timestamp()).label("lease_left")
        changed = change.returning(*t.revision.c, left).cte("changed")
        now = changed.c
        columns = ["pipeline", "checkpoint_id", "revision", "epoch", "who", "action", "from_state", "to_state", "why"]
        what = select(
            now.pipeline, now.checkpoint_id, now.revision, now.epoch, literal(self.who), literal(action),
            literal(from_, Text), literal(to, Text), literal(why[:1000] or None, Text),
        )  # fmt: skip
        told = insert(t.event).from_select(columns, what).cte("told")
        row = self.connection.execute(select(changed, literal(slot, Text).label("slot")).add_cte(told)).first()
        if row is None:
            return None
        found = to_revision(row)
        self._held[found.key] = found
        return found

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
        for name, (_, attempt, handle, manifest) in outputs.items():
            adopted = Participant(name, "sink", attempt, vote=True, handle=handle, manifest=manifest)
            self.put_participant(key, adopted)
            self.mark_committed(key, name)
        self.event(key, epoch, "adopted", to=State.COMMITTED, why=f"found in the place of slot {slot}")

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
        before = self.hold(key)
        allowed = ENTERED_FROM[to] - (set() if bump else {to})
        if "lease" in changes:
            changes["lease_until"] = _lease_until(changes.pop("lease"))
        if to in ENTERED_AT and not (bump and before.state is to):
            changes[ENTERED_AT[to]] = func.clock_timestamp()
        if to is State.ABORTED:
            changes["failed"] = ~_is_committed(key)
        here = is_this(key) & (r.epoch == epoch) & r.state.in_([state for state in allowed if state is not None])
        if unleased:
            here &= r.lease_until.is_(None) | (r.lease_until <= func.clock_timestamp())
        if numbered:
            changes["commit_seq"] = select(self._numbers(key.pipeline).c.number).scalar_subquery()
        change = update(t.revision).where(here).values(state=to, epoch=epoch + bump, **changes)
        if self._told(change, "attempt" if bump else to.lower(), from_=before.state, to=to, why=why, slot=before.slot):
            return True
        if before.state is to and before.epoch == epoch and not bump:
            return False
        msg = (
            f"checkpoint {key}: expected {' or '.join(sorted(s.lower() for s in allowed if s))} at epoch {epoch},"
            f" found {before.state.lower()} at epoch {before.epoch}"
            f"{' with a lease' if unleased and before.leased else ''}; nothing was changed"
        )
        raise Fenced(msg)

    def adopt(self, key: Key, *, epoch: int, run: Run, lease: float) -> None:
        """Give an undecided revision to this run, unless another run holds a lease on it."""
        before = self.hold(key)
        free = r.lease_until.is_(None) | (r.lease_until <= func.clock_timestamp())
        own = (r.run_id == run.run_id) & r.dag_id.is_not_distinct_from(run.dag_id)
        here = is_this(key) & (r.epoch == epoch) & r.state.in_(UNDECIDED) & (free | own)
        taken = update(t.revision).where(here)
        values = {"dag_id": run.dag_id, "run_id": run.run_id, "lease_until": _lease_until(lease)}
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

    # --- participants ------------------------------------------------------------------------------------------------

    def participants(self, key: Key) -> list[Participant]:
        """Return the participants of a revision, by name."""
        if key in self._votes:
            return self._votes[key]
        p = t.participant.c
        query = select(p.name, p.kind, p.attempt, p.vote, p.handle, p.manifest, p.reason)
        mine = (p.pipeline == key.pipeline) & (p.checkpoint_id == key.checkpoint_id) & (p.revision == key.revision)
        rows = self.connection.execute(query.where(mine).order_by(p.name))
        found = [Participant(**row._mapping) for row in rows]
        if key in self._held:  # only who holds the revision's row changes its participants
            self._votes[key] = found
        return found

    def replace_participants(self, key: Key, participants: Sequence[Participant]) -> None:
        """Replace all participants of a revision by these."""
        p = t.participant.c
        mine = (p.pipeline == key.pipeline) & (p.checkpoint_id == key.checkpoint_id) & (p.revision == key.revision)
        if self._votes.get(key) != []:
            self.connection.execute(delete(t.participant).where(mine))
        self._votes[key] = []
        self._put_participants(key, participants)

    def put_participant(self, key: Key, participant: Participant) -> None:
        """Replace the participant of the same name by this one, or add it."""
        self._put_participants(key, [participant])

    def _put_participants(self, key: Key, participants: Sequence[Participant]) -> None:
        if participants:
            self.connection.execute(self._participants(key, participants))
        self._know_participants(key, participants)

    @staticmethod
    def _participants(key: Key, participants: Sequence[Participant]) -> Any:  # noqa: ANN401 - a statement
        columns = ("kind", "attempt", "vote", "handle", "manifest", "reason")
        rows = [{**key._asdict(), **{name: getattr(p, name) for name in ("name", *columns)}} for p in participants]
        new = upsert(t.participant).values(rows)
        same = {name: new.excluded[name] for name in columns}
        return new.on_conflict_do_update(constraint="participant_pkey", set_=same)

    def _know_participants(self, key: Key, participants: Sequence[Participant]) -> None:
        if key in self._votes:
            found = {p.name: p for p in (*self._votes[key], *participants)}
            self._votes[key] = [found[name] for name in sorted(found)]

    def put_votes(self, key: Key, votes: Sequence[Participant], *, epoch: int) -> None:
        """Replace the participants of these names by these, with one event for each."""
        told = [
            {
                **key._asdict(),
                "epoch": epoch,
                "who": self.who,
                "action": f"voted {'yes' if one.vote else 'no'}",
                "why": f"{one.name} a{epoch} {one.reason or ''}".strip()[:1000],
            }
            for one in votes
        ]
        put = self._participants(key, votes).cte("put")
        self.connection.execute(insert(t.event).values(told).add_cte(put))
        self._know_participants(key, votes)

    def committed(self, key: Key) -> set[str]:
        """Return the names of the sinks whose rows are in `committed`."""
        c = t.committed.c
        mine = (c.job_id == key.pipeline) & (c.checkpoint_id == key.checkpoint_id) & (c.revision == key.revision)
        return set(self.connection.execute(select(c.operator_id).where(mine)).scalars())

    @staticmethod
    def _numbers(pipeline: str) -> Any:  # noqa: ANN401 - a part of a statement
        """Take the next commit_seq from the locked pipeline row (R12)."""
        seq = t.pipeline.c.next_commit_seq
        took = update(t.pipeline).where(t.pipeline.c.name == pipeline).values(next_commit_seq=seq + 1)
        return took.returning((seq - 1).label("number")).cte("took")

    def mark_promoted(self, key: Key, attempts: Mapping[str, int], *, epoch: int) -> set[str]:
        """Add the rows of sinks to `committed`, and tell of each and its attempt in the events; return the new ones."""
        mine = {"job_id": key.pipeline, "subtask_id": 0, "checkpoint_id": key.checkpoint_id, "revision": key.revision}
        rows = upsert(t.committed).values([{**mine, "operator_id": sink} for sink in attempts])
        new = rows.on_conflict_do_nothing().returning(t.committed.c.operator_id).cte("new")
        said = values(column("sink", Text), column("why", Text), name="said").data(
            [(sink, f"{sink} a{attempt}") for sink, attempt in attempts.items()]
        )
        columns = ["pipeline", "checkpoint_id", "revision", "epoch", "who", "action", "why"]
        what = select(*map(literal, key), literal(epoch), literal(self.who), literal("promoted"), said.c.why).join_from(
            new, said, said.c.sink == new.c.operator_id
        )
        told = insert(t.event).from_select(columns, what).cte("told")
        return set(self.connection.execute(select(new.c.operator_id).add_cte(told)).scalars())

    def mark_committed(self, key: Key, sink: str) -> bool:
        """Add a sink's row to `committed`; False: it is there already."""
        added = self.connection.execute(
            upsert(t.committed)
            .values(
                job_id=key.pipeline,
                operator_id=sink,
                subtask_id=0,
                checkpoint_id=key.checkpoint_id,
                revision=key.revision,
            )
            .on_conflict_do_nothing()
        )
        return bool(added.rowcount)

    # --- a record that is older than its sinks -----------------------------------------------------------------------

    def receipt(self, revision: Revision, participants: Sequence[Participant]) -> Json:
        """Return all that the record knows of a decided revision; its sinks keep it."""
        found = receipts.receipt(self.connection, revision, participants)
        which = (revision.key.pipeline, revision.checkpoint_id)
        self.summaries[which] = found["inputs"]
        self.owned[which] = Counter(source for source, *_ in found["files"])
        return found

    def reach(self, pipeline: str) -> Reach:
        """Return which decisions of a pipeline the record knows."""
        p = t.pipeline.c
        row = self.connection.execute(select(p.next_commit_seq, p.behind).where(p.name == pipeline)).first()
        return Reach(row.next_commit_seq, row.behind) if row else Reach(1, None)

    def lacks(self, pipeline: str, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of the held checkpoints and revisions that are not decided in the record."""
        return receipts.lacks(self.connection, pipeline, held)

    def say_behind(self, pipeline: str, why: str | None) -> None:
        """Note at the pipeline that a sink holds what the record does not know; None: remove the note."""
        self.connection.execute(update(t.pipeline).where(t.pipeline.c.name == pipeline).values(behind=why))

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
