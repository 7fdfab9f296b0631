"""Why a run came to nothing: the first sentence on the page and on the command line names it, on a running Airflow."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from support.pipelines.airflow_case import Case, assert_names, said_by_page
from support.servers.airflow import AirflowServer

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

AUDITED = "from twophase import audits"
BROKEN = """
def transform(words):
    return words.selectExpr("id", "nosuch AS word")


def dies(words):
    import os

    os.kill(os.getppid(), 9)
    os._exit(9)
"""


def test_a_transform_that_raises_is_named_with_its_file_and_line(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1, 2)
    case.fail()

    run = case.trigger()

    assert case.wait(run) == "failed"
    assert case.tasks(run) == {"stage": "failed", "commit": "upstream_failed", "abort": "failed"}
    assert (case.states(), case.rows()) == ([(1, 1, "ABORTED")], [])
    assert_names(case, r"AttemptFailed: .*ValueError: the test says so \(gated\.py:\d+\); .* \(try 1\); run ")
    (failed,) = [event for event in case.show()["events"] if event["action"] == "failed"]
    assert failed["who"] == f"admin via airflow {case.name}.stage try 1"


@pytest.mark.slow
def test_an_audit_is_named_with_its_verdict(airflow: AirflowServer) -> None:
    case = Case(airflow, before=AUDITED, audits="[audits.row_count(minimum=3)]")
    case.land(1)

    assert case.run() == "failed"
    assert_names(case, r"AuditFailed: .*row_count: .*expected at least 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "cause"),
    [
        ("broken:transform", r"AttemptFailed: .*AnalysisException: .*nosuch.*\(broken\.py:3\)"),
        ("broken:dies", r"AttemptFailed: .*spark-submit ended with code -?\d+ and left no result"),
        ("nowhere_at_all:transform", r"(ConfigError|AttemptFailed): .*nowhere_at_all"),
    ],
)
def test_a_spark_job_that_fails_is_named(airflow: AirflowServer, transform: str, cause: str) -> None:
    jobs = airflow.home / "spark_jobs"
    jobs.mkdir(exist_ok=True)
    (jobs / "broken.py").write_text(BROKEN)
    case = Case(airflow, transform=transform)
    case.land(1)

    assert case.run() == "failed"
    assert_names(case, cause)


@pytest.mark.slow
def test_input_that_is_not_there_is_named_though_nothing_could_begin(airflow: AirflowServer) -> None:
    case = Case(airflow, interval=True)

    assert case.run(conf={"slot": "2026-11-15/2026-11-16"}) == "failed"

    cause = r"InputMissing: .*expected finished files in \S+/dt=2026-11-15, found no such folder"
    (row,) = [row for row in json.loads(airflow.twophase("pipelines", "--json")) if row["pipeline"] == case.name]
    assert case.states() == []
    assert re.match(cause, row["last_failure"])
    assert (row["failures"], row["failed_slots"]) == (1, 1)
    assert re.search(rf"Slot 2026-11-15 → 2026-11-16 could not begin {cause}", said_by_page(case))
    case.land(1, day="2026-11-15")
    assert case.run(conf={"slot": "2026-11-15/2026-11-16"}) == "success"
    assert "could not begin" not in said_by_page(case)


#: The commit task fails right after its commit point.
FAILS = """
import os

os.environ["TWOPHASE_FAILPOINTS"] = "commit.after=raise"
"""


@pytest.mark.slow
def test_what_is_parked_is_named_and_keeps_recovery_red(airflow: AirflowServer) -> None:
    case = Case(airflow, before=FAILS)
    case.land(1)
    assert case.run() == "failed"
    (staged,) = (airflow.home / "data" / "lake" / f"{case.name}.twophase" / "staging").iterdir()
    shutil.rmtree(staged)
    source = "from twophase.airflow import maintenance_dags\nrecover_dag, sweep_dag = maintenance_dags(None, None)\n"
    airflow.add_dag("twophase_maintenance.py", source, "twophase_recover", "twophase_sweep")

    red = airflow.trigger("twophase_recover")

    assert airflow.wait("twophase_recover", red) == "failed"
    assert f"{case.name}/1 r1 is parked: lake: " in airflow.log("twophase_recover", red, "recover")
    assert_names(case, r"lake: .*is gone", title="It needs a person")
    airflow.twophase("restage", case.name, "1", "--reason", "the test took it away")
    assert airflow.wait("twophase_recover", airflow.trigger("twophase_recover")) == "success"
