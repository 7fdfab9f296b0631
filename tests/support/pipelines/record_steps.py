"""Revisions in the record, brought to any state by the record's own primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import text

from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.committer.registry import register
from twophase.core.checkpoint import Input, InputFile, Key, Participant, Revision, Run
from twophase.core.states import State

ME = Run("dag", "run_1")

LEASE = 60.0

MANIFEST = {"digest": "0" * 16, "rows": 10, "bytes": 100, "files": 1, "schema": [["id", "bigint"]]}


def put(
    record: PostgresRecord,
    name: str,
    outputs: dict[str, str] | None = None,
    declaration: dict[str, Any] | None = None,
    changes: Callable[..., list[str]] = lambda _old, _pending: [],
) -> None:
    with record.transaction() as tx:
        register(tx.connection, name, declaration or {}, outputs or {}, changes)


def make(record: PostgresRecord, pipeline: str, slot: str | None = None, inputs: dict[str, Input] | None = None) -> Key:
    """Add a checkpoint with its first revision."""
    with record.transaction() as tx:
        tx.lock(pipeline)
        number = tx.add_checkpoint(pipeline, slot, inputs or {"words": Input()})
        return tx.add_revision(pipeline, number, "regular", ME, LEASE).key


def again(record: PostgresRecord, key: Key, kind: str = "backfill") -> Key:
    """Add the next revision of a checkpoint."""
    with record.transaction() as tx:
        return tx.add_revision(key.pipeline, key.checkpoint_id, kind, ME, LEASE).key


def opened(tx: PostgresTransaction, key: Key, epoch: int = 1) -> None:
    tx.move(key, State.OPEN, epoch=epoch - 1, bump=True, why=f"attempt {epoch}")
    tx.replace_participants(key, [Participant("lake", "sink", epoch, vote=True, manifest=MANIFEST)])


def decided(tx: PostgresTransaction, key: Key) -> None:
    tx.lock(key.pipeline)
    tx.move(key, State.COMMITTING, epoch=1, commit_seq=tx.take_commit_seq(key.pipeline), rows=10, bytes=100)


def finished(tx: PostgresTransaction, key: Key) -> None:
    older = tx.committed_revision(key.pipeline, key.checkpoint_id)
    if older:
        tx.move(older.key, State.SUPERSEDED, epoch=older.epoch)
    tx.mark_committed(key, "lake")
    tx.move(key, State.COMMITTED, epoch=1, lease=None)


STEPS: dict[State, list[Callable[[PostgresTransaction, Key], Any]]] = {
    State.OPEN: [opened],
    State.PRECOMMITTED: [opened, lambda tx, key: tx.move(key, State.PRECOMMITTED, epoch=1)],
}

STEPS[State.COMMITTING] = [*STEPS[State.PRECOMMITTED], decided]

STEPS[State.COMMITTED] = [*STEPS[State.COMMITTING], finished]

STEPS[State.SUPERSEDED] = [*STEPS[State.COMMITTED], lambda tx, key: tx.move(key, State.SUPERSEDED, epoch=1)]

STEPS[State.ABORTING] = [opened, lambda tx, key: tx.move(key, State.ABORTING, epoch=1)]

STEPS[State.ABORTED] = [*STEPS[State.ABORTING], lambda tx, key: tx.move(key, State.ABORTED, epoch=1)]


def bring(record: PostgresRecord, key: Key, state: State) -> Key:
    """Take a new revision to a state at epoch 1, a transaction a step."""
    for step in STEPS[state]:
        with record.transaction() as tx:
            step(tx, key)
    return key


def read(record: PostgresRecord, key: Key) -> Revision:
    with record.transaction() as tx:
        return tx.revision(key)


def events(record: PostgresRecord, key: Key) -> list[str]:
    """Return what the events say was done, in order."""
    query = text(
        "SELECT action FROM twophase.event WHERE (pipeline, checkpoint_id, revision) = (:p, :c, :r) ORDER BY id"
    )
    with record.engine.connect() as connection:
        found = connection.execute(query, {"p": key.pipeline, "c": key.checkpoint_id, "r": key.revision})
        return list(found.scalars())


def sql(record: PostgresRecord, statement: str, **values: Any) -> Any:
    with record.engine.begin() as connection:
        found = connection.execute(text(statement), values)
        return found.scalar() if found.returns_rows else None


FILES = (InputFile("a.json", 10, 1), InputFile("b/ü ,\"'{}.json", 2**40, 2**62))
