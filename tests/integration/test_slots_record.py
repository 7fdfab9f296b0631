"""The record's side of slots, chains, retention and backfills: each promise on a real server, without any storage."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Connection, event, text

from support.pipelines.factories import PreStaged, land_words, words_pipeline
from twophase import Retention, sources
from twophase.backfill import Backfill, Selection
from twophase.committer import backfills, queries, retention
from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.committer.registry import register
from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Output, Participant, Revision, Run
from twophase.core.claims import Claim
from twophase.core.coordinator import Coordinator
from twophase.core.errors import Busy, ConfigError, IllegalTransition, StoreUnavailable
from twophase.core.ports import Committed, Outcome, Progress, Promotion
from twophase.core.states import State
from twophase.runner import Runner

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


def shown(found: Committed) -> tuple[int, list[tuple[int, int]]]:
    return found.end, [(output.key.checkpoint_id, output.key.revision) for output in found.outputs]


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has pipelines of its own in it."""
    return shared_record


@pytest.fixture
def book(record: PostgresRecord) -> Book:
    return Book(record, f"p_{uuid.uuid4().hex[:12]}")


@pytest.fixture
def reader(book: Book) -> Book:
    """Return a pipeline that reads the other one."""
    reads = {"rows": {"class": "twophase.sources.committed:Committed", "pipeline": book.name, "sink": "lake"}}
    return Book(book.record, f"d_{uuid.uuid4().hex[:12]}", reads)


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Do something in another session meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


