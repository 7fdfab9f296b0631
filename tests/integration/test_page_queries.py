"""Every query of the pages has an index behind it: a long history costs a page nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sqlalchemy import Connection, text

from benchmarks.filling import fill
from benchmarks.plans import long_reads
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.committer.registry import link
from twophase.core.states import State

CHECKPOINTS = 20_000
#: What every checkpoint of the second pipeline read of the first: of a hundred one was replaced since.
READ = """INSERT INTO twophase.input_revision
    (pipeline, checkpoint_id, revision, source, upstream, upstream_checkpoint_id, upstream_revision)
    SELECT 'after', checkpoint_id, revision, 'words', 'before', checkpoint_id, 1
    FROM twophase.revision WHERE pipeline = 'after' AND state = 'COMMITTED'"""
#: What the database would have noted when those were replaced.
MARK = """UPDATE twophase.revision d SET outdated = true
    WHERE pipeline = 'after' AND EXISTS (SELECT FROM twophase.revision u WHERE u.pipeline = 'before'
        AND u.checkpoint_id = d.checkpoint_id AND u.revision = 1 AND u.state = 'SUPERSEDED')"""
#: A write that was added in the end: it lacks all that is committed.
LATE = f"INSERT INTO twophase.write VALUES ('after', 'late', {CHECKPOINTS + 1}, {CHECKPOINTS + 1})"

Ask = Callable[[Connection], object]


def every_query() -> Iterator[Ask]:
    """Yield what the pages ask, each with parameters of its own."""
    yield queries.dags
    yield lambda c: queries.dags_of(c, "after")
    yield lambda c: queries.pipelines_of(c, "after")
    yield lambda c: queries.overview(c, ["after", "before"])
    yield lambda c: queries.declaration(c, "after")
    yield lambda c: queries.pending(c, "after")
    yield queries.stale
    yield lambda c: queries.unbegun(c, "after")
    yield queries.pipelines
    for state in (None, *State):
        for before in (None, (CHECKPOINTS // 2, 1)):
            yield partial(queries.checkpoints, pipeline="after", state=state, before=before, limit=51)
    for checkpoint_id in (1, CHECKPOINTS // 2, CHECKPOINTS):
        for ask in (queries.show, queries.revisions, queries.pending, queries.stale):
            yield partial(ask, pipeline="after", checkpoint_id=checkpoint_id)


@pytest.mark.usefixtures("home")
def test_no_page_reads_more_than_it_shows_of_a_long_history(dsn: str, record: PostgresRecord) -> None:
    for name in ("before", "after"):
        fill(name, dsn, CHECKPOINTS)
        with record.transaction() as tx:
            link(tx.connection, name, name)
    with record.engine.begin() as connection:
        connection.execute(text(READ))
        connection.execute(text(MARK))
        connection.execute(text(LATE))
    with record.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))

    long = []
    for ask in every_query():

        def action(ask: Ask = ask) -> None:
            with record.engine.connect() as connection:
                ask(connection)

        long += long_reads(record.engine, action)[1]

    assert long == []


@pytest.mark.usefixtures("home")
def test_the_overview_counts_what_is_pending_parked_and_stale(dsn: str, record: PostgresRecord) -> None:
    fill("before", dsn, 300)
    fill("after", dsn, 300)
    with record.engine.begin() as connection:
        connection.execute(text(READ))
        connection.execute(text(MARK))

    with record.engine.connect() as connection:
        found = {row["pipeline"]: row for row in queries.overview(connection, ["after", "before", "nowhere"])}
        stale = {row["checkpoint_id"] for row in queries.stale(connection, "after")}

    assert list(found) == ["after", "before"]
    assert (found["before"]["stale"], found["after"]["stale"]) == (0, len(stale))
    assert len(stale) == 3
    assert [(row["pending"], row["parked"]) for row in found.values()] == [(0, 0), (0, 0)]
