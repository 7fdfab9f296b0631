"""On a running Airflow: what a checkpoint costs beside a DAG that does nothing, and what recovery costs when idle."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from benchmarks.harness import Figure, Findings, Measure, Series, interleave, medians, say, step
from benchmarks.place import Place

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.servers.airflow import AirflowServer

NOTHING = """
from airflow.sdk import DAG, BaseOperator

class Nothing(BaseOperator):
    def execute(self, context):
        pass

with DAG({dag_id!r}, schedule={schedule}, catchup=False, max_active_runs=1, start_date={start}) as dag:
    previous = None
    for number in range({tasks}):
        task = Nothing(task_id=f"nothing_{{number}}")
        if previous is not None:
            previous >> task
        previous = task
"""
OURS = """
from twophase import Pipeline, sinks, sources
from twophase.airflow import TwophaseDag

copying = Pipeline(
    "copying",
    reads={"words": sources.Files("landing/copying", format="json", schema="id bigint")},
    transform="copying:transform",
    writes={"lake": sinks.Files("lake/copying")},
)
dag = TwophaseDag(copying, schedule=None, spark={"conf": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}})
"""
JOB = "def transform(words):\n    return words\n"
RECOVER = """
from datetime import timedelta
from twophase.airflow import maintenance_dags

recover_dag, sweep_dag = maintenance_dags(timedelta(minutes=1), None)
"""
#: The settings of a user's, not those that tests hurry with.
USUAL = {
    "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "5",
    "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "5",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "300",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
    "TWOPHASE_LEASE": "30",
}


@dataclass(frozen=True)
class Runs:
    """How many runs of each."""

    rounds: int


@dataclass(frozen=True)
class Minutes:
    """How long each schedule is watched, and how often they take turns."""

    minutes: float
    rounds: int


@contextmanager
def airflow(place: Place, environment: Mapping[str, str]) -> Iterator[AirflowServer]:
    """Start an Airflow for one measure."""
    with step("starting Airflow"):
        server = AirflowServer(home=place.home / "airflow", environment=environment)
        server.start()
    try:
        yield server
    finally:
        server.stop()


def run_checkpoint(place: Place, sizes: Runs) -> Findings:
    """Measure a run of one checkpoint beside one of two tasks that do nothing."""
    with airflow(place, {}) as server:
        jobs = server.home / "spark_jobs"
        jobs.mkdir(exist_ok=True)
        (jobs / "copying.py").write_text(JOB)
        landing = server.home / "data" / "landing" / "copying"
        landing.mkdir(parents=True)
        server.add_dag("copying.py", OURS, "copying")
        source = NOTHING.format(dag_id="nothing", schedule=None, start=None, tasks=2)
        server.add_dag("nothing.py", source, "nothing")
        numbers = iter(range(10_000))

        def checkpoint() -> Mapping[str, float]:
            number = next(numbers)
            (landing / f"{number}.json").write_text(json.dumps({"id": number}) + "\n")
            with watching("runs/copying/") as spark:
                wall, tasks = ran(server, "copying")
            return {"whole": wall, "spark-submit": spark.seconds, "besides": wall - spark.seconds, **tasks}

        def nothing() -> Mapping[str, float]:
            wall, tasks = ran(server, "nothing")
            return {"whole": wall, "besides": wall, **tasks}

        found = interleave({"checkpoint": checkpoint, "nothing": nothing}, rounds=sizes.rounds, tell=True)
    return Findings(
        compared="a run of one checkpoint, without the life of its spark-submit ÷ a run of two tasks that do nothing",
        figures=[Figure("run", found["checkpoint"]["besides"], found["nothing"]["besides"], goal=1.5)],
        profile={side: medians(parts) for side, parts in found.items()},
        notes=["a run is timed from its queueing to its end, as Airflow says"],
    )


def ran(server: AirflowServer, dag_id: str) -> tuple[float, dict[str, float]]:
    """Run a DAG once; return its seconds, and those of each task that ran."""
    run_id = server.trigger(dag_id)
    state = server.wait(dag_id, run_id, 300)
    if state != "success":
        msg = f"{dag_id}: expected success, found {state}"
        raise RuntimeError(msg)
    place = f"dags/{dag_id}/dagRuns/{quote(run_id, safe='')}"
    found = server.api("GET", place)
    tasks: list[dict[str, Any]] = server.api("GET", f"{place}/taskInstances")["task_instances"]
    return between(found["queued_at"], found["end_date"]), {task["task_id"]: task["duration"] or 0.0 for task in tasks}


def between(start: str, end: str) -> float:
    """Return the seconds from one time to another."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


