"""Settings from environment variables, for every layer: where folders are, and how long a lease lasts."""

from __future__ import annotations

import os
from pathlib import Path

from twophase.core.errors import ConfigError

LONGEST_LEASE = 86_400
#: The run folder, if none is named.
HOME = ".twophase"


def home() -> Path:
    """Return the run folder: `TWOPHASE_HOME`, default `.twophase` below the current folder."""
    return Path(os.environ.get("TWOPHASE_HOME") or HOME).absolute()


def data_path(path: str | Path) -> Path:
    """Resolve a path of a declaration; relative ones are below the folder `data` of `TWOPHASE_HOME`."""
    # Each checkpoint asks a dozen times: the steps in between are texts, which cost a tenth of a Path each.
    return Path(os.path.abspath(os.path.join(os.environ.get("TWOPHASE_HOME") or HOME, "data", path)))  # noqa: PTH100, PTH118


def dags() -> Path:
    """Return the folder of DAG files: `TWOPHASE_DAGS`, default `dags` below the current folder."""
    return Path(os.environ.get("TWOPHASE_DAGS") or "dags").absolute()


def spark_jobs() -> Path:
    """Return the folder of users' transforms: `TWOPHASE_SPARK_JOBS`, default `spark_jobs` below the current folder."""
    return Path(os.environ.get("TWOPHASE_SPARK_JOBS") or "spark_jobs").absolute()


def lease_seconds() -> float:
    """Return how long a process may be silent before another takes over: `TWOPHASE_LEASE`, default 30 s."""
    text = os.environ.get("TWOPHASE_LEASE") or "30"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_LEASE:
        msg = f"TWOPHASE_LEASE: expected a number of seconds above 0, a day at most, found {text!r}"
        raise ConfigError(msg)
    return seconds
