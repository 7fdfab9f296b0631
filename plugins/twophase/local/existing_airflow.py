"""Ask the Airflow that is configured here how it is set up, and for its connections; commands and `status` use it.

It runs a program that takes a few seconds (`twophase.airflow.self_report`). So it asks only for what the environment
does not say, and only if an Airflow is configured. A Spark job never asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from twophase.core import connections, settings
from twophase.core.errors import Unreachable

_SECONDS = 120.0
#: Seconds that an answer is cached: a command asks several times, but a notebook lives for days.
_FRESH = 60.0
#: Variables that say where an Airflow keeps its connections.
_TELLING = ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__SECRETS__BACKEND")

_answers: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}


@dataclass(frozen=True)
class Existing:
    """An Airflow on this machine: the one that `twophase up` made, or another one."""

    home: Path
    local: bool

    def __str__(self) -> str:
        """Return its name for errors."""
        return f"the Airflow in {self.home}"

    def environment(self) -> Mapping[str, str]:
        """Return the environment that leads a program to it."""
        if not self.local:
            return os.environ
        from twophase.local import airflow

        return airflow.beside()


def there() -> Existing | None:
    """Return the Airflow whose connections are used here: the local one if there is one, else the configured one."""
    from twophase.spark.submit import is_job

    if is_job(os.environ) or installed() is None:
        return None
    own = settings.home() / "airflow"
    if (own / "secrets" / "fernet_key").exists():
        return Existing(own, local=True)
    home = Path(os.environ.get("AIRFLOW_HOME") or "~/airflow").expanduser()
    config = Path(os.environ.get("AIRFLOW_CONFIG") or home / "airflow.cfg").expanduser()
    told = any(os.environ.get(name + suffix) for name in _TELLING for suffix in ("", "_CMD", "_SECRET"))
    return Existing(home, local=False) if told or config.is_file() or (home / "airflow.db").is_file() else None


def installed() -> str | None:
    """Return the version of Airflow; None: this interpreter has none."""
    try:
        return version("apache-airflow")
    except PackageNotFoundError:
        return None


def connection(existing: Existing, conn_id: str) -> connections.Connection | None:
    """Return a connection as that Airflow finds it; raise an error, not None, if it could not be asked."""
    key = (str(existing.home), conn_id)
    until, answer = _answers.get(key, (0.0, {}))
    if time.monotonic() >= until:
        answer = _ask(existing, conn_id)["connections"][conn_id]
        _answers[key] = (time.monotonic() + _FRESH, answer)
    if answer["found"] is not None:
        return connections.Connection(conn_id, **answer["found"])
    if answer["failed"]:
        reasons = ", ".join(f"{place} ({error})" for place, error in answer["failed"].items())
        msg = (
            f"connection {conn_id}: {existing} could not be asked for it: {reasons}; see what"
            f" `airflow connections get {conn_id}` says, or set {connections.PREFIX}{conn_id.upper()}"
        )
        raise Unreachable(msg)
    return None


def looked(existing: Existing, conn_id: str) -> str:
    """Say where that Airflow has looked for a connection."""
    _, answer = _answers.get((str(existing.home), conn_id), (0.0, {}))
    return f"{existing} ({', '.join(answer.get('looked', [])) or 'it has no database yet'})"


def describe(existing: Existing, *conn_ids: str) -> dict[str, Any]:
    """Return how that Airflow is set up, and which of these connections it has."""
    answer = _ask(existing, "--all", *conn_ids)
    described: dict[str, Any] = answer["description"]
    described["version"] = installed()
    described["connections"] = {
        conn_id: {"found": found["found"] is not None, "looked": found["looked"], "failed": found["failed"]}
        for conn_id, found in answer["connections"].items()
    }
    return described


def _ask(existing: Existing, *wanted: str) -> dict[str, Any]:
    """Run the program that answers; drop its other output, which may hold a secret."""
    command = [sys.executable, "-P", "-m", "twophase.airflow.self_report", *wanted]
    try:
        done = subprocess.run(
            command,
            env=dict(existing.environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        why = f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else "no answer"
        msg = f"airflow: {existing} could not be asked ({why}); see what `airflow info` says, or set TWOPHASE_DSN"
        raise Unreachable(msg) from None
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
