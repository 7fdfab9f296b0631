"""The stage task, without the way in which Spark is reached: begin, one attempt, audits, votes.

`StageOperator` and users' own operators inherit it. They implement four methods: `submit` runs a job to its end,
`outlives` says whether a job outlived the task that submitted it, `rejoin` waits for it, `kill` stops it from any
process.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from twophase.airflow import task_context
from twophase.airflow.compat import AirflowException, AirflowRescheduleException, AirflowSkipException
from twophase.airflow.failure_notes import Failing
from twophase.airflow.links import CheckpointLink
from twophase.core import private_files
from twophase.core.checkpoint import Json, Key, Revision
from twophase.core.declared import current_name, public_name
from twophase.core.errors import AttemptFailed, ConfigError, NotYet, TwophaseError
from twophase.core.failpoints import hit
from twophase.core.lease import Lease
from twophase.core.ports import Opened
from twophase.core.record_behind import check_known
from twophase.core.states import DECIDED, State
from twophase.pipeline import Pipeline
from twophase.sinks.base import Sink
from twophase.sources.base import Source

if TYPE_CHECKING:
    import jinja2
    from airflow.sdk import Context

    from twophase.attempt import Staging
    from twophase.committer.record import PostgresRecord
    from twophase.core.coordinator import Coordinator
    from twophase.spark.plan import Plan

log = logging.getLogger("twophase")

#: Seconds until the task looks again for input that is waited for; it is rescheduled, so the worker is free meanwhile.
LOOK_AGAIN = 60
_CODE = re.compile(r"Error code is: (-?\d+)")
_LATER = re.compile(r"\{\{ (staging|inputs)\('([a-z0-9_]+)'\) \}\}")


@dataclass(frozen=True)
class Job:
    """One submission: what runs, with which arguments."""

    key: Key
    attempt: int
    application: str
    arguments: list[str]
    #: Records the job's id, so that another task can rejoin or kill it.
    keep: Callable[[str], None] = field(repr=False)
    #: Fills the attempt's staging places and input lists into a rendered text.
    fill: Callable[[Any], Any] = field(repr=False)
    #: Connections that the driver needs; they go only into its environment.
    connections: list[str] = field(default_factory=list)


class StagingOperator(BaseOperator):
    """Stages one checkpoint; a subclass says how Spark is reached."""

    operator_extra_links = (CheckpointLink(),)
    #: Fields of the subclass whose templates may use `staging` and `inputs`.
    application: str
    application_args: list[Any] | None
    template_fields_of_ours: ClassVar[tuple[str, ...]] = ("checkpoint",)

    def __init__(
        self, *, pipeline: Pipeline, checkpoint: int | str | None = None, approval: bool = False, **kwargs: Any
    ) -> None:
        """Stage a pipeline; with `checkpoint`, another revision of that committed checkpoint."""
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.checkpoint = checkpoint
        self.approval = approval
        self.worked_on: Key | None = None
        self._failing: Failing | None = None
        if (pipeline.shipped_transform is not None) == bool(self.application):
            msg = (
                f"pipeline {pipeline.name!r}: expected either a transform as `module:function`, or application= with a"
                " Spark job of your own that writes to {{ staging('write') }}; a function cannot be submitted"
            )
            raise ConfigError(msg)

    # --- how Spark is reached ----------------------------------------------------------------------------------------

    def require(self) -> None:
        """Raise ConfigError if this machine cannot submit; called before anything begins."""

    @abstractmethod
    def submit(self, job: Job, context: Context) -> None:
        """Run a job to its end; raise if it fails. Call `job.keep(id)` as soon as the job has an id to find it by."""

    @abstractmethod
    def outlives(self, job_id: str, context: Context) -> bool:
        """Return True if a job that another task submitted is still running, or has succeeded."""

    @abstractmethod
    def rejoin(self, job_id: str, context: Context) -> None:
        """Wait for a job that another task submitted; raise when it fails."""

    @classmethod
    @abstractmethod
    def kill(cls, job: Json) -> None:
        """Stop a job, given what the record keeps of it; a job that has ended is no error."""

    def stop(self) -> None:
        """Stop the job that this task has submitted, if there is one."""

    def kept(self) -> dict[str, Any]:
        """Return what `kill` needs besides the job's id."""
        return {}

    def on_kill(self) -> None:
        """Record that Airflow stops this task, then stop its job."""
        if self._failing is not None:
            self._failing.stopped()
        self.stop()

    # --- templates ---------------------------------------------------------------------------------------------------

    def render_template_fields(self, context: Context, jinja_env: jinja2.Environment | None = None) -> None:
        """Render the fields, except for `staging` and `inputs`: the attempt that they depend on does not exist yet."""
        later = {name: _later(name) for name in ("staging", "inputs")}
        super().render_template_fields({**context, **later}, jinja_env)  # type: ignore[typeddict-item]

    # --- the task ----------------------------------------------------------------------------------------------------

    def execute(self, context: Context) -> dict[str, Any]:
        """Begin a checkpoint, stage it and record its votes; return its ids."""
        from twophase.attempt import Staging
        from twophase.core.next_step import APPROVAL
        from twophase.wiring import coordinator_of

        self.require()
        with task_context.record(context) as record:
            coordinator = coordinator_of(
                record,
                self.pipeline,
                approvals=[APPROVAL] if self.approval else [],
                run_ended=task_context.run_ended(context),
            )
            try:
                taken = self._begin(record, coordinator, context)
            except NotYet as missing:
                log.info("%s; looking again in %s s", missing, LOOK_AGAIN)
                raise AirflowRescheduleException(  # type: ignore[no-untyped-call]
                    datetime.now(UTC) + timedelta(seconds=LOOK_AGAIN)
                ) from missing
            if taken is None:
                msg = f"{self.pipeline.name}: no new input"
                raise AirflowSkipException(msg)
            revision = taken.revision if isinstance(taken, Opened) else taken
            self.worked_on = revision.key
            self._bring_to_votes(Staging(coordinator, self.pipeline), taken, context)
        return task_context.ids(revision.key)

    def _begin(self, record: PostgresRecord, coordinator: Coordinator, context: Context) -> Revision | Opened | None:
        """Begin what this run has to work on; if it cannot begin, the record keeps why."""
        from twophase.spark import transforms
        from twophase.unbegun import beginning
        from twophase.wiring import enter

        run, name = task_context.run_of(context), self.pipeline.name
        kind = (
            "replay" if self.checkpoint is not None else "backfill" if task_context.is_backfill(context) else "regular"
        )
        slot = None
        with beginning(record, name, None, run):
            if self.checkpoint is None:
                slot = task_context.slot_of(context, self.pipeline)
        with beginning(record, name, slot, run):
            self.pipeline.prepare(slot)
            if isinstance(self.pipeline.transform, str):
                state = self.pipeline.state is not None
                transforms.check(name, self.pipeline.transform, self.pipeline.reads, here=False, state=state)
            enter(record, self.pipeline, dag_id=run.dag_id)
            return coordinator.open_for_task(
                run,
                slot=slot,
                checkpoint_id=None if self.checkpoint is None else int(self.checkpoint),
                kind=kind,
                reprocess=task_context.wants_another(context),
            )

    def _bring_to_votes(self, staging: Staging, taken: Revision | Opened, context: Context) -> None:
        """Stage the revision and record its votes, unless that was done before."""
        coordinator = staging.coordinator
        revision = taken.revision if isinstance(taken, Opened) else taken
        if not isinstance(taken, Opened) and self._is_done(staging, revision):
            return
        with Failing(coordinator, revision, context) as self._failing:
            opened, job = self._attempt(coordinator, taken, context)
            attempt = self._failing.revision = opened.revision
            with Lease(coordinator, attempt, on_lost=self.stop) as lease:
                votes = staging.stage(opened, job, job.folder, lease)
                check_known(coordinator)
                coordinator.vote_all(attempt, votes, rests=True)
            shutil.rmtree(job.folder, ignore_errors=True)
        log.info("%s: attempt %s pre-committed", attempt.key, attempt.epoch)

    def _is_done(self, staging: Staging, revision: Revision) -> bool:
        """Return True if nothing is left for this task: it is decided, or all votes but an approval are yes."""
        if revision.state in DECIDED:
            log.info("%s: %s already, nothing to stage", revision.key, revision.state.lower())
            return True
        if self._is_voted_for(staging.coordinator, revision) and staging.still_staged(revision):
            log.info("%s: every participant of this task had voted yes", revision.key)
            staging.coordinator.rest(revision)
            return True
        return False

    def _is_voted_for(self, coordinator: Coordinator, revision: Revision) -> bool:
        """Return True if all participants but an approval voted yes for the newest attempt."""
        if revision.state is State.PRECOMMITTED:
            return True
        participants = coordinator.transact(lambda tx: tx.participants(revision.key))
        mine = [p for p in participants if p.kind != "approval"]
        return bool(mine) and all(p.vote and p.attempt == revision.epoch for p in mine)

    def _attempt(
        self, coordinator: Coordinator, taken: Revision | Opened, context: Context
    ) -> tuple[Opened, JobStager]:
        """Return the attempt to stage: one whose job outlived its task, one opened at begin, or a new one."""
        from twophase.run_folders import run_folder

        job = None if isinstance(taken, Opened) else taken.job
        if job is not None and not isinstance(taken, Opened):
            mine = job["attempt"] == taken.epoch and self.may_rejoin(job)
            if mine and self.outlives(job["id"], context):
                log.info("%s: attempt %s: its job %s outlived its task", taken.key, taken.epoch, job["id"])
                stager = JobStager(self, coordinator, taken, Path(job["folder"]), context, rejoined=job["id"])
                return coordinator.opened(taken), stager
        opened = taken if isinstance(taken, Opened) else coordinator.opened(coordinator.attempt(taken))
        attempt = opened.revision
        folder = run_folder(attempt.key, attempt.epoch, secrets.token_hex(4))
        return opened, JobStager(self, coordinator, attempt, folder, context)

    def may_rejoin(self, job: Json) -> bool:
        """Return True if this kind of operator submitted the job, so that it can rejoin it."""
        return current_name(job["operator"]) == public_name(type(self), "twophase.airflow")


