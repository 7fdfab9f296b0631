"""What every log table promises: the tests of Delta and Iceberg are subclasses of `Promises`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.faults.processes import context, start, stopped_at_end
from support.pipelines.factories import Row, counted
from support.servers.s3 import local
from support.sinks import log_table_outputs
from support.sinks.log_table_format import WIDER, Format, alter, foreign
from support.sinks.log_table_outputs import Staged, rows, stage
from support.sinks.log_table_upkeep import Upkeep
from twophase.core import failpoints
from twophase.core.errors import ManifestMismatch
from twophase.core.failpoints import FailpointError
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome
from twophase.sinks.log_tables.base import LogTableSink

#: Where a promoter may be killed; with a new column, into a table that is there or is not.
POINTS = ("table.created", "table.widened", "promote.checked", "promote.visible", "promote.durable")


class Promises(Upkeep):
    """A subclass gives the fixture `form`."""

    # --- promote -----------------------------------------------------------------------------------------------------

    def test_staged_output_is_seen_by_nobody(self, form: Format, sink: LogTableSink) -> None:
        stage(sink, 1).promote()

        stage(sink, 2)

        assert counted(form.content(sink)) == counted(rows(1))

    def test_promotion_shows_every_row_with_its_marker(self, form: Format, sink: LogTableSink) -> None:
        promotion = stage(sink).promote()

        assert promotion.outcome is Outcome.PROMOTED
        assert counted(form.content(sink)) == counted(rows(1))
        assert form.marker(sink) == 1

    def test_promoting_twice_changes_nothing(self, form: Format, sink: LogTableSink) -> None:
        staged = stage(sink)
        staged.promote()
        before = form.commits(sink)

        again = staged.promote()

        assert (again.outcome, again.attempt) == (Outcome.ALREADY_PROMOTED, 1)
        assert form.commits(sink) == before

    def test_a_late_promoter_finds_what_came_after_it_and_changes_nothing(
        self, form: Format, sink: LogTableSink
    ) -> None:
        first = stage(sink, 1)
        first.promote()
        stage(sink, 2).promote()
        stage(sink, 1, 3, rows(1, 3, revision=2), revision=2, older=first).promote()
        before = form.commits(sink)

        late = first.promote()

        assert late.outcome is Outcome.ALREADY_PROMOTED
        assert form.commits(sink) == before

    def test_an_output_without_rows_is_promoted_with_its_marker(self, form: Format, sink: LogTableSink) -> None:
        empty = stage(sink, 1, content=[])

        assert empty.promote().outcome is Outcome.PROMOTED
        assert empty.promote().outcome is Outcome.ALREADY_PROMOTED
        assert form.content(sink) == []
        assert form.marker(sink) == 1

    def test_an_output_without_files_is_found_by_the_tables_history(self, form: Format, sink: LogTableSink) -> None:
        """The high-water mark alone would also say yes of a revision that never came here."""
        table = form.make("lake/parts", partition_by=["word"])
        table.prepare()
        empty, never = stage(table, 1, content=[]), stage(table, 2, content=[])
        assert empty.promote().outcome is Outcome.PROMOTED
        stage(table, 3).promote()

        assert empty.promote().outcome is Outcome.ALREADY_PROMOTED
        assert never.promote().outcome is Outcome.FAILED

    def test_a_late_promoter_without_rows_does_not_set_the_mark_back(
        self, form: Format, sink: LogTableSink, tmp_path: Path
    ) -> None:
        stage(sink, 1).promote()
        empty = stage(sink, 2, content=[])
        point, log = "promote.checked=stop", tmp_path / "log"
        late = start(log_table_outputs.promote, sink.declaration(), empty.output, log=log, failpoints=point)
        with stopped_at_end(late):
            assert late.until_stopped(), late.said
            empty.promote()
            stage(sink, 3).promote()
            late.wake()
            assert late.wait() == 0, late.said

        assert form.marker(sink) == 3
        assert "already promoted" in late.said

    def test_staged_output_that_is_gone_is_lost_only_after_the_marker_was_read_again(
        self, form: Format, sink: LogTableSink
    ) -> None:
        promoted, lost = stage(sink, 1), stage(sink, 2)
        promoted.promote()
        shutil.rmtree(promoted.folder)
        shutil.rmtree(lost.folder)

        assert promoted.find().outcome is Outcome.ALREADY_PROMOTED
        assert lost.find().outcome is Outcome.FAILED
        assert "is gone" in (lost.promote().reason or "")
        assert form.marker(sink) == 1

    @pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
    @pytest.mark.parametrize("moment", ["vote", "promotion"])
    def test_a_damaged_staged_file_is_named_and_nothing_becomes_visible(
        self, form: Format, sink: LogTableSink, damage: str, moment: str
    ) -> None:
        stage(sink, 1).promote()
        staged = stage(sink, 2)
        victim = sorted(staged.folder.glob("*.parquet"))[1]
        match damage:
            case "missing":
                victim.unlink()
            case "truncated":
                victim.write_bytes(victim.read_bytes()[:-1])
            case _:
                alter(victim)

        if moment == "vote":
            with pytest.raises(ManifestMismatch, match=victim.name):
                staged.check()
        else:
            promotion = staged.promote()
            assert promotion.outcome is Outcome.FAILED
            assert victim.name in (promotion.reason or "")
        assert form.marker(sink) == 1

    def test_what_a_straggling_task_left_never_becomes_visible(self, form: Format, sink: LogTableSink) -> None:
        staged = stage(sink)
        (staged.folder / "part-late.parquet").write_bytes(b"half a file")

        staged.promote()

        assert counted(form.content(sink)) == counted(rows(1))
        assert not list(sink.verify(staged.output))

    def test_a_table_whose_folder_is_away_is_asked_again_later(self, sink: LogTableSink) -> None:
        staged = stage(sink)
        Path(sink._home).rename(f"{sink._home}.away")
        Path(sink.location()).rename(f"{sink.location()}.away")

        assert staged.promote().outcome is Outcome.RETRY_LATER
        assert "is it mounted" in (staged.find().reason or "")

    # --- other writers -----------------------------------------------------------------------------------------------

    def test_rows_of_other_writers_come_between_stay_and_are_not_strange(
        self, form: Format, sink: LogTableSink
    ) -> None:
        first, second = stage(sink, 1), stage(sink, 2)
        first.promote()
        theirs = foreign(form, sink)

        second.promote()

        assert counted(form.content(sink)) == counted([*rows(1), *theirs, *rows(2)])
        assert not list(sink.strangers([first.output, second.output]))

    def test_a_writer_that_is_faster_does_not_stop_a_promotion(
        self, form: Format, sink: LogTableSink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stage(sink, 1).promote()
        theirs: list[Row] = []

        def beaten(commit: Callable[[], object]) -> None:
            if len(theirs) < 3:
                theirs.extend(foreign(form, sink, len(theirs) + 1))
            commit()

        form.committing(monkeypatch, beaten)

        assert stage(sink, 2).promote().outcome is Outcome.PROMOTED
        assert counted(form.content(sink)) == counted([*rows(1), *rows(2), *theirs])

    def test_a_commit_whose_reply_was_lost_is_found_by_its_marker(
        self, form: Format, sink: LogTableSink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(commit: Callable[[], object]) -> None:
            commit()
            msg = "connection reset"
            raise OSError(msg)

        stage(sink, 1).promote()
        form.committing(monkeypatch, lost)

        assert stage(sink, 2).promote().outcome is Outcome.ALREADY_PROMOTED
        assert counted(form.content(sink)) == counted([*rows(1), *rows(2)])

    def test_a_store_that_does_not_answer_is_asked_again_later(
        self, form: Format, sink: LogTableSink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def down(commit: Callable[[], object]) -> None:
            msg = "no route to host"
            raise OSError(msg)

        stage(sink, 1).promote()
        staged = stage(sink, 2)
        with monkeypatch.context() as patched:
            form.committing(patched, down)
            waiting = staged.promote()

        assert (waiting.outcome, waiting.reason) == (Outcome.RETRY_LATER, "no route to host")
        assert staged.promote().outcome is Outcome.PROMOTED

    @pytest.mark.parametrize("rounds", [10, pytest.param(50, marks=pytest.mark.slow)])
    def test_of_two_promoters_at_once_one_commits(
        self, form: Format, sink: LogTableSink, tmp_path: Path, rounds: int
    ) -> None:
        expected: list[Row] = []
        for number in range(1, rounds + 1):
            staged = stage(sink, number)
            barrier = context.Barrier(2)
            logs = [tmp_path / f"{number}.{which}.log" for which in "ab"]
            both = [
                start(log_table_outputs.promote, sink.declaration(), staged.output, barrier, log=log) for log in logs
            ]
            with stopped_at_end(*both):
                assert [child.wait() for child in both] == [0, 0], [child.said for child in both]
            expected += rows(number)
            said = sorted(child.said.partition(":")[0] for child in both)
            assert said == ["outcome already promoted", "outcome promoted"], [child.said for child in both]

        assert counted(form.content(sink)) == counted(expected)
        assert form.marker(sink) == rounds

    # --- crashes -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("how", ["kill", "raise"])
    def test_a_crash_between_any_two_steps_is_finished_by_the_next_promoter(
        self, form: Format, sink: LogTableSink, tmp_path: Path, point: str, how: str
    ) -> None:
        if point != "table.created":
            stage(sink, 1).promote()
        staged = stage(sink, 2, content=[{**row, "city": "Ulm"} for row in rows(2)], schema=WIDER)
        if how == "kill":
            log = tmp_path / "log"
            child = start(
                log_table_outputs.promote, sink.declaration(), staged.output, log=log, failpoints=f"{point}=kill"
            )
            assert child.wait() == -9, child.said
        else:
            failpoints.configure(f"{point}=raise")
            with pytest.raises(FailpointError):
                staged.promote()
            failpoints.configure("")

        promotion = staged.promote()

        done = point in {"promote.visible", "promote.durable"}
        assert promotion.outcome is (Outcome.ALREADY_PROMOTED if done else Outcome.PROMOTED)
        assert sum(row["id"] >= 200 for row in form.content(sink)) == 4

    @pytest.mark.parametrize("point", ["promote.checked", "promote.visible"])
    def test_a_promoter_that_wakes_after_another_has_replaced_its_revision_changes_nothing(
        self, form: Format, sink: LogTableSink, tmp_path: Path, point: str
    ) -> None:
        stage(sink, 1).promote()
        staged = stage(sink, 2)
        late = start(
            log_table_outputs.promote,
            sink.declaration(),
            staged.output,
            log=tmp_path / "log",
            failpoints=f"{point}=stop",
        )
        with stopped_at_end(late):
            assert late.until_stopped(), late.said
            staged.promote()
            stage(sink, 2, 3, rows(2, 2, revision=2), revision=2, older=staged).promote()
            before = form.commits(sink)

            late.wake()
            assert late.wait() == 0, late.said

        assert form.commits(sink) == before
        assert counted(form.content(sink)) == counted([*rows(1), *rows(2, 2, revision=2)])

    # --- replacement -------------------------------------------------------------------------------------------------

    def replaced(self, sink: LogTableSink) -> tuple[Staged, Staged]:
        old = stage(sink, 1)
        old.promote()
        new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
        new.check()
        assert new.promote().outcome is Outcome.PROMOTED
        return old, new

    def test_a_replacement_takes_the_old_files_out_and_puts_the_new_in(self, form: Format, sink: LogTableSink) -> None:
        old, new = self.replaced(sink)

        assert counted(form.content(sink)) == counted(rows(1, 3, revision=2))
        assert not list(sink.verify(new.output))
        assert sink.stands(old.output)
        assert [local(left.path) for left in sink.superseded()] == [old.folder]

    def test_a_replacement_may_be_without_rows_and_replace_what_had_none(
        self, form: Format, sink: LogTableSink
    ) -> None:
        old = stage(sink, 1)
        old.promote()
        empty = stage(sink, 1, 2, [], revision=2, older=old)
        empty.promote()
        assert form.content(sink) == []

        assert stage(sink, 1, 3, rows(1), revision=3, older=empty).promote().outcome is Outcome.PROMOTED
        assert counted(form.content(sink)) == counted(rows(1))

    def test_what_was_replaced_is_forgotten_when_its_retention_is_over_and_not_before(
        self, form: Format, sink: LogTableSink
    ) -> None:
        old, new = self.replaced(sink)
        assert len(sink.files(old.output)) == 2

        for left in sink.superseded():
            sink.forget(left)

        assert not old.folder.exists()
        assert not sink.stands(old.output)
        assert counted(form.content(sink)) == counted(rows(1, 3, revision=2))
        assert not list(sink.verify(new.output))

    def test_files_that_another_writer_rewrote_are_not_replaced_blindly(self, form: Format, sink: LogTableSink) -> None:
        old = stage(sink, 1)
        old.promote()
        new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)
        form.rewrite(sink)

        with pytest.raises(ManifestMismatch, match="rewritten or removed by another writer"):
            new.check()
        refused = new.promote()

        assert refused.outcome is Outcome.FAILED
        assert "cannot be replaced" in (refused.reason or "")
        assert counted(form.content(sink)) == counted(rows(1))

    def test_what_was_rewritten_after_the_decision_is_replaced_once_the_table_is_restored(
        self, sink: LogTableSink, form: Format
    ) -> None:
        """The way out that the message names; staging again would not help, and is not named."""
        older = stage(sink)
        older.promote()
        newer = stage(sink, 1, 2, rows(1, revision=2), revision=2, older=older)
        newer.check()
        form.rewrite(sink)
        others = foreign(form, sink)

        parked = newer.promote()
        form.restore(sink)
        promoted = newer.promote()

        assert (parked.outcome, parked.hindrance) == (Outcome.FAILED, Hindrance.REWRITTEN)
        assert promoted.outcome is Outcome.PROMOTED, promoted.reason
        assert counted(form.content(sink)) == counted([*rows(1, revision=2), *others])

    def test_a_rewrite_in_the_instant_of_a_replacement_doubles_nothing(
        self, form: Format, sink: LogTableSink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Delta's library would take out files that are no longer there, and put the new ones beside their rows."""
        old = stage(sink, 1)
        old.promote()
        new = stage(sink, 1, 2, rows(1, 3, revision=2), revision=2, older=old)

        def beaten(commit: Callable[[], object]) -> None:
            form.rewrite(sink)
            commit()

        form.committing(monkeypatch, beaten)

        assert new.promote().outcome is Outcome.FAILED
        assert counted(form.content(sink)) == counted(rows(1))

    # --- restage -----------------------------------------------------------------------------------------------------

    def test_what_was_voted_for_before_a_restage_counts_when_it_is_found_in_the_table(
        self, form: Format, sink: LogTableSink
    ) -> None:
        """R10: the record adopts the attempt that the sink holds."""
        lost = stage(sink, 1, attempt=1)
        again = stage(sink, 1, attempt=2, earlier=[lost])
        lost.promote()

        found = again.promote()

        assert (found.outcome, found.attempt) == (Outcome.ALREADY_PROMOTED, 1)
        assert found.manifest == lost.output.manifest
        assert counted(form.content(sink)) == counted(rows(1))

    def test_a_marker_of_a_newer_record_is_not_taken_for_a_promotion(self, sink: LogTableSink) -> None:
        """A restored record hands out the same numbers again: its rows must not be dropped in silence."""
        stage(sink, 1, 1).promote()
        stage(sink, 2, 2).promote()
        after_restore = stage(sink, 3, 2, token="beef")

        refused = after_restore.promote()

        assert refused.outcome is Outcome.FAILED
        assert "the record is older than the table" in (refused.reason or "")

    def test_a_later_revision_of_a_newer_record_is_not_taken_for_a_replacement(self, sink: LogTableSink) -> None:
        """There the first one was aborted, and the second one committed; here the first one has other rows."""
        stage(sink, 1, 1, revision=2).promote()
        after_restore = stage(sink, 1, 1, rows(7), token="beef")

        refused = after_restore.promote()

        assert refused.outcome is Outcome.FAILED
        assert "the record is older than the table" in (refused.reason or "")

    def test_a_revision_that_the_record_lost_sight_of_is_not_doubled(self, form: Format, sink: LogTableSink) -> None:
        """Its write had another name then, so nothing says that the next one replaces it."""
        first = stage(sink, 1)
        first.promote()

        with pytest.raises(ManifestMismatch, match=f"{first.folder.name} is in the table, of the same checkpoint"):
            stage(sink, 1, 2, revision=2).check()

        stage(sink, 1, 2, revision=3, older=first).check()
        assert counted(form.content(sink)) == counted(rows(1))
