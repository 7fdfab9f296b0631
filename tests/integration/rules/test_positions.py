"""How far a source has been read: pinned at first sight, moved at the commit point, reported after COMMITTED."""

from __future__ import annotations

import logging

import pytest

from support.pipelines.rules_bench import ME, Bench
from twophase.core import failpoints
from twophase.core.checkpoint import Position
from twophase.core.errors import PromotionPending, SinkUnavailable
from twophase.core.failpoints import FailpointError
from twophase.core.states import State

#: What only sources of offsets come by.
POINTS = ("begin.pinned", "report.before", "report.after")


@pytest.fixture
def offsets(bench: Bench) -> Bench:
    """Return a bench whose source begins at its end when it is first seen, and wants to know what is committed."""
    bench.topic.pins = bench.topic.reports = True
    bench.coordinator = bench.process(sources={"topic": bench.topic})
    return bench


def test_a_begin_without_input_keeps_where_reading_begins_and_nothing_else(offsets: Bench) -> None:
    """Otherwise a start at the newest record would move at each begin, and nothing would ever be read."""
    empty = offsets.coordinator.begin(ME)
    offsets.topic.end = 13
    taken = offsets.begin()

    assert empty is None
    assert offsets.topic.found == {"0": Position(10, {"end": 10})}
    with offsets.record.transaction() as tx:
        assert tx.inputs(taken.key)["topic"].ranges == {"0": (10, 13)}
    assert taken.checkpoint_id == 1


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_a_pin_or_at_a_report_loses_and_doubles_nothing(offsets: Bench, point: str) -> None:
    if point != "begin.pinned":
        assert offsets.coordinator.begin(ME) is None
        offsets.topic.end = 13
    failpoints.configure(f"{point}=raise")
    with pytest.raises(FailpointError):
        offsets.committed()
    failpoints.configure("")
    if point == "begin.pinned":
        assert offsets.position() is None  # rolled back: the next begin sees the source for the first time
        assert offsets.coordinator.begin(ME) is None
    offsets.topic.end = 17
    offsets.committed()

    with offsets.record.transaction() as tx:
        ranges = [tx.ranges(offsets.name, number)["topic"].ranges["0"] for number in range(1, 3 - (point == POINTS[0]))]
    assert ranges == ([(10, 17)] if point == "begin.pinned" else [(10, 13), (13, 17)])
    assert offsets.position() == 17
    assert offsets.topic.told[-1] == {"0": 17}


def test_only_what_is_committed_is_reported(offsets: Bench) -> None:
    """A sink that waits keeps the reported offset behind the decided one."""
    assert offsets.coordinator.begin(ME) is None
    offsets.topic.end = 13
    offsets.committed()
    offsets.topic.end = 15
    offsets.lake.down.add(2)
    with pytest.raises(PromotionPending):
        offsets.committed()
    waiting = offsets.position()
    offsets.coordinator.report()
    offsets.lake.down.clear()
    offsets.coordinator.recover(decided_only=True)

    assert waiting == 15
    assert offsets.topic.told == [{"0": 13}, {"0": 13}, {"0": 15}]


def test_a_report_that_fails_is_a_warning(
    offsets: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        msg = "the group is away"
        raise SinkUnavailable(msg)

    assert offsets.coordinator.begin(ME) is None
    offsets.topic.end = 13
    monkeypatch.setattr(offsets.topic, "report", fail)
    with caplog.at_level(logging.WARNING, "twophase"):
        done = offsets.committed()

    assert offsets.read(done.key).state is State.COMMITTED
    assert "source 'topic': what is committed is not reported: the group is away" in caplog.text