def until_waiting(record: PostgresRecord) -> None:
    """Return once some session of this database waits for a lock."""
    query = text("SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                 " WHERE NOT l.granted AND a.datname = current_database()")  # fmt: skip
    with record.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for _ in range(int(PATIENCE / 0.01)):
            if connection.execute(query).scalar_one():
                return
            threading.Event().wait(0.01)
    msg = "nobody waits for a lock"
    raise AssertionError(msg)


# --- what a pipeline committed, as another one reads it ---------------------------------------------------------------


def test_a_range_ends_before_the_lowest_commit_that_is_not_promoted(book: Book) -> None:
    first, waiting, third = book.committed(), book.committing(), book.committed()

    before = book.range(1)
    with book.record.transaction() as tx:
        book.finish(tx, waiting)

    assert before == (2, [(first.checkpoint_id, 1)])
    assert book.range(2) == (4, [(waiting.checkpoint_id, 1), (third.checkpoint_id, 1)])


def test_a_replacement_that_is_not_promoted_ends_the_range_too(book: Book) -> None:
    first = book.committed()
    waiting = book.committing(book.again(first))
    later = book.committed()

    before = book.range(1)
    with book.record.transaction() as tx:
        book.finish(tx, waiting)

    assert before == (2, [(first.checkpoint_id, 1)])
    assert book.range(2) == (4, [(later.checkpoint_id, 1)])


def test_what_is_undecided_or_aborted_is_in_no_range(book: Book) -> None:
    first = book.committed()
    book.aborted(book.add())
    book.precommitted(book.add())
    book.add()

    assert book.range(1) == (2, [(first.checkpoint_id, 1)])


def test_a_replacement_never_enters_a_range_and_its_checkpoint_is_read_as_it_stands(book: Book) -> None:
    first, second = book.committed(), book.committed()
    book.replaced(book.replaced(first))

    assert book.range(1) == (5, [(1, 3), (2, 1)])
    assert book.range(second.checkpoint_id) == (5, [(2, 1)])
    assert book.range(3) == (5, [])


def test_a_checkpoint_that_was_aborted_first_is_in_the_range_of_its_first_commit(book: Book) -> None:
    first = book.aborted(book.add())
    book.committed()
    book.committed(book.again(first))

    assert book.range(1) == (3, [(1, 2), (2, 1)])
    assert book.range(2) == (3, [(1, 2)])


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_a_limit_counts_checkpoints_and_the_next_range_goes_on_where_it_ended(book: Book, limit: int) -> None:
    keys = [book.committed() for _ in range(3)]
    book.replaced(keys[0])
    keys += [book.committed() for _ in range(2)]
    seen: list[tuple[int, int]] = []
    start = 1

    while (found := book.range(start, limit=limit))[1]:
        assert len(found[1]) <= limit
        start = found[0]
        seen += found[1]

    assert sorted(seen) == [(1, 2), (2, 1), (3, 1), (4, 1), (5, 1)]


def test_a_range_that_is_fixed_stays_the_same_whatever_is_committed_later(book: Book) -> None:
    first, second = book.committed(), book.committed()
    end, found = book.range(1)
    book.replaced(first)
    book.committed()

    assert (end, found) == (3, [(1, 1), (2, 1)])
    assert book.range(1, end) == (3, [(1, 2), (second.checkpoint_id, 1)])


def test_a_slot_that_was_adopted_is_read_as_it_stands_from_its_adoption_on(book: Book) -> None:
    slot = book.add("a day")
    book.adopted(slot.checkpoint_id)
    adopted = book.range(1)
    book.committed(slot)

    assert adopted == (2, [(1, 0)])
    assert book.range(1) == (3, [(1, 1)])
    assert book.range(2) == (3, [])


def test_what_a_range_gives_is_held_until_the_reader_is_recorded_so_that_nobody_sweeps_it(
    book: Book, reader: Book
) -> None:
    """A replacement is promoted and retention is over, all while a begin downstream has not ended."""
    old = book.committed()
    new = book.committing(book.again(old))
    mine = reader.add()

    def supersede() -> None:
        with book.record.transaction() as tx:
            book.finish(tx, new)

    with book.record.transaction() as tx:
        _, found = shown(tx.committed_range(book.name, "lake", 1, None, None))
        with elsewhere(supersede) as superseded:
            until_waiting(book.record)
            still = book.read(old).state
            tx.fix_inputs(mine, {"rows": Input(outputs=(Output(old, 1, {}, {}),), upstream={})})
            tx.connection.commit()
            superseded.result(PATIENCE)
    book.age(30)

    assert found == [(1, 1)]
    assert still is State.COMMITTED
    assert book.read(old).state is State.SUPERSEDED
    assert book.expired() == []
    assert not book.swept(old)
    reader.aborted(mine)
    assert book.swept(old)


def test_a_checkpoint_whose_replacement_is_promoted_at_this_moment_is_not_missed(book: Book) -> None:
    """The range waits for the row of the older revision; then it must give the newer one, not neither."""
    old = book.committed()
    new = book.committing(book.again(old))

    with book.record.transaction() as tx:
        book.finish(tx, new)
        with elsewhere(lambda: book.range(1)) as ranged:
            until_waiting(book.record)
            tx.connection.commit()
            found = ranged.result(PATIENCE)

    assert [checkpoint_id for checkpoint_id, _ in found[1]] == [1]


class Position:
    """What a source asks the record, without one."""

    def __init__(self, tx: PostgresTransaction, start: int) -> None:
        self.tx = tx
        self.start = start

    def position(self) -> Mapping[str, int]:
        return {"commit_seq": self.start}

    def fixed(self) -> Mapping[str, tuple[int, int]]:
        return {}

    def new_files(self, found: Any) -> Any:
        raise AssertionError

    def remember(self, before: Any, after: Any) -> None:
        raise AssertionError

    def committed(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> Committed:
        return self.tx.committed_range(pipeline, sink, start, end, limit)


def test_checkpoints_from_before_a_write_was_declared_do_not_stop_those_who_read_it(book: Book) -> None:
    """The first checkpoints have no such output; whoever takes one at a time has to get past them."""
    book.committed(sinks=("copy",))
    book.committed(sinks=("copy",))
    wanted = book.committed()
    source = sources.Committed(book.name, "lake", max_checkpoints=1)
    seen: list[Key] = []
    start = 1
    for _ in range(3):
        with book.record.transaction() as tx:
            fixed = source.fix(None, Position(tx, start))
        seen += [output.key for output in fixed.outputs]
        _, start = fixed.ranges["commit_seq"]

    assert seen == [wanted]


def test_a_checkpoint_that_a_backfill_first_puts_into_a_write_is_read_there_once(book: Book) -> None:
    """The write was declared later; those who read it are past the checkpoint when it is filled in."""
    old = book.committed(sinks=("copy",))
    second = book.committed()
    end, before = book.range(1)
    book.committed(book.again(old))

    assert (end, before) == (3, [(second.checkpoint_id, 1)])
    assert book.range(end) == (4, [(old.checkpoint_id, 2)])


# --- stale -----------------------------------------------------------------------------------------------------------


def stale(book: Book) -> list[tuple[int, int, int, int]]:
    """Return the stale checkpoints of a pipeline: which revision, what it read, what stands now."""
    with book.record.engine.connect() as connection:
        rows = queries.stale(connection, book.name)
    columns = ("checkpoint_id", "revision", "read_revision", "committed_revision")
    return [tuple(row[column] for column in columns) for row in rows]


def test_what_was_made_from_a_replaced_revision_is_stale_until_it_is_made_again(book: Book, reader: Book) -> None:
    old = book.committed()
    first = reader.add()
    reader.reads(first, old)
    reader.committed(first)
    fresh = stale(reader)
    new = book.replaced(old)
    once = stale(reader)
    newest = book.replaced(new)
    twice = stale(reader)
    second = reader.again(first)
    reader.reads(second, newest)
    open_ = stale(reader)

    reader.committed(second)

    assert fresh == []
    assert once == [(1, 1, 1, 2)]
    assert twice == open_ == [(1, 1, 1, 3)]
    assert stale(reader) == []


def test_what_is_not_committed_is_not_stale(book: Book, reader: Book) -> None:
    old = book.committed()
    for end in (reader.aborted, reader.precommitted, reader.committing):
        key = reader.add()
        reader.reads(key, old)
        end(key)
    book.replaced(old)

    assert stale(reader) == []


def test_what_was_made_from_an_adopted_folder_is_stale_once_the_slot_is_committed(book: Book, reader: Book) -> None:
    slot = book.add("a day")
    adopted = book.adopted(slot.checkpoint_id)
    first = reader.add()
    reader.reads(first, adopted)
    reader.committed(first)

    book.committed(slot)

    assert stale(reader) == [(1, 1, 0, 1)]


# --- slots -----------------------------------------------------------------------------------------------------------


class Day:
    """A source that looks for a slot's input anew each time."""

    settles = False
    per_revision = True

    def __init__(self) -> None:
        self.looks = 0

    def claim(self, slot: str) -> Claim | None:
        return None

    def discover(self, slot: str | None = None, known: Known | None = None) -> list[InputFile]:
        self.looks += 1
        return [InputFile(f"{slot}/{self.looks}.json", 1, self.looks)]

    def fix(self, found: list[InputFile], progress: Progress) -> Input:
        return Input(files=tuple(found))

    def written_again(self, fixed: Any) -> list[InputFile]:
        return []

    def settle(self, checkpoint_id: int, files: Any) -> None:
        raise AssertionError


class Nowhere:
    """A sink that keeps nothing."""

    copies = True
    ordered = False

    def objection(self, *, latest: bool) -> str | None:
        return None

    def newest(self, pipeline: str) -> int | None:
        return None

    def markers(self, pipeline: str) -> tuple[tuple[int, int], ...]:
        return ()

    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        return {"replaces": None if older is None else older.key.revision}

    def claim(self, slot: str) -> Claim | None:
        return None

    def prepare(self, slot: str | None = None) -> None:
        """Need nothing."""

    def adopt(self, key: Key, slot: str) -> Output | None:
        return None

    def find(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        return Promotion(Outcome.ALREADY_PROMOTED)

    promote = find

    def discard(self, key: Key, handle: Json) -> None:
        """Keep nothing."""

    def discard_earlier(self, key: Key, attempt: int, handle: Json) -> None:
        """Keep nothing."""


def process(book: Book, run_ended: Callable[[Run | None], bool | None] = lambda _run: None) -> Coordinator:
    """Return a coordinator as one process would have it."""
    sinks, source = {"lake": Nowhere()}, {"day": Day()}
    return Coordinator(
        book.record, book.name, sources=source, sinks=sinks, lease=LEASE, run_ended=run_ended, patience=()
    )


def taken(book: Book, slot: str, run: Run = ME) -> Revision:
    found = process(book).begin(run, slot=slot)
    assert found is not None
    return found


def test_one_slot_has_one_checkpoint_however_many_runs_begin_it_at_once(book: Book) -> None:
    start = threading.Barrier(THREADS)

    def begin(number: int) -> Revision | str:
        coordinator = process(book)
        start.wait(PATIENCE)
        try:
            found = coordinator.begin(Run("dag", f"run_{number}"), slot="a day")
        except Busy as busy:
            return str(busy)
        assert found is not None
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(begin, range(THREADS)))

    won = [result for result in results if isinstance(result, Revision)]
    assert [(one.key, one.slot) for one in won] == [(Key(book.name, 1, 1), "a day")]
    assert all("works on it" in result for result in results if isinstance(result, str))
    assert book.count("checkpoint") == 1
    assert book.count("input_file") == 1


def test_slots_that_begin_at_once_have_numbers_of_their_own_without_holes(book: Book) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda number: taken(book, f"day {number}"), range(THREADS)))

    assert sorted(one.checkpoint_id for one in found) == list(range(1, THREADS + 1))
    assert {one.slot for one in found} == {f"day {number}" for number in range(THREADS)}


