"""What the record lets be swept, and which backfill goes on."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.pipelines.record_book import LEASE, PATIENCE, THREADS, Book, elsewhere
from twophase.backfill import Backfill, Selection
from twophase.committer import backfills
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Json, Key, Run
from twophase.core.states import State
from twophase.runner import Runner

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


def started(book: Book, selection: Json = SELECTION) -> backfills.BackfillRow:
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

    def one(_: int) -> backfills.BackfillRow:
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


def test_what_one_backfill_decided_is_not_anothers(book: Book) -> None:
    """Nor does the name of a run make it one's: the revision says which backfill it is of."""
    first = book.committed()
    with book.record.transaction() as tx:
        key = tx.add_revision(book.name, 1, "backfill", Run(None, "backfill-1.77"), LEASE, backfill="backfill-1a").key
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
