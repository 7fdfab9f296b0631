"""The record in PostgreSQL: each primitive, on a real server."""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

import pytest
from sqlalchemy import make_url, text

from support.servers.postgres import administer
from twophase.committer import queries
from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.committer.registry import register
from twophase.core.checkpoint import Input, InputFile, Key, Output, Participant, Revision, Run
from twophase.core.errors import ConfigError, Fenced, IllegalTransition, InputChanged, StoreUnavailable
from twophase.core.hindrances import Hindrance
from twophase.core.states import State
from twophase.local.record_access import open_record

ME = Run("dag", "run_1")
OTHER = Run("dag", "run_2")
LEASE = 60.0
MANIFEST = {"digest": "0" * 16, "rows": 10, "bytes": 100, "files": 1, "schema": [["id", "bigint"]]}


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def pipeline(record: PostgresRecord) -> str:
    """Return the name of a pipeline that is in the record."""
    name = f"p_{uuid.uuid4().hex[:12]}"
    put(record, name)
    return name


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


def expire(record: PostgresRecord, key: Key) -> None:
    """Let the lease of a revision have run out."""
    with record.transaction() as tx:
        tx.renew(key, epoch=tx.revision(key).epoch, lease=-1)


# --- move ------------------------------------------------------------------------------------------------------------


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


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_run_takes_over_what_nobody_holds(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    expire(record, key)

    with record.transaction() as tx:
        tx.adopt(key, epoch=1, run=OTHER, lease=LEASE)

    found = read(record, key)
    assert (found.run, found.leased, found.epoch) == (OTHER, True, 1)
    assert events(record, key)[-1] == "taken over"


def test_a_run_takes_its_own_again_without_ado(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.PRECOMMITTED)
    before = events(record, key)

    with record.transaction() as tx:
        tx.adopt(key, epoch=1, run=ME, lease=LEASE)

    assert read(record, key).run == ME
    assert events(record, key) == before


@pytest.mark.parametrize(("state", "run", "epoch"), [(State.OPEN, OTHER, 1), (State.OPEN, ME, 0), (State.OPEN, ME, 2)])
def test_a_run_cannot_take_what_another_holds_or_what_has_moved_on(
    record: PostgresRecord, pipeline: str, state: State, run: Run, epoch: int
) -> None:
    key = bring(record, make(record, pipeline), state)

    with pytest.raises(Fenced, match=r"run dag/run_1 was faster; nothing was changed"), record.transaction() as tx:
        tx.adopt(key, epoch=epoch, run=run, lease=LEASE)

    assert read(record, key).run == ME


@pytest.mark.parametrize("state", [State.COMMITTING, State.COMMITTED, State.SUPERSEDED, State.ABORTING, State.ABORTED])
def test_only_what_is_undecided_is_taken_over(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)
    expire(record, key)

    with pytest.raises(Fenced), record.transaction() as tx:
        tx.adopt(key, epoch=1, run=OTHER, lease=LEASE)


def test_of_many_that_take_over_at_once_one_does(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    expire(record, key)
    start = threading.Barrier(6)

    def adopt(number: int) -> bool:
        start.wait()
        try:
            with record.transaction() as tx:
                tx.adopt(key, epoch=1, run=Run("dag", f"other_{number}"), lease=LEASE)
        except Fenced:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(adopt, range(6)))

    assert taken.count(True) == 1
    assert read(record, key).run == Run("dag", f"other_{taken.index(True)}")


def test_a_script_and_a_dag_with_one_run_id_are_two_runs(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)

    with pytest.raises(Fenced), record.transaction() as tx:
        tx.adopt(key, epoch=1, run=Run(None, ME.run_id), lease=LEASE)


def test_a_lease_is_renewed_given_up_and_runs_out_on_the_records_clock(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    left = []

    for lease in (100.0, None, -5.0):
        with record.transaction() as tx:
            tx.renew(key, epoch=1, lease=lease)
        left.append(read(record, key).lease_left)

    assert left[0] is not None
    assert 90 < left[0] <= 100
    assert left[1] is None
    assert left[2] is not None
    assert left[2] <= -5


@pytest.mark.parametrize("state", [State.OPEN, State.COMMITTING, State.COMMITTED, State.ABORTED])
def test_renewing_for_another_epoch_is_fenced(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)

    with pytest.raises(Fenced, match=r"expected epoch 2, found 1; a newer attempt owns it"), record.transaction() as tx:
        tx.renew(key, epoch=2, lease=LEASE)


@pytest.mark.parametrize("state", [State.COMMITTED, State.SUPERSEDED, State.ABORTED])
def test_what_has_ended_needs_no_lease_and_gets_none(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)
    before = read(record, key).lease_left

    with record.transaction() as tx:
        tx.renew(key, epoch=1, lease=1000)

    assert (read(record, key).lease_left is None) == (before is None)
    assert (read(record, key).lease_left or 0) < 100


# --- parked ----------------------------------------------------------------------------------------------------------


def test_parking_twice_for_one_reason_is_one_event(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.COMMITTING)

    for reason in ("lost", "lost", "altered"):
        with record.transaction() as tx:
            tx.park(key, reason, {"lake": Hindrance.LOST})

    assert (read(record, key).parked_reason, read(record, key).hindrances) == ("altered", {"lake": "lost"})
    assert events(record, key).count("parked") == 2


@pytest.mark.parametrize("state", sorted(set(State) - {State.COMMITTING}))
def test_only_what_is_committing_is_parked(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)

    with record.transaction() as tx:
        tx.park(key, "lost", {"lake": Hindrance.LOST})

    assert read(record, key).parked_reason is None
    assert "parked" not in events(record, key)


# --- participants ----------------------------------------------------------------------------------------------------


def test_participants_are_replaced_as_a_whole_or_one_by_one(record: PostgresRecord, pipeline: str) -> None:
    key = make(record, pipeline)
    lake = Participant("lake", "sink", 1, vote=True, handle={"name": "ä"}, manifest={"rows": 2**40}, reason="why")
    audit = Participant("audit", "audit", 1)
    newer = Participant("lake", "sink", 2)

    with record.transaction() as tx:
        tx.replace_participants(key, [lake, Participant("gone", "sink", 1)])
        tx.replace_participants(key, [lake, audit])
        whole = tx.participants(key)
        tx.put_participant(key, newer)
        single = tx.participants(key)

    assert whole == [audit, lake]
    assert single == [audit, newer]


def test_a_sink_is_marked_committed_once(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.COMMITTING)

    with record.transaction() as tx:
        tx.mark_committed(key, "lake")
        tx.mark_committed(key, "lake")
        found = tx.committed(key)

    assert found == {"lake"}


# --- input -----------------------------------------------------------------------------------------------------------

FILES = (InputFile("a.json", 10, 1), InputFile("b/ü ,\"'{}.json", 2**40, 2**62))


def test_a_fixed_input_comes_back_as_it_was(record: PostgresRecord, pipeline: str) -> None:
    inputs = {"words": Input(files=FILES), "topic": Input(ranges={"0": (5, 9), "1": (0, 0)}), "none": Input()}

    key = make(record, pipeline, inputs=inputs)

    with record.transaction() as tx:
        assert tx.inputs(key) == inputs
        assert tx.ranges(pipeline, key.checkpoint_id)["topic"] == {"0": (5, 9), "1": (0, 0)}


def test_claims_count_what_was_fixed_and_what_is_still_owned(record: PostgresRecord, pipeline: str) -> None:
    key = make(record, pipeline, inputs={"words": Input(files=FILES), "topic": Input(ranges={"0": (5, 9)})})
    with record.transaction() as tx:
        before = tx.claims(pipeline, key.checkpoint_id)

    sql(record, "DELETE FROM twophase.input_file WHERE pipeline = :p AND path = 'a.json'", p=pipeline)

    with record.transaction() as tx:
        assert before == {"words": (2, 2)}
        assert tx.claims(pipeline, key.checkpoint_id) == {"words": (2, 1)}


def test_only_files_that_no_checkpoint_owns_are_new(record: PostgresRecord, pipeline: str) -> None:
    make(record, pipeline, inputs={"words": Input(files=FILES)})
    new = InputFile("c.json", 1, 1)

    with record.transaction() as tx:
        assert tx.new_files(pipeline, "words", [*FILES, new]) == [new]
        assert tx.new_files(pipeline, "words", FILES) == []
        assert tx.new_files(pipeline, "words", []) == []
        assert sorted(tx.new_files(pipeline, "other", FILES)) == sorted(FILES)


@pytest.mark.parametrize("changed", [InputFile("a.json", 11, 1), InputFile("a.json", 10, 2), InputFile("a.json", 0, 0)])
def test_a_known_file_that_changed_is_named(record: PostgresRecord, pipeline: str, changed: InputFile) -> None:
    key = make(record, pipeline, inputs={"words": Input(files=FILES)})

    with pytest.raises(InputChanged) as raised, record.transaction() as tx:
        tx.new_files(pipeline, "words", [InputFile("new.json", 1, 1), changed])

    assert str(raised.value).startswith(
        f"checkpoint {pipeline}/{key.checkpoint_id}: source 'words': its file 'a.json' has changed since:"
        f" expected 10 bytes of 1970-01-01 00:00:00.000000001 UTC, found {changed.size} bytes of 1970-01-01 00:00:00.0"
    )


@pytest.mark.parametrize("back", [InputFile("a.json", 10, 1), InputFile("a.json", 77, 7)])
def test_the_name_of_a_file_that_is_gone_is_a_new_file(record: PostgresRecord, pipeline: str, back: InputFile) -> None:
    key = bring(record, make(record, pipeline, inputs={"words": Input(files=FILES)}), State.COMMITTED)

    with record.transaction() as tx:
        tx.settle(pipeline, "words", key.checkpoint_id)
        assert tx.new_files(pipeline, "words", [back]) == [back]
    second = make(record, pipeline, inputs={"words": Input(files=(back,))})

    with record.transaction() as tx:
        assert tx.inputs(key)["words"].files == FILES
        assert tx.inputs(second)["words"].files == (back,)
        assert tx.claims(pipeline, key.checkpoint_id) == {"words": (2, 2)}


def test_files_are_unsettled_from_committed_until_settled(record: PostgresRecord, pipeline: str) -> None:
    one = make(record, pipeline, inputs={"words": Input(files=FILES), "other": Input(files=FILES[:1])})
    seen = []

    for step in STEPS[State.COMMITTED]:
        with record.transaction() as tx:
            seen.append(tx.unsettled(pipeline, "words"))
            step(tx, one)
    two = InputFile("c.json", 1, 1)
    bring(record, make(record, pipeline, inputs={"words": Input(files=(two,))}), State.COMMITTED)
    with record.transaction() as tx:
        both = tx.unsettled(pipeline, "words")
        tx.settle(pipeline, "words", one.checkpoint_id)
        tx.settle(pipeline, "words", one.checkpoint_id)
        rest, other = tx.unsettled(pipeline, "words"), tx.unsettled(pipeline, "other")

    assert seen == [[], [], [], []]
    assert both == [(1, list(FILES)), (2, [two])]
    assert rest == [(2, [two])]
    assert other == [(1, [FILES[0]])]


def test_a_position_moves_only_from_where_it_is(record: PostgresRecord, pipeline: str) -> None:
    with record.transaction() as tx:
        moved = [
            tx.advance(pipeline, "topic", "0", 5, 9),  # the first range of a partition is its first position
            tx.advance(pipeline, "topic", "0", 5, 9),
            tx.advance(pipeline, "topic", "0", 8, 12),
            tx.advance(pipeline, "topic", "0", 9, 12),
            tx.advance(pipeline, "topic", "1", 0, 3),
        ]
        found = tx.position(pipeline, "topic")

    assert moved == [True, False, False, True, True]
    assert found == {"0": 12, "1": 3}
    with record.transaction() as tx:
        assert tx.position(pipeline, "other") == {}


def test_of_many_that_advance_from_one_position_one_does(record: PostgresRecord, pipeline: str) -> None:
    start = threading.Barrier(6)

    def advance(number: int) -> bool:
        start.wait()
        with record.transaction() as tx:
            return tx.advance(pipeline, "topic", "0", 0, number + 1)

    with ThreadPoolExecutor(6) as pool:
        moved = list(pool.map(advance, range(6)))

    assert moved.count(True) == 1
    with record.transaction() as tx:
        assert tx.position(pipeline, "topic") == {"0": moved.index(True) + 1}


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_commit_seqs_have_no_gaps_and_no_doubles_whoever_fails(record: PostgresRecord, pipeline: str) -> None:
    """Every third transaction is rolled back after it took its number."""

    def take(number: int) -> int | None:
        with record.transaction() as tx:
            taken = tx.take_commit_seq(pipeline)
            if number % 3:
                return taken
            tx.connection.rollback()
        return None

    with ThreadPoolExecutor(6) as pool:
        taken = [number for number in pool.map(take, range(30)) if number is not None]

    assert sorted(taken) == list(range(1, 21))


def test_checkpoints_and_revisions_count_from_one(record: PostgresRecord, pipeline: str) -> None:
    one = bring(record, make(record, pipeline), State.ABORTED)
    two = make(record, pipeline)
    again_one = again(record, one)

    assert (one, two, again_one) == (Key(pipeline, 1, 1), Key(pipeline, 2, 1), Key(pipeline, 1, 2))


# --- newest, unfinished ----------------------------------------------------------------------------------------------


def newest(record: PostgresRecord, pipeline: str, slot: str | None = None) -> Key | None:
    with record.transaction() as tx:
        found = tx.newest(pipeline, slot)
    return found.key if found else None


def test_newest_of_nothing_is_none(record: PostgresRecord, pipeline: str) -> None:
    assert newest(record, pipeline) is None


def test_newest_is_the_last_revision_of_the_last_checkpoint(record: PostgresRecord, pipeline: str) -> None:
    bring(record, make(record, pipeline), State.COMMITTED)
    bring(record, make(record, pipeline), State.ABORTED)
    last = again(record, Key(pipeline, 2, 1))

    assert newest(record, pipeline) == last == Key(pipeline, 2, 2)


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED, State.ABORTING, State.ABORTED])
def test_newest_prefers_what_is_decided_to_a_later_replacement(
    record: PostgresRecord, pipeline: str, state: State
) -> None:
    first = bring(record, make(record, pipeline), State.COMMITTED)
    bring(record, again(record, first), state)

    assert newest(record, pipeline) == first


