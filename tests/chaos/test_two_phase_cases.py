"""The cases of Flink's TwoPhaseCommitSinkFunction, on each sink whose marker travels with its data.

Those of its GenericWriteAheadSink are in tests/integration/test_write_ahead.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.crashes import several_sinks
from support.pipelines.factories import PreStaged, Row, counted, land_words
from twophase import Pipeline
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Key, Run
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome, Promotion
from twophase.core.states import State
from twophase.runner import Runner
from twophase.wiring import coordinator_of, load

pytestmark = pytest.mark.chaos

#: What `make test` meets.
FEW = ("postgres", "delta")
KINDS = [
    pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in several_sinks.LOCAL if kind != "sent"
]


class Decided:
    """A pipeline into one sink, whose checkpoints are decided and not promoted."""

    def __init__(self, kind: str, record: PostgresRecord) -> None:
        self.kind = kind
        self.record = record
        self.rows: list[Row] = []
        self.runs = 0

    @property
    def pipeline(self) -> Pipeline:
        found = several_sinks.pipeline(self.kind)
        found.max_pending = 2
        return found

    def decide(self) -> Key:
        """Take a checkpoint up to its commit point; nobody is notified of it, nor of an earlier one."""
        self.rows += land_words(files=2, start=2 * self.runs)
        self.runs += 1
        missed = Promotion(Outcome.RETRY_LATER, "the notification was missed")
        with pytest.MonkeyPatch.context() as patched, Runner(self.pipeline, PreStaged(), record=self.record) as runner:
            patched.setattr(type(self.pipeline.writes[self.kind]), "promote", lambda *_: missed)
            taken = runner.coordinator.begin(Run(None, f"run-{self.runs}"))
            assert taken is not None
            attempt = runner.coordinator.attempt(taken)
            runner._stage_and_vote(attempt)
            runner.coordinator.decide_commit(attempt)
            return attempt.key

    def recover(self) -> None:
        """Finish what is decided, as a process that knows the record alone."""
        coordinator_of(self.record, load(self.record, "words")).recover(decided_only=True)

    def states(self) -> set[State]:
        with self.record.transaction() as tx:
            return {tx.revision(Key("words", number + 1, 1)).state for number in range(self.runs)}

    def check(self) -> None:
        """All that was decided is there, once."""
        assert self.states() == {State.COMMITTED}
        assert counted(several_sinks.held(self.kind)) == counted(several_sinks.expected(self.kind, self.rows))


@pytest.fixture(params=KINDS)
def decided(
    request: pytest.FixtureRequest, home: Path, dsn: str, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Decided]:
    monkeypatch.setenv(several_sinks.TARGET, dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
    yield Decided(request.param, record)
    failpoints.configure("")


def test_a_notification_of_2_before_1_promotes_1_first(decided: Decided) -> None:
    decided.decide()
    second = decided.decide()
    assert decided.states() == {State.COMMITTING}

    coordinator_of(decided.record, decided.pipeline).finish(second)

    decided.check()
    promoted = "SELECT checkpoint_id FROM twophase.event WHERE action = 'promoted' ORDER BY id"
    with decided.record.engine.connect() as connection:
        assert list(connection.exec_driver_sql(promoted).scalars()) == [1, 2]


def test_a_crash_before_the_notification_is_rolled_forward_from_the_record_alone(decided: Decided) -> None:
    decided.decide()

    decided.recover()

    decided.check()


def test_what_was_recovered_is_committed_again_harmlessly(decided: Decided) -> None:
    """It was promoted, and the process died before it could say so."""
    key = decided.decide()
    failpoints.configure("promote.inside=raise")
    with pytest.raises(FailpointError):
        coordinator_of(decided.record, decided.pipeline).finish(key)
    failpoints.configure("")
    assert decided.states() == {State.COMMITTING}

    decided.recover()
    decided.recover()

    decided.check()
    with decided.record.transaction() as tx:
        again = tx.participants(key)[0].output(tx.revision(key))
    promotion = decided.pipeline.writes[decided.kind].promote(again)
    assert promotion.outcome is Outcome.ALREADY_PROMOTED
    decided.check()
