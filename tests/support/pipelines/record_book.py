"""One pipeline in the record, whose revisions are begun, decided and swept without any storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from sqlalchemy import text

from twophase import Retention
from twophase.committer import retention
from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.committer.registry import register
from twophase.core.checkpoint import Input, Key, Output, Participant, Revision, Run
from twophase.core.ports import CommittedRange
from twophase.core.states import State

ME = Run("dag", "run_1")

LEASE = 60.0

THREADS = 8

#: Seconds after which a test gives up on another session.
PATIENCE = 20.0

SCHEMA = [["id", "bigint"]]

DECLARED = {"class": "twophase.sinks:Files", "path": "lake/t", "format": "parquet"}


def manifest(key: Key) -> dict[str, Any]:
    """Return a manifest that says whose it is."""
    return {"digest": f"{key.checkpoint_id:08x}{key.revision:08x}", "rows": 1, "bytes": 1, "files": 1, "schema": SCHEMA}


class Book:
    """One pipeline in the record, taken through its states by hand."""

    def __init__(self, record: PostgresRecord, name: str, reads: Mapping[str, Any] | None = None) -> None:
        self.record = record
        self.name = name
        with record.transaction() as tx:
            declaration = {"reads": dict(reads or {}), "writes": {"lake": DECLARED}}
            register(tx.connection, name, declaration, {}, lambda _old, _pending: [])

    def add(self, slot: str | None = None) -> Key:
        """Add a checkpoint with its first revision."""
        with self.record.transaction() as tx:
            tx.lock(self.name)
            number = tx.add_checkpoint(self.name, slot, {})
            return tx.add_revision(self.name, number, "regular", ME, LEASE).key

    def again(self, key: Key) -> Key:
        """Add the next revision of a checkpoint."""
        with self.record.transaction() as tx:
            return tx.add_revision(self.name, key.checkpoint_id, "backfill", ME, LEASE).key

    def precommitted(self, key: Key, sinks: tuple[str, ...] = ("lake",)) -> Key:
        handle = {"table": "lake/t", "name": f"{key.checkpoint_id}.r{key.revision}"}
        voted = [Participant(sink, "sink", 1, vote=True, handle=handle, manifest=manifest(key)) for sink in sinks]
        with self.record.transaction() as tx:
            tx.move(key, State.OPEN, epoch=0, bump=True)
            tx.replace_participants(key, voted)
            tx.move(key, State.PRECOMMITTED, epoch=1)
        return key

    def committing(self, key: Key | None = None, sinks: tuple[str, ...] = ("lake",)) -> Key:
        """Take a revision just past its commit point."""
        decided = self.precommitted(key or self.add(), sinks)
        with self.record.transaction() as tx:
            tx.lock(self.name)
            seq = tx.take_commit_seq(self.name)
            tx.move(decided, State.COMMITTING, epoch=1, commit_seq=seq, rows=1, bytes=1)
            for sink in sinks:
                tx.mark_committed(decided, sink)
        return decided

    def finish(self, tx: PostgresTransaction, key: Key) -> None:
        """Write COMMITTED as the coordinator does, the older revision first."""
        tx.hold(key)
        older = tx.committed_revision(self.name, key.checkpoint_id)
        if older is not None:
            tx.move(older.key, State.SUPERSEDED, epoch=older.epoch)
        tx.move(key, State.COMMITTED, epoch=1, lease=None)

    def committed(self, key: Key | None = None, sinks: tuple[str, ...] = ("lake",)) -> Key:
        """Take a revision all the way."""
        done = self.committing(key, sinks)
        with self.record.transaction() as tx:
            self.finish(tx, done)
        return done

    def replaced(self, key: Key) -> Key:
        """Let a new revision take the place of a committed one."""
        return self.committed(self.again(key))

    def aborted(self, key: Key) -> Key:
        with self.record.transaction() as tx:
            epoch = tx.revision(key).epoch
            tx.move(key, State.ABORTING, epoch=epoch)
            tx.move(key, State.ABORTED, epoch=epoch)
        return key

    def adopted(self, checkpoint_id: int, slot: str = "a day", rows: int = 7) -> Key:
        """Record what was in a slot's place before us."""
        key = Key(self.name, checkpoint_id, 0)
        handle = {"table": "lake/t", "name": "adopted"}
        with self.record.transaction() as tx:
            tx.add_adopted(key, slot, {"lake": Output(key, 1, handle, {**manifest(key), "rows": rows})})
        return key

    def reads(self, key: Key, *upstream: Key) -> None:
        """Record that a revision reads some of another pipeline."""
        outputs = tuple(Output(one, 1, {}, {}) for one in upstream)
        with self.record.transaction() as tx:
            tx.fix_inputs(key, {"rows": Input(outputs=outputs, upstream={})})

    def range(self, start: int, end: int | None = None, limit: int | None = None) -> tuple[int, list[tuple[int, int]]]:
        """Return where a range ends, and the checkpoints and revisions in it."""
        with self.record.transaction() as tx:
            return shown(tx.committed_range(self.name, "lake", start, end, limit))

    def read(self, key: Key) -> Revision:
        with self.record.transaction() as tx:
            return tx.revision(key)

    def newest(self, slot: str | None) -> tuple[int, int] | None:
        with self.record.transaction() as tx:
            found = tx.newest(self.name, slot)
        return (found.checkpoint_id, found.revision) if found else None

    def expired(self, **kept: Any) -> list[Key]:
        with self.record.engine.connect() as connection:
            return [found.key for found in retention.expired(connection, self.name, Retention(**kept))]

    def swept(self, key: Key) -> bool:
        with self.record.transaction() as tx:
            return retention.mark_swept(tx.connection, key)

    def age(self, days: int) -> None:
        """Let everything that was superseded have been so for some days."""
        statement = "UPDATE twophase.revision SET superseded_at = superseded_at - make_interval(days => :days)"
        with self.record.engine.begin() as connection:
            connection.execute(text(f"{statement} WHERE pipeline = :p"), {"days": days, "p": self.name})

    def count(self, table: str, column: str = "pipeline") -> int:
        with self.record.engine.connect() as connection:
            query = text(f"SELECT count(*) FROM twophase.{table} WHERE {column} = :p")
            return int(connection.execute(query, {"p": self.name}).scalar_one())


def shown(found: CommittedRange) -> tuple[int, list[tuple[int, int]]]:
    return found.end, [(output.key.checkpoint_id, output.key.revision) for output in found.outputs]


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Do something in another session meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)
