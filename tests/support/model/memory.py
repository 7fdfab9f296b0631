"""A record, a sink and a source in memory, which can be stopped between any two of their primitive steps.

They stand for PostgreSQL at READ COMMITTED with its row locks, for a table of folders on a file system, and for a log
of numbered records. `pause` is called before each primitive step and may stop, kill or switch processes there; a step
itself is atomic. What they do not do is decide: the rules are in the shipped coordinator.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from twophase.core.checkpoint import (
    Base,
    Input,
    InputFile,
    Json,
    Key,
    Known,
    Output,
    Participant,
    Position,
    Revision,
    Run,
)
from twophase.core.claims import Claim, Claims, Holder
from twophase.core.errors import (
    ConfigError,
    Fenced,
    IllegalTransition,
    InputChanged,
    ManifestMismatch,
    StoreUnavailable,
)
from twophase.core.hindrances import Hindrance
from twophase.core.ports import (
    CommittedRange,
    Lane,
    Look,
    Move,
    Outcome,
    Outlook,
    Progress,
    Promotion,
    Reach,
    StandingBase,
)
from twophase.core.states import DECIDED, ENTERED_FROM, LIVE, UNDECIDED, State

Pause = Callable[[str], None]
Row = tuple[str, int]


def no_pause(_: str) -> None:
    """Go on at once."""


# --- the record ------------------------------------------------------------------------------------------------------


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
    def transaction(self) -> Iterator[MemoryTransaction]:
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
        return False  # nothing here has backfills

    def decided_in(self, pipeline: str, checkpoint_id: int, backfill: str) -> Revision | None:
        raise NotImplementedError  # nothing here has backfills

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
        self._write_revision(key, row | {"parked_reason": None, "commit_seq": None})
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
        row = dict(self._rows("revision")[key], run=run, lease_until=self.record.now + lease)
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


# --- sinks -----------------------------------------------------------------------------------------------------------


class Marker(NamedTuple):
    """Which revision and attempt a folder holds, and the checksum of its manifest."""

    revision: int
    attempt: int
    digest: str


@dataclass
class Folder:
    """Files by name, and the marker once they are sealed."""

    files: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    marker: Marker | None = None

    def rows(self) -> list[Row]:
        return [row for rows in self.files.values() for row in rows]


class Left(NamedTuple):
    """What an attempt left beside the table."""

    checkpoint_id: int
    revision: int
    attempt: int
    path: str


class Superseded(NamedTuple):
    """A revision that a later one took the place of."""

    checkpoint_id: int
    revision: int
    path: str


ATTEMPT = re.compile(r"(\d+)\.r(\d+)\.a(\d+)\..+")
#: What keeps the name of a swept revision taken where folders cannot be exchanged.
TOMBSTONE = "_swept"


def _is_dead(left: Left) -> bool:
    return left.path.endswith((".junk", ".dead"))


class MemorySink:
    """A table of folders: staged beside it, taken by one promoter, then made visible by one rename or exchange.

    It takes the steps of `sinks.Files`, one by one, and promotes as `MemoryPromoter` says. A rename is durable only
    after the next fsync.
    """

    #: How often a promoter starts over before it leaves the work to whoever comes next.
    TRIES = 5
    copies = True
    ordered = False

    def objection(self, *, latest: bool) -> str | None:
        return None

    def newest(self, pipeline: str) -> int | None:
        return None

    def markers(self, pipeline: str) -> Iterable[tuple[int, int]]:
        return ()

    def __init__(self, pause: Pause = no_pause, *, exchanges: bool = True) -> None:
        self.pause = pause
        #: Whether two folders can change places in one step.
        self.exchanges = exchanges
        self.version = 0
        self.down = False
        #: What its target does not take: (revision, attempt).
        self.refused: set[tuple[Key, int]] = set()
        #: The next promotion ends in UNKNOWN: "before" its visible step, which then does not happen, or "after" it.
        self.loses_reply: str | None = None
        self.folders: dict[str, Folder] = {}
        self.manifests: dict[str, dict[str, tuple[Row, ...]]] = {}
        #: Staged output that nobody can see for a while, or ever again.
        self.hidden: dict[str, Folder] = {}
        self._names = 0
        self._volatile: list[tuple[str, str, bool]] = []
        self._prepare()

    def _prepare(self) -> None:
        """Set up what a kind of sink has besides."""

    # --- what readers see --------------------------------------------------------------------------------------------

    def shown(self) -> dict[int, Folder]:
        """Return what readers see, by checkpoint."""
        return {int(path[8:]): folder for path, folder in self.folders.items() if path.startswith("visible/")}

    def kept(self, marker: Marker) -> list[list[Row]]:
        """Return the rows that were promoted under a marker, wherever they are now."""
        places = ("visible/", "taken/", "superseded/")
        found = [(path, folder) for path, folder in self.folders.items() if folder.marker == marker]
        alive = [folder for path, folder in found if path.startswith(places) and not path.endswith((".junk", ".dead"))]
        return [folder.rows() for folder in alive]

    # --- the file system ---------------------------------------------------------------------------------------------

    def _step(self, name: str) -> None:
        self.pause(f"sink.{name}")

    def _fresh(self) -> str:
        self._names += 1
        return f"{self._names:04d}"

    def _rename(self, source: str, target: str) -> None:
        self._step("rename")
        if source not in self.folders:
            raise FileNotFoundError(source)
        if target in self.folders:
            raise FileExistsError(target)
        self.folders[target] = self.folders.pop(source)
        self._volatile.append((source, target, False))
        self.version += 1

    def _exchange(self, one: str, other: str) -> None:
        self._step("exchange")
        if one not in self.folders or other not in self.folders:
            raise FileNotFoundError(one)
        self.folders[one], self.folders[other] = self.folders[other], self.folders[one]
        self._volatile.append((one, other, True))
        self.version += 1

    def _fsync(self) -> None:
        self._step("fsync")
        self._volatile.clear()

    def power_failure(self, kept: int = 0) -> None:
        """Undo the renames that no fsync made durable; the first few may have reached the disk all the same."""
        lost = self._volatile[kept % (len(self._volatile) + 1) :]
        for source, target, exchanged in reversed(lost):
            if exchanged and {source, target} <= self.folders.keys():
                self.folders[source], self.folders[target] = self.folders[target], self.folders[source]
            elif not exchanged and target in self.folders and source not in self.folders:
                self.folders[source] = self.folders.pop(target)
        self._volatile.clear()
        self.version += 1

    def hide(self, key: Key) -> bool:
        """Make a revision's staged output disappear, as a careless hand does; say whether there was any."""
        prefix = f"{key.checkpoint_id}.r{key.revision}."
        paths = [
            path
            for path, folder in self.folders.items()
            if path.startswith((f"staging/{prefix}", f"taken/{prefix}"))
            and (folder.marker is None or folder.marker.revision == key.revision)
        ]
        for path in paths:
            self.hidden[path] = self.folders.pop(path)
        self.version += bool(paths)
        return bool(paths)

    def bring_back(self) -> set[tuple[int, int]]:
        """Make what disappeared appear again; return the checkpoints and revisions it is of."""
        back = set()
        while self.hidden:
            path, folder = self.hidden.popitem()
            self.folders.setdefault(path, folder)
            self.version += 1
            checkpoint_id, revision, *_ = path.partition("/")[2].split(".")
            back.add((int(checkpoint_id), int(revision[1:])))
        return back

    def _has(self, path: str, marker: Marker | None, step: str = "look") -> bool:
        self._step(step)
        return marker is not None and path in self.folders and self.folders[path].marker == marker

    def _list(self, prefix: str) -> list[str]:
        self._step("list")
        return [path for path in self.folders if path.startswith(prefix) and not path.endswith((".junk", ".dead"))]

    def _remove(self, path: str) -> None:
        dead = f"taken/{path.rpartition('/')[2]}.{self._fresh()}.dead"
        try:
            self._rename(path, dead)
        except FileNotFoundError:
            return
        self._step("remove")
        self.folders.pop(dead, None)
        self.version += 1

    # --- stage -------------------------------------------------------------------------------------------------------

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        place: dict[str, Any] = {"prefix": f"{key.checkpoint_id}.r{key.revision}.a{attempt}", "token": token}
        if older is not None:
            place["replaces"] = [older.key.revision, older.attempt, older.manifest["digest"]]
        return place

    def claim(self, slot: str) -> Claim | None:
        raise NotImplementedError  # nothing here has slots

    def adopt(self, key: Key, slot: str) -> Output | None:
        return None

    @staticmethod
    def staged(handle: Json) -> str:
        return f"staging/{handle['prefix']}.{handle['token']}"

    def write(self, handle: Json, name: str, rows: Sequence[Row]) -> None:
        """Write one file as an executor does, into a folder that is made if it is not there."""
        self._step("write")
        self.folders.setdefault(self.staged(handle), Folder()).files[name] = tuple(rows)
        self.version += 1

    def seal(self, output: Output) -> Json:
        """Describe what was staged, then put the marker in."""
        key, attempt, handle = output.key, output.attempt, output.handle
        self._step("manifest")
        folder = self.folders.setdefault(self.staged(handle), Folder())
        digest = f"{key.checkpoint_id}.{key.revision}.{attempt}.{handle['token']}"
        self.manifests[digest] = dict(folder.files)
        self._step("marker")
        folder = self.folders.setdefault(self.staged(handle), Folder())
        folder.marker = Marker(key.revision, attempt, digest)
        self.version += 1
        return {"digest": digest, "rows": len(folder.rows()), "bytes": 0, "attempt": attempt}

    def check(self, output: Output) -> None:
        """Compare the staged folder with its manifest before the vote, and see that it may take its place."""
        key, promoter = output.key, MemoryPromoter(self, output)
        self._step("check")
        if promoter.is_refused():
            msg = f"checkpoint {key}: the table holds something else than {promoter.replaces}"
            raise ManifestMismatch(msg)
        folder = self.folders.get(promoter.staged)
        if folder is None or folder.marker != promoter.marker:
            msg = f"checkpoint {key}: staged folder {promoter.staged} has no marker; stage it again"
            raise ManifestMismatch(msg)
        if self.manifests[output.manifest["digest"]].items() - folder.files.items():
            msg = f"checkpoint {key}: staged folder {promoter.staged} was altered"
            raise ManifestMismatch(msg)

    # --- promote -----------------------------------------------------------------------------------------------------

    def find(self, output: Output) -> Promotion:
        return MemoryPromoter(self, output).find()

    def promote(self, output: Output) -> Promotion:
        if self.down:
            return Promotion(Outcome.RETRY_LATER, "the sink is down")
        promoter = MemoryPromoter(self, output)
        if (output.key, output.attempt) in self.refused:
            return promoter._promoted() or Promotion(Outcome.FAILED, "the target refuses it", Hindrance.REFUSED)
        return promoter.promote()

    def lost_reply(self, when: str) -> bool:
        lost = self.loses_reply == when
        if lost:
            self.loses_reply = None
        return lost

    def discard(self, output: Output) -> None:
        for left in self.attempts():
            if left[:2] == output.key[1:]:
                self.remove(left)

    def prepare(self, slot: str | None = None) -> None:
        """Need nothing."""

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what earlier attempts staged, wherever it is, until nothing of it is left."""
        while earlier := [
            left
            for left in self.attempts()
            if left[:2] == output.key[1:] and left.attempt < output.attempt and not _is_dead(left)
        ]:
            for left in earlier:
                self.remove(left)

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> list[Left]:
        """List what attempts left beside the table."""
        self._step("list")
        found = [(path, ATTEMPT.fullmatch(path.rpartition("/")[2])) for path in self.folders]
        beside = [(path, match) for path, match in found if match and path.startswith(("staging/", "taken/"))]
        return [Left(int(match[1]), int(match[2]), int(match[3]), path) for path, match in beside]

    def beside(self) -> list[Left]:
        """List what a sweep has to leave nothing of."""
        return self.attempts()

    def remove(self, left: Left) -> None:
        """Remove one of those; what an exchange brought out is not this attempt's and is put away."""
        if left.path.startswith("taken/") and not left.path.endswith(".dead"):
            self._step("look")
            marker = self.folders[left.path].marker if left.path in self.folders else None
            if marker is not None and (marker.revision, marker.attempt) != (left.revision, left.attempt):
                with suppress(FileNotFoundError, FileExistsError):
                    self._put_back(left, marker)
                return
        self._remove(left.path)

    def _put_back(self, left: Left, found: Marker) -> None:
        """Put away what an exchange brought out; if that is what is committed, let it change places again."""
        if found.revision < left.revision:
            self._rename(left.path, f"superseded/{left.checkpoint_id}.r{found.revision}")
            return
        self._step("look")
        shown = self.folders.get(f"visible/{left.checkpoint_id}")
        if shown is not None and shown.marker is not None and shown.marker.attempt == left.attempt:
            self._exchange(left.path, f"visible/{left.checkpoint_id}")
            self._fsync()

    def superseded(self) -> list[Superseded]:
        """List what later revisions took the place of."""
        self._step("list")
        paths = [path for path, folder in self.folders.items() if path.startswith("superseded/") and folder.marker]
        keys = [path.partition("/")[2].split(".r") for path in paths]
        return [Superseded(int(key[0]), int(key[1]), path) for key, path in zip(keys, paths, strict=True)]

    def forget(self, old: Superseded) -> None:
        """Remove one of those; where folders cannot be exchanged its name stays taken for ever."""
        if self.exchanges:
            self._remove(old.path)
            return
        self._step("tombstone")
        if old.path in self.folders:
            self.folders[old.path] = Folder({TOMBSTONE: ()})
            self.version += 1