class Watch:
    """How long a process lived that has some text in its command line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        spark: psutil.Process | None = None
        while not self._over.wait(0.02) and spark is None:
            spark = self._find()
        if spark is None:
            return
        began = spark.create_time()
        psutil.wait_procs([spark])
        self.seconds = datetime.now().timestamp() - began  # noqa: DTZ005 - the difference of two moments

    def _find(self) -> psutil.Process | None:
        for process in psutil.process_iter(["cmdline"]):
            if any(self.text in part for part in process.info["cmdline"] or ()):
                return process
        return None

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def watching(text: str) -> Iterator[Watch]:
    """Time the first process that has a text in its command line."""
    watch = Watch(text)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


def run_recover(place: Place, sizes: Minutes) -> Findings:
    """Measure the CPU of Airflow while recovery has nothing to do, beside a DAG that does nothing as often."""
    with airflow(place, USUAL) as server:
        server.add_dag("twophase_maintenance.py", RECOVER, "twophase_recover")
        start = "__import__('datetime').datetime(2026, 1, 1)"
        schedule = "__import__('datetime').timedelta(minutes=1)"
        server.add_dag("idle.py", NOTHING.format(dag_id="idle", schedule=schedule, start=start, tasks=1), "idle")
        for dag_id in ("twophase_recover", "idle"):
            server.api("PATCH", f"dags/{dag_id}", is_paused=True)

        def turn(dag_id: str) -> Mapping[str, float]:
            server.api("PATCH", f"dags/{dag_id}", is_paused=False)
            used = cpu(server, sizes.minutes * 60)
            server.api("PATCH", f"dags/{dag_id}", is_paused=True)
            return {"cpu": used}

        sides = {"recover": lambda: turn("twophase_recover"), "idle": lambda: turn("idle")}
        found = interleave(sides, rounds=sizes.rounds, warmup=0, tell=True)
    mine, theirs = found["recover"]["cpu"], found["idle"]["cpu"]
    return Findings(
        compared=f"CPU of Airflow in {sizes.minutes:g} minutes with twophase_recover each minute ÷ with a no-op DAG",
        figures=[Figure("cpu", Series(mine.values), Series(theirs.values), goal=1.2)],
        profile={side: medians(parts) for side, parts in found.items()},
    )


def cpu(server: AirflowServer, seconds: float) -> float:
    """Return the CPU that everything below the supervisor uses in some time, ended children included."""
    supervisor = psutil.Process(server.component_pid("supervisor"))
    before = used(supervisor)
    threading.Event().wait(seconds)
    return used(supervisor) - before


def used(process: psutil.Process) -> float:
    """Add up the CPU of a process and of all below it, with what their ended children used."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            say("a process ended while it was looked at")
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


CHECKPOINT = Measure(
    "run",
    "What does a run of one checkpoint cost on Airflow, besides Spark?",
    full=Runs(rounds=10),
    quick=Runs(rounds=3),
    tiny=Runs(rounds=1),
    run=run_checkpoint,
)
RECOVERY = Measure(
    "recover",
    "What does recovery cost each minute when there is nothing to do?",
    full=Minutes(minutes=5, rounds=2),
    quick=Minutes(minutes=2, rounds=1),
    tiny=Minutes(minutes=0.1, rounds=1),
    run=run_recover,
)