class JobStager:
    """The stager of a task: it has a Spark job stage the plan."""

    def __init__(  # noqa: PLR0913 - an attempt, and who submits it
        self,
        operator: StagingOperator,
        coordinator: Coordinator,
        attempt: Revision,
        folder: Path,
        context: Context,
        *,
        rejoined: str | None = None,
    ) -> None:
        """Stage one attempt by a new job, or by the job that the task rejoins."""
        self.operator = operator
        self.coordinator = coordinator
        self.attempt = attempt
        self.folder = folder
        self.context = context
        self.rejoined = rejoined

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:  # noqa: ARG002 - a lost lease kills the job
        """Run or rejoin the job, and return what it staged."""
        if self.rejoined is None:
            self._submit(plan, folder)
        else:  # never submit again: a second driver would write to the same staging place
            with _telling(plan, folder):
                self.operator.rejoin(self.rejoined, self.context)
        return self._inspect(plan) if self.operator.application else _result(plan, folder)

    def _submit(self, plan: Plan, folder: Path) -> None:
        hit("submit.before")
        try:
            plan.write(folder / "plan.json")
            job = self._job(plan, folder)
        except OSError as error:
            msg = (
                f"run folder {folder} cannot be written ({error.strerror}); TWOPHASE_HOME has to be a folder that every"
                " worker can write to"
            )
            raise AttemptFailed(msg) from error
        hit("submit.planned")
        with _telling(plan, folder):
            self.operator.submit(job, self.context)

    def _job(self, plan: Plan, folder: Path) -> Job:
        from twophase.spark.submit import MAIN

        def fill(value: Any) -> Any:
            return _filled(value, plan, folder)

        own = self.operator.application
        return Job(
            plan.key,
            plan.attempt,
            own or str(MAIN),
            fill(list(self.operator.application_args or []))
            if own
            else [str(folder / "plan.json"), str(folder / "result.json")],
            self._keep,
            fill,
            [] if own else plan.connections(),
        )

    def _keep(self, job_id: str) -> None:
        job = {
            "attempt": self.attempt.epoch,
            "id": job_id,
            "folder": str(self.folder),
            "operator": public_name(type(self.operator), "twophase.airflow"),
            **self.operator.kept(),
        }
        self.coordinator.transact(lambda tx: tx.keep_job(self.attempt.key, epoch=self.attempt.epoch, job=job))
        log.info("%s: attempt %s is job %s", self.attempt.key, self.attempt.epoch, job_id)

    def _inspect(self, plan: Plan) -> dict[str, Json]:
        """Return the manifests of what a user's own job wrote, which does not make them itself."""
        return {name: self.operator.pipeline.sinks[name].inspect(plan.output(name)) for name in plan.staged}


