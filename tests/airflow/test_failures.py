"""What becomes of a run when something goes wrong: each row of the table in docs/operations.md, on a running Airflow.

Before the commit point everything is rolled back and the run fails; after it everything is rolled forward.
"""

from __future__ import annotations

import json
import os
import signal
import uuid

import psutil
import pytest

from support.pipelines.airflow_case import ASKING, Case, assert_names, said_by_page
from support.servers.airflow import AirflowServer, eventually

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_a_retried_stage_is_another_attempt_of_the_same_revision(airflow: AirflowServer) -> None:
    case = Case(airflow, retries=3)
    case.land(1, 2)
    case.hold()
    case.fail()
    run = case.trigger()
    case.until_running()
    case.let_go()
    airflow.wait_for_task(case.name, run, "stage", "up_for_retry", timeout=120)
    case.fail(fail=False)

    assert case.wait(run) == "success"
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.show()["epoch"] > 1
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_marking_stage_failed_kills_spark_and_rolls_back(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.mark(run, "stage", "failed")

    assert case.wait(run) == "failed"
    assert case.states() == [(1, 1, "ABORTED")]
    assert_names(case, rf"task stage of run {case.name}/\S+ was stopped by Airflow: it, or its run, was marked")
    eventually(lambda: not case.spark(), 60)
    assert case.rows() == []


@pytest.mark.slow
def test_marking_stage_as_a_success_commits_nothing_and_the_run_fails(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.mark(run, "stage", "success")

    assert case.wait(run) == "failed"
    assert case.states() == [(1, 1, "ABORTED")]
    assert "has passed nothing on" in airflow.log(case.name, run, "commit")
    assert case.rows() == []


@pytest.mark.slow
def test_marking_commit_as_a_success_before_it_ran_rolls_back_and_the_run_fails(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.mark(run, "commit", "success")
    case.let_go()

    assert case.wait(run) == "failed"
    assert case.states() == [(1, 1, "ABORTED")]
    assert case.rows() == []


@pytest.mark.slow
def test_marking_the_run_as_a_success_before_the_commit_point_rolls_back(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.mark_run(run, "success")

    case.until((1, 1, "ABORTED"))
    eventually(lambda: airflow.run_state(case.name, run) == "failed", 60)
    assert case.rows() == []


@pytest.mark.slow
def test_marking_the_run_as_failed_rolls_back(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.mark_run(run, "failed")

    case.until((1, 1, "ABORTED"))
    assert airflow.run_state(case.name, run) == "failed"
    eventually(lambda: not case.spark(), 60)
    assert case.rows() == []


def test_clearing_a_run_that_was_done_makes_a_new_revision(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1, 2)
    run = case.trigger()
    assert case.wait(run) == "success"

    case.clear(run)

    assert case.wait(run) == "success"
    assert case.states() == [(1, 1, "SUPERSEDED"), (1, 2, "COMMITTED")]
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_clearing_commit_alone_after_it_was_done_changes_nothing(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    run = case.trigger()
    assert case.wait(run) == "success"

    case.clear(run, "commit")

    assert case.wait(run) == "success"
    assert case.states() == [(1, 1, "COMMITTED")]


@pytest.mark.slow
def test_clearing_a_failed_run_takes_its_checkpoint_again(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.fail()
    run = case.trigger()
    assert case.wait(run) == "failed"
    case.fail(fail=False)

    case.clear(run)

    assert case.wait(run) == "success"
    assert case.states() == [(1, 1, "ABORTED"), (1, 2, "COMMITTED")]
    assert case.rows() == [1]


def test_a_killed_runner_takes_its_spark_along_and_the_retry_commits(airflow: AirflowServer) -> None:
    case = Case(airflow, retries=2)
    case.land(1, 2)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.kill_runner(run)

    eventually(lambda: not case.spark(), 30)
    case.let_go()
    assert case.wait(run) == "success"
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_a_driver_that_outlives_its_runner_changes_nothing_and_is_swept(airflow: AirflowServer) -> None:
    """The zombie writer: spark-submit behind a wrapper, so that the death of the runner does not reach it."""
    wrapper = airflow.home / "spark-submit-that-lives-on"
    wrapper.write_text('#!/bin/bash\nspark-submit "$@" &\nwait $!\n')
    wrapper.chmod(0o755)
    case = Case(airflow, retries=2, spark=f"spark_binary={str(wrapper)!r}")
    case.land(1, 2)
    case.hold()
    run = case.trigger()
    case.until_running()

    case.kill_runner(run)
    case.until_running()  # the next try, while the orphan is still held
    assert any("r1.a1." in " ".join(process.cmdline()) for process in case.spark())
    case.let_go()

    assert case.wait(run) == "success"
    eventually(lambda: not case.spark(), 120)
    assert (case.states(), case.show()["epoch"]) == ([(1, 1, "COMMITTED")], 2)
    assert case.rows() == [1, 2]
    staging = airflow.home / "data" / "lake" / f"{case.name}.twophase" / "staging"
    assert [path.name[:14] for path in staging.iterdir()] == ["00000001.r1.a1"]
    airflow.twophase("sweep", case.name)
    assert not list(staging.iterdir())


@pytest.mark.slow
def test_the_scheduler_killed_after_the_commit_point_delays_the_promotion(airflow: AirflowServer) -> None:
    case = stopped_in_commit(airflow)
    assert case.rows() == []

    os.kill(airflow.component_pid("scheduler"), signal.SIGKILL)

    airflow.wait_until_healthy(120)
    case.until((1, 1, "COMMITTED"), timeout=240)
    eventually(lambda: airflow.run_state(case.name, "it") == "success", 120)
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_the_database_killed_during_the_commit_changes_nothing(airflow: AirflowServer) -> None:
    case = stopped_in_commit(airflow)

    os.kill(airflow.component_pid("postgres"), signal.SIGKILL)
    airflow.wait_until_healthy(120)
    for process in psutil.process_iter():
        if process.status() == psutil.STATUS_STOPPED:
            os.kill(process.pid, signal.SIGCONT)

    case.until((1, 1, "COMMITTED"), timeout=240)
    eventually(lambda: airflow.run_state(case.name, "it") == "success", 120)
    assert case.rows() == [1, 2]


STOPS = """
import os
from pathlib import Path

if Path(os.environ["TWOPHASE_HOME"], "gate", {name!r}, "stop").exists():
    os.environ["TWOPHASE_FAILPOINTS"] = "commit.after=stop"
"""


def stopped_in_commit(airflow: AirflowServer) -> Case:
    """Let a run named `it` stop right after its commit point; only once, another try goes through."""
    name = f"case_{uuid.uuid4().hex[:8]}"
    case = Case(airflow, retries=3, name=name, before=STOPS.format(name=name))
    case.land(1, 2)
    (case.gate / "stop").touch()
    case.trigger(dag_run_id="it")
    case.until((1, 1, "COMMITTING"), timeout=240)
    (case.gate / "stop").unlink()
    return case


@pytest.mark.slow
def test_a_run_that_times_out_is_rolled_back(airflow: AirflowServer) -> None:
    case = Case(airflow, arguments="schedule=None, dagrun_timeout=timedelta(seconds=60)")
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()

    assert case.wait(run) == "failed"
    eventually(lambda: not case.spark(), 60)
    recover_until(case, "ABORTED")
    assert_names(case, rf"run {case.name}/\S+ timed out: it may take 0:01:00 \(dagrun_timeout\)")
    assert case.rows() == []


def recover_until(case: Case, state: str) -> None:
    """Let recovery look until it has acted: what held the lease may have died a moment ago."""
    for _ in range(5):
        recover(case.airflow)
        if case.states() == [(1, 1, state)]:
            return
    pytest.fail(f"recovery leaves it at {case.states()}")


def recover(airflow: AirflowServer) -> None:
    """Let recovery look at everything once."""
    source = "from twophase.airflow import maintenance_dags\nrecover_dag, sweep_dag = maintenance_dags(None, None)\n"
    if not (airflow.dags / "twophase_maintenance.py").exists():
        airflow.add_dag("twophase_maintenance.py", source, "twophase_recover", "twophase_sweep")
    assert airflow.wait("twophase_recover", airflow.trigger("twophase_recover")) == "success"


@pytest.mark.slow
def test_a_queued_commit_waits_longer_than_the_lease(airflow: AirflowServer) -> None:
    case = waiting_for_commit(airflow)
    recover(airflow)
    assert case.states() == [(1, 1, "PRECOMMITTED")]

    airflow.api("PATCH", f"pools/{case.name}", name=case.name, slots=1, include_deferred=False)

    assert case.wait("it") == "success"
    assert case.rows() == [1]


@pytest.mark.slow
def test_a_dag_file_edited_between_stage_and_commit_changes_nothing(airflow: AirflowServer) -> None:
    case = waiting_for_commit(airflow)

    case.declare(case.source.replace(f'"lake/{case.name}"', '"elsewhere"'))
    airflow.api("PATCH", f"pools/{case.name}", name=case.name, slots=1, include_deferred=False)

    assert case.wait("it") == "success"
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.rows() == [1]


@pytest.mark.slow
def test_a_dag_file_that_is_gone_suspends_the_run_and_its_return_commits_it(airflow: AirflowServer) -> None:
    case = suspended(airflow)
    recover(airflow)
    assert airflow.run_state(case.name, "it") == "running"
    assert (case.states(), case.rows()) == ([(1, 1, "PRECOMMITTED")], [])

    case.declare(case.source)

    assert case.wait("it") == "success"
    assert (case.states(), case.rows()) == ([(1, 1, "COMMITTED")], [1])


@pytest.mark.slow
def test_a_dag_deleted_between_stage_and_commit_is_rolled_back(airflow: AirflowServer) -> None:
    case = suspended(airflow)

    airflow.api("DELETE", f"dags/{case.name}")

    recover_until(case, "ABORTED")
    assert_names(case, rf"recovery: run {case.name}/it was deleted in Airflow before the commit point")
    assert case.rows() == []


def suspended(airflow: AirflowServer) -> Case:
    """Take the DAG's file away between stage and commit, until Airflow has seen that it is gone."""
    case = waiting_for_commit(airflow)
    (airflow.dags / f"{case.name}.py").unlink()
    eventually(lambda: airflow.api("GET", f"dags/{case.name}")["is_stale"], 120, every=1)
    airflow.api("PATCH", f"pools/{case.name}", name=case.name, slots=1, include_deferred=False)
    return case


def waiting_for_commit(airflow: AirflowServer) -> Case:
    """Let a run named `it` be staged while its pool has no slot for the commit."""
    name = f"case_{uuid.uuid4().hex[:8]}"
    airflow.api("POST", "pools", name=name, slots=1, description="", include_deferred=False)
    arguments = f'schedule=None, default_args={{"pool": "{name}", "retries": 0}}'
    case = Case(airflow, name=name, arguments=arguments)
    case.land(1)
    case.hold()
    case.trigger(dag_run_id="it")
    case.until_running()
    airflow.api("PATCH", f"pools/{name}", name=name, slots=0, include_deferred=False)
    case.let_go()
    case.until((1, 1, "PRECOMMITTED"))
    return case


@pytest.mark.slow
def test_an_approval_may_take_days(airflow: AirflowServer) -> None:
    case = Case(airflow, arguments="schedule=None, approve=True")
    case.land(1)
    run = case.trigger()
    airflow.wait_for_task(case.name, run, "approve", ASKING, timeout=200)

    recover(airflow)

    assert case.states() == [(1, 1, "OPEN")]
    assert airflow.run_state(case.name, run) == "running"
    asked = f"A person is asked to approve it: answer in Airflow, in run {case.name}/{run}."
    (row,) = json.loads(airflow.twophase("pending", case.name, "--json"))
    assert (row["advice"], row["command"]) == (asked, None)
    assert asked in said_by_page(case, "/checkpoints/1")


@pytest.mark.slow
@pytest.mark.parametrize("_again", range(5))
def test_two_runs_for_one_interval_commit_it_once(airflow: AirflowServer, _again: int) -> None:
    case = Case(airflow, interval=True, retries=20)
    case.land(1, 2, day="2026-11-15")
    slot = {"slot": "2026-11-15/2026-11-16"}

    runs = [case.trigger(conf=slot), case.trigger(conf=slot)]

    assert [case.wait(run) for run in runs] == ["success", "success"]
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_a_manual_run_waits_for_the_one_before_it(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    first = case.trigger()
    case.until_running()

    second = case.trigger()
    case.land(2)
    assert airflow.run_state(case.name, second) == "queued"
    case.let_go()

    assert [case.wait(run) for run in (first, second)] == ["success", "success"]
    assert case.states() == [(1, 1, "COMMITTED"), (2, 1, "COMMITTED")]
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_a_red_run_whose_checkpoint_was_recovered_turns_green_without_work(airflow: AirflowServer) -> None:
    case = stopped_in_commit(airflow)
    case.mark_run("it", "failed")
    recover_until(case, "COMMITTED")

    case.clear("it")

    assert case.wait("it") == "success"
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.rows() == [1, 2]


@pytest.mark.slow
def test_a_worker_that_cannot_write_the_run_folder_says_so(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    (airflow.home / "runs").mkdir(exist_ok=True)
    (airflow.home / "runs" / case.name).touch()
    run = case.trigger()

    assert case.wait(run) == "failed"
    assert "TWOPHASE_HOME has to be a folder that every worker can write to" in airflow.log(case.name, run, "stage")
    assert case.states() == [(1, 1, "ABORTED")]
