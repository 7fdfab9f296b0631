"""The demo on Airflow: it kills the process of a task, then the database, and then runs a checkpoint again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twophase.cli.demo.reader import PollingReader
from twophase.cli.demo.story import CONF, PATIENCE, PIPELINE, DemoFailed, Story
from twophase.cli.output import busy
from twophase.core import settings
from twophase.core.errors import StoreUnavailable
from twophase.local import airflow, postgres, processes, stack, supervisor
from twophase.local.airflow_client import ENDED, ApiError, Client

#: What is put into the folder of DAGs: the package's example, with retries that do not keep anybody waiting.
DAG = '''"""The word count of `twophase demo`."""

from datetime import timedelta

from twophase.airflow import TwophaseDag
from twophase.examples.word_count import word_count

dag = TwophaseDag(
    word_count,
    schedule=None,
    default_args={{"retries": 5, "retry_delay": timedelta(seconds=1)}},
    spark={spark!r},
)
'''
REPLAY = f"{PIPELINE}__replay"
#: The states of a task that are worth a line.
_TOLD = {
    "running": "is running",
    "up_for_retry": "has failed, and is up for retry",
    "success": "is done",
    "failed": "has failed",
    "upstream_failed": "cannot run",
}
_TICK = 0.05
#: Seconds between two questions to Airflow.
_ASK_EVERY = 0.5
_SERVER_ERROR = 500


class AirflowStory(Story):
    """Lets a supervised Airflow run the word count, and kills what it stands on."""

    #: Known once it runs.
    _airflow: Client
    #: What is killed.
    killed = "a task and the database are killed"
    #: How the DAG reaches Spark.
    spark: dict[str, Any] = {"conf": CONF}  # noqa: RUF012 - never changed

    def play(self) -> bool:
        """Play it; say whether the proof holds."""
        self.say.print(
            "[bold]Twophase demo[/]: Airflow counts words, from JSON files to a Parquet table, one checkpoint a run;"
            f" {self.killed}",
            soft_wrap=True,
        )
        self.start()
        with PollingReader(self.table, self.inputs) as reader:
            for number, (title, part) in enumerate(self.parts(), start=1):
                self.head(f"{number}. {title}")
                part()
        return self.prove(reader.check())

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        """Return what happens, in order."""
        return [
            ("Nothing is killed", self._quiet_run),
            ("The runner of a task is killed while its Spark writes", self._killed_runner),
            ("PostgreSQL is killed when all is staged, before the commit point", self._killed_database),
            ("Checkpoint 1 is run again: a backfill", self._backfill),
        ]

    # --- the parts ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start PostgreSQL and Airflow, with the word count as its only DAG."""
        from twophase.cli.local import watch
        from twophase.cli.record_access import opened

        folder = settings.dags()
        folder.mkdir(parents=True)
        (folder / f"{PIPELINE}.py").write_text(DAG.format(spark=self.spark), encoding="utf-8")
        started = stack.start(stack.free_port())
        try:
            with watch(self.say) as on_change:
                with opened(may_start=True):
                    pass  # there is a record
                found = stack.wait(started, on_change)
        except BaseException:
            if started is not None:
                started.terminate()  # it may be too young to be found by whoever stops everything
                started.wait(PATIENCE)
            raise
        self._airflow = Client(found["url"], airflow.passwords_file())
        with busy(self.say, "Airflow reads the DAG"):
            for dag_id in (PIPELINE, REPLAY):
                self._airflow.wait_for_dag(dag_id)
        self.tell(f"PostgreSQL and Airflow run. To look on: {found['url']}", "dim")
        self.tell(f"user {airflow.ADMIN}, password {self._airflow.password()}", "dim")

    def _quiet_run(self) -> None:
        self.tell(
            "Task stage fixes the input in the record, and Spark writes where no reader looks. Task commit decides in"
        )
        self.tell("one transaction, the commit point, and then makes all of it visible in one step.")
        self.land()
        self.finish(self.trigger(PIPELINE))
        self.look()

    def _killed_runner(self) -> None:
        runner = StageProcess(self.table, self.land())
        run = self.trigger(PIPELINE)
        self.follow(run, runner.writes)
        self._kill(runner.pid, "the process of the task stage; its Spark dies with it")
        self.tell("What Spark had written is staged where no reader looks, and nobody has voted for it.")
        self.look()
        self.finish(run)
        self.tell("The retry was attempt 2 of the same checkpoint: the same files, from the start.")
        self.look()

    def _killed_database(self) -> None:
        number = self.land()
        run = self.trigger(PIPELINE)
        self.follow(run, lambda: self._is_staged(number))
        self._kill(postgres.pid(), "PostgreSQL: the record is in it, and Airflow's own database")
        self.look()
        killed = time.monotonic()
        self.follow(run, lambda: postgres.running() is not None)
        self.tell(
            f"The supervisor had PostgreSQL back after {time.monotonic() - killed:.0f} s; the votes are in it still."
        )
        self.look()
        self.finish(run)
        self.look()

    def _backfill(self) -> None:
        self.finish(self.trigger(REPLAY, checkpoints="1"))
        self.tell("Its new revision took the place of the old one in one step.")
        self.look(1)

    # --- Airflow -----------------------------------------------------------------------------------------------------

    def trigger(self, dag_id: str, **conf: str) -> DagRun:
        """Start a run."""
        run = DagRun(dag_id, self._airflow.trigger(dag_id, conf=conf))
        given = "".join(f", {name} {value}" for name, value in conf.items())
        self._airflow_says(f"run of DAG {dag_id}{given}")
        return run

    def finish(self, run: DagRun) -> None:
        """Tell what Airflow does until a run has ended, which must be well."""
        self.follow(run, lambda: run.state in ENDED)
        self._airflow_says(f"the run {'is a success' if run.state == 'success' else 'has failed'}")
        if run.state != "success":
            msg = f"run {run.run_id} of DAG {run.dag_id} has failed; see {airflow.logs() / 'tasks'}"
            raise DemoFailed(msg)

    def follow(self, run: DagRun, until: Callable[[], bool]) -> None:
        """Tell what Airflow does with a run until something holds."""
        deadline, next_question, began = time.monotonic() + PATIENCE, 0.0, time.monotonic()
        with busy(self.say, "Airflow works") as update:
            while not until():
                if run.state in ENDED or time.monotonic() > deadline:
                    how = "has ended too early" if run.state in ENDED else "hangs"
                    msg = f"run {run.run_id} of DAG {run.dag_id} {how}: {run.now}; see {airflow.logs()}"
                    raise DemoFailed(msg)
                if time.monotonic() > next_question:
                    self._ask(run)
                    update(f"{run.now} · {time.monotonic() - began:.0f} s")
                    next_question = time.monotonic() + _ASK_EVERY
                time.sleep(_TICK)

    def _ask(self, run: DagRun) -> None:
        """Ask Airflow how a run is, and tell what is new."""
        try:
            run.state = self._airflow.run_state(run.dag_id, run.run_id)
            tasks = self._airflow.tasks(run.dag_id, run.run_id)
        except (ApiError, StoreUnavailable) as error:
            if isinstance(error, ApiError) and error.status < _SERVER_ERROR:
                raise
            run.now = "Airflow does not answer"  # while its database is away
            return
        for line in run.news(tasks):
            self._airflow_says(line)

    def _airflow_says(self, text: str) -> None:
        from rich.text import Text

        self.say.print(Text.assemble("   ", ("airflow: ", "dim"), text), soft_wrap=True)

    # --- killing -----------------------------------------------------------------------------------------------------

    def _kill(self, pid: int | None, what: str) -> None:
        if pid is None:
            msg = f"gone before it was killed: {what}"
            raise DemoFailed(msg)
        os.kill(pid, signal.SIGKILL)
        self.killing(pid, what)

    def killing(self, pid: int, what: str) -> None:
        """Tell who was killed."""
        from rich.text import Text

        self.say.print(Text.assemble("   ", (f"kill -9 {pid}", "bold red"), f": {what}"), soft_wrap=True)

    def _is_staged(self, checkpoint_id: int) -> bool:
        """Say whether everybody has voted for a checkpoint."""
        newest = self.record()[0]
        return newest["checkpoint_id"] == checkpoint_id and newest["state"] not in {"OPEN", "ABORTING", "ABORTED"}