def test_replacements_of_one_checkpoint_that_begin_at_once_are_one_revision(book: Book) -> None:
    book.committed(book.add("a day"))

    def replace(number: int) -> Revision | None:
        try:
            return process(book).replace(Run("dag", f"run_{number}"), 1)
        except Busy:
            return None

    with ThreadPoolExecutor(THREADS) as pool:
        found = [one for one in pool.map(replace, range(THREADS)) if one is not None]

    assert [one.key for one in found] == [Key(book.name, 1, 2)]
    assert book.count("revision") == 2


@pytest.mark.parametrize("state", [State.COMMITTING, State.COMMITTED])
def test_a_slot_that_is_decided_is_returned_as_it_is(book: Book, state: State) -> None:
    first = taken(book, "a day")
    (book.committing if state is State.COMMITTING else book.committed)(first.key)
    counts = [book.count(table) for table in ("checkpoint", "revision", "input_file")]

    again = taken(book, "a day", Run("dag", "another"))

    assert (again.key, again.run) == (first.key, ME)
    assert again.state is State.COMMITTED
    assert [book.count(table) for table in ("checkpoint", "revision", "input_file")] == counts


def test_a_slot_whose_replacement_is_under_way_is_still_decided(book: Book) -> None:
    first = taken(book, "a day")
    book.committed(first.key)
    book.again(first.key)

    assert taken(book, "a day", Run("dag", "another")).key == first.key


