"""Two promoters of the same output, released at the same instant, again and again, on each sink: one of them promotes.

The other one finds it promoted. Each is a process of its own that knows the declaration and the record's words alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from sqlalchemy import text

from support.crashes import several_sinks
from support.faults.processes import PATIENCE, context, polls, start, stopped_at_end
from support.pipelines.factories import SCHEMA, Row, counted
from support.sinks.staged_rows import Rows, prestage
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome
from twophase.sinks.base import Sink

pytestmark = pytest.mark.chaos

#: What a promoter that is not through yet asks for: to be called once more.
WAITING = {Outcome.RETRY_LATER, Outcome.UNKNOWN}
#: Sinks in which checkpoints need not keep an order.
UNORDERED = ("files", "postgres", "attached")

Told = SimpleQueue[tuple[int, str]]


def promote(kind: str, outputs: Iterable[Output], barrier: Barrier, told: Told) -> None:
    """Promote one output after the other, each when all others may too; tell how it went."""
    for number, output in enumerate(outputs):
        sink = Sink.load(several_sinks.pipeline(kind).writes[kind].declaration())
        sink.join("words", kind)
        barrier.wait(PATIENCE)
        told.put((number, until_settled(sink, output)))
        barrier.wait(PATIENCE)


def until_settled(sink: Sink, output: Output) -> Outcome:
    """Promote until it is told how it ended."""
    for _ in polls(PATIENCE):
        outcome = sink.promote(output).outcome
        if outcome not in WAITING:
            return outcome
    return Outcome.RETRY_LATER


def rows_of(number: int) -> list[Row]:
    first = number * several_sinks.ROWS
    return [{"id": first + i, "word": f"w{i % 7}", "frequency": i % 10} for i in range(several_sinks.ROWS)]


def staged(kind: str, count: int) -> list[Output]:
    """Stage some checkpoints; return them as the record has them once they are decided."""
    sink = several_sinks.pipeline(kind).writes[kind]
    sink.prepare()
    outputs = []
    for number in range(count):
        key = Key("words", number + 1, 1)
        began = datetime(2026, 11, 15, tzinfo=UTC)
        place = sink.place(key, 1, "7c1e09ab")
        output = Output(key, 1, place, commit_seq=number + 1, began=began, sink=kind)
        outputs.append(replace(output, manifest=prestage(sink, output, Rows(rows_of(number), 2, SCHEMA))))
    return outputs


def race(kind: str, home: Path, promoters: list[list[Output]]) -> list[tuple[int, str]]:
    """Let each promote its own at the same instants; return how each of them went."""
    barrier, told = context.Barrier(len(promoters)), context.SimpleQueue()
    children = [
        start(promote, kind, mine, barrier, told, log=home / f"promoter {number}.log")
        for number, mine in enumerate(promoters)
    ]
    with stopped_at_end(*children):
        found = [told.get() for mine in promoters for _ in mine]
        for child in children:
            assert child.wait() == 0, child.said
    return found


@pytest.fixture(autouse=True)
def _target(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", several_sinks.LOCAL)
def test_two_racing_promoters_commit_once(kind: str, rounds: int, home: Path, record: PostgresRecord) -> None:
    outputs = staged(kind, rounds)

    found = race(kind, home, [outputs, outputs])

    once = Counter({(number, outcome): 1 for number in range(rounds) for outcome in ("PROMOTED", "ALREADY_PROMOTED")})
    assert Counter((number, Outcome(outcome).name) for number, outcome in found) == once
    rows = [row for number in range(rounds) for row in rows_of(number)]
    assert counted(several_sinks.held(kind)) == counted(several_sinks.expected(kind, rows))
    with record.engine.connect() as connection:  # the target is in the same database here
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        assert connection.execute(text(deadlocks)).scalar_one() == 0


@pytest.mark.parametrize("kind", UNORDERED)
def test_checkpoints_that_are_promoted_at_once_do_not_hinder_each_other(kind: str, home: Path) -> None:
    """Not even by making the table, which whoever is first does."""
    outputs = staged(kind, 4)

    found = race(kind, home, [[output] for output in outputs])

    assert [Outcome(outcome) for _, outcome in found] == [Outcome.PROMOTED] * 4
    rows = [row for number in range(4) for row in rows_of(number)]
    assert counted(several_sinks.held(kind)) == counted(rows)
