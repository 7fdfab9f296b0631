"""The shipped coordinator and recovery keep every promise under schedules that nobody would think of.

See `support.model.schedules` for what is checked after each step, `memory_record` and `memory_ports` beside it for what
stands in for PostgreSQL, folders and a log.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.model.memory_ports import MemorySink
from support.model.memory_record import MemoryRecord
from support.model.schedules import (
    LABELS,
    LEASE,
    PROLOGUES,
    RETENTION,
    TO_THE_END,
    Action,
    Limits,
    random_schedule,
    replay,
)
from twophase.core.checkpoint import Key, Output, Run
from twophase.core.errors import ConfigError, StoreUnavailable
from twophase.core.ports import Outcome
from twophase.core.states import State

#: What the shipped code is held to.
HELD = Limits()

numbers = st.integers(0, 5)
kinds = st.sampled_from(
    ["script", "failing", "stage", "retry", "commit", "abort", "recover", "sweep", "restage", "backfill"]
)
troubles = st.sampled_from(
    ["kill", "drop", "grow", "end_run", "down", "unknown", "power", "straggle", "destroy", "bring_back"]
)
actions: st.SearchStrategy[Action] = st.one_of(
    st.tuples(st.just("start"), kinds, numbers),
    st.tuples(st.just("upto"), numbers, st.sampled_from(LABELS)),
    st.tuples(st.just("go"), numbers, st.sampled_from([1, 3, 8, 30, TO_THE_END])),
    st.tuples(st.just("tick"), st.sampled_from([LEASE + 1, RETENTION + 1])),
    st.tuples(troubles, numbers),
    st.tuples(st.just("fault"), st.sampled_from(["lose", "fail", "refuse"])),
)


@settings(max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PROLOGUES), st.lists(actions, min_size=5, max_size=30))
def test_any_schedule_keeps_every_promise(prologue: list[Action], schedule: list[Action]) -> None:
    """Whoever is killed, stopped or answered late, each record is visible once and nothing is left over."""
    replay([*prologue, *schedule], HELD)


@pytest.mark.parametrize("block", range(10))
def test_schedules_with_habits_keep_every_promise(block: int) -> None:
    """Schedules that do a few things often get further than those that do everything a little."""
    for seed in range(block * 40, block * 40 + 40):
        replay(random_schedule(seed, HELD), HELD)


@pytest.mark.parametrize("block", range(2))
def test_two_pending_promotions_keep_every_promise(block: int) -> None:
    """Up to two decided checkpoints may wait for a sink; they become visible in order."""
    limits = Limits(max_pending=2)
    for seed in range(block * 40, block * 40 + 40):
        replay(random_schedule(seed, limits), limits)


@pytest.mark.parametrize("block", range(2))
def test_without_an_exchange_every_promise_but_one_is_kept(block: int) -> None:
    """Where two folders cannot change places in one step readers may see a gap, and nothing else changes (R3)."""
    limits = Limits(exchanges=False)
    for seed in range(block * 40, block * 40 + 40):
        replay(random_schedule(seed, limits), limits)


def test_the_same_schedule_gives_the_same_history() -> None:
    """A seed found once can be looked at again."""
    histories = [replay(random_schedule(7, HELD), HELD) for _ in range(2)]

    assert histories[0].log == histories[1].log
    assert histories[0].steps == histories[1].steps


# --- directed schedules ----------------------------------------------------------------------------------------------


def test_restager_killed_before_its_vote_leaves_a_revision_that_can_be_restaged() -> None:
    """What is half restaged is not promoted, blocks nobody for ever, and is restaged again."""
    replay(
        [
            ("start", "script", 0),
            ("upto", 0, "commit.after"),
            ("destroy", 0),
            ("kill", 0),
            ("tick", LEASE + 1),
            ("start", "restage", 0),
            ("upto", 0, "sink.write"),
            ("kill", 0),
        ]
    )


@pytest.mark.parametrize("fault", ["lose", "fail", "refuse"])
@pytest.mark.parametrize("nth", range(45))
def test_lost_reply_anywhere_in_a_run_changes_nothing(nth: int, fault: str) -> None:
    """A transaction that lands without a reply, or not at all, is run again and finds itself done."""
    before: list[Action] = [("upto", 0, "tx.begin")] * nth

    replay([("start", "script", 0), *before, ("fault", fault), ("go", 0, TO_THE_END)])


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(
            [
                ("start", "stage", 0),
                ("go", 0, TO_THE_END),
                ("tick", LEASE + 1),
                ("end_run", 0),
                ("start", "recover", 0),
                ("upto", 0, "abort.before"),
                ("start", "stage", 0),
                ("go", 1, TO_THE_END),
                ("go", 0, TO_THE_END),
            ],
            id="recovery that looked before",
        ),
        pytest.param(
            [
                ("start", "stage", 0),
                ("go", 0, TO_THE_END),
                ("start", "abort", 0),
                ("upto", 0, "abort.before"),
                ("end_run", 0),
                ("start", "script", 0),
                ("upto", 1, "commit.before"),
                ("go", 0, TO_THE_END),
            ],
            id="the run that had it before",
        ),
    ],
)
def test_pre_committed_revision_that_was_taken_over_is_aborted_by_nobody_else(schedule: list[Action]) -> None:
    """Taking over what is pre-committed opens no attempt, so the epoch does not keep an older abort away."""
    replay(schedule)


def test_record_names_the_attempt_that_a_stopped_promoter_made_visible_after_a_restage() -> None:
    """The record adopts what the sink holds, also when it was the promoter's own and no longer the record's."""
    replay(
        [
            ("start", "script", 0),
            ("upto", 0, "commit.after"),
            ("upto", 0, "sink.rename"),
            ("destroy", 0),
            ("start", "restage", 0),
            ("upto", 1, "sink.write"),
            ("bring_back", 0),
            ("go", 0, TO_THE_END),
        ]
    )


def test_open_revision_that_was_taken_over_gets_no_attempt_from_the_run_that_had_it_before() -> None:
    """Taking over what has no attempt yet leaves the epoch at 0, which does not keep the older run away."""
    replay(
        [
            ("start", "script", 0),
            ("upto", 0, "begin.after"),
            ("tick", LEASE + 1),
            ("start", "script", 0),
            ("upto", 1, "begin.after"),
            ("go", 0, TO_THE_END),
        ]
    )


# --- replacement -----------------------------------------------------------------------------------------------------

#: A committed checkpoint, and one that takes its place, just past its commit point.
REPLACING: list[Action] = [
    ("start", "script", 0), ("go", 0, TO_THE_END), ("start", "backfill", 0), ("upto", 0, "commit.after"),
]  # fmt: skip
#: Somebody else finishes it.
FINISHED: list[Action] = [("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, TO_THE_END)]
#: The result is replaced again, and what was replaced first is swept.
REPLACED: list[Action] = [
    ("start", "backfill", 0), ("go", 1, TO_THE_END), ("tick", RETENTION), ("start", "sweep", 0), ("go", 1, TO_THE_END),
]  # fmt: skip
#: Steps of a promoter from the commit point to its end.
STEPS = 75


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("block", range(3))
def test_late_promoter_of_a_replacement_changes_nothing_wherever_it_was_stopped(block: int, exchanges: bool) -> None:
    """It wakes up after another finished its work, a third revision took its place, and the first one was swept."""
    for steps in range(block, STEPS, 3):
        schedule = [*REPLACING, ("go", 0, steps), *FINISHED, *REPLACED, ("go", 0, TO_THE_END)]
        replay(schedule, Limits(exchanges=exchanges))


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("end", [("kill", 0), ("power", 0), ("power", 1), ("fault", "lose")], ids=str)
def test_replacement_that_is_cut_off_anywhere_is_finished_by_whoever_comes_next(end: Action, exchanges: bool) -> None:
    for steps in range(0, STEPS, 2):
        replay([*REPLACING, ("go", 0, steps), end, *FINISHED], Limits(exchanges=exchanges))


def test_two_promoters_of_a_replacement_stopped_anywhere_replace_once() -> None:
    """Neither finds what the other one left half done and takes it for something else."""
    for steps in range(0, 40, 3):
        for other in range(0, 40, 3):
            second: list[Action] = [("tick", LEASE + 1), ("start", "recover", 0), ("go", 1, other)]
            replay([*REPLACING, ("go", 0, steps), *second, ("go", 0, TO_THE_END), ("go", 0, TO_THE_END)])


def test_backfill_of_several_checkpoints_goes_on_beside_the_regular_runs() -> None:
    world = replay(
        [
            *[("start", "script", 0), ("go", 0, TO_THE_END)] * 2,
            ("start", "backfill", 0),
            ("upto", 0, "sink.exchange"),
            ("start", "backfill", 1),
            ("upto", 1, "sink.exchange"),
            ("grow", 0),
            ("start", "script", 0),
            ("go", 2, TO_THE_END),
            ("go", 1, TO_THE_END),
            ("go", 0, TO_THE_END),
            *[("start", "backfill", 1), ("go", 0, TO_THE_END)] * 2,
        ]
    )

    standing = [tuple(r.key)[1:] for r in world.record.revisions().values() if r.state is State.COMMITTED]
    assert standing == [(1, 2), (2, 4), (3, 1)]


def test_what_lost_its_output_in_a_replacement_is_staged_again_while_the_old_revision_stands() -> None:
    replay([*REPLACING, ("destroy", 0), ("kill", 0), ("tick", LEASE + 1), ("start", "restage", 0), ("go", 0, 200)])


def test_restaged_replacement_counts_what_came_back_as_its_own() -> None:
    """The attempt that was lost is promoted after all, by one who read the record before: the record adopts it."""
    replay(
        [
            *REPLACING,
            ("upto", 0, "sink.rename"),
            ("destroy", 0),
            ("start", "restage", 0),
            ("upto", 1, "sink.write"),
            ("bring_back", 0),
            ("go", 0, TO_THE_END),
            ("go", 0, TO_THE_END),
        ]
    )


# --- the stand-ins themselves ----------------------------------------------------------------------------------------


def test_a_transaction_that_fails_leaves_nothing() -> None:
    """All of a transaction happens, or none."""
    record = MemoryRecord()

    with pytest.raises(ConfigError), record.transaction() as tx:
        tx.revision(tx.add_revision("p", 1, "regular", Run(None, "r"), LEASE).key._replace(checkpoint_id=2))

    assert not record.revisions()


def test_a_lost_reply_is_not_a_lost_transaction() -> None:
    """The next commit lands, and says that it did not."""
    record = MemoryRecord()
    record.faults.append("lose")

    with pytest.raises(StoreUnavailable), record.transaction() as tx:
        tx.add_revision("p", 1, "regular", Run(None, "r"), LEASE)

    assert [r.state for r in record.revisions().values()] == [State.OPEN]


def test_a_lease_runs_out_on_the_records_own_clock() -> None:
    """Time passes when it is told to."""
    record = MemoryRecord()
    with record.transaction() as tx:
        revision = tx.add_revision("p", 1, "regular", Run(None, "r"), LEASE)

    record.now += LEASE + 1

    assert revision.leased
    assert not record.revisions()[revision.key].leased


def test_promoting_twice_shows_the_folder_once() -> None:
    """The stand-in for a table of folders is itself idempotent."""
    sink, key = MemorySink(), Key("p", 1, 1)
    output = Output(key, 1, sink.place(key, 1, "t"))
    sink.write(output.handle, "part-0", [("0", 0)])
    output = replace(output, manifest=sink.seal(output))

    outcomes = [sink.promote(output).outcome for _ in range(2)]

    assert outcomes == [Outcome.PROMOTED, Outcome.ALREADY_PROMOTED]
    assert [path for path in sink.folders if path.startswith("visible/")] == ["visible/1"]


def test_replacing_twice_puts_each_older_folder_away_under_its_own_name() -> None:
    sink, older = MemorySink(), None
    for revision in (1, 2, 3):
        key = Key("p", 1, revision)
        output = Output(key, 1, sink.place(key, 1, "t", older=older))
        sink.write(output.handle, "part-0", [("0", revision)])
        older = replace(output, manifest=sink.seal(output))
        assert sink.promote(older).outcome is Outcome.PROMOTED

    assert {path: folder.rows() for path, folder in sink.folders.items()} == {
        "visible/1": [("0", 3)],
        "superseded/1.r1": [("0", 1)],
        "superseded/1.r2": [("0", 2)],
    }
