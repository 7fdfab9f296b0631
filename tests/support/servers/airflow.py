"""A running Airflow for tests: what `twophase up` starts, on a folder and ports of its own.

with AirflowServer(dags=tmp_path / "dags") as airflow:
    airflow.add_dag("orders.py", source)
    run_id = airflow.trigger("orders", conf={"day": "2026-11-15"})
    assert airflow.wait("orders", run_id) == "success"
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from sqlalchemy import Connection, create_engine

from twophase.local import postgres, stack
from twophase.local.airflow import QUICK
from twophase.local.airflow_client import Client

#: A password in a connection that every task could read, and that must turn up nowhere.
CANARY = "canary-5f1d2c9b7e"


class AirflowServer(Client):
    """One Airflow, from `start()` to `stop()`."""

    def __init__(
        self,
        dags: Path | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
        topics: Sequence[str] | None = None,
    ) -> None:
        """Choose the folders; `environment` goes to every process of it, tasks included, and overrides `QUICK`.

        With `topics` there is a Kafka broker, too.
        """
        self._topics = topics
        self._own = home is None
        self.home = home or Path(tempfile.mkdtemp(prefix="twophase-airflow-"))
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)  # run as root, PostgreSQL works as an account that has to enter it
        self.dags = dags or self.home / "dags"
        self.dags.mkdir(parents=True, exist_ok=True)
        self.port = stack.free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", self.home / "airflow" / "secrets" / "passwords.json")
        outside = ("AIRFLOW", "TWOPHASE_", "_AIRFLOW")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        self.environment = {
            **inherited,
            **QUICK,
            "TWOPHASE_LEASE": "3",
            "AIRFLOW_CONN_CANARY": f"postgres://somebody:{CANARY}@127.0.0.1:5432/somewhere",
            "TWOPHASE_HOME": str(self.home),
            "TWOPHASE_DAGS": str(self.dags),
            "TWOPHASE_SPARK_JOBS": str(self.home / "spark_jobs"),
            **(environment or {}),
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the server --------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Start everything, wait until it is healthy, and return what `up` says."""
        broker = [] if self._topics is None else ["--kafka", *(f"--topic={topic}" for topic in self._topics)]
        return self.twophase("up", "--port", str(self.port), *broker)

    def stop(self) -> None:
        """Stop everything, and remove a folder that was made here."""
        self.twophase("down")
        if self._own:
            shutil.rmtree(self.home)

    def twophase(self, *arguments: str, fails: bool = False) -> str:
        """Run a command of the command line on this server's folder and return what it prints, errors if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "twophase.cli", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert (done.returncode != 0) == fails, f"twophase {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout

    @contextmanager
    def record(self) -> Iterator[Connection]:
        """Open the record to read in it."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TWOPHASE_HOME", str(self.home))
            dsn = postgres.running()
        assert dsn is not None, "PostgreSQL is not running"
        engine = create_engine(dsn)
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()

    def status(self) -> dict[str, Any]:
        """Return what `status --json` tells."""
        found: dict[str, Any] = json.loads(self.twophase("status", "--json"))
        return found

    def components(self) -> dict[str, dict[str, Any]]:
        """Return each component as `status` has it; none when there is no supervisor."""
        found = self.status()["airflow"]
        return {part["name"]: part for part in found["components"]} if found else {}

    def component_pid(self, name: str) -> int:
        """Return the pid of api-server, scheduler, dag-processor, triggerer, postgres or supervisor."""
        state = json.loads((self.home / "supervisor" / "state").read_text(encoding="utf-8"))
        pid: int = state["pid"] if name == "supervisor" else state["components"][name]["pid"]
        return pid

    def wait_until_healthy(self, timeout: float = 90) -> None:
        """Wait until every component is healthy."""
        eventually(lambda: all(part["health"] == "healthy" for part in self.components().values()), timeout)

    def add_dag(self, file: str, source: str, *dag_ids: str) -> None:
        """Write a DAG file (at once, never half of it), and wait until its DAGs are there and unpaused."""
        aside = self.dags / f".{file}.{uuid.uuid4().hex}"
        aside.write_text(source, encoding="utf-8")
        written = datetime.now(UTC)
        aside.rename(self.dags / file)
        for dag_id in dag_ids or (file.removesuffix(".py"),):
            self.wait_for_dag(dag_id, written)


def eventually(holds: Callable[[], Any], timeout: float = 60, *, every: float = 0.2) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s"
        time.sleep(every)


def step_by_step(holds: Callable[[], Any], state: Callable[[], Any], timeout: float = 600) -> None:
    """Wait until something holds, however many steps it takes: each is seen as another state, within the timeout."""
    seen, deadline = state(), time.monotonic() + timeout
    while not holds():
        if (now := state()) != seen:
            seen, deadline = now, time.monotonic() + timeout
        assert time.monotonic() < deadline, f"nothing changed within {timeout:.0f} s"
        time.sleep(1)
