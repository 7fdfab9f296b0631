"""Ask Airflow whether a run has ended; the pages need it to say what to do next."""

from typing import Any

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

_ENDED = frozenset({"success", "failed"})


def has_ended(row: dict[str, Any]) -> bool | None:
    """Return True if the run of a revision is over, or was deleted in Airflow; None: it is no run of Airflow's."""
    if row["dag_id"] is None or row["run_id"] is None:
        return None
    mine = (DagRun.dag_id == row["dag_id"]) & (DagRun.run_id == row["run_id"])
    with create_session() as session:
        state = session.scalar(select(DagRun.state).where(mine))
    return state is None or str(getattr(state, "value", state)) in _ENDED
