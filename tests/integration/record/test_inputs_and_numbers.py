"""What the record knows of inputs, positions, numbers, and of what is newest or unfinished."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.pipelines.record_steps import FILES, STEPS, again, bring, make, read, sql
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Input, InputFile, Key, Position
from twophase.core.errors import InputChanged
from twophase.core.ports import Move
from twophase.core.states import State

# --- input -----------------------------------------------------------------------------------------------------------


def test_a_fixed_input_comes_back_as_it_was(record: PostgresRecord, pipeline: str) -> None:
    topic = Input(ranges={"0": (5, 9), "1": (0, 0)}, marks={"0": {"epoch": 3}})
    inputs = {"words": Input(files=FILES), "topic": topic, "none": Input()}

    key = make(record, pipeline, inputs=inputs)

    with record.transaction() as tx:
        assert tx.inputs(key) == inputs
        assert tx.ranges(pipeline, key.checkpoint_id)["topic"] == topic


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
            not tx.advance(pipeline, [Move("topic", "0", 5, 9)]),  # the first range is its first position
            not tx.advance(pipeline, [Move("topic", "0", 5, 9)]),
            not tx.advance(pipeline, [Move("topic", "0", 8, 12)]),
            not tx.advance(pipeline, [Move("topic", "0", 9, 12)]),
            not tx.advance(pipeline, [Move("topic", "1", 0, 3)]),
        ]
        found = tx.position(pipeline, "topic")

    assert moved == [True, False, False, True, True]
    assert found == {"0": 12, "1": 3}
    with record.transaction() as tx:
        moves = [Move("topic", "0", 12, 20), Move("topic", "1", 2, 9), Move("topic", "2", 7, 8)]
        moves += [Move("other", "0", 1, 2)]
        assert tx.advance(pipeline, moves) == [moves[1]]
        assert tx.position(pipeline, "topic") == {"0": 20, "1": 3, "2": 8}
    with record.transaction() as tx:
        assert tx.position(pipeline, "other") == {"0": 2}


def test_a_pin_stays_where_it_is_and_a_move_takes_the_mark_along(record: PostgresRecord, pipeline: str) -> None:
    def positions() -> dict[str, Position]:
        with record.transaction() as tx:
            return dict(tx.outlook(pipeline, None).look.positions.get("topic", {}))

    before = positions()
    with record.transaction() as tx:
        tx.pin(pipeline, "topic", {"0": Position(5, {"epoch": 1}), "1": Position(0)})
    pinned = positions()
    with record.transaction() as tx:
        tx.pin(pipeline, "topic", {"0": Position(7, {"epoch": 9}), "1": Position(0, {"epoch": 2})})
    again = positions()
    with record.transaction() as tx:
        assert not tx.advance(pipeline, [Move("topic", "0", 5, 8, {"epoch": 4}), Move("topic", "1", 0, 2)])

    assert before == {}
    assert pinned == {"0": Position(5, {"epoch": 1}), "1": Position(0)}
    assert again == {"0": Position(5, {"epoch": 1}), "1": Position(0, {"epoch": 2})}
    assert positions() == {"0": Position(8, {"epoch": 4}), "1": Position(2)}


def test_of_many_that_advance_from_one_position_one_does(record: PostgresRecord, pipeline: str) -> None:
    start = threading.Barrier(6)

    def advance(number: int) -> bool:
        start.wait()
        with record.transaction() as tx:
            return not tx.advance(pipeline, [Move("topic", "0", 0, number + 1)])

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