@dataclass
class DagRun:
    """A run of a DAG, and what was told of it."""

    dag_id: str
    run_id: str
    state: str = "queued"
    now: str = "Airflow works"
    told: dict[str, str] = field(default_factory=dict)

    def news(self, tasks: list[dict[str, Any]]) -> Iterator[str]:
        """Yield a line for each task that is in another state than before."""
        for task in tasks:
            words = _TOLD.get(task["state"])
            if words is None:
                continue
            name = task["task_id"]
            line = f"task {name} {words}" + (f", try {task['try_number']}" if words == "is running" else "")
            if self.told.get(name) != line:
                self.told[name] = self.now = line
                yield line


class StageProcess:
    """The process that runs the task stage of a checkpoint: it has started a spark-submit."""

    def __init__(self, table: Path, checkpoint_id: int) -> None:
        """Look for it in the session of the scheduler, and nowhere else."""
        state = supervisor.running(airflow.folder())
        self._session = (state.components["scheduler"].session if state else None) or 0
        self._runs = str(settings.home() / "runs" / PIPELINE / f"{checkpoint_id:08d}.")
        self._staging = Path(f"{table}.twophase") / "staging"
        self._staged = f"{checkpoint_id:08d}.*/**/*"
        self._found: processes.Identity | None = None

    @property
    def pid(self) -> int | None:
        """Return its pid while it lives."""
        return self._found.pid if self._found is not None and self._found.alive else None

    def writes(self) -> bool:
        """Say whether its Spark has begun to write."""
        if self._found is None:
            self._found = next(iter(processes.parents_of(self._runs, self._session)), None)
        return self._found is not None and any(path.is_file() for path in self._staging.glob(self._staged))
