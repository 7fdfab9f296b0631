"""One attempt, from its plan to its votes; the runner and Airflow's stage task both use it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twophase.audit_votes import Staged, audit, audit_again
from twophase.core import errors
from twophase.core.begin import written_again
from twophase.core.checkpoint import Json, Participant, Revision
from twophase.core.coordinator import Coordinator
from twophase.core.errors import AttemptFailed, InputChanged, NoSpace, SchemaChanged
from twophase.core.failpoints import hit
from twophase.core.lease import Lease
from twophase.core.manifest import schema_changes
from twophase.core.record_behind import check_known
from twophase.core.states import State
from twophase.pipeline import quarantine_of
from twophase.spark.plan import Plan, PlannedRead, PlannedState, PlannedWrite

if TYPE_CHECKING:
    from twophase.core.ports import Opened
    from twophase.pipeline import Pipeline
    from twophase.sinks.base import Sink

log = logging.getLogger("twophase")


class Stager(Protocol):
    """How an attempt's Spark work is done: in this process, or by a submission."""

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        """Stage every write of a plan; return each manifest's summary. Stop when `lost` returns True: it is fenced."""
        ...


class Staging:
    """Stages attempts of one pipeline and collects their votes."""

    def __init__(self, coordinator: Coordinator, pipeline: Pipeline) -> None:
        """Work on one pipeline's record."""
        self.coordinator = coordinator
        self.pipeline = pipeline

    def stage(self, opened: Opened, stager: Stager, folder: Path, lease: Lease) -> list[Participant]:
        """Stage every write, check it and run the audits; return the votes, which the caller records.

        If a check or an audit says no, the votes so far are recorded and the failure is raised. The votes of a restage
        are recorded here too; then the list is empty.
        """
        attempt = opened.revision
        mine = [p for p in opened.participants if p.attempt == attempt.epoch]
        participants = [p for p in mine if p.vote is None]  # an attempt that a task rejoins may have votes already
        plan = self._plan(opened, participants)
        if attempt.job is None or attempt.job["attempt"] != attempt.epoch:  # no Spark job of this attempt runs yet
            plan = self._know_input(plan)
        self._check_input(plan, unread=True)
        log.info("%s: attempt %s, staging", attempt.key, attempt.epoch)
        staged = stager(plan, folder, lambda: lease.lost)
        if attempt.state is State.COMMITTING:
            check_known(self.coordinator)
            self._vote_again(attempt, plan, {p.name: (p, staged[p.name]) for p in participants}, lease)
            lease.check()
            return []
        votes: list[Participant] = []
        for participant in participants:
            lease.check()
            self._check(attempt, plan, participant, staged[participant.name], votes)
            votes.append(replace(participant, vote=True, manifest=staged[participant.name]))
            log.info("%s: %s is staged, rows %s", attempt.key, participant.name, staged[participant.name]["rows"])
        found = {p.name: (p, p.manifest if p.vote else staged[p.name]) for p in mine}
        audited, refusal = audit(self.coordinator, self.pipeline, attempt, found, lease.check)
        lease.check()
        if refusal is not None:
            self.coordinator.vote_all(attempt, [*votes, *audited])
            raise refusal
        return [*votes, *audited]

    def still_staged(self, revision: Revision) -> bool:
        """Return True if every sink still has what it voted for and can still promote it; asked before the decision."""
        try:
            participants = self.coordinator.transact(lambda tx: tx.participants(revision.key))
            for participant in filter(attrgetter("stages"), participants):
                self.pipeline.sinks[participant.name].check(participant.output(revision))
        except AttemptFailed as failed:
            log.warning("%s; staging again", failed)
            return False
        return True

    def _plan(self, opened: Opened, participants: list[Participant]) -> Plan:
        attempt = opened.revision
        handles = {p.name: p.handle for p in participants}
        quarantines = {quarantine_of(name): name for name in self.pipeline.reads}
        return Plan(
            pipeline=self.pipeline.name,
            checkpoint_id=attempt.checkpoint_id,
            revision=attempt.revision,
            attempt=attempt.epoch,
            slot=attempt.slot,
            transform=self.pipeline.shipped_transform,
            reads={
                name: PlannedRead(self.pipeline.reads[name].declaration(), fixed)
                for name, fixed in opened.inputs.items()
            },
            writes={
                name: PlannedWrite(
                    sink.declaration(),
                    handles.get(name),
                    opened.schemas[name],
                    quarantines.get(name) if name not in self.pipeline.writes else None,
                )
                for name, sink in self.pipeline.sinks.items()
                if name not in self.pipeline.states
            },
            timestamp=opened.began.isoformat() if opened.began else None,
            states={
                name: PlannedState(
                    state.declared.declaration(), str(state.home), handles.get(name), opened.states.get(name, {})
                )
                for name, state in self.pipeline.states.items()
            },
        )

    def _know_input(self, plan: Plan) -> Plan:
        """Record new times of files written again with the same bytes, and checksums that are not known yet."""
        for name in plan.reads:
            source, fixed = self.pipeline.reads[name], plan.fixed(name)
            if again := source.written_again(fixed):
                log.info("%s: source %r: %s written again with the same bytes", plan.key, name, again[0].path)
                keep = partial(written_again, self.pipeline.name, plan.checkpoint_id, name, again)
                self.coordinator.transact(keep)
                plan = plan.with_files(name, again)
            if found := source.summed(plan.fixed(name)):
                keep_files = methodcaller("keep_files", self.pipeline.name, plan.checkpoint_id, name, found)
                self.coordinator.transact(keep_files)
                plan = plan.with_files(name, found)
        hit("attempt.known")
        return plan

    def _check_input(self, plan: Plan, *, unread: bool = False) -> None:
        try:
            for name in plan.reads:
                self.pipeline.reads[name].check(plan.fixed(name))
                if unread:
                    self.pipeline.reads[name].check_unread(plan.fixed(name))
        except InputChanged as changed:
            msg = f"checkpoint {plan.key}: {changed}"
            raise InputChanged(msg) from changed

    def _vote_again(self, attempt: Revision, plan: Plan, staged: Staged, lease: Lease) -> None:
        """Vote for a restage, only after all of it is checked and audited: a vote destroys what was staged before."""
        left = {}
        for name, (participant, manifest) in staged.items():
            if self.coordinator.is_promoted(attempt, participant, manifest):
                log.info("%s: %s had promoted an earlier attempt, which counts", attempt.key, name)
            else:
                left[name] = (participant, manifest)
        for participant, manifest in left.values():
            lease.check()
            self._check(attempt, plan, participant, manifest)
        audited = audit_again(self.coordinator, self.pipeline, attempt, left, lease.check)
        for name, (_, manifest) in left.items():
            lease.check()
            self.coordinator.vote(attempt, name, yes=True, manifest=manifest, audits=audited[name])
            log.info("%s: %s pre-committed, rows %s", attempt.key, name, manifest["rows"])

    def _check(
        self,
        attempt: Revision,
        plan: Plan,
        participant: Participant,
        manifest: Json,
        before: Sequence[Participant] = (),
    ) -> None:
        """Check that the input has not changed and that storage holds what the manifest says; otherwise vote no.

        The no is recorded together with the votes `before` it.
        """
        hit("vote.before")
        sink = self.pipeline.sinks[participant.name]
        try:
            self._check_input(plan)
            check_schema(attempt, participant.name, sink, plan, manifest["schema"])
            sink.check(replace(participant, manifest=manifest).output(attempt))
        except AttemptFailed as error:
            self.coordinator.vote_all(attempt, [*before, replace(participant, vote=False, reason=str(error))])
            raise
        hit("vote.checked")


