"""A small client of a local Airflow's REST API, for the demo: trigger a run, and see how it ends.

It reads the user's password from the file of `twophase up` when it first needs a token.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from twophase.core.errors import ConfigError, StoreUnavailable, TwophaseError

#: The states in which a run stays.
ENDED = frozenset({"success", "failed"})

_ASK_SECONDS = 30.0
_POLL = 0.2
_NOT_FOUND = 404
_ACCEPT = "application/json, text/plain;q=0.5, */*;q=0.1"


class ApiError(TwophaseError):
    """The API answered with an error; `status` is its number."""

    def __init__(self, status: int, text: str) -> None:
        """Say what the API said."""
        super().__init__(f"{status}: {text}")
        self.status = status


class Client:
    """Asks one Airflow, as any of its users."""

    def __init__(self, url: str, passwords: Path) -> None:
        """Name the address, and the file of passwords."""
        self.url = url
        self._passwords = passwords
        self._tokens: dict[str, str] = {}

    # --- the API -----------------------------------------------------------------------------------------------------

    def password(self, user: str = "admin") -> str:
        """Return a user's password."""
        found: str = json.loads(self._passwords.read_text(encoding="utf-8"))[user]
        return found

    def token(self, user: str = "admin") -> str:
        """Return a token of a user, asked for once."""
        if user not in self._tokens:
            body = {"username": user, "password": self.password(user)}
            self._tokens[user] = self.request("POST", "/auth/token", body)["access_token"]
        return self._tokens[user]

    def api(self, method: str, path: str, *, user: str | None = "admin", **body: Any) -> Any:  # noqa: ANN401 - any JSON
        """Call the API below /api/v2 (or another path from /) as a user, None for nobody; `body` is sent as JSON."""
        place = path if path.startswith("/") else f"/api/v2/{path}"
        return self.request(method, place, body or None, token=self.token(user) if user else None)

    def request(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:  # noqa: ANN401
        """Send a request; return the JSON or text of the answer, or raise ApiError."""
        headers = {"Content-Type": "application/json", "Accept": _ACCEPT}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)  # noqa: S310 - http
        try:
            with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as reply:  # noqa: S310 - our own http address
                text = reply.read().decode()
                return json.loads(text) if "json" in (reply.headers["Content-Type"] or "") else text
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, error.read().decode(errors="replace")) from None
        except (OSError, http.client.HTTPException) as error:
            msg = f"airflow: {self.url} does not answer: {error}"
            raise StoreUnavailable(msg) from None

    # --- DAGs and runs -----------------------------------------------------------------------------------------------

    def wait_for_dag(self, dag_id: str, since: datetime | None = None, timeout: float = 90) -> None:
        """Wait until Airflow has read the DAG's file (since some time), then unpause the DAG."""

        def fresh() -> bool:
            try:
                found = self.api("GET", f"dags/{quote(dag_id)}")
            except ApiError as refused:
                if refused.status != _NOT_FOUND:
                    raise
                self._check_imports()
                return False
            parsed = datetime.fromisoformat(found["last_parsed_time"])
            return not found["is_stale"] and (since is None or parsed > since)

        _until(fresh, f"DAG {dag_id}", timeout)
        self.api("PATCH", f"dags/{quote(dag_id)}", is_paused=False)

    def _check_imports(self) -> None:
        errors = self.api("GET", "importErrors")["import_errors"]
        if errors:
            raise ConfigError(errors[0]["stack_trace"])

    def trigger(self, dag_id: str, **body: Any) -> str:  # noqa: ANN401 - any JSON
        """Start a run (conf=…, logical_date=…, dag_run_id=…) and return its id."""
        run_id: str = self.api("POST", f"dags/{quote(dag_id)}/dagRuns", **{"logical_date": None, **body})["dag_run_id"]
        return run_id

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run."""
        state: str = self.api("GET", run_path(dag_id, run_id))["state"]
        return state

    def wait(self, dag_id: str, run_id: str, timeout: float = 120) -> str:
        """Wait until a run has ended, and return its state."""
        _until(lambda: self.run_state(dag_id, run_id) in ENDED, f"the end of run {dag_id} {run_id}", timeout)
        return self.run_state(dag_id, run_id)

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return the tasks of a run, each with its `task_id`, `state`, `try_number` and more."""
        found: list[dict[str, Any]] = self.api("GET", f"{run_path(dag_id, run_id)}/taskInstances")["task_instances"]
        return found

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """Return the state of each task of a run."""
        return {task["task_id"]: task["state"] for task in self.tasks(dag_id, run_id)}

    def wait_for_task(self, dag_id: str, run_id: str, task_id: str, *states: str, timeout: float = 60) -> str:
        """Wait until a task is in one of these states, and return it."""
        what = f"task {task_id} of run {dag_id} {run_id} in {' or '.join(states)}"
        _until(lambda: self.task_states(dag_id, run_id).get(task_id) in states, what, timeout)
        return str(self.task_states(dag_id, run_id)[task_id])

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """Return the log of one try of a task."""
        place = f"{run_path(dag_id, run_id)}/taskInstances/{quote(task_id)}/logs/{try_number}?full_content=true"
        lines = self.api("GET", place)["content"]
        return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)


def run_path(dag_id: str, run_id: str) -> str:
    """Return where the API has a run."""
    return f"dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"


def _until(holds: Callable[[], bool], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            msg = f"airflow: expected {what}, not within {timeout:.0f} s"
            raise StoreUnavailable(msg)
        time.sleep(_POLL)