def test_newest_of_a_replaced_checkpoint_is_the_replacement(record: PostgresRecord, pipeline: str) -> None:
    first = bring(record, make(record, pipeline), State.COMMITTED)
    second = bring(record, again(record, first), State.COMMITTED)

    assert newest(record, pipeline) == second
    assert read(record, first).state is State.SUPERSEDED


def test_newest_of_a_released_checkpoint_is_none(record: PostgresRecord, pipeline: str) -> None:
    bring(record, make(record, pipeline), State.COMMITTED)
    bring(record, make(record, pipeline), State.ABORTED)
    sql(
        record,
        "UPDATE twophase.checkpoint SET released_at = now() WHERE pipeline = :p AND checkpoint_id = 2",
        p=pipeline,
    )

    assert newest(record, pipeline) is None


def test_newest_goes_by_slot(record: PostgresRecord, pipeline: str) -> None:
    june = make(record, pipeline, slot="2026-06")
    may = make(record, pipeline, slot="2026-05")
    none = make(record, pipeline)

    assert [newest(record, pipeline, slot) for slot in ("2026-06", "2026-05", "2026-04", None)] == [
        june,
        may,
        None,
        none,
    ]
    assert read(record, may).slot == "2026-05"


def test_unfinished_gives_decided_ones_first_in_commit_order(record: PostgresRecord, pipeline: str) -> None:
    keys = [make(record, pipeline) for _ in range(len(State))]
    for key, state in zip(keys, sorted(set(State) - {State.COMMITTING}), strict=False):
        bring(record, key, state)
    late, early = make(record, pipeline), bring(record, make(record, pipeline), State.COMMITTING)
    bring(record, late, State.COMMITTING)

    with record.transaction() as tx:
        found = tx.unfinished(pipeline)

    assert [revision.key for revision in found[:2]] == [early, late]
    assert {revision.state for revision in found[2:]} == {State.OPEN, State.PRECOMMITTED, State.ABORTING}
    assert [revision.checkpoint_id for revision in found[2:]] == sorted(r.checkpoint_id for r in found[2:])


