"""Wire a pipeline to its record; the runner, Airflow's tasks and the commands get their coordinator here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from twophase.core.coordinator import Coordinator
from twophase.core.parts import script_run_ended
from twophase.core.settings import lease_seconds

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.core.checkpoint import Run
    from twophase.core.ports import Transaction
    from twophase.pipeline import Pipeline


def load(record: PostgresRecord, name: str) -> Pipeline:
    """Build a pipeline from the record alone."""
    from twophase.committer import queries
    from twophase.pipeline import Pipeline

    with record.engine.connect() as connection:
        return Pipeline.from_declaration(name, queries.declaration(connection, name))


def enter(record: PostgresRecord, pipeline: Pipeline, *, dag_id: str | None = None) -> None:
    """Put a pipeline's declaration in the record, and the DAG that runs it; refuse a change that is not allowed."""
    outputs = {name: sink.location() for name, sink in pipeline.sinks.items()}

    def step(tx: Transaction) -> None:
        tx.register(pipeline.name, pipeline.declaration(), outputs, pipeline.changes)
        if dag_id is not None:
            tx.link(pipeline.name, dag_id)

    coordinator_of(record, pipeline).transact(step)


def coordinator_of(
    record: PostgresRecord,
    pipeline: Pipeline,
    *,
    approvals: Sequence[str] = (),
    run_ended: Callable[[Run | None], str | bool | None] = script_run_ended,
) -> Coordinator:
    """Return the coordinator of one pipeline."""
    return Coordinator(
        record,
        pipeline.name,
        sources=pipeline.reads,
        sinks=pipeline.sinks,
        audits=list(pipeline.voters()),
        approvals=approvals,
        quarantines=pipeline.sinks.keys() - pipeline.writes.keys() - pipeline.states.keys(),
        states=pipeline.states.keys(),
        run_ended=run_ended,
        lease=lease_seconds(),
        max_pending=pipeline.max_pending,
    )
