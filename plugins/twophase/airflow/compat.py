"""Names that different versions of Airflow have in different modules; the other modules here import them."""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException

try:
    from airflow.sdk import CronDataIntervalTimetable
    from airflow.sdk.exceptions import (
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSkipException,
        DownstreamTasksSkipped,
    )
except ImportError:  # Airflow 3.1
    from airflow.exceptions import (  # type: ignore[attr-defined, no-redef]
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSkipException,
        DownstreamTasksSkipped,
    )
    from airflow.timetables.interval import CronDataIntervalTimetable  # type: ignore[assignment]

__all__ = [
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowRescheduleException",
    "AirflowSkipException",
    "CronDataIntervalTimetable",
    "DownstreamTasksSkipped",
]