def test_an_aborted_slot_is_taken_again_under_its_number_with_input_of_its_own(book: Book) -> None:
    first = taken(book, "a day")
    book.aborted(first.key)

    second = taken(book, "a day")

    assert second.key == Key(book.name, 1, 2)
    with book.record.transaction() as tx:
        files = [[file.path for file in tx.inputs(key)["day"].files] for key in (first.key, second.key)]
    assert len(files[0]) == len(files[1]) == 1


def test_a_released_slot_gets_a_new_checkpoint(book: Book) -> None:
    first = taken(book, "a day")
    book.aborted(first.key)
    process(book).release(1, "the day is read elsewhere")
    none = book.newest("a day")

    second = taken(book, "a day")

    assert none is None
    assert second.key == Key(book.name, 2, 1)
    assert book.newest("a day") == (2, 1)


def test_the_database_refuses_a_second_checkpoint_of_a_slot(book: Book) -> None:
    book.add("a day")

    with pytest.raises(IllegalTransition, match="checkpoint_one_per_slot"):
        book.add("a day")


def test_a_decided_slot_is_never_released(book: Book) -> None:
    book.committed(book.add("a day"))
    book.aborted(book.again(Key(book.name, 1, 1)))

    with pytest.raises(IllegalTransition, match="all aborted"):
        process(book).release(1, "by mistake")

    assert book.newest("a day") == (1, 1)


# --- what was there before us ----------------------------------------------------------------------------------------


def test_an_adopted_revision_stands_for_nothing_when_the_slot_is_asked_for(book: Book) -> None:
    """Whoever begins the slot goes on with the first revision of ours, whatever has become of it."""
    first = book.add("a day")
    book.adopted(1)
    found = [book.newest("a day")]
    book.aborted(first)
    found.append(book.newest("a day"))
    second = taken(book, "a day")
    found.append(book.newest("a day"))
    book.committed(second.key)
    found.append(book.newest("a day"))
    book.again(second.key)
    found.append(book.newest("a day"))

    assert found == [(1, 1), (1, 1), (1, 2), (1, 2), (1, 2)]