# --- queries ---------------------------------------------------------------------------------------------------------


def listed(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["checkpoint_id"], row["revision"]) for row in rows]


def test_a_listing_pages_by_key_and_by_state(record: PostgresRecord, pipeline: str) -> None:
    for number in range(1, 8):
        bring(record, make(record, pipeline), State.COMMITTED if number % 2 else State.ABORTED)

    with record.engine.connect() as connection:
        first = queries.checkpoints(connection, pipeline, limit=3)
        second = queries.checkpoints(connection, pipeline, limit=3, before=first[-1]["checkpoint_id"])
        aborted = queries.checkpoints(connection, pipeline, state=State.ABORTED, before=6)

    assert listed(first) == [(7, 1), (6, 1), (5, 1)]
    assert listed(second) == [(4, 1), (3, 1), (2, 1)]
    assert listed(aborted) == [(4, 1), (2, 1)]
    assert tuple(first[0]) == queries.COLUMNS


def test_paging_through_a_listing_shows_every_revision_once(record: PostgresRecord, pipeline: str) -> None:
    first = make(record, pipeline)
    for _ in range(3):
        bring(record, first, State.ABORTED)
        first = again(record, first)
    make(record, pipeline)
    seen: list[tuple[int, int]] = []

    with record.engine.connect() as connection:
        while page := queries.checkpoints(connection, pipeline, limit=2, before=seen[-1] if seen else None):
            seen += listed(page)

    assert seen == [(2, 1), (1, 4), (1, 3), (1, 2), (1, 1)]


