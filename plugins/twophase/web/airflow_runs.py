"""What Airflow knows of a run: whether anybody goes on with what it left."""

from typing import Any

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

_ENDED = frozenset({"success", "failed"})


def has_ended(row: dict[str, Any]) -> bool | None:
    """Say whether the run of a revision is over; one that Airflow does not have any more is. None: it is no run."""
    if row["dag_id"] is None or row["run_id"] is None:
        return None
    mine = (DagRun.dag_id == row["dag_id"]) & (DagRun.run_id == row["run_id"])
    with create_session() as session:
        state = session.scalar(select(DagRun.state).where(mine))
    return state is None or str(getattr(state, "value", state)) in _ENDED