def test_the_first_commit_of_an_adopted_slot_supersedes_what_was_there(book: Book) -> None:
    first = book.add("a day")
    adopted = book.adopted(1)

    book.committed(first)

    assert [(book.read(key).state, book.read(key).commit_seq) for key in (adopted, first)] == [
        (State.SUPERSEDED, 1),
        (State.COMMITTED, 2),
    ]


def test_an_attempt_in_an_adopted_slot_is_told_what_it_replaces(book: Book) -> None:
    first = taken(book, "a day")
    book.adopted(1)

    attempt = process(book).attempt(first)

    with book.record.transaction() as tx:
        assert [one.handle for one in tx.participants(attempt.key)] == [{"replaces": 0}]


def test_adopting_twice_changes_nothing(book: Book) -> None:
    book.add("a day")
    adopted = book.adopted(1, rows=7)
    tables = ("revision", "participant", "event")
    before = [book.count(table) for table in tables]

    book.adopted(1, rows=8)

    assert [book.count(table) for table in tables] == before
    assert (book.read(adopted).rows, book.read(adopted).commit_seq) == (7, 1)
    assert book.count("committed", "job_id") == 1
    assert book.committed().revision == 1


def test_adopting_at_once_is_adopting_once(book: Book) -> None:
    book.add("a day")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda rows: book.adopted(1, rows=rows), range(THREADS)))

    assert book.count("revision") == 2
    assert book.count("committed", "job_id") == 1
    assert book.read(book.committed(Key(book.name, 1, 1))).commit_seq == 2


@pytest.mark.parametrize("state", [State.COMMITTING, State.COMMITTED])
def test_nothing_is_adopted_once_the_slot_is_decided(book: Book, state: State) -> None:
    """A run that slept since it found the folder has found what the other one promoted."""
    first = book.add("a day")
    (book.committing if state is State.COMMITTING else book.committed)(first)

    adopted = book.adopted(1)

    with pytest.raises(ConfigError, match="is not in the record"):
        book.read(adopted)
    assert book.read(first).state is state


# --- inputs ----------------------------------------------------------------------------------------------------------

NAMES = ("plain.json", 'with "quotes", and commas', "line\nbreak", "tab\t", "ünïcode/日.json", " space ", "\\N")
ODD = tuple(InputFile(name, size, 10**18 + size) for size, name in enumerate(NAMES))


def test_inputs_of_a_revision_come_back_as_they_were_fixed(book: Book, reader: Book) -> None:
    upstream = [book.committed(), book.replaced(book.committed())]
    with reader.record.transaction() as tx:
        tx.lock(reader.name)
        number = tx.add_checkpoint(reader.name, None, {"words": Input(files=ODD), "rows": Input(ranges={"s": (1, 4)})})
        key = tx.add_revision(reader.name, number, "regular", ME, LEASE).key
        outputs = tuple(Output(one, 1, {}, {}) for one in upstream)
        tx.fix_inputs(key, {"rows": Input(ranges={"s": (1, 4)}, outputs=outputs, upstream={})})

    with reader.record.transaction() as tx:
        found = tx.inputs(key)

    assert set(found) == {"words", "rows"}
    assert sorted(found["words"].files) == sorted(ODD)
    assert found["rows"].ranges == {"s": (1, 4)}
    assert [output.key for output in found["rows"].outputs] == upstream
    assert [output.manifest for output in found["rows"].outputs] == [manifest(one) for one in upstream]
    assert found["rows"].upstream == {"sink": DECLARED, "schema": SCHEMA}


