"""The contract over each wrong sink; run by acceptance/test_own_sink.py, not collected by itself."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import wrong_sinks  # type: ignore[import-not-found]

from twophase.sinks.base import Sink
from twophase.testing import Read, SinkContract


def contract(cls: Any) -> type[SinkContract]:
    class Case(SinkContract):
        @pytest.fixture
        def sink(self, tmp_path: Path) -> Sink:
            made: Sink = cls(str(tmp_path / "words.db"))
            return made

        @pytest.fixture
        def read(self, sink: Any) -> Read:
            def rows() -> list[dict[str, Any]]:
                with sqlite3.connect(sink.path) as db:
                    return [{"id": number, "word": word} for number, word in db.execute("SELECT id, word FROM words")]

            return rows

    return Case


TestApplying = contract(wrong_sinks.Applying)
TestAppending = contract(wrong_sinks.Appending)
TestMarkerInMemory = contract(wrong_sinks.MarkerInMemory)
TestMarkerInASecondStep = contract(wrong_sinks.MarkerInASecondStep)
TestMarkerInAnEarlierStep = contract(wrong_sinks.MarkerInAnEarlierStep)
TestHighWaterMark = contract(wrong_sinks.HighWaterMark)
TestLookingBeforehand = contract(wrong_sinks.LookingBeforehand)
TestVisibleAtOnce = contract(wrong_sinks.VisibleAtOnce)
TestOneRowAfterTheOther = contract(wrong_sinks.OneRowAfterTheOther)
TestNeverTakingOut = contract(wrong_sinks.NeverTakingOut)
TestNeverDiscarding = contract(wrong_sinks.NeverDiscarding)
TestEmptyIsNothing = contract(wrong_sinks.EmptyIsNothing)
TestEveryAttempt = contract(wrong_sinks.EveryAttempt)
TestSilentVerify = contract(wrong_sinks.SilentVerify)
TestLastMarkerOnly = contract(wrong_sinks.LastMarkerOnly)
TestReplacingInTwoSteps = contract(wrong_sinks.ReplacingInTwoSteps)
TestBringingBack = contract(wrong_sinks.BringingBack)
TestDiscardingTheCheckpoint = contract(wrong_sinks.DiscardingTheCheckpoint)
TestDiscardingEveryRevision = contract(wrong_sinks.DiscardingEveryRevision)
TestSweepingEveryAttempt = contract(wrong_sinks.SweepingEveryAttempt)
TestKeepingEarlierAttempts = contract(wrong_sinks.KeepingEarlierAttempts)
TestPromotingAgain = contract(wrong_sinks.PromotingAgain)
TestReceipted = contract(wrong_sinks.Receipted)
TestReceiptAfterwards = contract(wrong_sinks.ReceiptAfterwards)
TestLastReceiptOnly = contract(wrong_sinks.LastReceiptOnly)
TestAnyNumber = contract(wrong_sinks.AnyNumber)
