"""Slots in the record: one checkpoint each, adopted or taken, with inputs of each revision's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Connection, event, text

from support.pipelines.record_book import DECLARED, LEASE, ME, PATIENCE, SCHEMA, THREADS, Book, elsewhere, manifest
from twophase.core.checkpoint import Input, InputFile, Json, Key, Known, Output, Position, Revision, Run
from twophase.core.claims import Claim
from twophase.core.coordinator import Coordinator
from twophase.core.errors import Busy, ConfigError, IllegalTransition, StoreUnavailable
from twophase.core.ports import Outcome, Progress, Promotion
from twophase.core.states import State

# --- slots -----------------------------------------------------------------------------------------------------------


class Day:
    """A source that looks for a slot's input anew each time."""

    settles = False
    reports = False
    per_revision = True

    def __init__(self) -> None:
        self.looks = 0

    def claim(self, slot: str) -> Claim | None:
        return None

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> list[InputFile]:
        self.looks += 1
        return [InputFile(f"{slot}/{self.looks}.json", 1, self.looks)]

    def fix(self, found: list[InputFile], progress: Progress) -> Input:
        return Input(files=tuple(found))

    def written_again(self, fixed: Any) -> list[InputFile]:
        return []

    def settle(self, checkpoint_id: int, files: Any) -> None:
        raise AssertionError

    def report(self, offsets: Mapping[str, int]) -> None:
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

    def find(self, output: Output) -> Promotion:
        return Promotion(Outcome.ALREADY_PROMOTED)

    promote = find

    def discard(self, output: Output) -> None:
        """Keep nothing."""

    def discard_earlier(self, output: Output, voted: Output) -> None:
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


@pytest.mark.parametrize("key", ["earlier", "standing"])
def test_a_handle_with_a_key_of_the_record_is_refused(book: Book, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """The record would read it as what a restage noted there."""
    monkeypatch.setattr(Nowhere, "place", lambda *_, **__: {"table": "t", key: 1})
    revision = taken(book, "a day")

    with pytest.raises(ConfigError, match=f"sink 'lake': place.. returned the key '{key}'"):
        process(book).attempt(revision)