def test_each_revision_has_input_of_its_own_beside_what_is_the_checkpoints_for_ever(book: Book) -> None:
    mine, first_day, second_day = (InputFile(name, 1, 1) for name in ("mine", "first", "second"))
    with book.record.transaction() as tx:
        tx.lock(book.name)
        number = tx.add_checkpoint(book.name, "a day", {"landing": Input(files=(mine,)), "day": Input()})
        first = tx.add_revision(book.name, number, "regular", ME, LEASE).key
        tx.fix_inputs(first, {"day": Input(files=(first_day,))})
    book.aborted(first)
    second = book.again(first)
    with book.record.transaction() as tx:
        tx.fix_inputs(second, {"day": Input(files=(first_day, second_day))})

    with book.record.transaction() as tx:
        inputs = [tx.inputs(key) for key in (first, second)]
        claims = tx.claims(book.name, number)
        new = tx.new_files(book.name, "day", [first_day, second_day])

    assert [one["landing"].files for one in inputs] == [(mine,), (mine,)]
    assert [set(one["day"].files) for one in inputs] == [{first_day}, {first_day, second_day}]
    assert claims == {"landing": (1, 1), "day": (0, 0)}
    assert set(new) == {first_day, second_day}


def test_a_revision_reads_a_file_of_its_interval_once(book: Book) -> None:
    key = book.add("a day")
    file = InputFile("x", 1, 1)

    refused = pytest.raises((IllegalTransition, psycopg2.IntegrityError), match="input_file_once")
    with refused, book.record.transaction() as tx:
        tx.fix_inputs(key, {"day": Input(files=(file, file))})

    with book.record.transaction() as tx:
        assert tx.inputs(key) == {}


def test_a_server_that_goes_away_while_files_are_copied_is_a_store_that_is_unavailable(book: Book) -> None:
    """So that the step is run again, as any other is."""
    key = book.add("a day")

    def terminate(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE twophase.revision SET inputs"):
            mine = connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
            with elsewhere(lambda: administer(mine)) as done:
                done.result(PATIENCE)

    def administer(backend: int) -> None:
        with book.record.engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": backend})

    event.listen(book.record.engine, "after_cursor_execute", terminate)
    try:
        with pytest.raises(StoreUnavailable), book.record.transaction() as tx:
            tx.fix_inputs(key, {"day": Input(files=ODD)})
    finally:
        event.remove(book.record.engine, "after_cursor_execute", terminate)


# --- retention -------------------------------------------------------------------------------------------------------


def test_retention_begins_when_a_revision_is_replaced(book: Book) -> None:
    first, second = book.committed(), book.committed()
    book.replaced(first)
    book.age(6)
    book.replaced(second)
    early = book.expired(superseded="7d")
    book.age(1)

    assert early == []
    assert book.expired(superseded="7d") == [first]
    assert book.expired(superseded="1d") == [first, second]


def test_the_last_few_of_each_checkpoint_are_kept(book: Book) -> None:
    first, second = book.committed(), book.committed()
    for _ in range(3):
        with book.record.transaction() as tx:
            standing = tx.committed_revision(book.name, first.checkpoint_id)
        assert standing is not None
        book.replaced(standing.key)
    book.replaced(second)
    book.age(30)

    assert book.expired(keep_last=1) == [Key(book.name, 1, 1), Key(book.name, 1, 2)]
    assert book.expired(keep_last=3) == []
    assert book.expired() == [Key(book.name, 1, number) for number in (1, 2, 3)] + [second]


def test_what_was_swept_does_not_make_others_go_that_are_kept(book: Book) -> None:
    first = book.committed()
    newer = book.replaced(first)
    book.replaced(newer)
    book.age(30)

    assert book.swept(first)

    assert book.expired(keep_last=1) == []


def test_what_stands_or_is_not_decided_is_never_swept(book: Book) -> None:
    standing = book.committed()
    others = [book.committing(), book.precommitted(book.add()), book.add(), book.aborted(book.add())]
    book.age(30)

    assert book.expired() == []
    assert not any(book.swept(key) for key in (standing, *others))


def test_sweeping_is_recorded_once(book: Book) -> None:
    old = book.committed()
    book.replaced(old)

    assert [book.swept(old), book.swept(old)] == [True, False]
    assert book.read(old).swept


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (State.OPEN, True),
        (State.PRECOMMITTED, True),
        (State.COMMITTING, True),
        (State.COMMITTED, False),
        (State.ABORTED, False),
    ],
)
def test_what_somebody_live_reads_is_kept(book: Book, reader: Book, state: State, kept: bool) -> None:
    """Its next attempt, or a restage of what is decided, reads the same again."""
    old = book.committed()
    key = reader.add()
    reader.reads(key, old)
    match state:
        case State.PRECOMMITTED:
            reader.precommitted(key)
        case State.COMMITTING:
            reader.committing(key)
        case State.COMMITTED:
            reader.committed(key)
        case State.ABORTED:
            reader.aborted(key)
    book.replaced(old)
    book.age(30)

    assert book.expired() == ([] if kept else [old])
    assert book.swept(old) is not kept


