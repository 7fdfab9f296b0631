"""A secret stays where it was put: in no template, log, XCom, command line, Spark environment, record or page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from sqlalchemy import text

from support.pipelines.airflow_case import CONF, Case, assert_names, said_by_page
from support.pipelines.onlookers import watching
from support.servers.airflow import CANARY, AirflowServer

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]


def test_no_secret_leaves_its_place(airflow: AirflowServer) -> None:
    case = Case(airflow)
    case.land(1)
    case.hold()
    run = case.trigger()
    case.until_running()
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    around_spark = [Path(f"/proc/{process.pid}/environ").read_text(errors="replace") for process in case.spark()]
    case.let_go()
    assert case.wait(run) == "success"

    secrets = {CANARY, *passwords(airflow)}
    places = {
        "command lines": lines,
        "Spark's environment": around_spark,
        "logs": [path.read_text(errors="replace") for path in (airflow.home / "logs").rglob("*") if path.is_file()],
        "templates and XCom": [told(airflow, case.name, run, task) for task in ("stage", "commit", "abort")],
        "the record": [dump(airflow)],
        "pages": [
            airflow.request("GET", f"/twophase{page}", token=airflow.token("admin"))
            for page in ("/", f"/pipelines/{case.name}", f"/pipelines/{case.name}/checkpoints/1")
        ],
    }

    assert all(places.values())
    assert not [(place, secret) for place, texts in places.items() for secret in secrets if secret in "\n".join(texts)]


#: A transform that fails in a worker, and repeats all that its driver was given.
REPEATING = """
import os

def transform(words, spark):
    given = [value for name, value in os.environ.items() if name.startswith("AIRFLOW_CONN_")]
    message = " and ".join([spark.sparkContext.getConf().get("spark.mine.password"), *given])

    def fail(batches):
        raise ValueError(message)

    return words.mapInArrow(fail, words.schema)
"""


@pytest.mark.slow
def test_a_run_that_fails_and_repeats_its_secrets_shows_none(airflow: AirflowServer) -> None:
    """In no command line, run folder, log, template, XCom, record, page or answer of the command line."""
    password, setting = "odd-pass@/w:rd?#%41\\ü", "odd-setting@/w rd"
    with airflow.record() as connection:
        url = connection.engine.url
        connection.execute(text("CREATE ROLE odd SUPERUSER LOGIN PASSWORD :it"), {"it": password})
        connection.commit()
    place: dict[str, Any] = {"host": url.host, "port": url.port, "login": "odd", "password": password}
    airflow.api("POST", "connections", connection_id="odd", conn_type="postgres", schema=url.database, **place)
    conf = {**CONF, "spark.mine.password": setting}
    case = Case(airflow, transform="repeating:transform", spark=f"conf={conf!r}")
    (airflow.home / "spark_jobs" / "repeating.py").write_text(REPEATING)
    table = f'sinks.Postgres("{case.name}", conn_id="odd", create=True)'
    case.declare(case.source.replace(f'sinks.Files("lake/{case.name}")', table))
    case.land(1)

    with watching(airflow.home) as seen:
        run = case.trigger()
        assert case.wait(run) == "failed"

    assert_names(case, r"AttemptFailed: .*ValueError: \*\*\*")
    places = {
        "command lines": [" ".join(seen.command_lines)],
        "run folder": [content.decode(errors="replace") for content in seen.files.values()],
        "logs": [path.read_text(errors="replace") for path in (airflow.home / "logs").rglob("*") if path.is_file()],
        "templates and XCom": [told(airflow, case.name, run, task) for task in ("stage", "commit", "abort")],
        "the record": [dump(airflow)],
        "pages": [said_by_page(case), said_by_page(case, "/checkpoints/1")],
        "the command line": [airflow.twophase("show", case.name, "1")],
    }
    assert all(places.values())
    found = [(where, part) for where, texts in places.items() for part in ("odd-pass", "odd-set") if part in str(texts)]
    assert not found


def passwords(airflow: AirflowServer) -> list[str]:
    """Return what the local Airflow and its PostgreSQL keep in files that only their owner reads."""
    files = [airflow.home / "postgres" / "password", *(airflow.home / "airflow" / "secrets").iterdir()]
    found = [path.read_text().strip() for path in files if path.suffix != ".json"]
    return [secret for secret in found if len(secret) > 8]


def told(airflow: AirflowServer, dag_id: str, run: str, task: str) -> str:
    place = f"dags/{dag_id}/dagRuns/{quote(run, safe='')}/taskInstances/{task}"
    entries = airflow.api("GET", f"{place}/xcomEntries")["xcom_entries"]
    values = [airflow.api("GET", f"{place}/xcomEntries/{quote(entry['key'])}") for entry in entries]
    return f"{airflow.api('GET', place)} {values}"


def dump(airflow: AirflowServer) -> str:
    """Return every row of the record as text."""
    with airflow.record() as connection:
        names = connection.execute(
            text("SELECT table_name FROM information_schema.tables WHERE table_schema = 'twophase'")
        ).scalars()
        rows = [connection.execute(text(f'SELECT t::text FROM twophase."{name}" t')).scalars().all() for name in names]
    return "\n".join(row for table in rows for row in table)


def test_the_examples_import_without_errors(airflow: AirflowServer, tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "dags"
    environment = {**airflow.environment, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__DAGS_FOLDER": str(examples)}
    code = (
        "from airflow.dag_processing.dagbag import DagBag\n"
        f"found = DagBag({str(examples)!r})\n"
        "assert not found.import_errors, found.import_errors\n"
        "print(*sorted(found.dags))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )

    names = done.stdout.splitlines()[-1].split()
    for name in ("word_count", "orders", "clicks", "visits", "invoices", "kafka_word_count"):
        assert {name, f"{name}__replay"} <= set(names)
    assert {"twophase_recover", "twophase_sweep"} <= set(names)
