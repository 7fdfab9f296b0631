"""The write-ahead sink: nothing is sent before the commit point, nothing is lost after it, and nothing overtakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.pipelines.factories import PreStaged, Row, visible, words_pipeline
from support.sinks import senders
from support.sinks.write_ahead_bench import HTTP, Bench, staged_output
from twophase import sinks
from twophase.committers import CheckpointCommitter
from twophase.core import failpoints
from twophase.core.errors import PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome
from twophase.core.states import State
from twophase.runner import Runner
from twophase.sinks.write_ahead import delivery

# --- what is sent, and when ------------------------------------------------------------------------------------------


def test_nothing_is_sent_before_the_commit_point(bench: Bench) -> None:
    bench.decided(at="commit.before")

    assert bench.sent() == []
    assert bench.state(1) is State.OPEN


def test_every_subtask_is_sent_once_in_order_with_its_checkpoint_and_time(
    bench: Bench, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer)

    done = bench.run(files=3, rows=7)

    assert done.state is State.COMMITTED
    assert bench.sent() == [(1, row) for row in (0, 3, 6, 1, 4, 2, 5)]
    assert done.created_at is not None
    assert {said["at"] for said in senders.received(bench.received)} == {done.created_at.isoformat()}
    assert (bench.home / "closed").read_text() == "closed\n"


def test_rows_are_not_held_in_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the rows take about the same memory: a batch, and a page of each column."""
    held: list[int] = []
    give = delivery.CountedRows.__next__

    def look(given: delivery.CountedRows) -> Row:
        held.append(pa.total_allocated_bytes())
        return give(given)

    monkeypatch.setattr(delivery.CountedRows, "__next__", look)
    peaks = []
    for checkpoint_id, count in enumerate((100_000, 400_000), 1):
        bench.declare(sender="support.sinks.senders:Careless", arguments={"returns": True, "takes": count})
        bench.sink.prepare()
        rows = [{"id": number, "word": f"word number {number} of many", "frequency": 1} for number in range(count)]
        output = staged_output(bench, checkpoint_id, rows, files=1)
        held.clear()
        before = pa.total_allocated_bytes()
        assert bench.sink.promote(output).outcome is Outcome.PROMOTED
        assert len(held) == count
        peaks.append(max(held) - before)

    assert peaks[1] < 2 * peaks[0]


def test_a_subtask_without_rows_is_committed_without_a_call(bench: Bench) -> None:
    bench.declare(sender="support.sinks.senders:Careless", arguments={"returns": False})

    done = bench.run(files=1, rows=0)

    assert done.state is State.COMMITTED


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"returns": None}, r"Careless\.send_values returned None, expected True or False"),
        ({"returns": True, "takes": 1}, r"returned True and has taken 1 of 2 rows; expected all of them"),
        ({"returns": False, "takes": 2}, r"subtask 0: Careless\.send_values returned False: not now"),
        ({"returns": True, "takes": 3}, r"Careless\.send_values raised StopIteration"),
    ],
)
def test_a_sender_is_believed_only_when_it_says_true_and_took_every_row(
    bench: Bench, arguments: dict[str, Any], reason: str
) -> None:
    bench.declare(sender="support.sinks.senders:Careless", arguments=arguments)

    with pytest.raises(PromotionPending, match=reason):
        bench.run()

    assert bench.state(1) is State.COMMITTING


def test_a_sender_that_cannot_be_built_any_more_is_asked_for_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.decided()

    with monkeypatch.context() as broken:
        broken.delattr(senders, "Appending")
        promotion = bench.promote(1)

    assert promotion.outcome is Outcome.RETRY_LATER
    assert "the sender could not be built: import path 'support.sinks.senders:Appending'" in (promotion.reason or "")
    assert bench.promote(1).outcome is Outcome.PROMOTED


# --- not now ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["1", "1 connection refused"])
def test_a_system_that_is_down_leaves_the_checkpoint_decided_and_says_why(
    bench: Bench, how: str, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer)
    bench.down(how)

    waiting = bench.pending()

    assert bench.state(1) is State.COMMITTING
    why = "raised ConnectionError: connection refused" if " " in how else "returned False: not now"
    assert f"out: subtask 0: Appending.send_values {why}" in str(waiting)
    assert bench.find(1).outcome is Outcome.RETRY_LATER
    assert "2 of 2 subtasks to be sent" in (bench.find(1).reason or "")


def test_later_checkpoints_queue_behind_it_and_the_next_success_sends_all_in_order(bench: Bench) -> None:
    bench.declare(max_pending=3)
    bench.down("0")
    for _ in range(3):
        bench.pending()
    bench.down(None)

    bench.run()

    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert bench.ids() == list(range(16))
    assert {bench.state(number) for number in (1, 2, 3, 4)} == {State.COMMITTED}


def test_no_more_than_max_pending_are_decided(bench: Bench) -> None:
    bench.declare(max_pending=1)
    bench.down("0")
    bench.pending()

    bench.pending()

    assert [bench.state(number) for number in (1, 2)] == [State.COMMITTING, State.PRECOMMITTED]


def test_a_promotion_that_was_cut_short_goes_on_after_the_subtasks_that_arrived(
    bench: Bench, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer)
    failpoints.configure("send.before=raise@2")
    bench.pending()
    failpoints.configure("")
    assert "1 of 2 subtasks to be sent" in (bench.find(1).reason or "")

    bench.recover()

    assert bench.sent() == [(1, row) for row in (0, 2, 1, 3)]


