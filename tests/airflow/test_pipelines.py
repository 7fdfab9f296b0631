"""Pipelines on a running Airflow: schedules, foreign jobs, approval, replay, assets, backfill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import duckdb
import pytest
from sqlalchemy import text

from support.pipelines.airflow_case import ASKING, CONF, Case, assert_names, partitioned
from support.servers.airflow import AirflowServer, eventually, step_by_step

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

FOREIGN = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
rows = spark.read.json(open(sys.argv[1]).read().splitlines())
rows.selectExpr("id", "id * 2 AS twice").write.parquet(sys.argv[2])
"""


def test_a_run_without_new_input_is_skipped_and_green_and_sends_no_event(airflow: AirflowServer) -> None:
    case = Case(airflow)

    run = case.trigger()

    assert case.wait(run) == "success"
    assert case.tasks(run) == {"stage": "skipped", "commit": "skipped", "abort": "success"}
    assert not airflow.api("GET", f"assets/events?source_dag_id={case.name}")["asset_events"]


class Done(NamedTuple):
    """A run that has committed two rows."""

    case: Case
    run: str


@pytest.fixture(scope="module")
def done(airflow: AirflowServer) -> Done:
    """Let one checkpoint through, for several tests to look at."""
    case = Case(airflow)
    case.land(1, 2)
    run = case.trigger()
    assert case.wait(run) == "success"
    return Done(case, run)


def test_a_commit_leaves_nothing_to_clean_up(done: Done) -> None:
    case, run = done

    assert case.tasks(run) == {"stage": "success", "commit": "success", "abort": "skipped"}
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.rows() == [1, 2]


def test_each_commit_sends_an_event_with_its_ids(airflow: AirflowServer, done: Done) -> None:
    case, _ = done

    (event,) = airflow.api("GET", f"assets/events?source_dag_id={case.name}")["asset_events"]
    assert event["uri"] == f"twophase://{case.name}/lake"
    told = {name: event["extra"][name] for name in ("pipeline", "checkpoint_id", "revision", "commit_seq", "rows")}
    assert told == {"pipeline": case.name, "checkpoint_id": 1, "revision": 1, "commit_seq": 1, "rows": 2}


def test_xcom_holds_ids_only_and_the_task_links_to_its_checkpoint(airflow: AirflowServer, done: Done) -> None:
    case, run = done
    place = f"dags/{case.name}/dagRuns/{quote(run, safe='')}/taskInstances/stage"

    entries = airflow.api("GET", f"{place}/xcomEntries")["xcom_entries"]
    links = airflow.api("GET", f"{place}/links")["extra_links"]

    assert {entry["key"] for entry in entries} <= {"return_value", "_link_CheckpointLink"}
    found = airflow.api("GET", f"{place}/xcomEntries/return_value")["value"]
    found = json.loads(found) if isinstance(found, str) else found
    assert found == {"pipeline": case.name, "checkpoint_id": 1, "revision": 1}
    assert links == {"Checkpoint": f"/twophase/pipelines/{case.name}/checkpoints/1"}


@pytest.mark.slow
def test_a_spark_script_that_knows_nothing_of_us_joins_by_its_output_path(airflow: AirflowServer) -> None:
    script = airflow.home / "foreign.py"
    script.write_text(FOREIGN)
    arguments = ["{{ inputs('words') }}", "{{ staging('lake') }}"]
    case = Case(airflow, transform=None, spark=f"application={str(script)!r}, application_args={arguments!r}")
    case.land(1, 2)

    run = case.trigger()

    assert case.wait(run) == "success"
    files = [str(path) for path in (airflow.home / "data" / "lake" / case.name).rglob("*.parquet")]
    with duckdb.connect() as reader:
        rows = reader.execute("SELECT id, twice FROM read_parquet(?) ORDER BY id", [files]).fetchall()
    assert rows == [(1, 2), (2, 4)]
    assert all(Path(path).name.startswith("part-r1-a1-") for path in files)
    shown = airflow.api("GET", f"dags/{case.name}/dagRuns/{quote(run, safe='')}/taskInstances/stage")
    assert shown["rendered_fields"]["application_args"][1] == "{{ staging('lake') }}"


@pytest.mark.slow
def test_a_person_approves_or_rejects_what_is_staged(airflow: AirflowServer) -> None:
    case = Case(airflow, arguments="schedule=None, approve=True")
    case.land(1)
    first = case.trigger()
    airflow.wait_for_task(case.name, first, "approve", ASKING, timeout=200)
    assert case.states() == [(1, 1, "OPEN")]
    assert case.rows() == []

    answer(case, first, "Reject", reason="wrong month")

    assert case.wait(first) == "failed"
    assert case.states() == [(1, 1, "ABORTED")]
    assert_names(case, r"approval: rejected by admin: wrong month; run ")
    (vote,) = [event for event in case.show()["events"] if event["action"] == "voted no"]
    assert vote["who"] == f"admin via airflow {case.name}.approve try 1"

    second = case.trigger()
    airflow.wait_for_task(case.name, second, "approve", ASKING, timeout=200)
    answer(case, second, "Approve")

    assert case.wait(second) == "success"
    assert case.rows() == [1]
    (approval,) = [part for part in case.show()["participants"] if part["kind"] == "approval"]
    assert approval["reason"] == "by admin"


