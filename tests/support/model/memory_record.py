"""A record in memory: it stands for PostgreSQL at READ COMMITTED with its row locks.

`pause` is called before each primitive step and may stop, kill or switch processes there; a step itself is atomic. What
it does not do is decide: the rules are in the shipped coordinator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from twophase.core.checkpoint import (
    Base,
    Input,
    InputFile,
    Json,
    Key,
    Output,
    Participant,
    Position,
    Revision,
    Run,
)
from twophase.core.claims import Claims, Holder
from twophase.core.errors import (
    ConfigError,
    Fenced,
    IllegalTransition,
    InputChanged,
    StoreUnavailable,
)
from twophase.core.hindrances import Hindrance
from twophase.core.ports import (
    CommittedRange,
    Lane,
    Look,
    Move,
    Outlook,
    Reach,
    StandingBase,
)
from twophase.core.states import DECIDED, ENTERED_FROM, LIVE, UNDECIDED, State

Pause = Callable[[str], None]
Row = tuple[str, int]


def no_pause(_: str) -> None:
    """Go on at once."""


class Event(NamedTuple):
    """One line of a revision's history."""

    key: Key
    epoch: int
    action: str
    to: State | None = None


class MemoryRecord:
    """Rows, moved conditionally, all or nothing per transaction; time passes only when it is told to."""

    def __init__(self, pause: Pause = no_pause) -> None:
        self.pause = pause
        self.now = 0.0
        self.version = 0
        self.rows: dict[str, dict[Any, Any]] = {}
        self.events: list[Event] = []
        self.locks: dict[Hashable, MemoryTransaction] = {}
        #: What happens to the next transactions: "refuse" (no connection), "fail" (not applied), "lose" (the reply),
        #: "late" (not applied before it arrives; until then it keeps its locks).
        self.faults: deque[str] = deque()
        self.late: list[MemoryTransaction] = []
        self.open: list[MemoryTransaction] = []

    def table(self, name: str) -> dict[Any, Any]:
        return self.rows.setdefault(name, {})

    @contextmanager
    def transaction(self, *, reads: bool = False) -> Iterator[MemoryTransaction]:
        self.pause("tx.begin")
        self._fault("refuse")
        tx = MemoryTransaction(self)
        self.open.append(tx)
        try:
            yield tx
            self.pause("tx.commit")
            tx.alive()
            self._fault("fail")
            if self.faults and self.faults[0] == "late":
                self.late.append(tx)
            self._fault("late")
            self._apply(tx)
        finally:
            if tx not in self.late:
                tx.end()
        self.pause("tx.committed")
        self._fault("lose")

    def arrive(self) -> None:
        """Carry out the COMMITs that are late, unless their sessions were dropped meanwhile."""
        while self.late:
            tx = self.late.pop(0)
            if not tx.dropped:
                self._apply(tx)
            tx.end()

    def _fault(self, kind: str) -> None:
        if self.faults and self.faults[0] == kind:
            self.faults.popleft()
            msg = f"committer database: {kind}"
            raise StoreUnavailable(msg)

    def _apply(self, tx: MemoryTransaction) -> None:
        for (table, key), row in tx.writes.items():
            if row is None:
                self.table(table).pop(key, None)
            else:
                self.table(table)[key] = row
        self.events += tx.events
        if tx.writes:
            self.version += 1

    def revisions(self) -> dict[Key, Revision]:
        """Return every revision as it is committed to the record."""
        return {key: self.to_revision(key, row) for key, row in sorted(self.table("revision").items())}

    def to_revision(self, key: Key, row: Mapping[str, Any]) -> Revision:
        columns = {name: value for name, value in row.items() if name not in {"lease_until", "superseded_at"}}
        until = row["lease_until"]
        return Revision(key=key, lease_left=None if until is None else until - self.now, **columns)