@contextmanager
def _telling(plan: Plan, folder: Path) -> Iterator[None]:
    """Replace Airflow's error for a failed job by the one that the job reported, if it reported one."""
    try:
        yield
    except AirflowException as error:
        if (folder / "result.json").exists():
            raise _failure(plan, folder) from error
        raise AttemptFailed(_unsaid(plan, error)) from error


def _result(plan: Plan, folder: Path) -> Mapping[str, Json]:
    from twophase.attempt import read_result

    if not (folder / "result.json").exists():
        msg = (
            f"checkpoint {plan.key}: attempt {plan.attempt}: Spark ended well and left no result in {folder}; it has to"
            " be the same folder on the worker and where the driver runs"
        )
        raise AttemptFailed(msg)
    return read_result(plan, folder / "result.json", "the stage task's", 0)


def _failure(plan: Plan, folder: Path) -> Exception:
    """Return the error that a job reported."""
    try:
        _result(plan, folder)
    except TwophaseError as error:
        return error
    return AttemptFailed(f"checkpoint {plan.key}: attempt {plan.attempt}: Spark failed after it had staged everything")


def _unsaid(plan: Plan, error: AirflowException) -> str:
    """Say that a job failed without a result; of Airflow's text, mostly a command line, keep only the exit code."""
    code = _CODE.search(str(error))
    how = f"spark-submit ended with code {code[1]}" if code else " ".join(str(error).split())[:300]
    return f"checkpoint {plan.key}: attempt {plan.attempt}: {how} and left no result; the log is the stage task's"


