"""What a checkpoint asks of the record: few transactions, few statements, each planned once by a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, event, text

from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.pipelines.record_steps import bring, make
from support.servers.postgres import administer
from twophase.committer.record import PostgresRecord
from twophase.committer.statement import Statement
from twophase.core.errors import StoreUnavailable
from twophase.core.states import State
from twophase.runner import Runner

#: What one checkpoint from one source to one sink may take in a process that has run before, without Spark.
TRANSACTIONS, STATEMENTS = 4, 20


@contextmanager
def watched(engine: Engine, *names: str) -> Iterator[list[str]]:
    """Collect what is sent to the server, by the first word of each statement."""
    said: list[str] = []
    listeners: dict[str, Callable[..., None]] = {
        "begin": lambda _: said.append("BEGIN"),
        "before_cursor_execute": lambda *a: said.append(a[2].split()[0]),
    }
    for name in names:
        event.listen(engine, name, listeners[name])
    yield said
    for name in names:
        event.remove(engine, name, listeners[name])


def test_a_checkpoint_takes_few_transactions_and_statements(home: Path, dsn: str) -> None:
    """No statement is built or planned anew, however many files there are; none is sent beside those counted."""
    with Runner(words_pipeline(), PreStaged(), dsn=dsn) as runner:
        for start in (0, 2):
            land_words(files=2, start=start)
            runner.run()
        land_words(files=50, rows=1, start=100)
        with watched(runner.record.engine, "begin", "before_cursor_execute") as said:
            done = runner.run()

        assert done is not None
        assert done.state is State.COMMITTED
        assert said.count("BEGIN") <= TRANSACTIONS
        assert set(said) == {"BEGIN", "EXECUTE"}
        assert said.count("EXECUTE") <= STATEMENTS


def test_a_look_leaves_no_transaction_and_the_session_as_it_was(record: PostgresRecord, pipeline: str) -> None:
    """It sees what is committed, opens no transaction at the server, and the next user of the session gets one."""
    later = text("SELECT transaction_timestamp() < statement_timestamp()")
    key = bring(record, make(record, pipeline), State.OPEN)

    with record.transaction(reads=True) as look:
        newest = look.outlook(pipeline, None).newest
        assert newest is not None
        assert newest.key == key
        assert look.connection.execute(later).scalar_one() is False

    with record.transaction() as tx:
        tx.connection.execute(later)
        assert tx.connection.execute(later).scalar_one() is True


def test_a_session_that_was_lost_plans_its_statements_again(record: PostgresRecord, dsn: str) -> None:
    """What a session has planned ends with it: the next one does not believe that it knows the names."""
    twice = Statement("SELECT 2 * CAST(:number AS bigint)")
    with record.engine.begin() as connection:
        first = twice(connection, number=21).scalar_one()
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    administer(dsn, f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(StoreUnavailable), record.transaction() as tx:
        twice(tx.connection, number=1)

    with record.engine.begin() as connection:
        second = twice(connection, number=4).scalar_one()

    assert (first, second) == (42, 8)


def test_a_statement_outlives_the_transaction_that_was_rolled_back(record: PostgresRecord) -> None:
    """The session keeps its plans: the next transaction neither misses one nor makes it a second time."""
    one = Statement("SELECT CAST(:value AS text)")
    with record.engine.connect() as connection:
        one(connection, value="a")
        connection.rollback()

        assert one(connection, value="it's :value and 50 %").scalar_one() == "it's :value and 50 %"


def test_a_session_that_forgot_its_statements_says_why_and_goes_on(record: PostgresRecord, pipeline: str) -> None:
    """A pooler changed the session behind a connection, or somebody deallocated: nothing happened, run it again."""
    with record.transaction() as tx:
        tx.lock(pipeline)
        tx.connection.exec_driver_sql("DEALLOCATE ALL")
    refused = pytest.raises(StoreUnavailable, match=r"whole sessions \(pgbouncer: pool_mode = session\)")
    with refused, record.transaction() as tx:
        tx.lock(pipeline)

    with record.transaction() as tx:
        assert tx.lock(pipeline).next_commit_seq == 1


def test_who_waited_for_the_lock_holds_the_revision_as_it_is_then(record: PostgresRecord, pipeline: str) -> None:
    """Pipeline and revision are held in one statement; whoever waits for it sees both as they are after the wait."""
    key = bring(record, make(record, pipeline), State.OPEN)
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'EXECUTE%'")

    def wait() -> tuple[int, State, int]:
        with record.transaction() as tx:
            reach = tx.lock(pipeline, key)
            return reach.next_commit_seq, tx.hold(key).state, tx.hold(key).epoch

    with ThreadPoolExecutor(1) as pool:
        with record.transaction() as tx:
            tx.lock(pipeline)
            waiting = pool.submit(wait)
            with record.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as onlooker:
                while not onlooker.execute(waits).scalar_one():
                    pass
            tx.take_commit_seq(pipeline)
            tx.move(key, State.OPEN, epoch=1, bump=True)
        found = waiting.result()

    assert found == (2, State.OPEN, 2)