def test_show_gives_one_checkpoint_whole(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline, inputs={"words": Input(files=FILES)}), State.COMMITTED)

    with record.engine.connect() as connection:
        found = queries.show(connection, pipeline, key.checkpoint_id)

    assert {name: found[name] for name in ("pipeline", "revision", "state", "epoch", "commit_seq", "rows")} == {
        "pipeline": pipeline,
        "revision": 1,
        "state": "COMMITTED",
        "epoch": 1,
        "commit_seq": 1,
        "rows": 10,
    }
    assert found["inputs"]["words"]["files"] == 2
    assert [file["path"] for file in found["inputs"]["words"]["paths"]] == ["a.json", FILES[1].path]
    assert [(p["name"], p["vote"], p["promoted_at"] is not None) for p in found["participants"]] == [
        ("lake", True, True)
    ]
    assert [event["action"] for event in found["events"]] == [
        "begin",
        "attempt",
        "precommitted",
        "committing",
        "committed",
    ]


def test_show_gives_the_newest_revision_unless_told(record: PostgresRecord, pipeline: str) -> None:
    first = bring(record, make(record, pipeline), State.ABORTED)
    again(record, first)

    with record.engine.connect() as connection:
        assert queries.show(connection, pipeline, 1)["revision"] == 2
        assert queries.show(connection, pipeline, 1, 1)["state"] == "ABORTED"
        with pytest.raises(ConfigError, match=f"checkpoint {pipeline}/1 r3: it is not in the record"):
            queries.show(connection, pipeline, 1, 3)
        with pytest.raises(
            ConfigError, match=f"checkpoint {pipeline}/2: it is not in the record; `twophase checkpoints"
        ):
            queries.show(connection, pipeline, 2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda connection: queries.checkpoints(connection, "nobody"),
        lambda connection: queries.show(connection, "nobody", 1),
        lambda connection: queries.declaration(connection, "nobody"),
    ],
)
def test_a_pipeline_that_is_not_in_the_record_is_named(record: PostgresRecord, ask: Callable[[Any], Any]) -> None:
    with record.engine.connect() as connection, pytest.raises(ConfigError, match="pipeline 'nobody': it is not in"):
        ask(connection)