def answer(case: Case, run: str, option: str, **given: str) -> None:
    """Answer as soon as the scheduler knows that the task waits: it takes an earlier answer for a killed task."""
    log = case.airflow.home / "logs" / "scheduler.log"
    waits = re.compile(rf"TaskInstance Finished: dag_id={case.name}, task_id=approve, run_id={re.escape(run)},")
    eventually(lambda: waits.search(log.read_text(errors="replace")), 60)
    place = f"dags/{case.name}/dagRuns/{quote(run, safe='')}/taskInstances/approve/-1/hitlDetails"
    case.airflow.api("PATCH", place, chosen_options=[option], params_input=given)


@pytest.mark.slow
def test_checkpoints_by_number_are_run_again_beside_the_regular_runs(airflow: AirflowServer) -> None:
    case = Case(airflow)
    for number in (1, 2, 3):
        case.land(number)
        assert case.run() == "success"
    airflow.wait_for_dag(f"{case.name}__replay")

    run = airflow.trigger(f"{case.name}__replay", conf={"checkpoints": "1..2"})

    assert airflow.wait(f"{case.name}__replay", run, 400) == "success"
    assert case.states() == [
        *((1, 1, "SUPERSEDED"), (1, 2, "COMMITTED")),
        *((2, 1, "SUPERSEDED"), (2, 2, "COMMITTED")),
        (3, 1, "COMMITTED"),
    ]
    assert {case.show(number)["kind"] for number in (1, 2)} == {"replay"}
    assert case.rows() == [1, 2, 3]


@pytest.mark.slow
def test_an_interval_run_by_hand_is_told_its_slot_and_a_second_one_does_nothing(airflow: AirflowServer) -> None:
    case = Case(airflow, interval=True)
    case.land(1, day="2026-11-15")
    slot = "2026-11-15/2026-11-16"

    assert case.run() == "failed"  # no interval, and none given
    assert case.run(conf={"slot": slot}) == "success"
    assert case.run(conf={"slot": slot}) == "success"
    assert case.states() == [(1, 1, "COMMITTED")]
    assert case.run(conf={"slot": slot, "reprocess": True}) == "success"
    assert case.states() == [(1, 1, "SUPERSEDED"), (1, 2, "COMMITTED")]
    assert case.rows() == [1]


@pytest.mark.slow
def test_a_backfill_of_airflows_own_makes_new_revisions(airflow: AirflowServer) -> None:
    case = Case(airflow, interval=True, arguments='schedule="@daily", start_date=datetime(2026, 11, 1), catchup=False')
    airflow.api("PATCH", f"dags/{case.name}", is_paused=False)
    days = [f"2026-11-{day:02d}" for day in (3, 4)]
    for number, day in enumerate(days):
        case.land(number, day=day)

    for _ in range(2):
        backfill(case, days[0], days[-1])

    assert case.rows() == [0, 1]
    assert {row[1] for row in case.states() if row[2] == "COMMITTED"} == {2}


def backfill(case: Case, first: str, last: str, **more: Any) -> None:
    """Backfill these days and wait until all is done, as long as the record tells of steps."""
    body = {
        "dag_id": case.name,
        "from_date": f"{first}T00:00:00Z",
        "to_date": f"{last}T00:00:00Z",
        "run_backwards": False,
        "max_active_runs": 2,
        "reprocess_behavior": "completed",
        "dag_run_conf": {},
        **more,
    }
    made = case.airflow.api("POST", "backfills", **body)
    step_by_step(lambda: case.airflow.api("GET", f"backfills/{made['id']}")["completed_at"], case.events)


@pytest.mark.slow
def test_a_chain_is_woken_by_an_asset_and_reads_what_the_record_says(airflow: AirflowServer) -> None:
    upstream = Case(airflow)
    downstream = Case(airflow, arguments=f'schedule=[asset("{upstream.name}", "lake")]')
    downstream.declare(
        downstream.source.replace(
            f'sources.Files("landing/{downstream.name}", format="json", schema="id bigint, word string")',
            f'sources.Committed("{upstream.name}", "lake")',
        )
    )
    airflow.api("PATCH", f"dags/{downstream.name}", is_paused=True)  # events come and nobody listens
    for number in (1, 2):
        upstream.land(number)
        assert upstream.run() == "success"
    airflow.api("PATCH", f"dags/{downstream.name}", is_paused=False)
    upstream.land(3)
    assert upstream.run() == "success"

    eventually(lambda: downstream.rows() == [1, 2, 3], 300, every=1)