def _later(macro: str) -> Callable[[str], str]:
    """Return a macro that renders as its own call; `_filled` replaces it at submission."""
    return lambda name: f"{{{{ {macro}('{name}') }}}}"


def _filled(value: Any, plan: Plan, folder: Path) -> Any:
    if isinstance(value, str):
        return _LATER.sub(lambda found: _place(found[1], found[2], plan, folder), value)
    if isinstance(value, Mapping):
        return {name: _filled(part, plan, folder) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(part, plan, folder) for part in value]
    return value


def _place(macro: str, name: str, plan: Plan, folder: Path) -> str:
    """Return a staging place, or the path of a file that lists a fixed input, one path per line."""
    there = plan.writes if macro == "staging" else plan.reads
    if name not in there:
        msg = f"pipeline {plan.pipeline}: {{{{ {macro}('{name}') }}}}: expected one of {', '.join(there)}"
        raise ConfigError(msg)
    if macro == "staging":
        return Sink.load(dict(plan.writes[name].sink)).staging_path(plan.output(name))
    listed = folder / f"{name}.inputs"
    paths = Source.load(dict(plan.reads[name].source)).paths(plan.fixed(name))
    with private_files.open_file(listed, "w") as file:
        file.writelines(f"{path}\n" for path in paths)
    return str(listed)