class MemoryTransaction:
    """One transaction at READ COMMITTED: sees what others committed and what it wrote itself; a write locks its row."""

    def __init__(self, record: MemoryRecord) -> None:
        self.record = record
        self.writes: dict[tuple[str, Any], Any] = {}
        self.events: list[Event] = []
        self.waits_for: Hashable = None
        self.dropped = False

    # --- rows and locks ----------------------------------------------------------------------------------------------

    def alive(self) -> None:
        if self.dropped:
            msg = "committer database: terminating connection due to idle-in-transaction timeout"
            raise StoreUnavailable(msg)

    def end(self) -> None:
        """Let go of every lock; what was not applied is forgotten."""
        for name in [name for name, holder in self.record.locks.items() if holder is self]:
            del self.record.locks[name]
        if self in self.record.open:
            self.record.open.remove(self)
        self.dropped = True

    def _step(self, name: str) -> None:
        self.record.pause(f"tx.{name}")
        self.alive()

    def _rows(self, table: str) -> dict[Any, Any]:
        found = dict(self.record.table(table))
        for (name, key), row in self.writes.items():
            if name == table:
                found[key] = row
        return {key: row for key, row in found.items() if row is not None}

    def _lock(self, name: Hashable) -> None:
        while self.record.locks.get(name, self) is not self:
            self.waits_for = name
            if self._deadlocked():
                self.waits_for = None
                msg = "committer database: deadlock detected"
                raise StoreUnavailable(msg)
            self.record.pause("tx.wait")
            self.alive()
        self.waits_for = None
        self.record.locks[name] = self

    def _deadlocked(self) -> bool:
        holder = self.record.locks.get(self.waits_for)
        for _ in self.record.open:
            if holder is None or holder is self:
                break
            holder = self.record.locks.get(holder.waits_for)
        return holder is self

    def _put(self, table: str, key: Any, row: Any) -> None:
        self._lock((table, key))
        self.writes[table, key] = row

    # --- a record that is older than its sinks: not in this model ----------------------------------------------------

    def receipt(self, revision: Revision, participants: Sequence[Participant]) -> Json:
        return {}

    def reach(self, pipeline: str) -> Reach:
        return Reach(1, None)

    def lacks(self, pipeline: str, held: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return []

    def say_behind(self, pipeline: str, why: str | None) -> None:
        raise NotImplementedError

    # --- state -------------------------------------------------------------------------------------------------------

    def began(self, pipeline: str, checkpoint_id: int) -> datetime | None:
        return None

    def standing_base(self, pipeline: str, checkpoint_id: int) -> StandingBase:
        self._step("standing_base")
        decided = [r for r in self._revisions(pipeline) if r.checkpoint_id < checkpoint_id and r.commit_seq is not None]
        if not decided:
            return StandingBase(Base())
        last = max(decided, key=lambda r: r.key)
        states = [p.standing or p for p in self.participants(last.key) if p.kind == "state"]
        return StandingBase(Base(last.checkpoint_id, last.revision, {p.name: p.attempt for p in states}))

    def base(self, key: Key) -> Base | None:
        found: Base | None = self._rows("base").get(key)
        return found

    def fix_base(self, key: Key, base: Base) -> None:
        self._step("fix_base")
        self._put("base", key, base)

    def states(self, pipeline: str, base: Base) -> Mapping[str, Json]:
        key = Key(pipeline, base.checkpoint_id, base.revision)
        return {p.name: (p.standing or p).manifest for p in self.participants(key) if p.kind == "state"}

    def oldest_state(self, pipeline: str) -> int | None:
        raise NotImplementedError  # nothing here is swept

    def lane(self, pipeline: str) -> Lane:
        self._step("lane")
        found: Lane = self._rows("lane").get(pipeline, Lane())
        return found

    def mark_stale(self, pipeline: str, checkpoint_id: int) -> None:
        self._step("mark_stale")
        later = [r.checkpoint_id for r in self._revisions(pipeline) if r.commit_seq and r.checkpoint_id > checkpoint_id]
        self._put("lane", pipeline, self.lane(pipeline)._replace(stale_from=min(later, default=None)))

    # --- revisions ---------------------------------------------------------------------------------------------------

    def lock(self, pipeline: str, holding: Key | None = None) -> Reach:
        self._step("lock")
        self._lock(("pipeline", pipeline))
        if holding is not None:
            self.hold(holding)
        return self.reach(pipeline)

    def outlook(self, pipeline: str, slot: str | None) -> Outlook:
        return Outlook(
            Look(datetime.fromtimestamp(self.record.now, UTC), {}, self._positions(pipeline)),
            self.reach(pipeline),
            self.unfinished(pipeline),
            self.newest(pipeline, slot),
        )

    def register(self, pipeline: str, declaration: Json, outputs: Mapping[str, str], changes: object) -> None:
        raise NotImplementedError  # nothing here is declared

    def link(self, pipeline: str, dag_id: str) -> None:
        raise NotImplementedError  # nothing here runs under Airflow

    def begun(self, pipeline: str, slot: str | None) -> None:
        pass  # nothing here fails to begin

    def not_begun(self, pipeline: str, slot: str | None, run: Run | None, why: str, *, failed: bool) -> None:
        raise NotImplementedError  # nothing here fails to begin

    def newest(self, pipeline: str, slot: str | None) -> Revision | None:
        self._step("newest")
        wanted = [key for key, row in self._rows("checkpoint").items() if key[0] == pipeline and row["slot"] == slot]
        if not wanted:
            return None
        last = max(wanted)
        if self._rows("checkpoint")[last]["released"]:
            return None
        mine = [r for r in self._revisions(pipeline) if (r.key.pipeline, r.checkpoint_id) == last]
        return max(mine, key=lambda r: (r.state in DECIDED, r.revision), default=None)

    def _revisions(self, pipeline: str) -> list[Revision]:
        found = self._rows("revision").items()
        return [self.record.to_revision(key, row) for key, row in found if key.pipeline == pipeline]

    def revision(self, key: Key) -> Revision:
        self._step("revision")
        return self._revision(key)

    def _revision(self, key: Key) -> Revision:
        row = self._rows("revision").get(key)
        if row is None:
            msg = f"checkpoint {key}: it is not in the record"
            raise ConfigError(msg)
        return self.record.to_revision(key, row)

    def hold(self, key: Key) -> Revision:
        self._step("hold")
        self._lock(("revision", key))
        return self._revision(key)

    def unfinished(self, pipeline: str) -> list[Revision]:
        self._step("unfinished")
        found = [r for r in self._revisions(pipeline) if r.state in LIVE | {State.ABORTING}]
        return sorted(found, key=lambda r: (r.commit_seq is None, r.commit_seq or 0, r.key))

    def committed_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        self._step("committed_revision")
        found = self._revisions(pipeline)
        return next((r for r in found if r.checkpoint_id == checkpoint_id and r.state is State.COMMITTED), None)

    def live_revision(self, pipeline: str, checkpoint_id: int) -> Revision | None:
        self._step("live_revision")
        found = self._revisions(pipeline)
        return next((r for r in found if r.checkpoint_id == checkpoint_id and r.state in LIVE), None)

    def newest_of(self, pipeline: str, checkpoint_id: int) -> Revision:
        self._step("newest_of")
        return max((r for r in self._revisions(pipeline) if r.checkpoint_id == checkpoint_id), key=lambda r: r.revision)

    def is_latest(self, pipeline: str, checkpoint_id: int) -> bool:
        rows = self._rows("revision").items()
        return not any(key[0] == pipeline and key[1] > checkpoint_id and row["commit_seq"] for key, row in rows)

    def is_replayed(self, pipeline: str, checkpoint_id: int, backfill: str) -> bool:
        lane: Lane = self._rows("lane").get(pipeline, Lane())
        earlier = range(lane.first or checkpoint_id, checkpoint_id)
        return lane.replay == backfill and all(self.decided_in(pipeline, one, backfill) for one in earlier)

    def decided_in(self, pipeline: str, checkpoint_id: int, backfill: str) -> Revision | None:
        mine = [r for r in self._revisions(pipeline) if (r.checkpoint_id, r.backfill) == (checkpoint_id, backfill)]
        return max((r for r in mine if r.commit_seq is not None), key=lambda r: r.revision, default=None)

    def hold_lane(self, pipeline: str, replay: str | None, first: int) -> bool:
        """Let a replay hold the lane, or end it (None); False: another one holds it from an earlier checkpoint on."""
        lane = self.lane(pipeline)
        if lane.replay is not None and replay is not None and (lane.first or 0) < first:
            return False
        self._put("lane", pipeline, lane._replace(replay=replay, first=None if replay is None else first))
        return True

    def newest_of_run(self, pipeline: str, run: Run, checkpoint_id: int | None) -> Revision | None:
        raise NotImplementedError  # nothing here runs under Airflow

    def acknowledge(self, key: Key, run: Run) -> None:
        raise NotImplementedError  # nothing here runs under Airflow

    def keep_job(self, key: Key, *, epoch: int, job: Json) -> None:
        raise NotImplementedError  # no job here outlives its submitter

    def slot(self, pipeline: str, checkpoint_id: int) -> str | None:
        row = self._rows("checkpoint").get((pipeline, checkpoint_id))
        if row is None:
            msg = f"checkpoint {pipeline}/{checkpoint_id}: it is not in the record"
            raise ConfigError(msg)
        slot: str | None = row["slot"]
        return slot

    def fix_inputs(self, key: Key, inputs: Mapping[str, Input]) -> None:
        self._step("fix_inputs")
        self._put("inputs", key, dict(inputs))

    def add_adopted(self, key: Key, slot: str, outputs: Mapping[str, Output]) -> None:
        raise NotImplementedError  # nothing here has slots

    def committed_range(
        self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None
    ) -> CommittedRange:
        raise NotImplementedError  # nothing here reads another pipeline

    def add_revision(
        self, pipeline: str, checkpoint_id: int, kind: str, run: Run, lease: float, *, backfill: str | None = None
    ) -> Revision:
        self._step("add_revision")
        numbers = [r.revision for r in self._revisions(pipeline) if r.checkpoint_id == checkpoint_id]
        key = Key(pipeline, checkpoint_id, max(numbers, default=0) + 1)
        self._step("insert_revision")
        self._lock(("revision", key))
        if key in self._rows("revision"):
            msg = f"checkpoint {key}: duplicate key"
            raise IllegalTransition(msg)
        row = {"state": State.OPEN, "epoch": 0, "kind": kind, "run": run, "lease_until": self.record.now + lease}
        self._write_revision(key, row | {"parked_reason": None, "commit_seq": None, "backfill": backfill})
        self.events.append(Event(key, 0, "begin", State.OPEN))
        return self._revision(key)

    def _write_revision(self, key: Key, row: dict[str, Any]) -> None:
        """Write a row unless a check or a partial unique index of the database stands in the way."""
        for name, states in (("live", LIVE), ("committed", {State.COMMITTED})):
            if row["state"] in states:
                self._lock((name, key.pipeline, key.checkpoint_id))
                others = [
                    r for r in self._revisions(key.pipeline) if r.checkpoint_id == key.checkpoint_id and r.key != key
                ]
                if any(r.state in states for r in others):
                    msg = f"checkpoint {key}: duplicate key in revision_one_{name}"
                    raise IllegalTransition(msg)
        decided = row["commit_seq"] is not None
        parked = row["parked_reason"] is not None and row["state"] is not State.COMMITTING
        swept = row.get("swept") and row["state"] is not State.SUPERSEDED
        if decided != (row["state"] in DECIDED) or parked or swept:
            msg = f"checkpoint {key}: check constraint violated by {row}"
            raise IllegalTransition(msg)
        self._put("revision", key, row)

    def move(
        self,
        key: Key,
        to: State,
        *,
        epoch: int,
        why: str = "",
        bump: bool = False,
        unleased: bool = False,
        numbered: bool = False,
        **changes: Any,
    ) -> bool:
        before = self.hold(key)
        allowed = ENTERED_FROM[to] - (set() if bump else {to})
        if before.epoch == epoch and before.state in allowed and not (unleased and before.leased):
            row = dict(self._rows("revision")[key], state=to, epoch=epoch + bump)
            if numbered:
                changes["commit_seq"] = self.take_commit_seq(key.pipeline)
            if "lease" in changes:
                lease = changes.pop("lease")
                row["lease_until"] = None if lease is None else self.record.now + lease
            if to is State.SUPERSEDED:
                row["superseded_at"] = self.record.now
            self._write_revision(key, row | changes)
            self.events.append(Event(key, epoch + bump, why, to))
            return True
        if before.state is to and before.epoch == epoch and not bump:
            return False
        wanted = sorted(state for state in allowed if state)
        msg = f"checkpoint {key}: expected {wanted} at {epoch}, found {before.state} at {before.epoch}"
        raise Fenced(msg)

    def take_over(self, key: Key, *, epoch: int, run: Run, lease: float, backfill: str | None = None) -> None:
        before = self.hold(key)
        if before.epoch != epoch or before.state not in UNDECIDED or (before.leased and before.run != run):
            msg = f"checkpoint {key}: run {before.run} was faster; nothing was changed"
            raise Fenced(msg)
        row = dict(self._rows("revision")[key], run=run, lease_until=self.record.now + lease, backfill=backfill)
        self._write_revision(key, row)

    def renew(self, key: Key, *, epoch: int, lease: float | None) -> None:
        before = self.hold(key)
        if before.epoch != epoch:
            msg = f"checkpoint {key}: expected epoch {epoch}, found {before.epoch}; a newer attempt owns it"
            raise Fenced(msg)
        if before.state in LIVE | {State.ABORTING}:
            until = None if lease is None else self.record.now + lease
            self._write_revision(key, dict(self._rows("revision")[key], lease_until=until))

    def park(self, key: Key, reason: str, hindrances: Mapping[str, Hindrance]) -> None:
        before = self.hold(key)
        if before.state is State.COMMITTING and before.parked_reason != reason:
            self._write_revision(key, dict(self._rows("revision")[key], parked_reason=reason, hindrances=hindrances))
            self.note(key, "parked", reason)

    def fail(self, key: Key, *, epoch: int, run: Run | None, why: str) -> bool:
        before = self.hold(key)
        mine = before.epoch == epoch and before.run == run
        if not mine or before.state not in UNDECIDED or before.error == why:
            return False
        self._write_revision(key, dict(self._rows("revision")[key], error=why))
        self.note(key, "failed", why)
        return True

    def note(self, key: Key, action: str, why: str = "") -> None:
        self.events.append(Event(key, self._revision(key).epoch, action))

    def expired(self, pipeline: str, age: float) -> list[Key]:
        """Return the superseded revisions whose retention is over."""
        self._step("expired")
        last = self.record.now - age
        rows = self._rows("revision").items()
        old = [key for key, row in rows if row["state"] is State.SUPERSEDED and row["superseded_at"] <= last]
        return [key for key in old if key.pipeline == pipeline and not self._revision(key).swept]

    def mark_swept(self, key: Key) -> None:
        """Record that the output of a superseded revision goes."""
        if self.hold(key).state is State.SUPERSEDED:
            self._write_revision(key, dict(self._rows("revision")[key], swept=True))

    # --- participants ------------------------------------------------------------------------------------------------

    def participants(self, key: Key) -> list[Participant]:
        self._step("participants")
        return [row for (owner, _), row in sorted(self._rows("participant").items()) if owner == key]

    def open_attempt(
        self, key: Key, participants: Sequence[Participant], *, epoch: int, why: str = "", lease: float | None = None
    ) -> None:
        self.move(key, State.OPEN, epoch=epoch, why=why, bump=True, lease=lease)
        for owner, name in self._rows("participant"):
            if owner == key:
                self._put("participant", (owner, name), None)
        for participant in participants:
            self._put("participant", (key, participant.name), participant)

    def put_participant(self, key: Key, participant: Participant) -> None:
        self._step("put_participant")
        self._put("participant", (key, participant.name), participant)

    def put_votes(self, key: Key, votes: Sequence[Participant], *, epoch: int) -> None:
        for one in votes:
            self.put_participant(key, one)
            self.note(key, f"voted {'yes' if one.vote else 'no'}")

    def last_schemas(self, pipeline: str, sinks: Sequence[str]) -> dict[str, list[list[str]] | None]:
        return dict.fromkeys(sinks)

    def rows_before(self, key: Key, slot: str | None, sink: str) -> int | None:
        raise NotImplementedError  # nothing here has audits

    def committed(self, key: Key) -> set[str]:
        self._step("committed")
        return {sink for owner, sink in self._rows("committed") if owner == key}

    def mark_promoted(self, key: Key, attempts: Mapping[str, int], *, epoch: int) -> set[str]:
        new = set()
        for sink in attempts:
            self._step("mark_promoted")
            self._lock(("committed", (key, sink)))
            if (key, sink) not in self._rows("committed"):
                self._put("committed", (key, sink), self.record.now)
                self.note(key, "promoted")
                new.add(sink)
        return new

    # --- input -------------------------------------------------------------------------------------------------------

    def _take(self, pipeline: str, column: str) -> int:
        self._step(f"take_{column}")
        self._lock(("pipeline", pipeline))
        row = self._rows("pipeline").get(pipeline, {"checkpoint_id": 1, "commit_seq": 1})
        self._put("pipeline", pipeline, dict(row, **{column: row[column] + 1}))
        number: int = row[column]
        return number

    def add_checkpoint(self, pipeline: str, slot: str | None, inputs: Mapping[str, Input]) -> int:
        checkpoint_id = self._take(pipeline, "checkpoint_id")
        self._put("checkpoint", (pipeline, checkpoint_id), {"slot": slot, "inputs": dict(inputs), "released": False})
        for source, fixed in inputs.items():
            for file in fixed.files:
                self._lock(("path", pipeline, source, file.path))
                if any(self._owners(pipeline, source, file.path)):
                    msg = f"source {source!r}: file {file.path!r} has an owner"
                    raise IllegalTransition(msg)
                self._put("input_file", (pipeline, source, file.path, checkpoint_id), {"file": file, "gone": False})
        return checkpoint_id

    def claim(self, pipeline: str, checkpoint_id: int, claims: Claims) -> Holder | None:
        raise NotImplementedError  # nothing here has slots

    def unclaimed(self, pipeline: str) -> list[tuple[int, str]]:
        raise NotImplementedError  # nothing here has slots

    def claim_earlier(self, pipeline: str, claims: Iterable[tuple[int, Claims]]) -> None:
        raise NotImplementedError  # nothing here has slots

    def _owners(self, pipeline: str, source: str, path: str) -> Iterator[InputFile]:
        for key, row in self._rows("input_file").items():
            if key[:3] == (pipeline, source, path) and not row["gone"]:
                yield row["file"]

    def take_commit_seq(self, pipeline: str) -> int:
        return self._take(pipeline, "commit_seq")

    def inputs(self, key: Key) -> dict[str, Input]:
        self._step("inputs")
        found: dict[str, Input] = self._rows("checkpoint")[key.pipeline, key.checkpoint_id]["inputs"]
        return {**found, **self._rows("inputs").get(key, {})}

    def ranges(self, pipeline: str, checkpoint_id: int) -> Mapping[str, Input]:
        return self.inputs(Key(pipeline, checkpoint_id, 0))

    def claims(self, pipeline: str, checkpoint_id: int) -> Mapping[str, tuple[int, int]]:
        inputs = self.inputs(Key(pipeline, checkpoint_id, 0)).items()
        fixed = {name: len(found.files) for name, found in inputs if found.files}
        owned = [key[1] for key in self._rows("input_file") if (key[0], key[3]) == (pipeline, checkpoint_id)]
        return {name: (count, owned.count(name)) for name, count in fixed.items()}

    def remember(self, *_: object) -> None:
        raise AssertionError

    def new_files(
        self, pipeline: str, source: str, found: Sequence[InputFile], since: datetime | None = None
    ) -> list[InputFile]:
        self._step("new_files")
        new = []
        for file in found:
            owned = next(self._owners(pipeline, source, file.path), None)
            if owned is None:
                new.append(file)
            elif owned != file:
                msg = f"source {source!r}: file {file.path!r} has changed"
                raise InputChanged(msg)
        return new

    def keep_files(self, *_: object) -> None:
        raise AssertionError

    def unsettled(self, pipeline: str, source: str) -> list[tuple[int, list[InputFile]]]:
        self._step("unsettled")
        committed = {r.checkpoint_id for r in self._revisions(pipeline) if r.state is State.COMMITTED}
        found: dict[int, list[InputFile]] = {}
        for key, row in sorted(self._rows("input_file").items()):
            if key[:2] == (pipeline, source) and key[3] in committed and not row["gone"]:
                found.setdefault(key[3], []).append(row["file"])
        return sorted(found.items())

    def release(self, pipeline: str, checkpoint_id: int, why: str) -> bool:
        self._step("release")
        mine = [r for r in self._revisions(pipeline) if r.checkpoint_id == checkpoint_id]
        if {r.state for r in mine} != {State.ABORTED}:
            return False
        row = self._rows("checkpoint")[pipeline, checkpoint_id]
        self._put("checkpoint", (pipeline, checkpoint_id), dict(row, released=True))
        for key in self._rows("input_file"):
            if (key[0], key[3]) == (pipeline, checkpoint_id):
                self._put("input_file", key, None)
        return True

    def settle(self, pipeline: str, source: str, checkpoint_id: int) -> None:
        self._step("settle")
        for key, row in self._rows("input_file").items():
            if (*key[:2], key[3]) == (pipeline, source, checkpoint_id):
                self._put("input_file", key, dict(row, gone=True))

    def position(self, pipeline: str, source: str) -> Mapping[str, int]:
        self._step("position")
        return {name: at.offset for name, at in self._positions(pipeline).get(source, {}).items()}

    def _positions(self, pipeline: str) -> dict[str, dict[str, Position]]:
        found: dict[str, dict[str, Position]] = {}
        for key, at in self._rows("position").items():
            if key[0] == pipeline:
                found.setdefault(key[1], {})[key[2]] = at
        return found

    def pin(self, pipeline: str, source: str, positions: Mapping[str, Position]) -> None:
        self._step("pin")
        for partition, at in positions.items():
            key = (pipeline, source, partition)
            if self._rows("position").get(key, at).offset == at.offset:
                self._put("position", key, at)

    def reposition(self, *_: object) -> None:
        raise NotImplementedError  # no person acts here

    def advance(self, pipeline: str, moves: Sequence[Move]) -> list[Move]:
        refused = []
        for move in moves:
            self._step("advance")
            key = (pipeline, move.source, move.partition)
            self._lock(("position", key))
            there = self._rows("position").get(key)
            if there is None or there.offset == move.start:
                self._put("position", key, Position(move.end, move.mark))
            else:
                refused.append(move)
        return refused