@partitioned
@pytest.mark.slow
def test_a_partitioned_timetable_gives_each_run_its_key(airflow: AirflowServer) -> None:
    timetable = 'CronPartitionTimetable("0 0 * * *", timezone="UTC")'
    case = Case(
        airflow,
        interval=True,
        before="from airflow.sdk import CronPartitionTimetable",
        arguments=f"schedule={timetable}, start_date=datetime(2026, 11, 1), catchup=False",
    )
    days = ["2026-11-03", "2026-11-04"]
    for number, day in enumerate(days):
        case.land(number, day=day)

    for _ in range(2):
        backfill(case, days[0], days[-1])

    assert case.rows() == [0, 1]
    assert {row[1] for row in case.states() if row[2] == "COMMITTED"} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "timetable"),
    [
        ("twophase.airflow.compat", "CronDataIntervalTimetable"),
        pytest.param("airflow.sdk", "CronPartitionTimetable", marks=partitioned),
    ],
)
def test_days_of_a_zone_read_and_write_their_own_folders_where_the_clock_is_changed(
    airflow: AirflowServer, module: str, timetable: str
) -> None:
    """On 29 March 2026 a day has 23 hours in Berlin, and begins in UTC the day before."""
    berlin = ', timezone="Europe/Berlin"'
    case = Case(
        airflow,
        interval=True,
        before=f"from {module} import {timetable}",
        arguments=f'schedule={timetable}("0 0 * * *"{berlin}), start_date=datetime(2026, 3, 1), catchup=False',
        more=berlin,
    )
    days = [f"2026-03-{day}" for day in (28, 29, 30)]
    for number, day in enumerate(days):
        case.land(number, day=day)

    backfill(case, days[0], days[-1], from_date=f"{days[0]}T00:00:00+01:00", to_date=f"{days[-1]}T00:00:00+02:00")

    assert case.rows() == [0, 1, 2]
    table = airflow.home / "data" / "lake" / case.name
    assert sorted(path.name for path in table.iterdir()) == [f"dt={day}" for day in days]


@pytest.mark.slow
def test_a_task_group_sits_in_anybodys_dag(airflow: AirflowServer) -> None:
    case = Case(airflow)
    group = f"""
from airflow.sdk import DAG, BaseOperator

class Nothing(BaseOperator):
    def execute(self, context):
        pass

with DAG("{case.name}_around", schedule=None):
    Nothing(task_id="before") >> TwophaseTaskGroup(pipeline, spark={{"conf": {CONF!r}}}) >> Nothing(task_id="after")
"""
    case.declare(case.source.partition("dag = TwophaseDag(")[0] + group, f"{case.name}_around")
    case.land(1)

    run = airflow.trigger(f"{case.name}_around")

    assert airflow.wait(f"{case.name}_around", run, 240) == "success"
    assert case.rows() == [1]
    assert airflow.task_states(f"{case.name}_around", run)["after"] == "success"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_intervals_are_backfilled_once_each_while_regular_runs_go_on(airflow: AirflowServer) -> None:
    arguments = 'schedule="@daily", start_date=datetime(2026, 10, 1), catchup=False'
    case = Case(airflow, interval=True, arguments=arguments, more=', on_missing="empty"')
    days = [f"2026-10-{day:02d}" for day in range(1, 31)]
    for number, day in enumerate(days):
        case.land(number, day=day)
    for number in (100, 101):
        case.land(number, day=f"2026-11-{number - 98:02d}")

    regular = [case.trigger(conf={"slot": f"2026-11-0{day}/2026-11-0{day + 1}"}) for day in (2, 3)]
    backfill(case, days[0], days[-1], max_active_runs=3)

    assert [case.wait(run) for run in regular] == ["success", "success"]
    assert case.rows() == [*range(30), 100, 101]


def test_a_table_in_postgres_is_reached_by_airflows_own_connection(airflow: AirflowServer) -> None:
    with airflow.record() as connection:
        url = connection.engine.url
    place: dict[str, Any] = {"host": url.host, "port": url.port, "login": url.username, "password": url.password}
    airflow.api("POST", "connections", connection_id="dwh", conn_type="postgres", schema=url.database, **place)
    case = Case(airflow)
    table = f'sinks.Postgres("{case.name}", conn_id="dwh", create=True)'
    case.declare(case.source.replace(f'sinks.Files("lake/{case.name}")', table))
    case.land(1, 2, 3)
    run = case.trigger()

    assert case.wait(run) == "success"
    with airflow.record() as connection:
        found = connection.execute(text(f'SELECT id, _checkpoint FROM public."{case.name}" ORDER BY id')).all()
    assert list(map(tuple, found)) == [(1, 1), (2, 1), (3, 1)]
    assert case.states() == [(1, 1, "COMMITTED")]
    assert str(url.password) not in airflow.log(case.name, run, "stage")
