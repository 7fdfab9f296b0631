"""The approve task, between stage and commit: a person's vote, by Airflow's required actions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param

from twophase.airflow import task_context
from twophase.airflow.failure_notes import Failing
from twophase.airflow.links import CheckpointLink
from twophase.airflow.operators import staged, task_coordinator
from twophase.core.checkpoint import Key
from twophase.core.next_step import APPROVAL
from twophase.core.states import State

if TYPE_CHECKING:
    from airflow.sdk import Context

    from twophase.pipeline import Pipeline

log = logging.getLogger("twophase")

_REASON = "Why; the record keeps it."


class ApproveOperator(ApprovalOperator):
    """Waits for a person's vote on what is staged; rejecting it aborts the revision."""

    operator_extra_links = (CheckpointLink(),)

    def __init__(self, *, pipeline: Pipeline, stage_task_id: str = "stage", **kwargs: Any) -> None:
        """Ask for a yes or a no, without a time limit unless `response_timeout` is given."""
        reason = Param(None, type=["null", "string"], title="Reason", description=_REASON)
        settled = {
            "subject": f"Commit a checkpoint of {pipeline.name}?",
            "fail_on_reject": True,
            **kwargs,
            "params": {"reason": reason, **kwargs.get("params", {})},
        }
        super().__init__(**settled)
        self.stage_task_id = stage_task_id
        self.worked_on: Key | None = None

    def execute(self, context: Context) -> Any:
        """Show what is staged and wait for an answer; return at once if the revision is not OPEN any more."""
        key = self.worked_on = staged(context, self.stage_task_id)
        with task_context.record(context) as record:
            coordinator = task_coordinator(record, key.pipeline, context)
            revision = coordinator.transact(lambda tx: tx.revision(key))
            if revision.state is not State.OPEN:
                log.info("%s: %s, nobody has to approve it", key, revision.state.lower())
                return None
            participants = coordinator.transact(lambda tx: tx.participants(key))
        self.subject = f"Commit {key}?"
        told = [
            f"- **{p.name}**: " + (f"{p.manifest['rows']} rows" if p.stages else p.reason or "passed")
            for p in participants
            if p.kind != "approval"
        ]
        slot = f"Slot {revision.slot}\n\n" if revision.slot else ""
        self.body = f"{slot}Staged, invisible to readers:\n\n" + "\n".join(told)
        return super().execute(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Record the vote under the name of the person who gave it."""
        key = self.worked_on = staged(context, self.stage_task_id)
        with task_context.record(context) as record:
            coordinator = task_coordinator(record, key.pipeline, context)
            revision = coordinator.transact(lambda tx: tx.revision(key))
            if "error" in event:  # nobody answered in time, or the answer cannot be read
                with Failing(coordinator, revision, context):
                    return super().execute_complete(context, event)
            person = (event.get("responded_by_user") or {}).get("name")
            if person:
                record.who = f"{person} via {record.who.rpartition(' via ')[2]}"
            yes = event["chosen_options"] == [self.APPROVE]
            given = " ".join(str((event.get("params_input") or {}).get("reason") or "").split())
            by = f"{'' if yes else 'rejected '}by {person or 'the default after the time-out'}"
            coordinator.vote(revision, APPROVAL, yes=yes, reason=f"{by}: {given}" if given else by)
        log.info("%s: %s %s", key, "approved" if yes else "not approved", by)
        return super().execute_complete(context, event)
