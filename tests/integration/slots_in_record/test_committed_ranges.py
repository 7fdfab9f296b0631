"""What a pipeline committed, as another one reads it: ranges that never miss or repeat, and what is stale."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import text

from support.pipelines.record_book import PATIENCE, Book, elsewhere, shown
from twophase import sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.core.checkpoint import Input, Key, Output
from twophase.core.ports import CommittedRange
from twophase.core.states import State


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

    def pin(self, positions: Any) -> None:
        raise AssertionError

    def new_files(self, found: Any) -> Any:
        raise AssertionError

    def remember(self, before: Any, after: Any) -> None:
        raise AssertionError

    def committed(self, pipeline: str, sink: str, start: int, end: int | None, limit: int | None) -> CommittedRange:
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
