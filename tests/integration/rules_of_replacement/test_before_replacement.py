"""Rules R4 to R6: what may be replaced, one at a time, by markers that name their revision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import SCHEMA, stage_rows, visible
from support.pipelines.replacement_bench import ME, Bench, words
from twophase.core import failpoints
from twophase.core.checkpoint import Input, Key, Known, Output, Position, Run
from twophase.core.errors import Busy, ConfigError, IllegalTransition, Parked, PromotionPending
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome, Progress
from twophase.core.states import State
from twophase.sinks.files.sink import Files

OTHER = Run("dag", "run_2")


class Offsets:
    """A source of one partition that has grown to `end`."""

    settles = False
    reports = False
    per_revision = False

    def __init__(self) -> None:
        self.end = 10

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> int:
        return self.end

    def fix(self, found: int, progress: Progress) -> Input:
        return Input(ranges={"0": (progress.position().get("0", 0), found)})

    def written_again(self, fixed: Any) -> list[Any]:
        return []

    def settle(self, checkpoint_id: int, files: Any) -> None:
        raise AssertionError

    def report(self, offsets: Mapping[str, int]) -> None:
        raise AssertionError


# --- R4: a replacement needs something to replace, and moves no position ----------------------------------------------


def test_r4_a_replacement_leaves_positions_and_files_to_their_checkpoint(bench: Bench) -> None:
    topic = Offsets()
    bench.coordinator = bench.process(sources={**bench.pipeline.reads, "topic": topic})
    bench.committed()
    topic.end = 20
    bench.committed()
    query = "SELECT array_agg(path || ' ' || checkpoint_id ORDER BY path) FROM twophase.input_file WHERE pipeline = :p"
    before = bench.sql(query)
    topic.end = 30

    bench.replaced(1)

    with bench.record.transaction() as tx:
        assert tx.position(bench.name, "topic") == {"0": 20}
        assert tx.inputs(bench.key(1, 2))["topic"].ranges == {"0": (0, 10)}
    assert bench.sql(query) == before == ["000000.json 1", "000001.json 2"]
    assert words() == [(1, "r2a1"), (2, "r1a1")]


def test_r4_a_replacement_of_an_older_checkpoint_is_not_refused_by_the_position(bench: Bench) -> None:
    """Principle 2: committed means that this checkpoint is recorded, not that a larger one is."""
    bench.coordinator = bench.process(sources={"topic": Offsets()})
    bench.committed()

    assert bench.replaced(1).state is State.COMMITTED
    assert bench.replaced(1).revision == 3


@pytest.mark.parametrize("state", [State.ABORTED, None], ids=["aborted", "unknown"])
def test_r4_what_has_no_committed_revision_cannot_be_replaced(bench: Bench, state: State | None) -> None:
    if state is State.ABORTED:
        bench.coordinator.abort(bench.begin(), "failed")

    with pytest.raises(ConfigError, match=r"nothing of it is committed|it is not in the record"):
        bench.replace(1)

    assert bench.sql("SELECT count(*) FROM twophase.revision WHERE pipeline = :p") == (1 if state else 0)


def test_r4_an_aborted_replacement_leaves_the_checkpoint_committed_and_replaceable(bench: Bench) -> None:
    first = bench.committed()
    bench.coordinator.abort(bench.precommitted(bench.replace()), "failed")

    done = bench.replaced()

    assert (done.revision, done.state) == (3, State.COMMITTED)
    assert bench.read(first.key).state is State.SUPERSEDED
    assert words() == [(1, "r3a1")]
    assert bench.beside("superseded") == {"superseded/00000001.r1"}


# --- R5: one live revision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.OPEN, State.PRECOMMITTED])
def test_r5_a_replacement_that_is_under_way_is_not_begun_beside(bench: Bench, state: State) -> None:
    bench.committed()
    live = bench.replace()
    if state is State.PRECOMMITTED:
        live = bench.precommitted(live)

    with pytest.raises(Busy, match="run dag/run_1 works on it"):
        bench.process().replace(OTHER, 1)
    with pytest.raises(IllegalTransition, match="revision_one_live"), bench.record.transaction() as tx:
        tx.add_revision(bench.name, 1, "backfill", OTHER, 60.0)

    assert bench.read(live.key).state is state
    assert words() == [(1, "r1a1")]


def test_r5_a_replacement_that_is_decided_is_promoted_before_the_next_one_begins(bench: Bench) -> None:
    bench.committed()
    bench.lake.down = {(1, 2)}
    decided = bench.replacing()

    with pytest.raises(PromotionPending, match=r"/1 r2: it is decided and not promoted yet"):
        bench.process().replace(OTHER, 1)
    bench.lake.down = set()
    third = bench.process().replace(OTHER, 1)

    assert bench.read(decided.key).state is State.COMMITTED
    assert third.key == bench.key(1, 3)


def test_r5_a_checkpoint_whose_first_revision_is_live_is_not_replaced(bench: Bench) -> None:
    live = bench.begin()

    with pytest.raises(Busy):
        bench.process().replace(OTHER, 1)

    assert bench.sql("SELECT count(*) FROM twophase.revision WHERE pipeline = :p") == 1
    assert bench.read(live.key).run == ME


def test_r5_a_replacement_that_is_being_aborted_does_not_stand_in_the_way(bench: Bench) -> None:
    bench.committed()
    replacement = bench.precommitted(bench.replace())
    failpoints.configure("abort.after=raise")
    with pytest.raises(FailpointError):
        bench.coordinator.abort(replacement, "failed")
    failpoints.configure("")

    third = bench.replace()

    assert third.key == bench.key(1, 3)
    assert bench.coordinator.commit(bench.precommitted(third)).state is State.COMMITTED
    assert words() == [(1, "r3a1")]


# --- R6: markers are for ever, and name their revision ----------------------------------------------------------------


def test_r6_the_rows_of_every_revision_stay_whatever_is_replaced_and_swept(bench: Bench) -> None:
    bench.committed()
    bench.replaced()
    bench.replaced()
    bench.age()
    bench.sweep()

    rows = bench.sql("SELECT array_agg(operator_id || ' r' || revision) FROM twophase.committed WHERE job_id = :p")
    assert sorted(rows) == ["copy r1", "copy r2", "copy r3", "lake r1", "lake r2", "lake r3"]
    for change in ("DELETE FROM twophase.committed", "UPDATE twophase.committed SET revision = 9"):
        with pytest.raises(Exception, match="its rows are never changed"):
            bench.sql(f"{change} WHERE job_id = :p")


def test_r6_the_marker_of_what_is_replaced_is_not_this_ones(bench: Bench) -> None:
    bench.committed()
    replacement = bench.replacing()
    mine = bench.participants(replacement.key)["lake"]

    found = bench.lake.find(mine.output(replacement))

    assert found.outcome is Outcome.RETRY_LATER
    assert "staged at" in (found.reason or "")


def test_r6_the_marker_of_a_later_revision_says_that_this_one_was_promoted(bench: Bench) -> None:
    first = bench.committed()
    bench.replaced()

    assert bench.promote(first.key).outcome is Outcome.ALREADY_PROMOTED
    assert words() == [(1, "r2a1")]


def test_r6_a_folder_that_is_not_the_one_to_be_replaced_is_left_alone(bench: Bench) -> None:
    """Somebody put something else in its place after the vote: a person has to look."""
    bench.committed()
    replacement = bench.replacing()
    shown = Path(bench.lake.location()) / "checkpoint=00000001"
    shown.rename(shown.with_name("elsewhere"))
    shown.mkdir()
    (shown / "notes.txt").write_text("mine")

    with pytest.raises(Parked, match=r"folder .* is there already, with no marker"):
        bench.coordinator.finish(replacement.key)

    assert (shown / "notes.txt").exists()
    assert bench.staged(replacement.key).exists()


def test_r6_the_marker_of_another_slot_in_the_same_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours of a day give one folder, as a wrong pattern may have it; each was voted for when it was free."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    sink = Files("lake/hours", slot_folder="dt={start:%Y-%m-%d}")
    sink.prepare()

    def staged(key: Key, hour: int, older: Output | None = None) -> Output:
        slot = f"2026-11-15T{hour:02d}:00:00+00:00/2026-11-15T{hour + 1:02d}:00:00+00:00"
        output = Output(key, 1, sink.place(key, 1, "7c1e", slot=slot, older=older), sink="lake")
        stage_rows(sink, output.handle, "part", [{"id": hour, "word": "w", "frequency": 1}], 1)
        output = replace(output, manifest=sink.seal(output, SCHEMA))
        sink.check(output)
        return output

    voted = staged(Key("hours", 2, 1), 1)
    other = staged(Key("hours", 1, 1), 0)
    sink.promote(other)
    newer = staged(Key("hours", 1, 2), 0, other)
    sink.promote(newer)

    promoted = sink.promote(voted)

    assert [row["id"] for row in visible("lake/hours")] == [0]
    assert promoted.outcome is Outcome.FAILED