class MemoryPromoter:
    """Takes the steps of the shipped `FilesPromoter`, one by one.

    It is a copy, so that a schedule can stop it between any two steps, none of them a system call, and let the power
    fail: folders are entries of a dictionary here, a marker is a field, a manifest a dictionary, and renames that no
    fsync followed can be undone. It leaves out whether the table is mounted and whose it is, receipts, and whether the
    manifest of a later revision is there. `integration/test_model_promoter.py` holds it against the shipped one from
    every state that a promoter may find, with and without exchanges: what is said, done and left.
    """

    def __init__(self, sink: MemorySink, output: Output) -> None:
        key, handle = output.key, output.handle
        self.sink = sink
        self.key = key
        self.prefix: str = handle["prefix"]
        self.staged = sink.staged(handle)
        self.visible = f"visible/{key.checkpoint_id}"
        self.marker = Marker(key.revision, output.attempt, output.manifest["digest"])
        self.replaces = Marker(*handle["replaces"]) if "replaces" in handle else None
        self.earlier = output.earlier

    def _is_replaced(self, path: str) -> bool:
        return self.replaces is not None and self.sink._has(path, self.replaces, "replaced?")

    def is_refused(self) -> bool:
        """Say whether what is visible now can be neither replaced nor counted as promoted."""
        found = self.sink.folders.get(self.visible)
        marker = found.marker if found else None
        return found is not None and marker != self.replaces and (marker is None or marker.digest not in self.earlier)

    def find(self) -> Promotion:
        promoted = self._promoted()
        if promoted is None:
            if self._is_staged():
                return Promotion(Outcome.RETRY_LATER, "staged")
            promoted = self._promoted() or Promotion(Outcome.FAILED, "staged output is gone")
        return promoted

    def _is_staged(self) -> bool:
        """Promoters may take it from each other meanwhile: only what two listings agree on is missing."""
        before: list[str] | None = None
        for _ in range(self.sink.TRIES):
            folders = [self.staged, *self.sink._list(f"taken/{self.prefix}.")] if before is None else before
            if any(self.sink._has(path, self.marker) and self._is_whole(path) for path in folders):
                return True
            before = [self.staged, *self.sink._list(f"taken/{self.prefix}.")]
            if before == folders:
                break
        return False

    def _is_whole(self, path: str) -> bool:
        return not self.sink.manifests[self.marker.digest].items() - self.sink.folders[path].files.items()

    def _promoted(self) -> Promotion | None:
        """Read the marker back; None: nothing is visible in this place, or still what is to be replaced."""
        found: Marker | None = self.marker
        if not self.sink._has(self.visible, self.marker, "marker?"):
            if self._is_replaced(self.visible):
                return None
            self.sink._step("markers")
            if self.visible not in self.sink.folders:  # perhaps because it is being replaced just now
                gone = self.sink.folders.get(f"superseded/{self.key.checkpoint_id}.r{self.key.revision}")
                put_away = gone is not None and (gone.marker == self.marker or TOMBSTONE in gone.files)
                return Promotion(Outcome.ALREADY_PROMOTED) if put_away else None
            found = self.sink.folders[self.visible].marker
        ours = found is not None and (
            found == self.marker or found.revision > self.marker.revision or found.digest in self.earlier
        )
        if found is None or not ours:
            return Promotion(Outcome.FAILED, f"the table holds {found}")
        self.sink._fsync()
        if found.revision > self.marker.revision:  # it was promoted, and replaced since
            return Promotion(Outcome.ALREADY_PROMOTED)
        summary = None
        if found != self.marker:
            rows = sum(len(rows) for rows in self.sink.manifests[found.digest].values())
            summary = {"digest": found.digest, "rows": rows, "bytes": 0, "attempt": found.attempt}
        return Promotion(Outcome.ALREADY_PROMOTED, attempt=found.attempt, manifest=summary)

    def promote(self) -> Promotion:  # noqa: PLR0911 - one return per outcome
        for _ in range(self.sink.TRIES):
            promoted = self._promoted()
            if promoted:
                self._put_away()
                return promoted
            mine = self._take()
            if mine is None:
                found = self.find()
                if found.outcome is Outcome.RETRY_LATER:
                    continue
                return found
            if not self._check_taken(mine):
                return Promotion(Outcome.FAILED, "what was staged is not what was voted for")
            if self.sink.lost_reply("before"):
                return Promotion(Outcome.UNKNOWN)
            if self._show(mine):
                if self.sink.lost_reply("after"):
                    return Promotion(Outcome.UNKNOWN)
                promoted = self._promoted()
                return replace(promoted, outcome=Outcome.PROMOTED) if promoted else Promotion(Outcome.UNKNOWN)
        return Promotion(Outcome.RETRY_LATER, "other promoters are at it")

    def _take(self) -> str | None:
        """Rename the staged folder to a name that only this call uses; None: it is not there (any more)."""
        for source in (self.staged, *self.sink._list(f"taken/{self.prefix}.")):
            mine = f"taken/{self.prefix}.{self.sink._fresh()}"
            try:
                self.sink._rename(source, mine)
            except FileNotFoundError:
                continue
            if self.sink._has(mine, self.marker, "taken"):
                return mine
            if self._is_replaced(mine):  # an exchange was done, and its promoter died or sleeps
                self._supersede(mine)
                continue
            with suppress(FileNotFoundError):
                self.sink._rename(mine, f"{mine}.junk")
        return None

    def _check_taken(self, mine: str) -> bool:
        """Check a taken folder against its manifest, and remove what a straggling task left in it."""
        self.sink._step("check_taken")
        folder = self.sink.folders.get(mine)
        if folder is None:
            return True  # another took it from us: showing it will fail
        expected = self.sink.manifests[self.marker.digest]
        if expected.items() - folder.files.items():
            return False
        folder.files = dict(expected)
        return True

    def _show(self, mine: str) -> bool:
        """Make a taken folder visible: the one atomic step. False: somebody was faster, start over."""
        try:
            if self._is_replaced(self.visible):
                return self._exchange(mine)
            self.sink._rename(mine, self.visible)
        except (FileNotFoundError, FileExistsError):
            return False
        self.sink._step("visible")
        return True

    def _exchange(self, mine: str) -> bool:
        """Let a taken folder and what it replaces change places, and put the latter away."""
        if not self.sink.exchanges:
            return self._rename_twice(mine)
        self.sink._exchange(mine, self.visible)
        self.sink._step("visible")
        if not self._is_replaced(mine):  # what was lost came back when its restaged copy was promoted already
            self.sink._exchange(mine, self.visible)
            return False
        self.sink._fsync()
        self._supersede(mine)
        return True

    def _rename_twice(self, mine: str) -> bool:
        """Replace where folders cannot be exchanged: out with the old, in with the new."""
        assert self.replaces
        self.sink._rename(self.visible, f"superseded/{self.key.checkpoint_id}.r{self.replaces.revision}")
        self.sink._step("gap")
        self.sink._rename(mine, self.visible)
        self.sink._step("visible")
        return True

    def _put_away(self) -> None:
        """Find what an exchange brought out, whichever attempt's it was, and put it away."""
        if self.replaces is None:
            return
        for left in self.sink._list(f"taken/{self.key.checkpoint_id}.r{self.key.revision}."):
            if self._is_replaced(left):
                self._supersede(left)

    def _supersede(self, mine: str) -> None:
        """Move what was replaced to superseded/; another may have done it."""
        assert self.replaces
        try:
            self.sink._rename(mine, f"superseded/{self.key.checkpoint_id}.r{self.replaces.revision}")
        except (FileNotFoundError, FileExistsError):
            return
        self.sink._fsync()


