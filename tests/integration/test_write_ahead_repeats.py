"""The write-ahead sink after a loss, a second run, a sweep: nothing is sent again unless that is asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.factories import PreStaged
from support.sinks import senders
from support.sinks.write_ahead_bench import FOUR, Bench, staged_output
from twophase import committers
from twophase.committers import CheckpointCommitter
from twophase.core.checkpoint import Output, Run
from twophase.core.errors import ConfigError, ManifestMismatch
from twophase.core.ports import Outcome, Promotion
from twophase.core.states import State
from twophase.runner import Runner
from twophase.sinks.base import Attempt
from twophase.sinks.write_ahead import delivery
from twophase.sweep import sweep
from twophase.verification import verify
from twophase.wiring import load

# --- lost, restaged --------------------------------------------------------------------------------------------------


def test_staged_rows_that_are_gone_are_parked_and_restaged(bench: Bench) -> None:
    bench.decided()
    bench.staged(1).rename(bench.home / "lost")
    assert bench.find(1).outcome is Outcome.FAILED
    assert "is gone" in (bench.promote(1).reason or "")

    with Runner(bench.pipeline, PreStaged(files=3), record=bench.record) as runner:
        runner.restage(1, "the disk was lost")

    assert bench.ids() == [0, 1, 2, 3]
    assert bench.state(1) is State.COMMITTED


def test_what_was_lost_half_sent_is_not_sent_again_without_a_person(bench: Bench) -> None:
    """The rows of the next attempt may be split in another way: no number tells which of them have arrived."""
    bench.down("1")
    bench.pending(files=2)
    bench.staged(1).rename(bench.home / "lost")
    bench.down(None)

    with (
        Runner(bench.pipeline, PreStaged(files=3), record=bench.record) as runner,
        pytest.raises(ManifestMismatch, match=r"attempt 1 had begun to send .* declare republish=True"),
    ):
        runner.restage(1, "the disk was lost")
    assert bench.ids() == [0]

    bench.declare(republish=True)
    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        runner.restage(1, "they may come again")
    assert bench.ids() == [0, 0, 1, 2, 3]
    assert bench.state(1) is State.COMMITTED


def test_what_was_thought_to_be_lost_and_was_sent_after_all_counts(bench: Bench) -> None:
    """R10: a promoter of the first attempt was slow, and has sent all of it before the second one is asked."""
    bench.sink.prepare()
    first = staged_output(bench, 1)
    second = staged_output(bench, 1, FOUR, files=3, attempt=2, earlier=[first.manifest["digest"]])
    bench.sink.promote(first)

    found = bench.sink.find(second)
    promotion = bench.sink.promote(second)

    assert found == promotion
    assert promotion == Promotion(Outcome.ALREADY_PROMOTED, attempt=1, manifest=first.manifest)
    assert [row for _, row in bench.sent()] == [0, 2, 1, 3]
    adopted = Output(second.key, 1, second.handle, first.manifest)
    assert list(bench.sink.verify(adopted)) == []


def test_what_was_lost_and_came_back_is_not_sent_beside_what_was_staged_again(bench: Bench) -> None:
    """A promoter that slept since before the loss finds other rows under its numbers, and some not sent."""
    bench.sink.prepare()
    first = staged_output(bench, 1, files=3)
    second = staged_output(bench, 1, attempt=2, earlier=[first.manifest["digest"]])
    bench.sink.promote(second)

    late = bench.sink.promote(first)

    assert late == Promotion(Outcome.RETRY_LATER, "it was staged again, and another attempt has begun to send since")
    assert [row for _, row in bench.sent()] == [0, 2, 1, 3]


def test_what_a_record_from_an_older_backup_takes_for_new_was_sent_and_is_not_voted_for(bench: Bench) -> None:
    """Its rows may be others than those that were sent under the same numbers."""
    bench.sink.prepare()
    sent = staged_output(bench, 2)
    assert bench.sink.promote(sent).outcome is Outcome.PROMOTED

    with pytest.raises(ManifestMismatch, match="rows of it were sent already, says committers"):
        staged_output(bench, 2, attempt=2)
    staged_output(bench, 3)


def test_an_older_checkpoint_that_was_decided_later_is_sent_too(bench: Bench, committer: CheckpointCommitter) -> None:
    """Intervals run in any order: what was sent is known by membership."""
    bench.declare(committer=committer)
    bench.sink.prepare()

    for number in (6, 5):
        output = staged_output(bench, number)
        assert bench.sink.promote(output).outcome is Outcome.PROMOTED

    assert Counter(checkpoint for checkpoint, _ in bench.sent()) == {5: 4, 6: 4}


@pytest.mark.parametrize("damage", ["altered", "unmounted"])
def test_staged_rows_that_are_not_what_was_voted_for_are_not_sent(bench: Bench, damage: str) -> None:
    bench.decided()
    if damage == "altered":
        file = next(bench.staged(1).glob("*.parquet"))
        file.write_bytes(file.read_bytes()[:-1] + b"X")
    else:
        Path(bench.sink.location()).rename(bench.home / "away")

    promotion = bench.promote(1)

    assert promotion.outcome is (Outcome.FAILED if damage == "altered" else Outcome.RETRY_LATER)
    assert bench.sent() == []


# --- again -----------------------------------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_not_run_again(bench: Bench) -> None:
    bench.run()

    with (
        Runner(bench.pipeline, PreStaged(), record=bench.record) as runner,
        pytest.raises(ConfigError, match="sink 'out': what was sent cannot be taken back; declare republish=True"),
    ):
        runner.replace(1)

    assert bench.ids() == [0, 1, 2, 3]


def test_republished_rows_bear_their_revision(bench: Bench) -> None:
    bench.declare(republish=True, idempotent=True)
    bench.run()

    with Runner(bench.pipeline, PreStaged(files=1), record=bench.record) as runner:
        again = runner.replace(1)

    said = [said["row"] for said in senders.received(bench.received)]
    assert again.state is State.COMMITTED
    assert [row["_twophase_revision"] for row in said] == [1] * 4 + [2] * 4
    assert len({row["_twophase_id"] for row in said}) == 8
    assert said[4]["_twophase_id"] == "words/out/1/r2/0/0"


# --- sweep, verify ---------------------------------------------------------------------------------------------------


def test_the_sweeper_removes_sent_rows_and_what_the_committer_need_not_remember(bench: Bench) -> None:
    bench.declare(committer=committers.File(), max_pending=2)
    bench.run()
    bench.down("0")
    bench.pending()
    late = bench.output(1)
    folder = bench.home / "data/committers/words/out"

    list(sweep(bench.record, load(bench.record, "words")))

    assert not bench.staged(1).exists()
    assert bench.staged(2).exists()
    left = {path.name: path.read_text() for path in folder.glob("subtask.*")}
    assert left == dict.fromkeys(["subtask.-1", f"subtask.{delivery.BEGUN}"], "2 1\n")
    bench.down(None)
    assert bench.sink.promote(late).outcome is Outcome.FAILED
    assert bench.ids() == [0, 1, 2, 3]
    assert [difference for difference in verify(bench.record, bench.pipeline) if difference] == []
    assert list(sweep(bench.record, bench.pipeline)) == []


def test_what_a_late_promoter_finds_finished_and_forgotten_it_leaves_alone(bench: Bench) -> None:
    bench.declare(committer=committers.File())
    bench.run()
    list(sweep(bench.record, bench.pipeline))

    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        done = runner.coordinator.finish(bench.key(1))

    assert done.state is State.COMMITTED
    assert done.parked_reason is None
    assert bench.ids() == [0, 1, 2, 3]


def test_what_the_committer_remembers_outlives_the_rows(bench: Bench) -> None:
    """As long as they are there, somebody late may ask whether they were sent."""
    bench.declare(committer=committers.File())
    bench.run()
    mark = next(left for left in bench.sink.attempts() if "committers.File" in left.path)
    assert isinstance(mark, Attempt)

    bench.sink.remove(mark)

    assert bench.promote(1).outcome is Outcome.ALREADY_PROMOTED
    assert bench.ids() == [0, 1, 2, 3]


def test_verify_tells_what_the_committer_does_not_know(bench: Bench) -> None:
    bench.run()
    with bench.record.engine.begin() as connection:
        connection.execute(text("DELETE FROM twophase_write_ahead.committed WHERE subtask_id = 1"))

    found = [difference for difference in verify(bench.record, bench.pipeline) if difference]

    assert [difference.difference for difference in found] == ["subtask 1 is not in committers.Postgres of words/out"]


def test_an_aborted_attempt_is_discarded(bench: Bench) -> None:
    bench.land()
    with Runner(bench.pipeline, PreStaged(), record=bench.record) as runner:
        taken = runner.coordinator.begin(Run(None, "me"))
        assert taken is not None
        attempt = runner.coordinator.attempt(taken)
        runner._stage_and_vote(attempt)
        runner.coordinator.abort(attempt, "no more")

    assert not list(Path(f"{bench.sink.location()}.twophase/staging").iterdir())
    assert bench.sent() == []


# --- changes ---------------------------------------------------------------------------------------------------------


def test_the_memory_of_what_was_sent_cannot_be_changed_while_something_is_pending(bench: Bench) -> None:
    bench.decided()
    bench.declare(committer=committers.File())

    with pytest.raises(ConfigError, match=r"write 'out': committer was .* while a checkpoint is pending"):
        Runner(bench.pipeline, PreStaged(), record=bench.record)
