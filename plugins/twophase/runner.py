"""Run checkpoints without Airflow; scripts, notebooks, tests, `twophase run` and backfills call it."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from twophase.attempt import Stager, Staging, read_result
from twophase.core import connections
from twophase.core.checkpoint import Json, Participant, Revision, Run
from twophase.core.declared import import_path
from twophase.core.errors import (
    Busy,
    ConfigError,
    Fenced,
    NotYet,
    RecordBehind,
    SinkUnavailable,
    StoreUnavailable,
    in_one_line,
)
from twophase.core.failpoints import hit
from twophase.core.lease import Lease
from twophase.core.ports import Opened
from twophase.core.record_behind import check_known
from twophase.core.settings import spark_jobs
from twophase.core.slots import Slot
from twophase.core.states import DECIDED, UNDECIDED, State
from twophase.local.record_access import open_record
from twophase.run_folders import run_folder
from twophase.unbegun import beginning
from twophase.wiring import coordinator_of, enter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline, Transform
    from twophase.spark.plan import Plan

log = logging.getLogger("twophase")

#: Seconds to wait beyond another run's lease: its last renewal may be under way.
GRACE = 0.1
#: Seconds between two looks for input that is waited for; the last one repeats.
POLLS = (1.0, 2.0, 5.0, 10.0, 30.0)
#: Settings of Spark that may bring the transform from a place that this process does not see.
_ELSEWHERE = re.compile(r"spark\.(submit\.pyFiles|archives|yarn\.dist\..*|pyspark\..*|executorEnv\..*|files)")


def run(
    pipeline: Pipeline,
    spark: SparkSession | None = None,
    slot: str | None = None,
    *,
    reprocess: bool = False,
    dsn: str | None = None,
) -> Revision | None:
    """Run one checkpoint, exactly once; return None when there is no new input.

    With `spark` the work is done in this process, and the transform may be any function. Without it a spark-submit does
    the work. What an earlier crash left is finished first. A run that was killed is taken over once its lease is out.
    For a pipeline that reads intervals `slot` says which one: `start/end` in ISO 8601, or a partition key. A slot that
    is committed already is returned as it is; with `reprocess` a new revision takes its place.
    """
    with Runner(pipeline, stager_for(pipeline, spark), dsn=dsn) as runner:
        return runner.run(slot, reprocess=reprocess)


def script() -> Run:
    """Return a new run of this process, with a random id."""
    return Run(None, f"script-{secrets.token_hex(6)}")


def stager_for(
    pipeline: Pipeline,
    spark: SparkSession | None = None,
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> Stager:
    """Return a stager: one that uses `spark`, or one that submits."""
    from twophase.spark import installed, submit

    if spark is not None:
        installed.check(Path(sys.modules[type(spark).__module__.partition(".")[0]].__path__[0]))
        return InProcess(spark, pipeline.transform)
    if pipeline.shipped_transform is None:
        if pipeline.transform is None:
            msg = f"pipeline {pipeline.name!r}: it has no transform; only the stage task of Airflow can submit its job"
        else:
            msg = f"pipeline {pipeline.name!r}: a function as transform needs `spark=`; or name it as `module:function`"
        raise ConfigError(msg)
    submit.require()
    return Submitted(master or "local[*]", conf or {})


class Runner:
    """Runs checkpoints of one pipeline, one after the other, over one connection to the record."""

    def __init__(  # noqa: PLR0913 - how it runs, by name
        self,
        pipeline: Pipeline,
        stager: Stager,
        *,
        dsn: str | None = None,
        record: PostgresRecord | None = None,
        waits: bool = True,
        restages: bool = False,
    ) -> None:
        """Prepare the pipeline, open the record unless it is given, and enter the pipeline in it.

        `waits` says whether to wait for input where the source is declared to wait, or to raise NotYet. With `restages`
        the writes are not prepared here: a restage prepares only those that it stages again.
        """
        self.pipeline = pipeline
        self.stager = stager
        self.waits = waits
        pipeline.prepare(writes=not restages)
        self.record = record or open_record(dsn, may_start=True)
        with beginning(self.record, pipeline.name, None, script()):
            enter(self.record, pipeline)
        self.coordinator = coordinator_of(self.record, pipeline)
        self.staging = Staging(self.coordinator, pipeline)

    def __enter__(self) -> Self:
        """Return the runner itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections to the record."""
        self.record.engine.dispose()

    def run(
        self,
        slot: str | None = None,
        *,
        reprocess: bool = False,
        kind: str = "regular",
        me: Run | None = None,
        backfill: str | None = None,
    ) -> Revision | None:
        """Run one checkpoint; return None when there is no new input.

        With `reprocess` a slot that was decided before gets a new revision, unless the same backfill decided it.
        """
        slot = self._slot(slot)
        run = me or script()

        def begin() -> Revision | Opened | None:
            with beginning(self.record, self.pipeline.name, slot, run):
                if slot is not None:  # what has no slot was prepared with the runner
                    self.pipeline.prepare(slot)
                self._check_transform()
                return self.coordinator.open(run, slot=slot, kind=kind, backfill=backfill)

        done = self._run_through(begin)
        if done is not None and reprocess and done.run != run:
            return self.replace(done.checkpoint_id, me=run, backfill=backfill)
        return done

    def replace(
        self, checkpoint_id: int, *, kind: str = "backfill", me: Run | None = None, backfill: str | None = None
    ) -> Revision:
        """Run a new revision of a committed checkpoint; the committed one stays until the new one is promoted."""
        run = me or script()

        def begin() -> Revision | Opened | None:
            self._check_transform()
            return self.coordinator.open(run, checkpoint_id=checkpoint_id, kind=kind, backfill=backfill)

        done = self._run_through(begin)
        if done is None:
            raise AssertionError  # a replacement begins, or an error is raised
        return done

    def _check_transform(self) -> None:
        """Refuse, before anything begins, a transform that its source shows cannot be called."""
        from twophase.spark import transforms

        if isinstance(self.stager, InProcess | Submitted) and isinstance(self.pipeline.transform, str):
            name, reads, state = self.pipeline.name, self.pipeline.reads, self.pipeline.state is not None
            transforms.check(name, self.pipeline.transform, reads, here=self.stager.here, state=state)

    def _slot(self, slot: str | None) -> str | None:
        """Return a slot in its canonical spelling; raise ConfigError if one is missing or not expected."""
        which = f"pipeline {self.pipeline.name!r}"
        if slot is None and self.pipeline.slotted:
            msg = f"{which}: it reads intervals; say which: slot='start/end' in ISO 8601, or a partition key"
            raise ConfigError(msg)
        if slot is not None and not self.pipeline.slotted:
            msg = f"{which}: slot {slot!r}: none of its reads goes by intervals"
            raise ConfigError(msg)
        return None if slot is None else Slot.parse(slot, self.pipeline.zone).text

    def _run_through(self, begin: Callable[[], Revision | Opened | None]) -> Revision | None:
        """Begin a checkpoint, and bring it to its commit."""
        while True:
            taken = self._begin(begin)
            if taken is None:
                return None
            if isinstance(taken, Opened):
                done = self._bring_to_commit(taken)
                break
            if taken.state in DECIDED:
                return self.coordinator.finish(taken.key)
            if taken.state is State.PRECOMMITTED and self.staging.still_staged(taken):
                log.info("%s: every participant had voted yes, going on to commit", taken.key)
                with Lease(self.coordinator, taken):
                    done = self.coordinator.commit(taken)
                break
            try:
                attempt = self.coordinator.attempt(taken)
            except Fenced as fenced:  # the run that it was taken over from is alive after all, and was faster
                log.info("%s", fenced)
                continue
            done = self._bring_to_commit(self.coordinator.opened(attempt))
            break
        log.info("%s: %s, rows %s, commit_seq %s", done.key, done.state.lower(), done.rows, done.commit_seq)
        return done

    def _bring_to_commit(self, opened: Opened) -> Revision:
        """Stage an attempt, then record its votes and commit it in one transaction, then promote."""
        attempt = opened.revision
        with Lease(self.coordinator, attempt) as lease:
            folder, votes = self._stage(opened, lease)
            try:
                return self.coordinator.vote_and_commit(attempt, votes)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def restage(self, checkpoint_id: int, reason: str, sinks: Collection[str] = ()) -> Revision:
        """Stage a decided revision again for some sinks, from the same input with today's transform, and promote it.

        Without `sinks` it does so for those that lost their staged output. A sink whose target refuses its rows has to
        be named.
        """
        which = f"checkpoint {self.pipeline.name}/{checkpoint_id}"
        found = self.coordinator.transact(lambda tx: tx.live_revision(self.pipeline.name, checkpoint_id))
        if found is None or found.state is not State.COMMITTING:
            msg = f"{which}: it is not committing, there is nothing to restage"
            raise ConfigError(msg)
        check_known(self.coordinator)
        attempt = self.coordinator.restage(found.key, reason, sinks)
        try:
            self._stage_and_vote(attempt)
        except BaseException:
            with suppress(Fenced, StoreUnavailable):  # then the lease runs out by itself
                self.coordinator.rest(attempt)  # it may be tried again at once
            raise
        return self.coordinator.finish(attempt.key)

    def _begin(self, begin: Callable[[], Revision | Opened | None]) -> Revision | Opened | None:
        """Call `begin`, and again after waiting: for the lease of another run to run out, or for input to arrive."""
        pauses = iter(POLLS)
        while True:
            try:
                taken = begin()
            except Busy as busy:
                if busy.lease_left is None:
                    raise
                log.info("%s; waiting for it to end or to run out", busy)
                threading.Event().wait(max(busy.lease_left, 0) + GRACE)
            except NotYet as missing:
                if not self.waits:
                    raise
                log.info("%s; waiting for it", missing)
                threading.Event().wait(next(pauses, POLLS[-1]))
            except Fenced as fenced:
                log.info("%s", fenced)
            else:
                revision = taken.revision if isinstance(taken, Opened) else taken
                if revision is not None and revision.state in UNDECIDED:
                    log.info("%s: begun", revision.key)
                return taken

    def _stage_and_vote(self, attempt: Revision) -> None:
        """Stage an attempt and record its votes."""
        with Lease(self.coordinator, attempt) as lease:
            folder, votes = self._stage(self.coordinator.opened(attempt), lease)
            if votes:
                self.coordinator.vote_all(attempt, votes)
        shutil.rmtree(folder, ignore_errors=True)

    def _stage(self, opened: Opened, lease: Lease) -> tuple[Path, list[Participant]]:
        """Stage every write; return the run folder and the votes.

        Any failure aborts the revision; its input stays with the checkpoint.
        """
        attempt = opened.revision
        try:
            folder = run_folder(attempt.key, attempt.epoch, secrets.token_hex(4))
            return folder, self.staging.stage(opened, self.stager, folder, lease)
        except (Fenced, RecordBehind):
            raise  # a newer attempt owns it, or the record is behind its sinks: touch nothing
        except BaseException as error:
            why = in_one_line(error)
            log.info("%s: attempt %s failed", attempt.key, attempt.epoch)
            try:
                self.coordinator.fail(attempt, why)
                self.coordinator.abort(attempt, why)  # if this was a restage, it is decided: changes nothing
            except (StoreUnavailable, SinkUnavailable) as unavailable:
                error.add_note(f"it is not aborted yet ({unavailable}); the next run takes it over")
            raise


class InProcess:
    """Stages in this process, in the caller's Spark session."""

    #: Whether transforms are imported by an interpreter with the path of this one.
    here = True

    def __init__(self, spark: SparkSession, transform: Transform | None) -> None:
        """Use a session; the transform may be any function."""
        self.spark = spark
        self.transform = transform

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:  # noqa: ARG002 - a Stager
        """Stage every write of a plan."""
        from twophase.spark.stage import stage

        if self.transform is None:
            msg = f"pipeline {plan.pipeline!r}: it has no transform; only the stage task of Airflow can submit its job"
            raise ConfigError(msg)
        hit("submit.before")
        transform = self._import(self.transform) if isinstance(self.transform, str) else self.transform
        hit("submit.planned")
        staged: Mapping[str, Json] = stage(self.spark, plan, transform)
        hit("stage.after")
        return staged

    def _import(self, path: str) -> Callable[..., Any]:
        """Import the function that a transform names, also from spark_jobs/; send the files there to the executors."""
        folder = spark_jobs()
        if folder.is_dir():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            for job in sorted(folder.glob("*.py")):
                self.spark.sparkContext.addPyFile(str(job))
        found: Callable[..., Any] = import_path(path)
        return found


class Submitted:
    """Stages by a spark-submit, with the same main as under Airflow."""

    def __init__(self, master: str, conf: Mapping[str, str]) -> None:
        """Say where Spark runs and how."""
        self.master = master
        self.conf = conf
        #: Whether transforms are imported by an interpreter with the path of this one.
        self.here = master.startswith("local") and not any(map(_ELSEWHERE.fullmatch, conf))

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        """Write the plan, submit it, wait for its result."""
        from twophase.spark.submit import SparkSubmit

        hit("submit.before")
        paths = [folder / name for name in ("plan.json", "result.json", "spark.log")]
        plan.write(paths[0])
        hit("submit.planned")
        given = connections.exported(plan.connections())
        submission = SparkSubmit().submit(*paths, master=self.master, conf=self.conf, environment=given)
        try:
            code = submission.wait(should_stop=lost)
        except BaseException:
            submission.kill()
            raise
        return read_result(plan, paths[1], paths[2], code)
