"""The record says why a revision ended: what failed first, then how that came to end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed, twophase
from support.pipelines.factories import PreStaged, land_words, words_pipeline
from twophase import audits
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Revision, Run
from twophase.core.errors import AuditFailed
from twophase.core.failpoints import FailpointError
from twophase.pipeline import Pipeline
from twophase.runner import Runner
from twophase.wiring import coordinator_of, enter

pytestmark = pytest.mark.usefixtures("home")

MINE, OTHER = Run("words", "manual__1"), Run("words", "manual__2")


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def begun(record: PostgresRecord) -> Revision:
    """Return the first attempt of a checkpoint that a run of Airflow's has taken."""
    land_words()
    enter(record, words_pipeline())
    coordinator = coordinator_of(record, words_pipeline())
    taken = coordinator.begin(MINE)
    assert taken
    return coordinator.attempt(taken)


def error() -> str:
    found: str = listed("show", "words", "1")["error"]
    return found


def events(action: str) -> list[str]:
    return [event["why"] for event in listed("show", "words", "1")["events"] if event["action"] == action]


def test_an_abort_takes_over_what_failed_before_it(record: PostgresRecord) -> None:
    """The first sentence of the error is the cause; how the run ended comes after it."""
    coordinator, attempt = coordinator_of(record, words_pipeline()), begun(record)

    assert coordinator.fail(attempt, "AttemptFailed: no such column (try 1)")
    coordinator.abort(attempt, "run words/manual__1 ended before the commit point")

    assert error() == "AttemptFailed: no such column (try 1); run words/manual__1 ended before the commit point"
    assert events("failed") == ["AttemptFailed: no such column (try 1)"]


def test_a_later_try_has_the_last_word_and_a_commit_forgets_both(record: PostgresRecord) -> None:
    coordinator, first = coordinator_of(record, words_pipeline()), begun(record)
    coordinator.fail(first, "AttemptFailed: one (try 1)")
    second = coordinator.attempt(first)
    coordinator.fail(second, "AttemptFailed: two (try 2)")
    assert error() == "AttemptFailed: two (try 2)"

    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = NULL, dag_id = NULL, run_id = 'gone'"))
    done = Runner(words_pipeline(), PreStaged(), record=record).run()

    assert done
    assert (done.state, done.error) == ("COMMITTED", None)
    assert len(events("failed")) == 2


def test_a_failure_of_an_older_copy_is_not_kept(record: PostgresRecord) -> None:
    """Whoever was fenced, or whose run was taken over, or who comes after the decision, writes nothing (R15)."""
    coordinator, first = coordinator_of(record, words_pipeline()), begun(record)
    second = coordinator.attempt(first)

    assert not coordinator.fail(first, "an older attempt")
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET run_id = 'manual__2'"))
    assert not coordinator.fail(second, "another run's")
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET run_id = 'manual__1'"))
    coordinator.abort(second, "it ended")
    assert not coordinator.fail(second, "too late")

    assert error() == "it ended"
    assert events("failed") == []


def test_the_same_failure_told_twice_is_one_event(record: PostgresRecord) -> None:
    """The reply may be lost, and the step run again."""
    coordinator, attempt = coordinator_of(record, words_pipeline()), begun(record)

    assert [coordinator.fail(attempt, "ValueError: x (try 1)") for _ in range(2)] == [True, False]
    assert events("failed") == ["ValueError: x (try 1)"]


def test_a_no_is_the_cause_also_when_its_voter_died_right_after_it(record: PostgresRecord) -> None:
    land_words()
    enter(record, words_pipeline())
    coordinator = coordinator_of(record, words_pipeline(), approvals=["approval"])
    taken = coordinator.begin(MINE)
    assert taken
    attempt = coordinator.attempt(taken)

    coordinator.vote(attempt, "approval", yes=False, reason="rejected by anna: wrong month")
    coordinator.abort(attempt, "run words/manual__1 ended before the commit point")

    assert error().startswith("approval: rejected by anna: wrong month; run words/manual__1 ended")


@pytest.mark.parametrize("known", [None, "NoSpace: lake is full (try 3)"])
def test_recovery_names_the_last_known_failure_and_how_the_run_ended(record: PostgresRecord, known: str | None) -> None:
    attempt = begun(record)
    coordinator = coordinator_of(record, words_pipeline(), run_ended=lambda run: f"run {run} ended as failed")
    if known:
        coordinator.fail(attempt, known)
    coordinator.rest(attempt)

    coordinator.recover()

    assert error() == "; ".join(filter(None, [known, "recovery: run words/manual__1 ended as failed"]))


def test_a_run_without_airflow_names_its_failure_once(record: PostgresRecord) -> None:
    land_words()
    declared = words_pipeline()
    audited = Pipeline(
        declared.name,
        reads=declared.reads,
        transform=declared.transform,
        writes=declared.writes,
        audits=[audits.row_count(minimum=99)],
    )

    with pytest.raises(AuditFailed):
        Runner(audited, PreStaged(), record=record).run()

    assert error().startswith("AuditFailed: checkpoint words/1 r1: ")
    assert error().count("expected at least 99") == 1


def test_a_run_without_airflow_that_dies_after_telling_why_is_ended_with_it(record: PostgresRecord) -> None:
    """The failure is told before anything is aborted, so nothing is lost when the process dies in between."""
    land_words()
    failpoints.configure("stage.before=raise,abort.before=raise")
    with pytest.raises(FailpointError):
        Runner(words_pipeline(), PreStaged(), record=record).run()
    failpoints.configure("")
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET lease_until = NULL"))

    assert twophase("recover").exit_code == 0

    assert error().startswith("FailpointError: failpoint stage.before")
    assert error().endswith("recovery: its run ended before the commit point")
