"""One pipeline of a test on a running Airflow: its DAG, its input, its gate, and what became of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import uuid
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
from sqlalchemy import text

from support.servers.airflow import AirflowServer, eventually
from twophase.committer import queries

JOBS = Path(__file__).parents[2] / "jobs"
#: The state of a task that waits for a person; before Airflow 3.3 it was that of any task that waits.
ASKING = "awaiting_input" if version("apache-airflow") >= "3.3" else "deferred"
#: For a test of partitioned timetables.
partitioned = pytest.mark.skipif(version("apache-airflow") < "3.3", reason="older Airflows tell tasks no partition key")
#: A JVM that is up sooner, for jobs of a few rows.
CONF = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "1",
}

DAG = """
from datetime import datetime, timedelta
from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag, TwophaseTaskGroup, asset

pipeline = Pipeline(
    {name!r},
    reads={{"words": {source}}},
    transform={transform!r},
    writes={{"lake": {sink}}},
    audits={audits},
)
dag = TwophaseDag(
    pipeline,
    spark={{"conf": {conf!r}, **dict({spark})}},
    **{{
        "default_args": {{"retries": {retries}, "retry_delay": timedelta(seconds=1)}},
        **dict({arguments}),
    }},
)
"""
LANDING = 'sources.Files("landing/{name}", format="json", schema="id bigint, word string")'
INTERVAL = (
    'sources.Interval("landing/{name}/dt={{start:%Y-%m-%d}}", format="json", schema="id bigint, word string"{more})'
)


class Case:
    """A pipeline of its own on a shared Airflow."""

    def __init__(
        self,
        airflow: AirflowServer,
        *,
        arguments: str = "schedule=None",
        spark: str = "",
        before: str = "",
        transform: str | None = "gated:transform",
        retries: int = 0,
        interval: bool = False,
        more: str = "",
        audits: str = "()",
        name: str | None = None,
    ) -> None:
        """Write the DAG and wait until Airflow has it."""
        self.airflow = airflow
        self.name = name or f"case_{uuid.uuid4().hex[:8]}"
        self.gate = airflow.home / "gate" / self.name
        self.gate.mkdir(parents=True)
        self.landing = airflow.home / "data" / "landing" / self.name
        self.landing.mkdir(parents=True)
        jobs = airflow.home / "spark_jobs"
        jobs.mkdir(exist_ok=True)
        shutil.copy(JOBS / "gated.py", jobs)
        zone = more if "timezone=" in more else ""
        folder = f', slot_folder="dt={{start:%Y-%m-%d}}"{zone}' if interval else ""
        self.source = DAG.format(
            name=self.name,
            source=(INTERVAL if interval else LANDING).format(name=self.name, more=more),
            sink=f'sinks.Files("lake/{self.name}"{folder})',
            conf=CONF,
            retries=retries,
            arguments=arguments,
            spark=spark,
            transform=transform,
            audits=audits,
        )
        self.source = f"{before}\n{self.source}"
        self.declare(self.source)

    def declare(self, source: str, *dag_ids: str) -> None:
        """Put the DAG's file there."""
        self.airflow.add_dag(f"{self.name}.py", source, *(dag_ids or (self.name,)))

    # --- what the test does ------------------------------------------------------------------------------------------

    def land(self, *ids: int, day: str | None = None) -> None:
        """Put a file of rows into the landing folder."""
        folder = self.landing / f"dt={day}" if day else self.landing
        folder.mkdir(exist_ok=True)
        new = folder / f"_{uuid.uuid4().hex}.json"
        new.write_text("".join(json.dumps({"id": number, "word": "w"}) + "\n" for number in ids))
        new.rename(folder / new.name.removeprefix("_"))

    def hold(self) -> None:
        """Hold every Spark job of this pipeline in its transform."""
        (self.gate / "hold").touch()

    def let_go(self) -> None:
        """Let them go on."""
        (self.gate / "hold").unlink()

    def fail(self, *, fail: bool = True) -> None:
        """Let every Spark job of this pipeline fail, or no longer."""
        if fail:
            (self.gate / "fail").touch()
        else:
            (self.gate / "fail").unlink()

    def trigger(self, **body: Any) -> str:
        """Start a run."""
        return self.airflow.trigger(self.name, **body)

    def wait(self, run_id: str, timeout: float = 240) -> str:
        """Wait for the end of a run."""
        return self.airflow.wait(self.name, run_id, timeout)

    def run(self, **body: Any) -> str:
        """Start a run and wait for its end; return its state."""
        return self.wait(self.trigger(**body))

    def until_running(self, timeout: float = 120) -> None:
        """Wait until a Spark job of this pipeline is in its transform."""
        eventually((self.gate / "running").exists, timeout)
        (self.gate / "running").unlink()

    def mark(self, run_id: str, task_id: str, state: str) -> None:
        """Mark a task of a run."""
        self.airflow.api("PATCH", f"{self._place(run_id)}/taskInstances/{task_id}", new_state=state)

    def mark_run(self, run_id: str, state: str) -> None:
        """Mark a run."""
        self.airflow.api("PATCH", self._place(run_id), state=state)

    def clear(self, run_id: str, *task_ids: str, **more: Any) -> None:
        """Clear these tasks of a run, or all of it."""
        if task_ids:
            body = {"dag_run_id": run_id, "task_ids": list(task_ids), "dry_run": False, "only_failed": False, **more}
            self.airflow.api("POST", f"dags/{self.name}/clearTaskInstances", **body)
        else:
            self.airflow.api("POST", f"{self._place(run_id)}/clear", dry_run=False, **more)

    def _place(self, run_id: str) -> str:
        from urllib.parse import quote

        return f"dags/{self.name}/dagRuns/{quote(run_id, safe='')}"

    def spark(self) -> list[psutil.Process]:
        """Return the processes of this pipeline's Spark jobs."""
        return [process for process in psutil.process_iter() if self._is_spark(process)]

    def _is_spark(self, process: psutil.Process) -> bool:
        return f"runs/{self.name}/" in _command(process)

    def kill_runner(self, run_id: str, task_id: str = "stage") -> None:
        """Kill the runner of a task, and first the worker that would report its death; what it started lives on."""
        instance = self.airflow.api("GET", f"{self._place(run_id)}/taskInstances/{task_id}")["id"]
        found = [one for one in psutil.process_iter() if instance in _command(one)]  # both, the child by inheritance
        assert found
        for process in sorted(found, key=psutil.Process.create_time):
            os.kill(process.pid, signal.SIGKILL)

    # --- what became of it -------------------------------------------------------------------------------------------

    def states(self) -> list[tuple[int, int, str]]:
        """Return checkpoint, revision and state of all there is, oldest first."""
        with self.airflow.record() as connection:
            if self.name not in queries.names(connection):
                return []
            found = queries.checkpoints(connection, self.name)
        return sorted((row["checkpoint_id"], row["revision"], row["state"]) for row in found)

    def events(self) -> int:
        """Return how many steps the record tells of."""
        counted = text("SELECT count(*) FROM twophase.event WHERE pipeline = :pipeline")
        with self.airflow.record() as connection:
            found: int = connection.execute(counted, {"pipeline": self.name}).scalar_one()
        return found

    def show(self, checkpoint_id: int = 1) -> dict[str, Any]:
        """Return one checkpoint whole."""
        with self.airflow.record() as connection:
            return queries.show(connection, self.name, checkpoint_id)

    def until(self, *states: tuple[int, int, str], timeout: float = 120) -> None:
        """Wait until the record has just these revisions in these states."""
        eventually(lambda: self.states() == list(states), timeout, every=1)

    def rows(self) -> list[int]:
        """Return the ids that a reader sees, each as often as it is there."""
        files = sorted((self.airflow.home / "data" / "lake" / self.name).rglob("*.parquet"))
        if not files:
            return []
        with duckdb.connect() as connection:
            found = connection.execute("SELECT id FROM read_parquet(?) ORDER BY id", [[str(path) for path in files]])
            return [row[0] for row in found.fetchall()]

    def tasks(self, run_id: str) -> dict[str, str | None]:
        """Return the state of each task of a run."""
        return self.airflow.task_states(self.name, run_id)


def said_by_page(case: Case, below: str = "") -> str:
    """Return what a pipeline's page says, or one below it, without its markup."""
    html = case.airflow.api("GET", f"/twophase/pipelines/{case.name}{below}", user="viewer")
    body = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def assert_names(case: Case, cause: str, *, title: str = "It failed") -> None:
    """Hold the first sentence of the checkpoint's page, and the error on the command line, against a pattern."""
    page = said_by_page(case, "/checkpoints/1")
    told = re.search(rf" {title} (.*)", page)
    shown = re.search(r"^  (?:error|parked_reason) +(.*)$", case.airflow.twophase("show", case.name, "1"), re.MULTILINE)

    assert told, page
    assert re.match(cause, told[1]), told[1]
    assert shown
    assert re.match(cause, shown[1]), shown[1]


def _command(process: psutil.Process) -> str:
    """Return the command line of a process; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return ""
