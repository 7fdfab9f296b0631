"""The record's leases, parked revisions and participants."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from support.pipelines.record_steps import LEASE, ME, bring, events, make, read
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key, Participant, Run
from twophase.core.coordinator import Coordinator
from twophase.core.errors import Fenced, StoreUnavailable
from twophase.core.hindrances import Hindrance
from twophase.core.lease import Lease
from twophase.core.ports import Transaction
from twophase.core.states import State

OTHER = Run("dag", "run_2")


def expire(record: PostgresRecord, key: Key) -> None:
    """Let the lease of a revision have run out."""
    with record.transaction() as tx:
        tx.renew(key, epoch=tx.revision(key).epoch, lease=-1)


# --- one thread renews them -----------------------------------------------------------------------------------------


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that a thread does."""
    pause = threading.Event()
    for _ in range(3000):
        if is_so():
            return
        pause.wait(0.01)
    raise TimeoutError


def leased(record: PostgresRecord, pipeline: str) -> tuple[Coordinator, Key]:
    """Return a coordinator with short leases, and a revision whose lease has run out."""
    key = bring(record, make(record, pipeline), State.OPEN)
    expire(record, key)
    return Coordinator(record, pipeline, sources={}, sinks={}, lease=0.3), key


def test_one_thread_renews_all_leases_of_a_process(record: PostgresRecord, pipeline: str) -> None:
    """A checkpoint starts no thread of its own; the lease of each run lasts as long as it works."""
    one, first = leased(record, pipeline)
    _, second = leased(record, pipeline)
    with Lease(one, read(record, first)), Lease(one, read(record, second)):
        threads = [thread.name for thread in threading.enumerate() if "lease" in thread.name]
        until(lambda: read(record, first).leased and read(record, second).leased)
    until(lambda: not read(record, first).leased and not read(record, second).leased)

    assert threads == ["leases"]


def test_who_is_fenced_is_told_and_the_others_are_renewed_on(record: PostgresRecord, pipeline: str) -> None:
    """What is done about one lost lease, however slow, holds up no other."""
    one, first = leased(record, pipeline)
    _, second = leased(record, pipeline)
    told, goes_on = threading.Event(), threading.Event()

    def slow() -> None:
        told.set()
        goes_on.wait()

    with Lease(one, read(record, first), on_lost=slow) as lost, Lease(one, read(record, second)) as kept:
        with record.transaction() as tx:
            tx.move(first, State.OPEN, epoch=1, bump=True)
        assert told.wait(30)
        expire(record, second)
        until(lambda: read(record, second).leased)
        goes_on.set()

    assert (lost.lost, kept.lost) == (True, False)
    with pytest.raises(Fenced, match=r"expected epoch 1, found 2"):
        lost.check()


def test_a_record_that_is_away_for_a_moment_costs_no_lease(record: PostgresRecord, pipeline: str) -> None:
    """A renewal that fails is tried again at the next beat."""
    one, key = leased(record, pipeline)
    one.record = away = Away(record)
    with Lease(one, read(record, key)) as lease:
        until(lambda: away.asked > 1)
        away.back = True
        until(lambda: read(record, key).leased)

    assert not lease.lost


class Away:
    """A record that does not answer until it is back."""

    def __init__(self, record: PostgresRecord) -> None:
        self.record = record
        self.asked = 0
        self.back = False

    def transaction(self, *, reads: bool = False) -> AbstractContextManager[Transaction]:
        self.asked += 1
        if not self.back:
            raise StoreUnavailable
        return self.record.transaction(reads=reads)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_run_takes_over_what_nobody_holds(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    expire(record, key)

    with record.transaction() as tx:
        tx.take_over(key, epoch=1, run=OTHER, lease=LEASE)

    found = read(record, key)
    assert (found.run, found.leased, found.epoch) == (OTHER, True, 1)
    assert events(record, key)[-1] == "taken over"


def test_a_run_takes_its_own_again_without_ado(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.PRECOMMITTED)
    before = events(record, key)

    with record.transaction() as tx:
        tx.take_over(key, epoch=1, run=ME, lease=LEASE)

    assert read(record, key).run == ME
    assert events(record, key) == before


@pytest.mark.parametrize(("state", "run", "epoch"), [(State.OPEN, OTHER, 1), (State.OPEN, ME, 0), (State.OPEN, ME, 2)])
def test_a_run_cannot_take_what_another_holds_or_what_has_moved_on(
    record: PostgresRecord, pipeline: str, state: State, run: Run, epoch: int
) -> None:
    key = bring(record, make(record, pipeline), state)

    with pytest.raises(Fenced, match=r"run dag/run_1 was faster; nothing was changed"), record.transaction() as tx:
        tx.take_over(key, epoch=epoch, run=run, lease=LEASE)

    assert read(record, key).run == ME


@pytest.mark.parametrize("state", [State.COMMITTING, State.COMMITTED, State.SUPERSEDED, State.ABORTING, State.ABORTED])
def test_only_what_is_undecided_is_taken_over(record: PostgresRecord, pipeline: str, state: State) -> None:
    key = bring(record, make(record, pipeline), state)
    expire(record, key)

    with pytest.raises(Fenced), record.transaction() as tx:
        tx.take_over(key, epoch=1, run=OTHER, lease=LEASE)


def test_of_many_that_take_over_at_once_one_does(record: PostgresRecord, pipeline: str) -> None:
    key = bring(record, make(record, pipeline), State.OPEN)
    expire(record, key)
    start = threading.Barrier(6)

    def adopt(number: int) -> bool:
        start.wait()
        try:
            with record.transaction() as tx:
                tx.take_over(key, epoch=1, run=Run("dag", f"other_{number}"), lease=LEASE)
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
        tx.take_over(key, epoch=1, run=Run(None, ME.run_id), lease=LEASE)


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