# --- sources ---------------------------------------------------------------------------------------------------------


class MemorySource:
    """Numbered records in partitions; a checkpoint takes a range that starts at the decided position."""

    settles = False
    reports = False
    per_revision = False

    def __init__(self, ends: Mapping[str, int], limit: int, pause: Pause = no_pause) -> None:
        self.ends = dict(ends)
        self.limit = limit
        self.pause = pause

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> dict[str, int]:
        self.pause("source.discover")
        return dict(self.ends)

    def fix(self, found: Mapping[str, int], progress: Progress) -> Input:
        position = progress.position()
        starts = {partition: position.get(partition, 0) for partition in found}
        progress.pin({partition: Position(0, {"end": 0}) for partition in found if partition not in position})
        ends = {p: max(start, min(found[p], start + self.limit)) for p, start in starts.items()}
        ranges = {p: (start, ends[p]) for p, start in starts.items()}
        return Input(ranges=ranges, marks={p: {"end": end} for p, end in ends.items()})

    def claim(self, slot: str) -> Claim | None:
        raise NotImplementedError  # nothing here has slots

    def written_again(self, fixed: Input) -> list[InputFile]:
        raise AssertionError

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        raise AssertionError

    def report(self, offsets: Mapping[str, int]) -> None:
        raise AssertionError

    @staticmethod
    def read(fixed: Input) -> list[Row]:
        """Return the records of a fixed input."""
        return [(partition, off) for partition, (start, end) in fixed.ranges.items() for off in range(start, end)]
