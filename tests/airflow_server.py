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
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import pytest
from sqlalchemy import Connection, create_engine

from twophase.local import postgres

#: Everything that Airflow would do in minutes happens in seconds.
QUICK = {
    "TWOPHASE_LEASE": "3",
    "AIRFLOW__CORE__KILLED_TASK_CLEANUP_TIME": "5",
    "AIRFLOW__CORE__PARALLELISM": "6",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "120",  # a file that was changed does not wait for it
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "1",
    "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "3",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "15",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
}
ENDED = ("success", "failed")
#: A password in a connection that every task could read, and that must turn up nowhere.
CANARY = "canary-5f1d2c9b7e"


class Refused(Exception):
    """The API answered with an error; `status` is its number."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class AirflowServer:
    """One Airflow, from `start()` to `stop()`."""

    def __init__(
        self, dags: Path | None = None, *, environment: Mapping[str, str] | None = None, home: Path | None = None
    ) -> None:
        """Choose the folders; `environment` goes to every process of it, tasks included, and overrides `QUICK`."""
        self._own = home is None
        self.home = home or Path(tempfile.mkdtemp(prefix="twophase-airflow-"))
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)  # run as root, PostgreSQL works as an account that has to enter it
        self.dags = dags or self.home / "dags"
        self.dags.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        outside = ("AIRFLOW", "TWOPHASE_", "_AIRFLOW")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        self.environment = {
            **inherited,
            **QUICK,
            "AIRFLOW_CONN_CANARY": f"postgres://somebody:{CANARY}@127.0.0.1:5432/somewhere",
            "TWOPHASE_HOME": str(self.home),
            "TWOPHASE_DAGS": str(self.dags),
            "TWOPHASE_SPARK_JOBS": str(self.home / "spark_jobs"),
            **(environment or {}),
        }
        self._tokens: dict[str, str] = {}

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
        return self.twophase("up", "--port", str(self.port))

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

    def password(self, user: str = "admin") -> str:
        """Return a user's password."""
        found: str = json.loads((self.home / "airflow" / "secrets" / "passwords.json").read_text())[user]
        return found

    # --- the API -----------------------------------------------------------------------------------------------------

    def token(self, user: str = "admin") -> str:
        """Return a token of a user, asked for once."""
        if user not in self._tokens:
            body = {"username": user, "password": self.password(user)}
            self._tokens[user] = self.request("POST", "/auth/token", body)["access_token"]
        return self._tokens[user]

    def api(self, method: str, path: str, *, user: str | None = "admin", **body: Any) -> Any:
        """Call the API below /api/v2 (or another path from /) as a user, None for nobody; `body` is sent as JSON."""
        place = path if path.startswith("/") else f"/api/v2/{path}"
        return self.request(method, place, body or None, token=self.token(user) if user else None)

    def request(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        """Send a request; return the JSON or text of the answer, or raise Refused."""
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/plain;q=0.5, */*;q=0.1"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                text = reply.read().decode()
                return json.loads(text) if "json" in (reply.headers["Content-Type"] or "") else text
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode(errors="replace")) from None

    # --- DAGs and runs -----------------------------------------------------------------------------------------------

    def add_dag(self, file: str, source: str, *dag_ids: str) -> None:
        """Write a DAG file (at once, never half of it), and wait until its DAGs are there and unpaused."""
        aside = self.dags / f".{file}.{uuid.uuid4().hex}"
        aside.write_text(source, encoding="utf-8")
        written = datetime.now(UTC)
        aside.rename(self.dags / file)
        for dag_id in dag_ids or (file.removesuffix(".py"),):
            self.wait_for_dag(dag_id, written)

    def wait_for_dag(self, dag_id: str, since: datetime | None = None, timeout: float = 90) -> None:
        """Wait until Airflow has read the DAG's file (since some time), then unpause the DAG."""

        def fresh() -> bool:
            try:
                found = self.api("GET", f"dags/{quote(dag_id)}")
            except Refused as refused:
                if refused.status != 404:
                    raise
                errors = self.api("GET", "importErrors")["import_errors"]
                assert not errors, errors[0]["stack_trace"]
                return False
            parsed = datetime.fromisoformat(found["last_parsed_time"])
            return not found["is_stale"] and (since is None or parsed > since)

        eventually(fresh, timeout)
        self.api("PATCH", f"dags/{quote(dag_id)}", is_paused=False)

    def trigger(self, dag_id: str, **body: Any) -> str:
        """Start a run (conf=…, logical_date=…, dag_run_id=…) and return its id."""
        run_id: str = self.api("POST", f"dags/{quote(dag_id)}/dagRuns", **{"logical_date": None, **body})["dag_run_id"]
        return run_id

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run."""
        state: str = self.api("GET", _run(dag_id, run_id))["state"]
        return state

    def wait(self, dag_id: str, run_id: str, timeout: float = 120) -> str:
        """Wait until a run has ended, and return its state."""
        eventually(lambda: self.run_state(dag_id, run_id) in ENDED, timeout)
        return self.run_state(dag_id, run_id)

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Return the state of each task of a run."""
        found = self.api("GET", f"{_run(dag_id, run_id)}/taskInstances")["task_instances"]
        return {task["task_id"]: task["state"] for task in found}

    def wait_for_task(self, dag_id: str, run_id: str, task_id: str, *states: str, timeout: float = 60) -> str:
        """Wait until a task is in one of these states, and return it."""
        eventually(lambda: self.task_states(dag_id, run_id).get(task_id) in states, timeout)
        return str(self.task_states(dag_id, run_id)[task_id])

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """Return the log of one try of a task."""
        place = f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}/logs/{try_number}?full_content=true"
        lines = self.api("GET", place)["content"]
        return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)


def _run(dag_id: str, run_id: str) -> str:
    return f"dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(holds: Callable[[], Any], timeout: float = 60, *, every: float = 0.2) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s"
        time.sleep(every)
