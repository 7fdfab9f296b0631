"""Which DAGs run a pipeline: what the pages go by when they show only what somebody may read."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text

from twophase.committer import tables as t
from twophase.committer.record import PostgresRecord
from twophase.committer.registry import link, register
from twophase.core.errors import IllegalTransition


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def pipeline(record: PostgresRecord) -> str:
    """Return the name of a pipeline that is in the record."""
    name = f"p_{uuid.uuid4().hex[:12]}"
    with record.transaction() as tx:
        register(tx.connection, name, {}, {}, lambda _old, _pending: [])
    return name


def join(record: PostgresRecord, pipeline: str, dag_id: str) -> None:
    with record.transaction() as tx:
        link(tx.connection, pipeline, dag_id)


def dags(record: PostgresRecord, pipeline: str) -> list[str]:
    with record.engine.connect() as connection:
        d = t.pipeline_dag.c
        return list(connection.execute(select(d.dag_id).where(d.pipeline == pipeline).order_by(d.dag_id)).scalars())


def test_linking_twice_changes_nothing(record: PostgresRecord, pipeline: str) -> None:
    for _ in range(2):
        join(record, pipeline, "nightly")

    assert dags(record, pipeline) == ["nightly"]


def test_a_pipeline_may_run_in_several_dags(record: PostgresRecord, pipeline: str) -> None:
    for dag_id in (pipeline, f"{pipeline}__replay", "somebody.elses"):
        join(record, pipeline, dag_id)

    assert dags(record, pipeline) == sorted([pipeline, f"{pipeline}__replay", "somebody.elses"])


def test_many_that_link_at_once_make_one_link(record: PostgresRecord, pipeline: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: join(record, pipeline, "nightly"), range(16)))

    assert dags(record, pipeline) == ["nightly"]


def test_a_link_that_is_there_waits_for_nobody(record: PostgresRecord, pipeline: str) -> None:
    """A run links its pipeline each time: it must not queue behind one that holds the pipeline's row."""
    join(record, pipeline, "nightly")

    with record.transaction() as holding:
        holding.lock(pipeline)
        with record.transaction() as tx:
            tx.connection.execute(text("SET LOCAL lock_timeout = '100ms'"))
            link(tx.connection, pipeline, "nightly")


def test_a_pipeline_that_is_not_in_the_record_cannot_be_linked(record: PostgresRecord) -> None:
    with pytest.raises(IllegalTransition, match="pipeline_dag_pipeline_fkey"):
        join(record, "nowhere", "nightly")