def check_schema(attempt: Revision, name: str, sink: Sink, plan: Plan, schema: Any) -> None:  # noqa: ANN401 - JSON
    """Raise SchemaChanged unless a schema may follow the one that was last decided in the sink."""
    before = plan.writes[name].schema if name in plan.writes else plan.states[name].base.get("schema")
    if not before:
        return
    problems = schema_changes(before, schema, by_position=sink.by_position(), may_widen=sink.widens)
    if problems:
        msg = f"checkpoint {attempt.key}: sink {name!r}: {'; '.join(problems)}; only new columns may be added"
        raise SchemaChanged(msg)


def read_result(plan: Plan, result: Path, logged: Path | str, code: int) -> Mapping[str, Json]:
    """Return the manifest summaries that a submission staged, or raise the error that it reported."""
    where = f"checkpoint {plan.key}: attempt {plan.attempt}"
    if not result.exists():
        msg = f"{where}: Spark ended with code {code} and no result; its log is {logged}"
        raise AttemptFailed(msg)
    found = json.loads(result.read_bytes())
    if found["status"] == "staged":
        writes: Mapping[str, Json] = found["writes"]
        return writes
    kind = getattr(errors, found["type"], AttemptFailed)
    if not (isinstance(kind, type) and issubclass(kind, errors.TwophaseError)):
        kind = AttemptFailed
    if "No space left on device" in found["error"]:
        kind = NoSpace
    said = found["error"].removeprefix(f"checkpoint {plan.key}: ")
    msg = f"{where}: {said}; the log is {logged}"
    raise kind(msg)
