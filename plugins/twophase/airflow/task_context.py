"""What every task of ours needs from Airflow's context: its run, its slot, and the record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType

from twophase.airflow.compat import AirflowFailException
from twophase.core.checkpoint import Key, Run
from twophase.core.errors import (
    AuditFailed,
    BadRecord,
    BadValue,
    ConfigError,
    Fenced,
    IllegalTransition,
    InputMissing,
    Parked,
    RecordBehind,
    Retryable,
    SchemaChanged,
)
from twophase.core.slots import Slot

if TYPE_CHECKING:
    from airflow.sdk import Context

    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline

log = logging.getLogger("twophase")

#: Errors that a retry cannot help: a newer attempt owns the revision (R15), another attempt would read and find the
#: same, or a person has to act.
FINAL = (
    *(Fenced, AuditFailed, BadRecord, BadValue, SchemaChanged),
    *(ConfigError, InputMissing, IllegalTransition, Parked, RecordBehind),
)
_ENDED = frozenset({"success", "failed"})
_NOT_FOUND = 404


@contextmanager
def record(context: Context) -> Iterator[PostgresRecord]:
    """Open the record for the length of a task; an error that a retry cannot help fails the task without retries."""
    from twophase.local.record_access import open_record

    ti = context["ti"]
    with failing_for_good():
        # Airflow tells a task who triggered its run, but not who marked or cleared it.
        person = getattr(context["dag_run"], "triggering_user_name", None)
        task = f"airflow {ti.dag_id}.{ti.task_id} try {ti.try_number}"
        opened = open_record(who=f"{person} via {task}" if person else task)
        try:
            yield opened
        finally:
            opened.engine.dispose()


@contextmanager
def failing_for_good() -> Iterator[None]:
    """Fail the task without retries on an error that a retry would only repeat."""
    try:
        yield
    except Retryable:
        raise
    except FINAL as error:
        raise AirflowFailException(str(error)) from error


def run_of(context: Context) -> Run:
    """Return the run under its name in the record."""
    ti = context["ti"]
    return Run(ti.dag_id, ti.run_id)


def slot_of(context: Context, pipeline: Pipeline) -> str | None:
    """Return the slot of a run: by its parameter, its partition key, or its data interval."""
    given = context["params"].get("slot")
    if not pipeline.slotted:
        if given:
            msg = f"pipeline {pipeline.name!r}: slot {given!r}: none of its reads goes by intervals"
            raise ConfigError(msg)
        return None
    found: str | None = given or context.get("partition_key")
    if found:
        return Slot.parse(found, pipeline.zone).text
    start, end = context.get("data_interval_start"), context.get("data_interval_end")
    if start is None or end is None or start >= end:
        msg = (
            f"pipeline {pipeline.name!r}: run {run_of(context)} has no data interval; trigger it with the parameter"
            " slot: `start/end` in ISO 8601, or a partition key"
        )
        raise ConfigError(msg)
    return Slot.between(start, end).text


def wants_another(context: Context) -> bool:
    """Return True if a run asks for another revision of what is committed: as a backfill, or by its parameter."""
    return is_backfill(context) or bool(context["params"].get("reprocess"))


def is_backfill(context: Context) -> bool:
    """Return True if Airflow's own backfill made this run."""
    return str(getattr(context["dag_run"].run_type, "value", context["dag_run"].run_type)) == "backfill"


def run_ended(context: Context) -> Callable[[Run | None], str | bool | None]:
    """Return a function that says whether and how a run ended; it asks Airflow. A script's run ends with its lease."""
    ti = context["ti"]

    def ended(run: Run | None) -> str | bool | None:
        if run is None or run.dag_id is None:
            return True
        try:
            state = ti.get_dagrun_state(run.dag_id, run.run_id)
        except AirflowRuntimeError as error:
            if _is_gone(error):  # so no task of it can go on
                return f"run {run} was deleted in Airflow before the commit point"
            log.warning("run %s: Airflow does not say whether it has ended: %s", run, error)
            return None
        return f"run {run} ended as {state} before the commit point" if state in _ENDED else False

    return ended


def _is_gone(error: AirflowRuntimeError) -> bool:
    detail: Any = error.error.detail or {}
    return error.error.error is ErrorType.API_SERVER_ERROR and detail.get("status_code") == _NOT_FOUND


def ids(key: Key) -> dict[str, Any]:
    """Return a revision's ids, which are all that goes into XCom."""
    return {"pipeline": key.pipeline, "checkpoint_id": key.checkpoint_id, "revision": key.revision}
