"""Airflow parses every DAG file again and again, in a process that has its parser loaded: a file pays for what it says.

What only a task needs (the record, Spark's submission, promotion's queries) is imported when a task runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Every kind of read and write; one pipeline may have one kind of read only.
EVERYTHING = """
from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

every = Pipeline(
    "every",
    reads={
        "files": sources.Files("landing/files", format="json", schema="word string", on_bad_record="quarantine"),
        "words": sources.Committed("other", "lake"),
        "names": sources.Lookup("lookup/names", format="json"),
    },
    transform="every:transform",
    writes={
        "files": sinks.Files("lake/files"),
        "delta": sinks.Delta("lake/delta"),
        "iceberg": sinks.Iceberg("lake.every", path="lake/iceberg", catalog="lake_catalog"),
        "postgres": sinks.Postgres("every", conn_id="dwh", mode="upsert", key=["word"]),
        "sent": sinks.WriteAhead("twophase.examples.http_sender:HttpSender", arguments={"conn_id": "carrier"}),
    },
)
dag = TwophaseDag(every, schedule=None)
"""

#: Run in a fresh interpreter: what each file of the command line imports after the ones before it, as JSON.
PARSE = """
import json, runpy, sys
import airflow.dag_processing.dagbag
import airflow.providers.apache.spark.operators.spark_submit

found = []
for path in sys.argv[1:]:
    before = set(sys.modules)
    runpy.run_path(path)
    found.append(sorted(set(sys.modules) - before))
print(json.dumps(found))
"""

#: What a process that reads or writes rows, or the record, needs.
HEAVY = frozenset(
    {"adbc_driver_postgresql", "alembic", "boto3", "deltalake", "duckdb", "fastapi", "numpy", "obstore", "pandas"}
    | {"psycopg2", "pyarrow", "pyiceberg", "pyspark", "sqlalchemy", "typer"}
)
#: What of ours only a task needs.
OF_TASKS = (
    *("committer", "core.coordinator", "core.next_step", "local", "row_queries", "runner"),
    *("sources.bad_records", "spark.plan", "spark.stage", "spark.submit"),
)
#: What the interval's file does not declare.
NOT_DECLARED = (
    *("audits", "sinks.log_tables", "sinks.postgres", "sinks.write_ahead"),
    *("sources.committed", "sources.files", "sources.lookup"),
)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Parse an interval's file and then one with everything; return what each brought in."""
    home = tmp_path_factory.mktemp("home")
    every = home / "every.py"
    every.write_text(EVERYTHING)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    done = subprocess.run(
        [sys.executable, "-c", PARSE, str(ROOT / "dags" / "invoices.py"), str(every)],
        env={**environment, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(("interval", "everything"), json.loads(done.stdout.splitlines()[-1]), strict=True))


def of_ours(modules: list[str], parts: tuple[str, ...]) -> list[str]:
    assert all(find_spec(f"twophase.{part}") for part in parts), "a module was renamed: name it here by its new name"
    return [name for name in modules for part in parts if f"{name}.".startswith(f"twophase.{part}.")]


@pytest.mark.parametrize("file", ["interval", "everything"])
def test_parsing_a_dag_file_loads_no_library_that_only_a_task_needs(imported: dict[str, list[str]], file: str) -> None:
    assert [name for name in imported[file] if name.partition(".")[0] in HEAVY] == []


def test_parsing_a_dag_file_loads_neither_the_record_nor_the_ways_to_spark(imported: dict[str, list[str]]) -> None:
    assert of_ours(imported["interval"], OF_TASKS) == []


def test_parsing_a_dag_file_loads_no_sink_or_source_that_it_does_not_declare(imported: dict[str, list[str]]) -> None:
    assert of_ours(imported["interval"], NOT_DECLARED) == []
    assert "twophase.sinks.files.sink" in imported["interval"]
    assert "twophase.sinks.postgres.sink" in imported["everything"]