def test_a_system_that_is_down_delays_no_other_sink(bench: Bench) -> None:
    bench.pipeline = words_pipeline(writes={"out": bench.sink, "lake": sinks.Files("lake/words")}, max_files=1)
    bench.down("0")

    bench.pending()

    assert sorted(row["id"] for row in visible("lake/words")) == [0, 1, 2, 3]
    with bench.record.transaction() as tx:
        assert tx.committed(bench.key(1)) == {"lake"}
    bench.down(None)
    bench.recover()
    assert bench.ids() == [0, 1, 2, 3]
    assert bench.state(1) is State.COMMITTED


# --- Flink's write-ahead cases ---------------------------------------------------------------------------------------


def test_rows_persist_when_a_notification_is_missed_and_go_with_the_next(bench: Bench) -> None:
    bench.decided()
    assert bench.sent() == []

    bench.run()

    assert bench.sent() == [(1, 0), (1, 2), (1, 1), (1, 3), (2, 4), (2, 6), (2, 5), (2, 7)]


@pytest.mark.parametrize("at", ["vote.checked", "stage.after"])
def test_work_that_was_never_decided_is_discarded_on_restore(bench: Bench, at: str) -> None:
    """The script's own abort does it at once; its rows are sent by the next take of the same input, once."""
    bench.run()
    failpoints.configure(f"{at}=raise")
    with pytest.raises(FailpointError):
        bench.run()
    failpoints.configure("")

    assert bench.state(2) is State.ABORTED
    assert not list(Path(f"{bench.sink.location()}.twophase/staging").glob("00000002.r1*"))
    assert bench.ids() == [0, 1, 2, 3]
    bench.run()
    assert bench.ids() == list(range(8))


def test_a_committer_that_fails_loses_nothing_and_nothing_overtakes(bench: Bench) -> None:
    """The original has 43 of 33 values here: what was sent and not committed is sent again. So has this without ids."""
    own = senders.Sqlite(path=str(bench.home / "own.db"))
    bench.declare(committer=own, max_pending=5)
    bench.run(files=1, rows=10)
    (bench.home / "broken").touch()
    with pytest.raises(PromotionPending, match="ConnectionError: the committer is broken"):
        bench.run(files=1, rows=10)
    with pytest.raises(PromotionPending):
        bench.run(files=1, rows=5)
    assert 3 not in dict(bench.sent())
    (bench.home / "broken").unlink()

    bench.run(files=1, rows=8)

    order = [checkpoint for checkpoint, _ in bench.sent()]
    assert order == sorted(order)
    assert set(bench.ids()) == set(range(33))
    assert len(bench.ids()) > 33


def test_a_committer_that_fails_leads_to_exactly_33_of_33_values_where_the_marker_is_with_the_data(
    bench: Bench, service: tuple[senders.Service, str]
) -> None:
    kept, url = service
    own = senders.Sqlite(path=str(bench.home / "own.db"))
    bench.declare(sender=HTTP, arguments={"url": url, "batch": 3}, committer=own, idempotent=True, max_pending=5)
    bench.run(files=2, rows=10)
    (bench.home / "broken").touch()
    with pytest.raises(PromotionPending):
        bench.run(files=2, rows=10)
    with pytest.raises(PromotionPending):
        bench.run(files=2, rows=5)
    (bench.home / "broken").unlink()

    bench.run(files=2, rows=8)

    assert sorted(row["id"] for row in kept.rows()) == list(range(33))
    bounds = [row["id"] for row in kept.rows()]
    assert all(max(bounds[:end]) < min(bounds[end:]) for end in (10, 20, 25))


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)], ids=["fewer", "more"])
def test_fewer_or_more_subtasks_after_a_restart_commit_each_pending_one_once(
    bench: Bench, before: int, after: int, committer: CheckpointCommitter
) -> None:
    bench.declare(committer=committer, max_pending=3)
    bench.decided(files=before)

    bench.run(files=after)

    assert bench.ids() == list(range(8))
    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4
    output = bench.output(1)
    with committer.of("words", "out") as asked:
        assert [asked.is_committed(number, 1, 1) for number in range(5)] == [number < before for number in range(5)]
    assert output.manifest["files"] == before


# --- Flink's two-phase cases -----------------------------------------------------------------------------------------


def test_a_notification_of_2_before_1_sends_1_first(bench: Bench) -> None:
    bench.declare(max_pending=2)
    bench.down("0")
    bench.pending()
    bench.pending()
    bench.down(None)

    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        runner.coordinator.finish(bench.key(2))

    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4
    assert {bench.state(1), bench.state(2)} == {State.COMMITTED}


def test_a_crash_before_the_notification_is_rolled_forward_from_the_record_alone(bench: Bench) -> None:
    bench.decided()

    bench.recover()

    assert bench.state(1) is State.COMMITTED
    assert bench.ids() == [0, 1, 2, 3]


def test_recovered_work_is_committed_again_harmlessly(bench: Bench, committer: CheckpointCommitter) -> None:
    """All was sent, and the process died before it could say so."""
    bench.declare(committer=committer)
    bench.decided(at="promote.inside")
    assert bench.find(1).outcome is Outcome.ALREADY_PROMOTED

    bench.recover()
    again = bench.promote(1)

    assert again.outcome is Outcome.ALREADY_PROMOTED
    assert bench.ids() == [0, 1, 2, 3]
