"""The operators after staging (commit, abort) and those for all pipelines (recover, sweep); DAGs of ours use them.

They need the record alone, not the DAG file. A run commits the revision that its stage task returned, and aborts those
that the record has under its run. So a stage task that was marked as a success without running passes nothing on, and
nothing is committed.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.sdk import AssetAlias, BaseOperator

from twophase.airflow import task_context
from twophase.airflow.assets import asset, event
from twophase.airflow.compat import AirflowException, AirflowFailException, DownstreamTasksSkipped
from twophase.airflow.failure_notes import Failing
from twophase.airflow.links import CheckpointLink
from twophase.core.checkpoint import Key, Revision
from twophase.core.declared import import_path
from twophase.core.errors import ConfigError, Fenced, TwophaseError
from twophase.core.lease import Lease
from twophase.core.states import DECIDED, UNDECIDED, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.sdk import Context

    from twophase.committer.record import PostgresRecord
    from twophase.core.coordinator import Coordinator
    from twophase.core.ports import Transaction
    from twophase.pipeline import Pipeline

log = logging.getLogger("twophase")

#: The alias for asset events of what recovery finished: its DAG declares no pipeline.
RECOVERED = AssetAlias("twophase_recovered")
_FAILED = frozenset({"failed", "upstream_failed"})


def staged(context: Context, task_id: str) -> Key:
    """Return the revision that the stage task of this run returned."""
    ti = context["ti"]
    is_mapped = ti.map_index is not None and ti.map_index >= 0
    found = ti.xcom_pull(task_id, map_indexes=ti.map_index) if is_mapped else ti.xcom_pull(task_id)
    if not isinstance(found, dict):
        msg = (
            f"run {task_context.run_of(context)}: task {task_id} has passed nothing on: it did not run to its end"
            " (was it marked as a success?); clear it, nothing was committed"
        )
        raise AirflowFailException(msg)
    return Key(found["pipeline"], found["checkpoint_id"], found["revision"])


def task_coordinator(record: PostgresRecord, pipeline: str, context: Context) -> Coordinator:
    """Return the coordinator of a pipeline, built from the record: an edited DAG file changes nothing."""
    from twophase.wiring import coordinator_of, load

    return coordinator_of(record, load(record, pipeline), run_ended=task_context.run_ended(context))


class CommitOperator(BaseOperator):
    """Commits and promotes what the stage task of the same run staged."""

    operator_extra_links = (CheckpointLink(),)

    def __init__(self, *, pipeline: Pipeline, stage_task_id: str = "stage", **kwargs: Any) -> None:
        """Commit what a stage task staged; each write of the pipeline is an outlet."""
        super().__init__(**{"outlets": [asset(pipeline, name) for name in pipeline.writes], **kwargs})
        self.stage_task_id = stage_task_id
        self.worked_on: Key | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Pass the commit point, unless that is done already, then promote; return the ids.

        After a commit there is nothing to clean up, so the abort task is skipped, which saves starting it.
        """
        run = task_context.run_of(context)
        key = self.worked_on = staged(context, self.stage_task_id)
        with task_context.record(context) as record:
            coordinator = task_coordinator(record, key.pipeline, context)
            revision = coordinator.transact(lambda tx: tx.revision(key))
            done = (
                coordinator.finish(key) if revision.state in DECIDED else self._commit(coordinator, revision, context)
            )
            coordinator.acknowledge(done, run)
        log.info("%s: %s, rows %s, commit_seq %s", done.key, done.state.lower(), done.rows, done.commit_seq)
        for outlet in self.outlets:
            context["outlet_events"][outlet].extra = event(done)
        cleanup = [task for task in self.get_direct_relatives(upstream=False) if isinstance(task, AbortOperator)]
        if not cleanup:
            return task_context.ids(key)
        ti = context["ti"]
        ti.xcom_push("return_value", task_context.ids(key))
        skipped = [(task.task_id, ti.map_index) for task in cleanup]
        raise DownstreamTasksSkipped(tasks=skipped)  # type: ignore[no-untyped-call]

    def _commit(self, coordinator: Coordinator, revision: Revision, context: Context) -> Revision:
        if revision.run != task_context.run_of(context):
            msg = f"checkpoint {revision.key}: run {revision.run} has taken it over; nothing was committed by this one"
            raise Fenced(msg)
        if revision.state is not State.PRECOMMITTED:
            why = f" ({revision.error})" if revision.error else ""
            missing = coordinator.transact(lambda tx: [p.name for p in tx.participants(revision.key) if not p.vote])
            waits = f"; without a yes: {', '.join(missing)}" if missing and revision.state is State.OPEN else ""
            msg = (
                f"checkpoint {revision.key}: expected precommitted, found {revision.state.lower()}{why}{waits};"
                " clear the stage task to stage it again"
            )
            raise AirflowFailException(msg)
        with Failing(coordinator, revision, context), Lease(coordinator, revision):
            return coordinator.commit(revision, f"the commit point, by run {revision.run}")