def test_the_list_of_pipelines_says_what_was_last_and_what_is_pending(record: PostgresRecord, pipeline: str) -> None:
    bring(record, make(record, pipeline), State.COMMITTED)
    bring(record, make(record, pipeline), State.COMMITTING)
    make(record, pipeline)

    with record.engine.connect() as connection:
        found = next(row for row in queries.pipelines(connection) if row["pipeline"] == pipeline)
        assert pipeline in queries.names(connection)

    assert (found["last_checkpoint"], found["last_commit_seq"], found["pending"]) == (1, 1, 2)


def held(record: PostgresRecord, pipeline: str, as_of: datetime | int | None = None) -> list[tuple[int, int, int]]:
    """Return what the sink held: checkpoint, revision, commit_seq."""
    found = queries.promoted(record.engine, pipeline, "lake", as_of)
    return [(*p.output.key[1:], p.commit_seq) for p in found]


def test_as_of_gives_what_was_committed_then_replaced_revisions_included(record: PostgresRecord, pipeline: str) -> None:
    """Checkpoint 1 is replaced twice, checkpoint 3 is decided and not promoted; by time and by commit_seq."""
    times = [sql(record, "SELECT clock_timestamp()")]
    one = make(record, pipeline)
    for key in (one, lambda: make(record, pipeline), lambda: again(record, one), lambda: again(record, one)):
        bring(record, key if isinstance(key, Key) else key(), State.COMMITTED)
        times.append(sql(record, "SELECT clock_timestamp()"))
    bring(record, make(record, pipeline), State.COMMITTING)
    expected = [
        [],
        [(1, 1, 1)],
        [(1, 1, 1), (2, 1, 2)],
        [(2, 1, 2), (1, 2, 3)],
        [(2, 1, 2), (1, 3, 4)],
    ]

    assert [held(record, pipeline, seq) for seq in range(5)] == expected
    assert [held(record, pipeline, time) for time in times] == expected
    assert held(record, pipeline, 5) == held(record, pipeline) == expected[-1]


