"""The record moves a revision once, by state and epoch, with one event."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import NamedTuple

import pytest
from sqlalchemy import make_url, text

from support.pipelines.record_steps import LEASE, ME, bring, events, make, read, sql
from support.servers.postgres import administer
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key
from twophase.core.errors import ConfigError, Fenced, IllegalTransition, StoreUnavailable
from twophase.core.states import State


@pytest.mark.parametrize(("usual", "found"), [("off", "on"), ("local", "local")])
def test_a_decision_is_on_disk_before_it_is_acted_on_whatever_is_usual(dsn: str, usual: str, found: str) -> None:
    """A crash of the server must not take back what sinks were told; whoever asks for enough is left alone."""
    administer(dsn, f"ALTER DATABASE {make_url(dsn).database} SET synchronous_commit = {usual}")
    opened = PostgresRecord.open(dsn)

    with opened.engine.connect() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == found
    opened.engine.dispose()


def test_a_move_happens_once_with_one_event(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)

    with record.transaction() as tx:
        first = tx.move(key, State.PRECOMMITTED, epoch=1, why="every vote")
    with record.transaction() as tx:
        second = tx.move(key, State.PRECOMMITTED, epoch=1, why="every vote")

    assert (first, second) == (True, False)
    assert read(record, key).state is State.PRECOMMITTED
    assert events(record, key) == ["begin", "attempt", "precommitted"]


def test_an_event_says_who_when_from_where_to_where_and_why(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)

    with record.transaction() as tx:
        tx.move(key, State.ABORTING, epoch=1, why="x" * 2000)

    with record.engine.connect() as connection:
        last = queries.show(connection, pipeline, 1)["events"][-1]
    assert (last["who"], last["action"], last["from_state"], last["to_state"], last["epoch"]) == (
        ("test", "aborting", "OPEN", "ABORTING", 1)
    )
    assert last["why"] == "x" * 1000
    assert isinstance(last["at"], datetime)


class Wrong(NamedTuple):
    """A move that cannot be, and what is said of it."""

    state: State
    to: State
    epoch: int
    message: str


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(State.OPEN, State.PRECOMMITTED, 2, "open at epoch 2, found open at epoch 1"),
        Wrong(State.OPEN, State.COMMITTING, 1, "precommitted at epoch 1, found open at epoch 1"),
        Wrong(State.ABORTING, State.PRECOMMITTED, 1, "open at epoch 1, found aborting at epoch 1"),
        Wrong(State.COMMITTING, State.ABORTING, 1, "open or precommitted at epoch 1, found committing at epoch 1"),
        Wrong(State.COMMITTED, State.COMMITTED, 0, "committing at epoch 0, found committed at epoch 1"),
        Wrong(State.ABORTED, State.ABORTED, 2, "aborting at epoch 2, found aborted at epoch 1"),
    ],
)
def test_a_move_from_elsewhere_is_fenced_and_says_what_it_found(
    record: PostgresRecord, pipeline: str, wrong: Wrong
) -> None:
    key = bring(record, make(record, pipeline), wrong.state)
    before = events(record, key)

    with pytest.raises(Fenced) as raised, record.transaction() as tx:
        tx.move(key, wrong.to, epoch=wrong.epoch)

    assert str(raised.value) == f"checkpoint {key}: expected {wrong.message}; nothing was changed"
    assert read(record, key).state is wrong.state
    assert events(record, key) == before


def test_a_move_and_its_event_are_rolled_back_together(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    before = events(record, key)

    def move_and_fail() -> None:
        with record.transaction() as tx:
            tx.move(key, State.ABORTING, epoch=1)
            raise LookupError

    with pytest.raises(LookupError):
        move_and_fail()

    assert read(record, key).state is State.OPEN
    assert events(record, key) == before


def test_without_its_event_nothing_moves(record: PostgresRecord, pipeline: str) -> None:
    """An event that cannot be written takes the move with it."""
    key = bring(record, make(record, pipeline), State.OPEN)
    nobody = PostgresRecord(record.engine)
    nobody.who = None  # type: ignore[assignment]

    with pytest.raises(IllegalTransition), nobody.transaction() as tx:
        tx.move(key, State.ABORTING, epoch=1)

    assert read(record, key).state is State.OPEN


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED])
def test_a_bump_opens_the_next_attempt(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)

    with record.transaction() as tx:
        moved = tx.move(key, State.OPEN, epoch=1, bump=True)

    assert moved
    assert (read(record, key).state, read(record, key).epoch) == (State.OPEN, 2)


def test_a_bump_is_not_repeatable_by_epoch_alone(record: PostgresRecord, pipeline: str) -> None:
    """Whoever bumps from the same epoch is another attempt, not the same one again."""
    key = bring(record, make(record, pipeline), State.OPEN)
    with record.transaction() as tx:
        tx.move(key, State.OPEN, epoch=1, bump=True)

    with pytest.raises(Fenced, match="at epoch 1, found open at epoch 2"), record.transaction() as tx:
        tx.move(key, State.OPEN, epoch=1, bump=True)


def test_a_state_does_not_follow_itself_without_a_bump(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    before = events(record, key)

    with record.transaction() as tx:
        moved = tx.move(key, State.OPEN, epoch=1, why="again")

    assert not moved
    assert events(record, key) == before


def test_a_bump_in_committing_keeps_the_decision(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.COMMITTING)
    query = "SELECT decided_at FROM twophase.revision WHERE pipeline = :p"
    before = (sql(record, query, p=pipeline), read(record, key).commit_seq)

    with record.transaction() as tx:
        tx.move(key, State.COMMITTING, epoch=1, bump=True)

    found = read(record, key)
    assert (found.state, found.epoch) == (State.COMMITTING, 2)
    assert (sql(record, query, p=pipeline), found.commit_seq) == before


@pytest.mark.parametrize("state", [State.COMMITTED, State.SUPERSEDED, State.ABORTING, State.ABORTED])
def test_no_bump_where_no_attempt_can_be_opened(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)

    for to in State:
        with pytest.raises((Fenced, IllegalTransition)), record.transaction() as tx:
            tx.move(key, to, epoch=1, bump=True)

    assert (read(record, key).state, read(record, key).epoch) == (state, 1)


def test_a_lease_stands_in_the_way_of_an_unleased_move(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)

    with pytest.raises(Fenced, match="found open at epoch 1 with a lease"), record.transaction() as tx:
        tx.move(key, State.ABORTING, epoch=1, unleased=True)

    assert read(record, key).state is State.OPEN


@pytest.mark.parametrize("lease", [None, -1])
def test_without_a_lease_an_unleased_move_goes_through(
    record: PostgresRecord, pipeline: str, lease: float | None
) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    with record.transaction() as tx:
        tx.renew(key, epoch=1, lease=lease)

    with record.transaction() as tx:
        assert tx.move(key, State.ABORTING, epoch=1, unleased=True)


def test_of_many_that_move_at_once_one_does(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    start = threading.Barrier(6)

    def move(_: int) -> bool:
        start.wait()
        with record.transaction() as tx:
            return tx.move(key, State.PRECOMMITTED, epoch=1)

    with ThreadPoolExecutor(6) as pool:
        moved = list(pool.map(move, range(6)))

    assert sorted(moved) == [False] * 5 + [True]
    assert events(record, key).count("precommitted") == 1


def test_what_is_not_in_the_record_is_named(record: PostgresRecord, pipeline: str) -> None:
    with record.transaction() as tx:
        with pytest.raises(ConfigError, match=f"checkpoint {pipeline}/9 r1: it is not in the record"):
            tx.move(Key(pipeline, 9, 1), State.OPEN, epoch=0)
        with pytest.raises(ConfigError, match="pipeline 'nobody': it is not in the record"):
            tx.lock("nobody")


def test_what_the_database_refuses_is_one_line(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)

    with pytest.raises(IllegalTransition) as raised, record.transaction() as tx:
        tx.add_revision(pipeline, key.checkpoint_id, "regular", ME, LEASE)

    assert str(raised.value).startswith(
        'committer database: duplicate key value violates unique constraint "revision_one_li'
    )
    assert "\n" not in str(raised.value)


def test_a_server_that_goes_away_in_a_transaction_is_unavailable(record: PostgresRecord, pipeline: str) -> None:
    def lose_the_server() -> None:
        with record.transaction() as tx:
            backend = tx.connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            sql(record, "SELECT pg_terminate_backend(:pid)", pid=backend)
            tx.lock(pipeline)

    with pytest.raises(StoreUnavailable, match=r"^committer database: "):
        lose_the_server()

    with record.transaction() as tx:  # the next one gets a connection that works
        tx.lock(pipeline)