class AbortOperator(BaseOperator):
    """Cleans up at the end of a run: aborts what it left undecided, and kills its Spark job.

    It decides the run's state. It fails if something had to be aborted, or if the commit task failed: a run that was
    marked as a success before its commit point must not look like one.
    """

    operator_extra_links = (CheckpointLink(),)

    template_fields = ("checkpoint",)

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        commit_task_id: str = "commit",
        checkpoint: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Clean up what a pipeline's tasks left in this run, or only what they left of one checkpoint."""
        super().__init__(**kwargs)
        self.checkpoint = checkpoint
        self.pipeline_name = pipeline.name
        self.commit_task_id = commit_task_id
        self.worked_on: Key | None = None

    def execute(self, context: Context) -> None:
        """Abort what this run left undecided; after the commit point, or with nothing begun, change nothing (R15)."""
        from twophase.committer import queries

        run = task_context.run_of(context)
        with task_context.record(context) as record:
            with record.engine.connect() as connection:
                known = self.pipeline_name in queries.names(connection)
            left = self._left(record, context) if known else []
            coordinator = task_coordinator(record, self.pipeline_name, context) if left else None
            how = f"run {run} ended before the commit point ({self._ends(context)})"
            ended = [self._abort(coordinator, revision, how) for revision in left if coordinator]
        aborted = [f"{revision.key}: {revision.error}" for revision in ended if revision.state is State.ABORTED]
        if aborted:
            msg = f"aborted, nothing of it became visible: {'; '.join(aborted)}"
            raise AirflowFailException(msg)
        if self._has_failed(context):
            msg = f"run {run} failed; it left nothing undecided"
            raise AirflowFailException(msg)
        log.info("%s: run %s left nothing undecided", self.pipeline_name, run)

    def _abort(self, coordinator: Coordinator, revision: Revision, how: str) -> Revision:
        self.worked_on = revision.key
        kill_job(revision)
        ended = coordinator.abort(revision, how)
        log.info("%s: %s", ended.key, ended.state.lower())
        return ended

    def _left(self, record: PostgresRecord, context: Context) -> list[Revision]:
        """Return the undecided revisions of this run."""
        run = task_context.run_of(context)
        with record.transaction() as tx:
            mine = [r for r in tx.unfinished(self.pipeline_name) if r.state in UNDECIDED and r.run == run]
        return [r for r in mine if self.checkpoint is None or r.checkpoint_id == int(self.checkpoint)]

    def _has_failed(self, context: Context) -> bool:
        """Return True if the commit task has failed, or could not run."""
        return any(state in _FAILED for state in self._states(context, [self.commit_task_id]).values())

    def _ends(self, context: Context) -> str:
        """Say how the tasks before it ended, as Airflow has it; that also shows tasks that were marked by hand."""
        number = context["ti"].map_index
        mine = f"_{number}" if number is not None and number >= 0 else ""
        found = self._states(context, sorted(self.upstream_task_ids)).items()
        return ", ".join(f"{name} {state}" for name, state in sorted(found) if name.endswith(mine))

    def _states(self, context: Context, task_ids: list[str]) -> dict[str, str]:
        ti = context["ti"]
        states = ti.get_task_states(ti.dag_id, task_ids=task_ids, run_ids=[ti.run_id])
        return {name: state for of_run in states.values() for name, state in of_run.items()}


