"""The DAGs that look after all pipelines, for users' DAG files: recovery every 5 minutes, a sweep each day."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG
from airflow.sdk.timezone import utc

from twophase.airflow.operators import RecoverOperator, SweepOperator

_START = datetime(2026, 1, 1, tzinfo=utc)


def maintenance_dags(recover: Any = timedelta(minutes=5), sweep: Any = "@daily", **kwargs: Any) -> tuple[DAG, DAG]:
    """Return `twophase_recover` and `twophase_sweep`, on the schedules given; further arguments go to both."""
    settled = {"catchup": False, "max_active_runs": 1, "start_date": _START, "tags": ["twophase"], **kwargs}
    with DAG(
        "twophase_recover",
        schedule=recover,
        doc_md="Finishes what crashes left, from the record: promotes what is decided, and aborts what no run will go"
        " on with. It fails while something is parked, that is, while it needs a person.",
        **settled,
    ) as recovers:
        RecoverOperator(task_id="recover")
    with DAG(
        "twophase_sweep",
        schedule=sweep,
        doc_md="Removes what the record says is dead: staged output of aborted work, and superseded revisions whose"
        " retention is over.",
        **settled,
    ) as sweeps:
        SweepOperator(task_id="sweep", retries=2)
    return recovers, sweeps
