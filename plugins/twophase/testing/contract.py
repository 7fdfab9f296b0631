"""`SinkContract`: the promises of a sink, one test for each; a user's test class inherits it."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from twophase.core.errors import TwophaseError
from twophase.core.ports import Outcome
from twophase.sinks.base import Sink
from twophase.testing.outputs import PIPELINE, WAITING, Read, Rows, Stage, Staged, again, session
from twophase.testing.promoter import Promoting

#: One promotion may take fewer lines than that in which they were counted, and come to its end.
_KILLED = {-signal.SIGKILL, 0}
_DONE = {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}
#: How many sweep at once.
SWEEPERS = 4


class SinkContract:
    """What every sink has to do. A subclass provides a sink, and a reader of what it holds."""

    #: At how many lines of its code a promotion is killed, stopped or cut off.
    places = 12

    @pytest.fixture
    def sink(self) -> Sink:
        """Return the sink, over an empty system."""
        raise NotImplementedError

    @pytest.fixture
    def read(self) -> Read:
        """Return a function that returns the rows a reader finds."""
        raise NotImplementedError

    @pytest.fixture
    def stage(self, sink: Sink) -> Stage:
        """Return a function that stages into the sink with Spark."""
        sink.prepare()
        return Stage(session(), sink)

    # --- the plain way -----------------------------------------------------------------------------------------------

    def test_its_declaration_builds_it_again(self, sink: Sink) -> None:
        """A process that knows only the record can build the sink."""
        rebuilt = again(sink)

        assert (rebuilt.declaration(), rebuilt.location()) == (again(rebuilt).declaration(), sink.location())

    def test_what_is_staged_is_invisible(self, stage: Stage, read: Read) -> None:
        """Readers see nothing before the promotion."""
        staged = stage()

        assert (read(), staged.find(), staged.output.manifest["rows"]) == ([], Outcome.RETRY_LATER, 3)

    def test_a_promotion_shows_everything_once(self, stage: Stage, read: Read) -> None:
        """After it every row is there once, and the marker says so."""
        staged = stage()

        assert staged.promote() is Outcome.PROMOTED

        assert _same(read(), staged.rows)
        assert staged.find() is Outcome.ALREADY_PROMOTED
        assert not list(again(stage.sink).verify(staged.output))

    def test_an_output_without_rows_is_promoted_too(self, stage: Stage, read: Read) -> None:
        """It has a marker, though no rows: otherwise recovery would wait for it for ever."""
        first = stage()
        first.promote()
        empty = stage(rows=0)

        assert empty.promote() in _DONE
        assert [empty.find(), empty.promote()] == [Outcome.ALREADY_PROMOTED] * 2
        assert _same(read(), self.expected(first, empty))

    def test_the_attempt_that_was_voted_for_is_promoted_and_no_other(self, stage: Stage, read: Read) -> None:
        """Also if another attempt was staged before or after it: a zombie may have left that."""
        first = stage()
        second = stage.attempt(first.key, 2, rows=2)
        third = stage()
        stage.attempt(third.key, 2, rows=2)

        assert [second.promote(), third.promote()] == [Outcome.PROMOTED] * 2
        assert _same(read(), self.expected(second, third))

    def test_verify_tells_of_what_is_not_there(self, stage: Stage) -> None:
        """Without this, a `verify` that finds nothing would prove nothing."""
        staged = stage()

        assert list(again(stage.sink).verify(staged.output))

    # --- again -------------------------------------------------------------------------------------------------------

    def test_a_repeated_promotion_changes_nothing(self, stage: Stage, read: Read) -> None:
        """The sink that repeats it has nothing in memory from the first promotion."""
        staged = stage()
        staged.promote()

        assert [staged.promote(), staged.promote()] == [Outcome.ALREADY_PROMOTED] * 2
        assert _same(read(), staged.rows)

    def test_a_promotion_is_repeated_harmlessly_after_later_ones(self, stage: Stage, read: Read) -> None:
        """A marker that keeps only the last promotion would fail here."""
        first, second = stage(), stage()
        first.promote()
        second.promote()

        assert first.promote() is Outcome.ALREADY_PROMOTED
        assert _same(read(), self.expected(first, second))

    def test_what_overtakes_does_not_hide_what_it_overtook(self, stage: Stage, read: Read) -> None:
        """Unless the sink is declared `ordered`, a later checkpoint may be promoted first."""
        if stage.sink.ordered:
            pytest.skip("its promotions keep the order")
        first, second = stage(), stage()
        second.promote()

        assert (first.find(), first.promote()) == (Outcome.RETRY_LATER, Outcome.PROMOTED)
        assert _same(read(), self.expected(first, second))

    # --- interrupted -------------------------------------------------------------------------------------------------

    def test_a_promotion_that_is_killed_anywhere_is_finished_by_the_next(self, stage: Stage, read: Read) -> None:
        """Readers see all of it or nothing, the next promotion finishes it, and nothing is there twice."""
        done: list[Staged] = []
        codes: list[int] = []
        for place in self._places(stage, done):
            before, staged = self.expected(*done), stage()
            codes.append(Promoting(staged, "kill", place).ended())
            assert codes[-1] in _KILLED
            assert codes[0] == -signal.SIGKILL, "the first line of its own code was not come by"
            assert _same(read(), before) or _same(read(), self.expected(*done, staged)), f"killed at {place}"
            done.append(staged)
            assert staged.finish() in _DONE
            assert _same(read(), self.expected(*done)), f"killed at {place}"

    def test_a_lost_reply_is_settled_by_the_marker(self, stage: Stage, read: Read) -> None:
        """Connections that are cut anywhere inside leave it promoted or not, and the marker tells which."""
        done: list[Staged] = []
        for place in self._places(stage, done):
            staged = stage()
            Promoting(staged, "cut", place).ended()
            found, seen = staged.find(), read()
            assert found in {Outcome.ALREADY_PROMOTED, Outcome.RETRY_LATER}
            done.append(staged)
            if found is Outcome.ALREADY_PROMOTED:
                assert _same(seen, self.expected(*done)), f"cut off at {place}"
            assert staged.finish() in _DONE
            assert _same(read(), self.expected(*done)), f"cut off at {place}"

    # --- late, and at once -------------------------------------------------------------------------------------------

    def test_a_late_promoter_shows_nothing_twice(self, stage: Stage, read: Read) -> None:
        """The late one was stopped in the middle, and another process finished the promotion meanwhile."""
        done: list[Staged] = []
        for place in self._places(stage, done):
            staged = stage()
            late = Promoting(staged, "stop", place)
            late.until_stopped()
            first = staged.promote()
            late.wake()
            assert late.ended() == 0
            done.append(staged)
            assert first in {*_DONE, *WAITING}
            assert staged.promote() is Outcome.ALREADY_PROMOTED
            assert _same(read(), self.expected(*done)), f"stopped at {place}"

    def test_two_promoters_at_once_promote_once(self, stage: Stage, read: Read) -> None:
        """At most one makes it visible; the other finds it promoted, or is told to try again later."""
        done: list[Staged] = []
        for _ in range(5):
            staged = stage()
            racing = [Promoting(staged, "stop", 1) for _ in range(2)]
            for one in racing:
                one.until_stopped()
            for one in racing:
                one.wake()
            outcomes = [one.outcome() for one in racing]
            done.append(staged)
            assert outcomes.count(Outcome.PROMOTED) <= 1
            assert set(outcomes) <= {*_DONE, *WAITING}
            assert staged.finish() in _DONE
            assert _same(read(), self.expected(*done))

    # --- replaced ----------------------------------------------------------------------------------------------------

    def test_a_replacement_takes_the_place_of_the_older_revision(self, stage: Stage, read: Read) -> None:
        """Rows of other checkpoints stay."""
        self._skip_unless_replaceable(stage.sink)
        other, first = stage(), stage()
        other.promote()
        first.promote()
        second = stage(of=first, rows=2)
        assert _same(read(), self.expected(other, first))

        assert second.promote() is Outcome.PROMOTED

        assert _same(read(), self.expected(other, second))

    def test_a_replacement_that_is_killed_anywhere_shows_one_revision_whole(self, stage: Stage, read: Read) -> None:
        """Readers see the older or the newer one, never both, none or a part; the next promotion finishes it."""
        self._skip_unless_replaceable(stage.sink)
        done: list[Staged] = []
        for place in self._places(stage, done, replacing=True)[::2]:
            first = stage()
            first.promote()
            second = stage(of=first, rows=2)
            assert Promoting(second, "kill", place).ended() in _KILLED
            seen = read()
            old, new = self.expected(*done, first), self.expected(*done, second)
            assert _same(seen, old) or _same(seen, new), f"killed at {place}"
            done.append(second)
            assert second.finish() in _DONE
            assert _same(read(), new), f"killed at {place}"

    def test_a_late_promoter_does_not_bring_back_what_was_replaced(self, stage: Stage, read: Read) -> None:
        """Wherever it was stopped, and though the replacement is promoted before it goes on."""
        self._skip_unless_replaceable(stage.sink)
        done: list[Staged] = []
        for place in self._places(stage, done)[:: max(self.places // 4, 1)]:
            first = stage()
            late = Promoting(first, "stop", place)
            late.until_stopped()
            if first.promote() in WAITING:  # the stopped process holds a lock: it has to go on first
                late.wake()
                late.ended()
                assert first.promote() is Outcome.ALREADY_PROMOTED
            second = stage(of=first, rows=2)
            assert second.promote() is Outcome.PROMOTED
            late.wake()
            late.ended()
            done.append(second)
            assert first.promote() is Outcome.ALREADY_PROMOTED
            assert _same(read(), self.expected(*done)), f"stopped at {place}"

    # --- staged again ------------------------------------------------------------------------------------------------

    def test_what_is_staged_again_leaves_nothing_earlier_to_be_promoted(self, stage: Stage, read: Read) -> None:
        """`discard_earlier` removes it, and may be repeated; the new attempt and other checkpoints are left alone."""
        if not stage.sink.copies:
            pytest.skip("it takes over what is staged, and an earlier attempt may still win")
        first, other = stage(), stage()
        second = stage.again(first)
        for _ in range(2):
            again(stage.sink).discard_earlier(second.output, first.output)

        assert (first.find(), first.promote()) == (Outcome.FAILED, Outcome.FAILED)
        assert read() == []
        assert [second.finish(), other.finish()] == [Outcome.PROMOTED] * 2
        assert _same(read(), self.expected(second, other))

    def test_an_earlier_attempt_that_was_promoted_after_all_counts(self, stage: Stage, read: Read) -> None:
        """The restaged attempt is shown neither beside it nor in its place."""
        first = stage()
        second = stage.again(first)
        first.promote()
        if stage.sink.copies:
            again(stage.sink).discard_earlier(second.output, first.output)

        assert [second.find(), second.promote()] == [Outcome.ALREADY_PROMOTED] * 2
        assert _same(read(), first.rows)

    def test_a_late_promoter_shows_nothing_beside_what_is_staged_again(self, stage: Stage, read: Read) -> None:
        """The late one promotes the earlier attempt. After the vote for the new one, a copying sink shows only that.

        A sink that takes staged files in as they lie may show the earlier one instead, whole.
        """
        done: list[Staged] = []
        for place in self._places(stage, done)[:: max(self.places // 4, 1)]:
            first = stage()
            second = stage.again(first)
            late = Promoting(first, "stop", place)
            late.until_stopped()
            voted = _is_voted_for(first, second)
            if voted:
                assert second.promote() in {*_DONE, *WAITING}
            late.wake()
            late.ended()
            if not voted and first.finish() not in _DONE:
                voted = _is_voted_for(first, second)
                assert voted, f"stopped at {place}: neither attempt can be promoted"
            assert (second if voted else first).finish() in _DONE
            possible = [second] if voted and stage.sink.copies else [first, second]
            shown = [one for one in possible if _same(read(), self.expected(*done, one))]
            assert shown, f"stopped at {place}"
            done.append(shown[0])

    # --- receipts ----------------------------------------------------------------------------------------------------

    def test_what_it_was_given_is_known_by_receipts(self, stage: Stage) -> None:
        """`newest` returns the highest commit_seq, `receipts` the receipts in order; a restored record needs both."""
        first, second = stage(), stage()
        first.promote()
        self._skip_unless_receipted(stage.sink)
        sink = again(stage.sink)
        assert sink.newest(PIPELINE) == first.commit_seq
        second.promote()

        kept = [first.output.receipt, second.output.receipt]
        assert sink.newest(PIPELINE) == second.commit_seq
        assert [dict(one) for one in sink.receipts(PIPELINE, first.commit_seq)] == kept
        assert [dict(one) for one in sink.receipts(PIPELINE, second.commit_seq)] == kept[1:]

    def test_a_receipt_is_kept_before_anything_is_shown(self, stage: Stage, read: Read) -> None:
        """Wherever it is killed, the sink knows the commit_seq of what readers see, so no record reuses it."""
        done: list[Staged] = []
        places = self._places(stage, done)
        self._skip_unless_receipted(stage.sink)
        for place in places[:: max(self.places // 4, 1)]:
            staged = stage()
            Promoting(staged, "kill", place).ended()
            unseen = _same(read(), self.expected(*done))
            assert unseen or again(stage.sink).newest(PIPELINE) == staged.commit_seq, f"killed at {place}"
            done.append(staged)
            assert staged.finish() in _DONE

    def test_a_number_that_is_another_decisions_is_refused(self, stage: Stage, read: Read) -> None:
        """A restored record may use a commit_seq a second time; the sink shows nothing of that."""
        first, other = stage(), stage()
        first.promote()
        self._skip_unless_receipted(stage.sink)
        receipt = {**other.output.receipt, "commit_seq": first.commit_seq}
        other.output = replace(other.output, commit_seq=first.commit_seq, receipt=receipt)

        assert other.promote() is Outcome.FAILED
        assert _same(read(), first.rows)

    def _skip_unless_receipted(self, sink: Sink) -> None:
        if again(sink).newest(PIPELINE) is None:
            pytest.skip("it keeps no receipts: of a restored record nobody is told by it")

    # --- discarded ---------------------------------------------------------------------------------------------------

    def test_what_is_discarded_is_gone_and_cannot_be_promoted(self, stage: Stage, read: Read) -> None:
        """That holds for all attempts of the revision, and for no other revision; discarding may be repeated."""
        first = stage()
        second = stage.attempt(first.key, 2)
        other = stage()
        for _ in range(2):
            again(stage.sink).discard(second.output)

        assert (first.find(), second.promote()) == (Outcome.FAILED, Outcome.FAILED)
        with pytest.raises(TwophaseError):
            again(stage.sink).check(first.output)
        assert read() == []
        left = {(one.checkpoint_id, one.revision) for one in again(stage.sink).attempts()}
        assert (first.key.checkpoint_id, first.key.revision) not in left
        assert other.promote() is Outcome.PROMOTED
        assert _same(read(), other.rows)

    def test_discarding_a_revision_leaves_the_others(self, stage: Stage, read: Read) -> None:
        """Promoted revisions stay, also of the same checkpoint, and so does what the next revision has staged."""
        promoted = stage()
        promoted.promote()
        if not stage.sink.objection(latest=True):
            replacement = stage(of=promoted, rows=2)
            again(stage.sink).discard(replacement.output)
        aborted = stage()
        following = stage.attempt(aborted.key._replace(revision=2), 1)

        again(stage.sink).discard(aborted.output)

        assert (_same(read(), promoted.rows), promoted.find()) == (True, Outcome.ALREADY_PROMOTED)
        assert following.promote() is Outcome.PROMOTED
        assert _same(read(), self.expected(promoted, following))

    def test_what_is_swept_is_one_attempt(self, stage: Stage, read: Read) -> None:
        """Another attempt can still be promoted, and promoted rows stay."""
        first = stage()
        second = stage.attempt(first.key, 2)
        self._sweep(first)

        assert (first.find(), second.promote()) == (Outcome.FAILED, Outcome.PROMOTED)
        if stage.sink.copies:
            self._sweep(second)
        assert _same(read(), second.rows)

    def test_sweepers_at_once_are_harmless_to_each_other(self, stage: Stage, read: Read) -> None:
        """What one has removed is no error for the others, and nothing else is removed."""
        promoted = stage()
        promoted.promote()
        dead = [stage() for _ in range(3)]
        mine = {(one.key.checkpoint_id, one.key.revision, one.output.attempt) for one in dead}
        found = list(again(stage.sink).attempts())

        def sweep(sink: Sink) -> None:
            for left in found:
                if left[:3] in mine:
                    sink.remove(left)

        with ThreadPoolExecutor(SWEEPERS) as pool:
            list(pool.map(sweep, [again(stage.sink) for _ in range(SWEEPERS)]))

        assert not [left for left in again(stage.sink).attempts() if left[:3] in mine]
        assert {one.find() for one in dead} == {Outcome.FAILED}
        assert (_same(read(), promoted.rows), promoted.find()) == (True, Outcome.ALREADY_PROMOTED)

    def _sweep(self, staged: Staged) -> None:
        """Remove what an attempt left, as the sweeper does."""
        mine = (staged.key.checkpoint_id, staged.key.revision, staged.output.attempt)
        sink = again(staged.sink)
        for left in list(sink.attempts()):
            if left[:3] == mine:
                sink.remove(left)

    # --- what is expected --------------------------------------------------------------------------------------------

    def expected(self, *promoted: Staged) -> Rows:
        """Return the rows that a reader must find after these were promoted in this order; by default all of them."""
        return [row for staged in promoted for row in staged.rows]

    def _skip_unless_replaceable(self, sink: Sink) -> None:
        if why := sink.objection(latest=True):
            pytest.skip(f"it does not replace: {why}")

    def _places(self, stage: Stage, done: list[Staged], *, replacing: bool = False) -> Sequence[int]:
        """Promote to count the lines that run; return some line numbers, with the first and the last among them.

        The second promotion is counted, because the first may have to create the table.
        """
        first = stage()
        first.promote()
        second = stage(of=first) if replacing else stage()
        count = Promoting(second, "count", 0).count()
        done += [second] if replacing else [first, second]
        step = max(count / self.places, 1.0)
        return sorted({min(count, 1 + round(number * step)) for number in range(self.places)} | {count})


def _is_voted_for(first: Staged, second: Staged) -> bool:
    """Do what a restage does before its vote; return True if it gets to the vote."""
    sink = again(second.sink)
    try:
        sink.check(second.output)
        if sink.copies:
            sink.discard_earlier(second.output, first.output)
    except Exception:  # noqa: BLE001 - a sink may be anybody's: it cannot now, and nothing is voted for
        return False
    return second.find() is Outcome.RETRY_LATER


def _same(found: Rows, expected: Rows) -> bool:
    """Compare as multisets, by the staged columns only."""

    def counted(rows: Rows) -> Counter[tuple[Any, Any]]:
        return Counter((row["id"], row["word"]) for row in rows)

    return counted(found) == counted(expected)