# --- backfills under way ---------------------------------------------------------------------------------------------

SELECTION = {"checkpoints": [1, 3]}


def started(book: Book, selection: Json = SELECTION) -> backfills.Backfill:
    with book.record.transaction() as tx:
        return backfills.start(tx.connection, book.name, selection, "me", None)


def ended(book: Book, selection: Json = SELECTION) -> None:
    with book.record.transaction() as tx:
        backfills.give_up(tx.connection, book.name, selection)


def test_the_same_backfill_goes_on_until_it_ends(book: Book) -> None:
    first = started(book)
    second = started(book)
    other = started(book, {"checkpoints": [1, 4]})
    ended(book)
    third = started(book)

    assert (first.goes_on, second.goes_on, other.goes_on, third.goes_on) == (False, True, False, False)
    assert second.id == first.id
    assert len({first.id, other.id, third.id}) == 3


def test_a_selection_is_the_same_whatever_the_order_of_its_words(book: Book) -> None:
    first = started(book, {"from": "2026-01-01", "to": "2026-01-02", "every": None})

    assert started(book, {"every": None, "to": "2026-01-02", "from": "2026-01-01"}).id == first.id


def test_the_same_backfill_of_two_pipelines_is_two(book: Book, reader: Book) -> None:
    assert started(book).id != started(reader).id


def test_starting_at_once_is_starting_once(book: Book) -> None:
    start = threading.Barrier(THREADS)

    def one(_: int) -> backfills.Backfill:
        start.wait(PATIENCE)
        return started(book)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(one, range(THREADS)))

    assert book.count("backfill") == 1
    assert len({one.id for one in found}) == 1
    assert sorted(one.goes_on for one in found) == [False] + [True] * (THREADS - 1)


def test_starting_while_the_same_one_ends_starts_a_new_one(book: Book) -> None:
    """The other one ends between the two statements of a start."""
    first = started(book)
    looks: list[str] = []

    def end_first(_connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.lstrip().startswith("SELECT") and "twophase.backfill" in statement and not looks:
            looks.append(statement)
            with elsewhere(lambda: ended(book)) as done:
                done.result(PATIENCE)

    event.listen(book.record.engine, "before_cursor_execute", end_first)
    try:
        second = started(book)
    finally:
        event.remove(book.record.engine, "before_cursor_execute", end_first)

    assert looks
    assert (second.goes_on, second.id == first.id) in {(False, False), (True, True)}


def test_what_one_campaign_decided_is_not_anothers(book: Book) -> None:
    first = book.committed()
    with book.record.transaction() as tx:
        key = tx.add_revision(book.name, 1, "backfill", Run(None, "backfill-1a.77"), LEASE).key
        undecided = tx.decided_in(book.name, 1, "backfill-1a")
    book.committed(key)

    with book.record.transaction() as tx:
        found = {name: tx.decided_in(book.name, 1, name) for name in ("backfill-1a", "backfill-1", "backfill-1a.7")}

    assert undecided is None
    assert {name: one and one.key for name, one in found.items()} == {
        "backfill-1a": key,
        "backfill-1": None,
        "backfill-1a.7": None,
    }
    assert first.revision == 1


def test_a_backfill_that_ends_late_does_not_end_one_that_was_started_since(
    record: PostgresRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    monkeypatch.setenv("TWOPHASE_LEASE", "3")
    pipeline = words_pipeline(f"late_{uuid.uuid4().hex[:8]}")
    land_words(rows=1)
    assert Runner(pipeline, PreStaged(), record=record).run()

    def backfill() -> Backfill:
        return Backfill(record, pipeline.name, Selection(checkpoints=(1, 1)), lambda _: PreStaged())

    one, same = backfill(), backfill()
    assert [done.failed for done in one.run()] == [None]
    one.end()
    newer = backfill()
    assert [done.failed for done in same.run()] == [None]
    same.end()

    assert same.started.id == one.started.id != newer.started.id
    assert backfill().started.id == newer.started.id