def kill_job(revision: Revision) -> None:
    """Kill the Spark job of a revision that is about to be aborted, if the record knows one."""
    if revision.job is None:
        return
    try:
        import_path(revision.job["operator"]).kill(revision.job)
    except Exception as error:  # noqa: BLE001 - whatever the cluster's client raises, or an operator of one's own
        # Nothing depends on it: the job writes to its own staging place, which is never promoted.
        log.warning("%s: its job %s could not be killed: %s", revision.key, revision.job["id"], error)


class SelectOperator(BaseOperator):
    """Returns the checkpoints that the parameter `checkpoints` names; a range without any is an error."""

    def __init__(self, *, pipeline: Pipeline, **kwargs: Any) -> None:
        """Choose among one pipeline's checkpoints."""
        super().__init__(**kwargs)
        self.pipeline_name = pipeline.name

    def execute(self, context: Context) -> list[int]:
        """Return the numbers, each once, in order."""
        from twophase.backfill import ranges
        from twophase.committer import backfills

        wanted = str(context["params"]["checkpoints"])
        with task_context.record(context) as record, record.engine.connect() as connection:
            found: set[int] = set()
            for first, last in ranges(wanted):
                there = {number for number, _ in backfills.checkpoints(connection, self.pipeline_name, first, last)}
                if not there:
                    msg = f"pipeline {self.pipeline_name!r}: no checkpoint from {first} to {last}"
                    raise ConfigError(msg)
                found |= there
        return sorted(found)


class RecoverOperator(BaseOperator):
    """Finishes what crashes left in any pipeline: promotes what is decided, aborts what no run will go on with.

    It fails while something is parked: only a person can help then, and people notice a failed task.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Look after every pipeline in the record."""
        super().__init__(**{"outlets": [RECOVERED], **kwargs})

    def execute(self, context: Context) -> None:
        """Recover each pipeline that has something unfinished; a failure in one does not stop the others."""
        from twophase.committer import queries
        from twophase.core.recovery import Leave, RollForward

        problems = []
        with task_context.record(context) as record:
            with record.engine.connect() as connection:
                unfinished = queries.unfinished(connection)
            for name in unfinished:
                try:
                    coordinator = task_coordinator(record, name, context)
                    for revision, decision in coordinator.recover(aborting=kill_job):
                        if isinstance(decision, RollForward):
                            self._tell(coordinator, revision, context)
                        elif isinstance(decision, Leave) and decision.failed:
                            problems.append(decision.reason)
                    problems += coordinator.settle()
                    left = coordinator.transact(partial(_unfinished, name))
                    problems += [f"{r.key} is parked: {r.parked_reason}" for r in left if r.parked_reason]
                except (TwophaseError, OSError) as problem:
                    log.exception("%s: left as it is", name)
                    problems.append(f"{name}: {' '.join(str(problem).split())}")
        if problems:
            raise AirflowException("; ".join(problems))

    def _tell(self, coordinator: Coordinator, revision: Revision, context: Context) -> None:
        """Send the asset events that the run could not send."""
        done = coordinator.transact(lambda tx: tx.revision(revision.key))
        if done.state in DECIDED - {State.COMMITTING}:
            for name in coordinator.sinks:
                context["outlet_events"][RECOVERED].add(asset(done.key.pipeline, name), extra=event(done))


def _unfinished(pipeline: str, tx: Transaction) -> list[Revision]:
    return tx.unfinished(pipeline)


class SweepOperator(BaseOperator):
    """Removes what the record says is dead, of every pipeline."""

    def __init__(self, *, dry_run: bool = False, **kwargs: Any) -> None:
        """With `dry_run` only say what would be removed, and why."""
        super().__init__(**kwargs)
        self.only_tells = dry_run

    def execute(self, context: Context) -> int:
        """Sweep each pipeline; return how much was removed."""
        from twophase.committer import queries
        from twophase.sweep import sweep
        from twophase.wiring import load

        count, problems = 0, []
        with task_context.record(context) as record:
            with record.engine.connect() as connection:
                names: Sequence[str] = queries.names(connection)
            for name in names:
                try:
                    for removed in sweep(record, load(record, name), dry_run=self.only_tells):
                        count += 1
                        log.info("%s %s: %s", "would remove" if self.only_tells else "removed", *removed[2:])
                except (TwophaseError, OSError) as problem:
                    log.exception("%s: left as it is", name)
                    problems.append(f"{name}: {' '.join(str(problem).split())}")
        if problems:
            raise AirflowException("; ".join(problems))
        return count