def test_as_of_the_very_moment_of_a_replacement_is_the_new_one(record: PostgresRecord, pipeline: str) -> None:
    first = bring(record, make(record, pipeline), State.COMMITTED)
    second = bring(record, again(record, first), State.COMMITTED)
    moment = read(record, second).committed_at

    assert held(record, pipeline, moment) == [(1, 2, 2)]


def test_what_was_promoted_carries_the_attempt_and_its_manifest(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.COMMITTED)

    found = list(queries.promoted(record.engine, pipeline, "lake"))

    assert found == [queries.Promoted(Output(key, 1, {}, MANIFEST), 1, None)]
    assert held(record, pipeline) == [(1, 1, 1)]


def test_the_last_schema_is_the_one_of_the_last_decision(record: PostgresRecord, pipeline: str) -> None:
    key = make(record, pipeline)
    found = []

    for step in STEPS[State.COMMITTED]:
        with record.transaction() as tx:
            found.append(queries.last_schema(tx.connection, pipeline, "lake"))
            step(tx, key)
    with record.transaction() as tx:
        found.append(queries.last_schema(tx.connection, pipeline, "lake"))
        other = queries.last_schema(tx.connection, pipeline, "dwh")

    assert found == [None, None, None, MANIFEST["schema"], MANIFEST["schema"]]
    assert other is None


