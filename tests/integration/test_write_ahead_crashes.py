"""The write-ahead sink killed, stopped and raced: nothing is lost, and where ids are kept nothing is doubled."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import text

from support.faults.processes import call, context, start, stopped_at_end
from support.sinks import senders
from support.sinks.write_ahead_bench import HTTP, Bench, staged_output
from twophase import committers
from twophase.committers import CheckpointCommitter
from twophase.core.errors import PromotionPending
from twophase.core.failpoints import FAILPOINTS
from twophase.core.ports import Outcome
from twophase.core.states import State
from twophase.sinks.write_ahead import delivery

WINDOWS = {"send.row", "send.sent"}
SENDING = [name for name in FAILPOINTS if name.startswith("send.")]


def met(point: str) -> int:
    """Return at which time a process dies: the second subtask or row, or the one end."""
    return 1 if point == "send.closed" else 2


# --- killed while sending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", SENDING)
def test_killed_anywhere_nothing_is_lost_and_only_the_two_windows_double(
    bench: Bench, point: str, committer: CheckpointCommitter
) -> None:
    """In the middle of send_values, and between it and the commit: there it is at least once, and nowhere else."""
    bench.declare(committer=committer)
    bench.land()

    crashed = call(
        senders.take,
        bench.pipeline.declaration(),
        log=bench.home / "crash.log",
        failpoints=f"{point}=kill@{met(point)}",
    )
    recovered = call(senders.recover, log=bench.home / "recover.log")

    assert crashed.hit(point), crashed.said
    assert (crashed.wait(), recovered.wait()) == (-9, 0), recovered.said
    counts = Counter(bench.ids())
    assert set(counts) == {0, 1, 2, 3}
    assert (max(counts.values()) > 1) == (point in WINDOWS)
    assert bench.state(1) is State.COMMITTED


@pytest.mark.parametrize("action", ["kill", "raise"])
@pytest.mark.parametrize("point", SENDING)
def test_killed_anywhere_each_row_takes_effect_once_where_its_id_is_kept(
    bench: Bench, point: str, action: str, service: tuple[senders.Service, str]
) -> None:
    kept, url = service
    bench.declare(sender=HTTP, arguments={"url": url, "batch": 1}, idempotent=True)
    bench.land(rows=6)

    crashed = call(
        senders.take,
        bench.pipeline.declaration(),
        log=bench.home / "crash.log",
        failpoints=f"{point}={action}@{met(point)}",
    )
    recovered = call(senders.recover, log=bench.home / "recover.log")

    assert crashed.hit(point), crashed.said
    assert recovered.wait() == 0, recovered.said
    assert sorted(row["id"] for row in kept.rows()) == list(range(6))
    assert bench.state(1) is State.COMMITTED


def test_an_answer_that_was_lost_and_a_service_that_is_down_double_nothing(
    bench: Bench, service: tuple[senders.Service, str]
) -> None:
    kept, url = service
    bench.declare(sender=HTTP, arguments={"url": url, "batch": 2}, idempotent=True)
    kept.trouble = ["lose"]
    with pytest.raises(PromotionPending, match=r"RemoteDisconnected"):
        bench.run(files=1, rows=6)
    kept.trouble = ["", "down"]
    bench.recover()
    assert bench.state(1) is State.COMMITTING

    bench.recover()

    assert bench.state(1) is State.COMMITTED
    assert [row["id"] for row in kept.rows()] == list(range(6))


def test_a_sender_gets_its_credentials_by_the_id_of_a_connection(
    bench: Bench, service: tuple[senders.Service, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, url = service
    monkeypatch.setenv("AIRFLOW_CONN_CARRIER", "http://me:canary@carrier.example.org")
    bench.declare(sender=HTTP, arguments={"url": url, "conn_id": "carrier"}, idempotent=True)

    bench.run()

    assert kept.authorization == "Basic bWU6Y2FuYXJ5"
    with bench.record.engine.connect() as connection:
        recorded = connection.execute(text("SELECT declaration::text FROM twophase.pipeline")).scalar_one()
    assert "carrier" in recorded
    assert "canary" not in recorded


def test_ids_are_the_same_however_often_a_row_is_sent(bench: Bench) -> None:
    bench.declare(idempotent=True)
    bench.down("1")
    bench.pending()
    bench.down(None)
    bench.recover()

    said = [said["row"] for said in senders.received(bench.received)]

    assert {row["_twophase_id"]: row["id"] for row in said} == {
        "words/out/1/r1/0/0": 0,
        "words/out/1/r1/0/1": 2,
        "words/out/1/r1/1/0": 1,
        "words/out/1/r1/1/1": 3,
    }
    assert len(said) == 5


# --- several promoters -----------------------------------------------------------------------------------------------


ROUNDS = 25


def test_two_racing_promoters_send_each_row_once(bench: Bench, committer: CheckpointCommitter) -> None:
    bench.declare(committer=committer)
    bench.sink.prepare()
    outputs = [staged_output(bench, number) for number in range(1, ROUNDS + 1)]
    barrier, results = context.Barrier(2), context.SimpleQueue()

    both = [
        start(senders.race, bench.sink.declaration(), outputs, barrier, results, log=bench.home / f"{number}.log")
        for number in range(2)
    ]
    with stopped_at_end(*both):
        assert [child.wait() for child in both] == [0, 0], both[0].said + both[1].said

    assert Counter(results.get() for _ in range(2 * ROUNDS)) == {"promoted": ROUNDS, "already promoted": ROUNDS}
    assert bench.sent() == [(number, row) for number in range(1, ROUNDS + 1) for row in (0, 2, 1, 3)]


def test_a_stopped_promoter_keeps_the_others_from_sending_and_goes_on_when_it_wakes(
    bench: Bench, committer: CheckpointCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.declare(committer=committer)
    bench.sink.prepare()
    output, results = staged_output(bench, 1), context.SimpleQueue()
    arguments = (bench.sink.declaration(), output, results)
    stopped = start(senders.promote, *arguments, log=bench.home / "stopped.log", failpoints="send.row=stop@2")
    with stopped_at_end(stopped):
        assert stopped.until_stopped(), stopped.said
        monkeypatch.setattr(delivery, "PATIENCE", 0.2)

        waits = bench.sink.promote(output)
        stopped.wake()
        assert stopped.wait() == 0

    assert waits.outcome is Outcome.RETRY_LATER
    assert f":{stopped.process.pid}" in (waits.reason or "")
    assert results.get() == "promoted"
    assert bench.sink.promote(output).outcome is Outcome.ALREADY_PROMOTED
    assert [row for _, row in bench.sent()] == [0, 2, 1, 3]


def test_a_committer_that_cannot_be_reached_stops_the_sending_before_it_begins(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.decided()
    output = bench.output(1)

    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://nobody@127.0.0.1:1/nothing")
    found = bench.sink.find(output)
    promotion = bench.sink.promote(output)

    assert {found.outcome, promotion.outcome} == {Outcome.RETRY_LATER}
    assert "refused" in (promotion.reason or "")
    assert bench.sent() == []


def test_a_committer_that_is_away_delays_the_sending_and_not_the_decision(
    bench: Bench, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", "postgres://nobody@127.0.0.1:1/nothing")
    bench.declare(committer=committers.Postgres(conn_id="shop"), max_pending=2)
    for _ in range(2):
        assert "refused" in str(bench.pending())
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", dsn.replace("postgresql+psycopg2", "postgres"))

    bench.run()

    assert [checkpoint for checkpoint, _ in bench.sent()] == [1] * 4 + [2] * 4 + [3] * 4
