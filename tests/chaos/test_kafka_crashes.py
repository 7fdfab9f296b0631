"""Every failpoint, killed and raised, from a Kafka topic into Kafka, files and PostgreSQL at once.

Every committed record of the topic reaches each of them once, and the consumer group ends where the topic does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.test_sink_crashes import WAYS, expect_in_order, recover
from support.crashes import scenarios, several_sinks
from support.crashes.sink_matrix import points
from support.faults.processes import call
from support.pipelines.factories import PreStaged, counted
from twophase.committer.record import PostgresRecord
from twophase.core.failpoints import FAILPOINTS
from twophase.local.kafka import Broker
from twophase.runner import Runner, script
from twophase.sources.kafka import Kafka
from twophase.storage.kafka_cluster import Place

pytestmark = pytest.mark.chaos

KINDS = "kafka+files+postgres"
FROM_KAFKA = KINDS + several_sinks.FROM_KAFKA
#: What `make test` meets, killed: those that only a source of offsets comes by, and one of each step besides.
FEW = ("begin.pinned", "begin.after", "vote.checked", "commit.after", "kafka.committed", "report.before")


def cases() -> Iterator[object]:
    met = {*points(KINDS), *scenarios.OFFSETS}
    for point in (name for name in FAILPOINTS if name in met):
        for action in ("kill", "raise"):
            few = action == "kill" and point in FEW
            yield pytest.param(point, action, marks=() if few else pytest.mark.slow)


@pytest.fixture(autouse=True)
def _servers(home: Path, dsn: str, kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    several_sinks.serve_kafka(kafka)
    monkeypatch.setenv("TWOPHASE_LEASE", "0.5")
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))


@pytest.mark.parametrize(("failpoint", "action"), list(cases()))
def test_a_crash_anywhere_between_kafka_and_three_sinks_loses_and_doubles_nothing(
    failpoint: str, action: str, record: PostgresRecord, home: Path, kafka: Broker
) -> None:
    first = [] if failpoint == "begin.pinned" else several_sinks.produce(kafka, 0, 1)
    if first:
        assert call(several_sinks.run, FROM_KAFKA, log=home / "first.log").wait() == 0
    rows = first + several_sinks.produce(kafka, 2, 3)
    victim = WAYS.get(failpoint.partition(".")[0], several_sinks.run)
    if victim is several_sinks.sweep:  # something dead to sweep: an attempt that another one replaced
        call(several_sinks.run, FROM_KAFKA, log=home / "dead.log", failpoints="vote.before=kill")
        call(several_sinks.run, FROM_KAFKA, log=home / "second.log")

    crashed = call(victim, FROM_KAFKA, log=home / "crash.log", failpoints=f"{failpoint}={action}")

    assert crashed.hit(failpoint), f"{failpoint} was not reached:\n{crashed.said}"
    warned = failpoint.startswith("report.") and action == "raise"
    assert crashed.wait() == (-9 if action == "kill" else 0 if warned else 1), crashed.said
    for kind in several_sinks.split(FROM_KAFKA):
        assert counted(several_sinks.held(kind)) in (counted(first), counted(rows)), kind
    recover(FROM_KAFKA, home)
    rows += several_sinks.produce(kafka, 4)
    drained = call(several_sinks.drain, FROM_KAFKA, log=home / "drain.log")
    assert drained.wait() == 0, drained.said
    for kind in several_sinks.split(FROM_KAFKA):
        assert counted(several_sinks.held(kind)) == counted(rows), kind
    expect_in_order(FROM_KAFKA, record, home)
    assert sum(reported(several_sinks.pipeline(FROM_KAFKA).reads["words"]).values()) == len(rows)


def vote(kinds: str) -> None:
    """Take one checkpoint up to its votes, as a task does, and end."""
    with Runner(several_sinks.pipeline(kinds), PreStaged()) as runner:
        taken = runner.coordinator.begin(script())
        assert taken is not None
        runner._stage_and_vote(runner.coordinator.attempt(taken))


def test_what_was_voted_for_before_a_restart_is_committed_once(home: Path, kafka: Broker) -> None:
    rows = several_sinks.produce(kafka, 0, 1)
    voted = call(vote, FROM_KAFKA, log=home / "vote.log")
    assert voted.wait() == 0, voted.said
    assert [several_sinks.held(kind) for kind in several_sinks.split(FROM_KAFKA)] == [[], [], []]

    for number in (1, 2):
        drained = call(several_sinks.drain, FROM_KAFKA, log=home / f"drain{number}.log")
        assert drained.wait() == 0, drained.said

    for kind in several_sinks.split(FROM_KAFKA):
        assert counted(several_sinks.held(kind)) == counted(rows), kind


def reported(source: object) -> dict[Place, int]:
    """Return the offsets that the consumer group is told to read next."""
    assert isinstance(source, Kafka)
    places = [Place(source.topics[0], partition) for partition in range(2)]
    return source.cluster().group_offsets(several_sinks.group(), places)
