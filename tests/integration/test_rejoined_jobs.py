"""A job that did not outlive its task is followed by another attempt, never by a second job of the same attempt."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from twophase import Pipeline, sinks, sources
from twophase.airflow.operators import kill_job
from twophase.airflow.spark_submit import StageOperator
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key, Revision, Run
from twophase.core.states import State
from twophase.wiring import coordinator_of, enter


class Way(StageOperator):
    """A cluster that says what it is told of the job that the record keeps."""

    alive: bool

    def outlives(self, job_id: str, context: Any) -> bool:
        return self.alive


class Lost(StageOperator):
    """A cluster whose client is not even installed here."""

    @classmethod
    def kill(cls, job: Any) -> None:
        msg = f"no client for {job['id']}"
        raise RuntimeError(msg)


def _words() -> Pipeline:
    return Pipeline(
        "words",
        reads={"words": sources.Files("landing", format="json", schema="word string")},
        transform="words:transform",
        writes={"lake": sinks.Files("lake")},
    )


def test_a_job_that_cannot_be_killed_keeps_nothing_from_being_aborted(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the kill raises is told; what such a job still writes is in a place that is never promoted."""
    job = {"id": "driver-1", "operator": f"{Lost.__module__}:{Lost.__qualname__}"}

    with caplog.at_level(logging.WARNING, "twophase"):
        kill_job(Revision(Key("words", 1, 1), State.ABORTING, 1, job=job))

    assert caplog.messages == ["words/1 r1: its job driver-1 could not be killed: no client for driver-1"]


@pytest.mark.parametrize(
    ("name", "rejoined"),
    [
        ("twophase.airflow.stage:StageOperator", True),
        ("twophase.airflow:StageOperator", True),
        ("gone.with.its:Operator", False),
    ],
)
def test_a_job_is_rejoined_by_the_operator_that_submitted_it_by_whatever_name(name: str, rejoined: bool) -> None:
    """One whose operator is gone is nobody's: the task goes on with another attempt and does not fail over it."""
    operator = StageOperator(task_id="stage", pipeline=_words())

    assert operator.may_rejoin({"operator": name}) is rejoined


@pytest.mark.parametrize(("alive", "epoch"), [(True, 1), (False, 2)])
def test_a_job_that_has_failed_is_followed_by_another_attempt(
    home: Path, record: PostgresRecord, monkeypatch: pytest.MonkeyPatch, alive: bool, epoch: int
) -> None:
    """A second driver in the first one's staging place would find that it was claimed, try after try."""
    (home / "data" / "landing").mkdir(parents=True)
    (home / "data" / "landing" / "1.json").write_text('{"word": "apple"}\n')
    pipeline = _words()
    enter(record, pipeline)
    coordinator = coordinator_of(record, pipeline)
    begun = coordinator.begin(Run("dag", "run"))
    assert begun is not None
    first = coordinator.attempt(begun)
    operator = f"{Way.__module__}:{Way.__qualname__}"
    job = {"attempt": 1, "id": "driver-1", "folder": str(home / "first"), "operator": operator, "conn_id": "spark"}
    coordinator.transact(lambda tx: tx.keep_job(first.key, epoch=1, job=job))
    kept = coordinator.transact(lambda tx: tx.revision(first.key))
    monkeypatch.setattr(Way, "alive", alive, raising=False)

    opened, submission = Way(task_id="stage", pipeline=pipeline)._attempt(coordinator, kept, {})

    assert opened.revision.epoch == epoch
    assert (submission.folder == home / "first", submission.rejoined) == (alive, "driver-1" if alive else None)
