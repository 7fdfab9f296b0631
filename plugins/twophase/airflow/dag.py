"""`TwophaseDag` and `TwophaseTaskGroup`: a pipeline as a DAG of its own, or as a group in a user's DAG.

    stage ──▶ [approve] ──▶ commit          abort: a teardown, at the end of every run

Begin is part of stage. As a setup task it would be cleared with every task after it, so clearing commit alone would
read everything again. Abort is a teardown, so it runs whatever happened or was marked. With `on_failure_fail_dagrun`
abort alone decides the run's state; without it a run whose data was aborted could be marked as a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow.sdk import DAG, Param, TaskGroup
from airflow.sdk.definitions._internal.contextmanager import DagContext
from airflow.sdk.definitions._internal.expandinput import DictOfListsExpandInput, MappedArgument
from airflow.sdk.definitions.taskgroup import MappedTaskGroup

from twophase.airflow.compat import CronDataIntervalTimetable
from twophase.airflow.dag_page import doc
from twophase.airflow.operators import AbortOperator, CommitOperator, SelectOperator
from twophase.airflow.spark_submit import StageOperator
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

    from twophase.pipeline import Pipeline

#: Retries for the usual failures of staging: a busy cluster, a late file, a database that restarts.
STAGING = {"retries": 2, "retry_delay": timedelta(seconds=30), "retry_exponential_backoff": True}
#: Retries for the usual failures of a commit: the committer database or a sink is down for a while.
COMMITTING = {
    "retries": 5,
    "retry_delay": timedelta(seconds=10),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(minutes=5),
}
#: How many runs of a pipeline with intervals may be active: intervals do not depend on each other.
INTERVALS_AT_ONCE = 16
#: Airflow's schedule presets that are no cron expressions.
_NO_CRON = frozenset({"@once", "@continuous"})

_SLOT = "Which interval, as start/end in ISO 8601, or which partition key; empty: the run's own."
_REPROCESS = "Make a new revision of what is committed already."
_CHECKPOINTS = "Which ones to run again, as numbers: 17, 17..20, or 17..20,25."


class Tasks(NamedTuple):
    """The tasks of one pipeline."""

    stage: BaseOperator
    commit: BaseOperator
    abort: BaseOperator


def add_tasks(
    pipeline: Pipeline,
    *,
    spark: Mapping[str, Any] | None = None,
    approve: bool | Mapping[str, Any] = False,
    **extra: Any,
) -> Tasks:
    """Add a pipeline's tasks to the DAG or the group that is being declared."""
    asks = approve is not False
    stage = StageOperator(
        task_id="stage", pipeline=pipeline, approval=asks, **_defaults(STAGING), **(spark or {}), **extra
    )
    commit = CommitOperator(task_id="commit", pipeline=pipeline, stage_task_id=stage.task_id, **_defaults(COMMITTING))
    abort = AbortOperator(
        task_id="abort",
        pipeline=pipeline,
        commit_task_id=commit.task_id,
        on_failure_callback=None,  # the task that failed before it has called it already
        **_defaults(COMMITTING),
        **extra,
    )
    abort.as_teardown(on_failure_fail_dagrun=True)
    if asks:
        from twophase.airflow.approve import ApproveOperator

        given = dict(approve) if isinstance(approve, Mapping) else {}
        stage >> ApproveOperator(task_id="approve", pipeline=pipeline, stage_task_id=stage.task_id, **given) >> commit
    stage >> commit
    [stage, commit] >> abort  # whatever is marked or cleared, not before both have ended
    return Tasks(stage, commit, abort)


def _defaults(settled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user's default_args do not set."""
    dag = DagContext.get_current()
    given = dag.default_args if dag is not None else {}
    return {name: value for name, value in settled.items() if name not in given}


class TwophaseTaskGroup(TaskGroup):
    """A pipeline's tasks as a group inside a user's DAG."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        group_id: str | None = None,
        spark: Mapping[str, Any] | None = None,
        approve: bool | Mapping[str, Any] = False,
        **kwargs: Any,
    ) -> None:
        """Add stage, approve if wanted, commit and abort; `spark` is for SparkSubmitOperator's arguments."""
        super().__init__(group_id=group_id or pipeline.name, **kwargs)
        with self:
            self.tasks = add_tasks(pipeline, spark=spark, approve=approve)


class TwophaseDag(DAG):
    """A pipeline as a DAG; it takes all arguments of a DAG.

    For a pipeline that reads intervals, a cron schedule gives each run its data interval. A pipeline without intervals
    has one active run at a time. A second DAG, `<dag_id>__replay`, runs committed checkpoints again.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        dag_id: str | None = None,
        spark: Mapping[str, Any] | None = None,
        approve: bool | Mapping[str, Any] = False,
        **kwargs: Any,
    ) -> None:
        """Declare the DAG, its tasks and its replay DAG; `spark` is for SparkSubmitOperator's arguments."""
        dag_id = dag_id or pipeline.name
        settled: dict[str, Any] = {
            "doc_md": doc(pipeline),
            "max_active_runs": INTERVALS_AT_ONCE if pipeline.slotted else 1,
            **kwargs,
        }
        if not pipeline.slotted and settled["max_active_runs"] != 1:
            msg = (
                f"pipeline {pipeline.name!r}: max_active_runs: expected 1, found {settled['max_active_runs']}: its"
                " checkpoints follow each other"
            )
            raise ConfigError(msg)
        settled["schedule"] = _timetable(pipeline, settled.get("schedule"))
        settled["params"] = {**(_params() if pipeline.slotted else {}), **(settled.get("params") or {})}
        super().__init__(dag_id, **settled)
        with self:
            add_tasks(pipeline, spark=spark, approve=approve)
        self.replay = _replay(pipeline, dag_id, spark, settled)


def _timetable(pipeline: Pipeline, schedule: Any) -> Any:
    """Return the schedule; with intervals a cron expression becomes a timetable whose runs have data intervals."""
    if pipeline.slotted and isinstance(schedule, str) and schedule not in _NO_CRON:
        return CronDataIntervalTimetable(schedule, timezone=str(pipeline.zone))
    return schedule


def _params() -> dict[str, Param]:
    return {
        "slot": Param(None, type=["null", "string"], title="Slot", description=_SLOT),
        "reprocess": Param(default=False, type="boolean", title="Reprocess", description=_REPROCESS),
    }


def _replay(pipeline: Pipeline, dag_id: str, spark: Mapping[str, Any] | None, settled: Mapping[str, Any]) -> DAG:
    """Return the replay DAG: it runs checkpoints by number, each in a lane of its own, so no regular run waits."""
    kept = {name: settled[name] for name in ("default_args", "owner_links", "access_control") if name in settled}
    with DAG(
        f"{dag_id}__replay",
        schedule=None,
        doc_md=f"Runs committed checkpoints of `{pipeline.name}` again, each as a new revision.",
        tags=[*(settled.get("tags") or ()), "twophase"],
        params={"checkpoints": Param(type="string", minLength=1, title="Checkpoints", description=_CHECKPOINTS)},
        max_active_runs=1,
        **kept,
    ) as replay:
        # What `@task_group` with `expand` does, without the third of a second that importing Airflow's decorators costs
        # each time a DAG file is parsed.
        numbers = DictOfListsExpandInput({"checkpoint": SelectOperator(task_id="select", pipeline=pipeline).output})
        with MappedTaskGroup(group_id="replay", expand_input=numbers):
            add_tasks(pipeline, spark=spark, checkpoint=MappedArgument(input=numbers, key="checkpoint"))
    return replay