# --- who writes where ------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> str:
    """Return a location that no other test uses."""
    return f"/lake/{uuid.uuid4().hex}"


def fresh() -> str:
    return f"p_{uuid.uuid4().hex[:12]}"


def owner(record: PostgresRecord, location: str) -> str | None:
    found: str | None = sql(record, "SELECT pipeline FROM twophase.output WHERE location = :l", l=location)
    return found


def test_registering_again_changes_nothing(record: PostgresRecord, place: str) -> None:
    name = fresh()
    query = "SELECT updated_at FROM twophase.pipeline WHERE name = :n"

    put(record, name, {"lake": place}, {"a": 1})
    before = sql(record, query, n=name)
    put(record, name, {"lake": place}, {"a": 1})

    assert sql(record, query, n=name) == before
    assert owner(record, place) == name


@pytest.mark.parametrize("suffix", ["", "/inside", "/deeper/inside", ".twophase", ".twophase/staging"])
def test_two_pipelines_cannot_share_a_table(record: PostgresRecord, place: str, suffix: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": place})

    with pytest.raises(ConfigError, match=rf"belongs to pipeline '{first}' \(write 'lake'\); two cannot share a table"):
        put(record, second, {"out": place + suffix})

    with record.engine.connect() as connection:
        assert second not in queries.names(connection)


def test_a_table_cannot_be_put_around_another(record: PostgresRecord, place: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": f"{place}/deeper/inside"})

    with pytest.raises(ConfigError, match=f"but {place}/deeper/inside belongs to pipeline '{first}'"):
        put(record, second, {"out": place})


@pytest.mark.parametrize("sibling", ["_2", "%", "2/inside", ".archive"])
def test_a_table_beside_another_is_fine(record: PostgresRecord, place: str, sibling: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": place})

    put(record, second, {"out": place + sibling})

    assert owner(record, place + sibling) == second


def test_a_sign_with_a_meaning_in_patterns_is_only_a_sign(record: PostgresRecord, place: str) -> None:
    put(record, fresh(), {"lake": f"{place}/aXb/inside"})
    name = fresh()

    put(record, name, {"out": f"{place}/a_b"})

    assert owner(record, f"{place}/a_b") == name


def test_a_moved_path_frees_the_old_one(record: PostgresRecord, place: str) -> None:
    first, second = fresh(), fresh()
    put(record, first, {"lake": place}, {"path": place})

    put(record, first, {"lake": f"{place}_moved"}, {"path": f"{place}_moved"})
    put(record, second, {"out": place})

    assert (owner(record, place), owner(record, f"{place}_moved")) == (second, first)


def test_a_write_keeps_its_name_once_there_is_a_checkpoint(record: PostgresRecord, place: str) -> None:
    """By the name the record knows what is in the table, and what another revision replaces there."""
    name = fresh()
    put(record, name, {"lake": place})
    put(record, name, {"words": place})
    make(record, name)

    with pytest.raises(ConfigError, match=f"write 'table' goes to {place}, which is that of write 'words'"):
        put(record, name, {"table": place})

    put(record, name, {"words": place, "table": f"{place}_2"})
    assert owner(record, f"{place}_2") == name


def test_incompatible_changes_are_refused_once_there_is_a_checkpoint(record: PostgresRecord, place: str) -> None:
    name = fresh()
    put(record, name, {"lake": place}, {"a": 1})
    put(record, name, {"lake": place}, {"a": 2}, lambda _old, _pending: ["never asked"])
    make(record, name)

    with pytest.raises(ConfigError) as raised:
        put(
            record, name, {"lake": f"{place}_moved"}, {"a": 3}, lambda old, pending: [f"a was {old['a']}", str(pending)]
        )

    assert str(raised.value) == (
        f"pipeline {name!r}: its declaration changed incompatibly since checkpoint 1: a was 2; True;"
        " put it back, or give the pipeline a new name"
    )
    assert owner(record, place) == name
    with record.engine.connect() as connection:
        assert queries.declaration(connection, name) == {"a": 2}


@pytest.mark.parametrize("state", State)
def test_changes_are_asked_with_whether_a_checkpoint_is_pending(record: PostgresRecord, state: State) -> None:
    name = fresh()
    put(record, name, {}, {"a": 1})
    bring(record, make(record, name), state)
    asked: list[bool] = []

    def changes(_: Any, pending: bool) -> list[str]:
        asked.append(pending)
        return []

    put(record, name, {}, {"a": 2}, changes)

    assert asked == [state not in {State.COMMITTED, State.SUPERSEDED, State.ABORTED}]
    with record.engine.connect() as connection:
        assert queries.declaration(connection, name) == {"a": 2}


def test_of_many_that_register_one_location_at_once_one_wins(record: PostgresRecord, place: str) -> None:
    """One inside another counts as the same: no unique index could tell."""
    start = threading.Barrier(6)
    candidates = {fresh(): place + "/inside" * (number % 2) for number in range(6)}

    def enter(name: str) -> str | None:
        start.wait()
        try:
            put(record, name, {"out": candidates[name]})
        except ConfigError:
            return None
        return name

    with ThreadPoolExecutor(6) as pool:
        won = [name for name in pool.map(enter, candidates) if name]

    assert len(won) == 1
    assert owner(record, candidates[won[0]]) == won[0]
    with record.engine.connect() as connection:
        assert set(candidates) & set(queries.names(connection)) == set(won)


def test_one_pipeline_may_be_registered_by_many_at_once(record: PostgresRecord, place: str) -> None:
    name = fresh()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: put(record, name, {"out": place}, {"a": 1}), range(6)))

    assert owner(record, place) == name


# --- a wrong DSN -----------------------------------------------------------------------------------------------------

SECRET = "hunter2"


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def complaint(dsn: str) -> str:
    """Return what opening the record complains of."""
    with pytest.raises(ConfigError) as raised:
        open_record(dsn)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    return str(raised.value)


def test_a_wrong_password_is_one_line_without_it(server: str) -> None:
    said = complaint(make_url(server).set(password=SECRET).render_as_string(hide_password=False))

    assert "password authentication failed" in said
    assert ":***@" in said
    assert SECRET not in said
    assert "\n" not in said


def test_a_closed_port_is_one_line_without_the_password(server: str) -> None:
    wrong = make_url(server).set(password=SECRET, port=closed_port())

    said = complaint(wrong.render_as_string(hide_password=False))

    assert "Connection refused" in said
    assert SECRET not in said
    assert "\n" not in said


def test_a_missing_database_is_one_line_without_the_password(server: str) -> None:
    password = make_url(server).password or ""

    said = complaint(make_url(server).set(database="no_such").render_as_string(hide_password=False))

    assert 'database "no_such" does not exist' in said
    assert password not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "garbage",
    [
        SECRET,
        f"not a dsn {SECRET}",
        f"postgresql://ann:{SECRET}@h:port/db",
        f"postgresql://ann:{SECRET}@[h/db",
        f"mysql://ann:{SECRET}@h/db",
        f"postgresql://ann:{SECRET}@127.0.0.1:99999/db",
        f"postgresql://ann:{SECRET}@127.0.0.1:1/db?nonsense=1",
        f"postgresql://ann:{SECRET}%00@127.0.0.1:1/db",
    ],
)
def test_garbage_is_one_line_without_the_password(garbage: str) -> None:
    said = complaint(garbage)

    assert SECRET not in said
    assert "\n" not in said
