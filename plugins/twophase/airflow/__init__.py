"""What users import in DAG files: a pipeline as a DAG or a task group, and the operators that these use.

Names are loaded when they are first used, so a DAG file imports only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twophase.airflow.approve import ApproveOperator
    from twophase.airflow.assets import asset
    from twophase.airflow.dag import TwophaseDag, TwophaseTaskGroup
    from twophase.airflow.maintenance import maintenance_dags
    from twophase.airflow.operators import AbortOperator, CommitOperator, RecoverOperator, SweepOperator
    from twophase.airflow.spark_submit import StageOperator

__all__ = [
    "AbortOperator",
    "ApproveOperator",
    "CommitOperator",
    "RecoverOperator",
    "StageOperator",
    "SweepOperator",
    "TwophaseDag",
    "TwophaseTaskGroup",
    "asset",
    "maintenance_dags",
]

_HOMES = {
    "AbortOperator": "operators",
    "ApproveOperator": "approve",
    "CommitOperator": "operators",
    "RecoverOperator": "operators",
    "StageOperator": "spark_submit",
    "SweepOperator": "operators",
    "TwophaseDag": "dag",
    "TwophaseTaskGroup": "dag",
    "asset": "assets",
    "maintenance_dags": "maintenance",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"twophase.airflow.{_HOMES[name]}"), name)
    msg = f"module 'twophase.airflow' has no attribute {name!r}"
    raise AttributeError(msg)
