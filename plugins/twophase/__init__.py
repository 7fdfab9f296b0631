"""Exactly-once Spark pipelines on Airflow.

This is what users import. Names are loaded when they are first used, so code inside Spark imports neither SQLAlchemy
nor Airflow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase import audits, committers, sinks, sources, windows
    from twophase.committed_reads import committed_files, read_committed
    from twophase.core.retention import Retention
    from twophase.pipeline import Pipeline
    from twophase.runner import run
    from twophase.spark.continuous.declaration import sql
    from twophase.state.declaration import State
    from twophase.state_reads import read_state, state_changes

__all__ = [
    "Pipeline",
    "Retention",
    "State",
    "audits",
    "committed_files",
    "committers",
    "read_committed",
    "read_state",
    "run",
    "sinks",
    "sources",
    "sql",
    "state_changes",
    "windows",
]

_HOMES = {
    "Pipeline": "twophase.pipeline",
    "Retention": "twophase.core.retention",
    "State": "twophase.state.declaration",
    "committed_files": "twophase.committed_reads",
    "read_committed": "twophase.committed_reads",
    "read_state": "twophase.state_reads",
    "run": "twophase.runner",
    "sql": "twophase.spark.continuous.declaration",
    "state_changes": "twophase.state_reads",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"twophase.{name}")
    msg = f"module 'twophase' has no attribute {name!r}"
    raise AttributeError(msg)
