"""What `twophase up`, `down` and `status` do with the local Airflow: start it, wait for it, look at it, stop it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypedDict

from twophase.core.errors import ConfigError, StoreUnavailable
from twophase.local import airflow, kafka_component, postgres, supervisor

PORT = 8080

_POLL = 0.3
_ASK_SECONDS = 5.0
_START_SECONDS = 240.0
_STOP_SECONDS = 120.0
#: How Airflow's health report names the components that it knows.
_REPORTED = {"scheduler": "scheduler", "dag-processor": "dag_processor", "triggerer": "triggerer"}


class ComponentStatus(TypedDict):
    """What `status` tells of a component."""

    name: str
    health: str
    pid: int | None
    since: str | None
    restarts: int
    log: str


class Stack(TypedDict):
    """What `status` tells of the whole."""

    pid: int
    url: str
    components: list[ComponentStatus]


def start(port: int | None, topics: Sequence[str] | None = None) -> subprocess.Popen[bytes] | None:
    """Start the supervisor unless it runs, with a broker if there are `topics`; return its process if it is new."""
    airflow.installed()
    state = supervisor.running(airflow.folder())
    if state is not None:
        if port not in {None, state.facts["port"]}:
            msg = f"airflow: already running at {airflow.url(state.facts['port'])}; stop it first: twophase down"
            raise ConfigError(msg)
        if topics is not None and kafka_component.KafkaComponent.name not in state.components:
            msg = "up --kafka: Airflow is already running, without a broker; stop it first: twophase down"
            raise ConfigError(msg)
        return None
    if topics is not None:
        kafka_component.check_environment()
    supervisor.clear(airflow.folder())
    _check_free(port or PORT)
    airflow.make_secrets()  # from now on this is the Airflow of this run folder, and no other one is asked
    command = [sys.executable, "-P", "-m", "twophase.local.airflow", "--port", str(port or PORT)]
    command += [] if topics is None else ["--kafka", *topics]
    with supervisor.open_log(airflow.logs() / "supervisor.log") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait(started: subprocess.Popen[bytes] | None, on_change: Callable[[list[ComponentStatus]], None]) -> Stack:
    """Wait until every component is healthy, telling each change."""
    deadline = time.monotonic() + _START_SECONDS
    told: list[ComponentStatus] = []
    while True:
        stack = describe()
        if stack is not None:
            if stack["components"] != told:
                told = stack["components"]
                on_change(told)
            if all(part["health"] == "healthy" for part in told):
                return stack
        elif started is None or started.poll() is not None:
            msg = f"airflow: its supervisor ended; see {airflow.logs() / 'supervisor.log'}"
            raise StoreUnavailable(msg)
        if time.monotonic() > deadline:
            ill = ", ".join(f"{part['name']} is {part['health']}" for part in told if part["health"] != "healthy")
            msg = f"airflow: not healthy within {_START_SECONDS:.0f} s: {ill or 'no supervisor'}; see {airflow.logs()}"
            raise StoreUnavailable(msg)
        time.sleep(_POLL)


def stop() -> bool:
    """Stop Airflow and the embedded PostgreSQL below it; tell whether there was anything to stop."""
    return supervisor.stop(airflow.folder(), _STOP_SECONDS)


def describe() -> Stack | None:
    """Return how each component is; None when there is no supervisor."""
    state = supervisor.running(airflow.folder())
    if state is None:
        return None
    port = state.facts["port"]
    report = _report(port)
    parts = [
        ComponentStatus(
            name=name,
            health=_health(name, told, report),
            pid=told.pid,
            since=told.since,
            restarts=told.restarts,
            log=str(airflow.logs() / f"{name}.log"),
        )
        for name, told in state.components.items()
    ]
    return Stack(pid=state.pid, url=airflow.url(port), components=parts)


def _health(name: str, told: supervisor.Told, report: dict[str, Any] | None) -> str:
    """Return one word: a component is healthy when it runs, and has said so since it was started."""
    if told.pid is None or told.since is None:
        return "down"
    if name == kafka_component.KafkaComponent.name:
        return "healthy"  # it counts as started once it has said that it is ready
    if name not in _REPORTED:
        answers = report is not None if name == "api-server" else postgres.running() is not None
        return "healthy" if answers else "starting"
    said = (report or {}).get(_REPORTED[name]) or {}
    beat = said.get(f"latest_{_REPORTED[name]}_heartbeat")
    if not beat or datetime.fromisoformat(beat) < datetime.fromisoformat(told.since):
        return "starting"
    return str(said["status"])


def _report(port: int) -> dict[str, Any] | None:
    """Ask the api-server how everything is; None when it does not answer."""
    address = f"{airflow.url(port)}/api/v2/monitor/health"
    try:
        with urllib.request.urlopen(address, timeout=_ASK_SECONDS) as reply:  # noqa: S310 - our own http address
            found: dict[str, Any] = json.load(reply)
    except (OSError, urllib.error.HTTPError):
        return None
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((airflow.HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _check_free(port: int) -> None:
    """Refuse a port that somebody listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((airflow.HOST, port))
        except OSError as error:
            why = f"airflow: port {port} on {airflow.HOST} cannot be had ({error.strerror})"
            msg = f"{why}; end what listens there, or choose another: twophase up --port {port + 1}"
            raise ConfigError(msg) from None
