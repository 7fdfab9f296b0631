"""A person's vote: the task between stage and commit, on Airflow's required actions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator

from twophase.airflow import tasks
from twophase.airflow.links import CheckpointLink
from twophase.airflow.operators import protocol_of, staged
from twophase.airflow.staging import APPROVAL
from twophase.core.checkpoint import Key
from twophase.core.states import State

if TYPE_CHECKING:
    from airflow.sdk import Context

    from twophase.pipeline import Pipeline

log = logging.getLogger("twophase")


class ApproveOperator(ApprovalOperator):
    """Waits for a person's vote on what is staged; rejecting it aborts the revision."""

    operator_extra_links = (CheckpointLink(),)

    def __init__(self, *, pipeline: Pipeline, stage_task_id: str = "stage", **kwargs: Any) -> None:
        """Ask for a yes or a no; nothing expires, unless `response_timeout` says so."""
        settled = {"subject": f"Commit a checkpoint of {pipeline.name}?", "fail_on_reject": True, **kwargs}
        super().__init__(**settled)
        self.stage_task_id = stage_task_id
        self.worked_on: Key | None = None

    def execute(self, context: Context) -> Any:
        """Tell what is staged and wait; what is decided or approved already needs nobody."""
        key = self.worked_on = staged(context, self.stage_task_id)
        with tasks.record(context) as record:
            protocol = protocol_of(record, key.pipeline, context)
            revision = protocol.transact(lambda tx: tx.revision(key))
            if revision.state is not State.OPEN:
                log.info("%s: %s, nobody has to approve it", key, revision.state.lower())
                return None
            participants = protocol.transact(lambda tx: tx.participants(key))
        self.subject = f"Commit {key}?"
        told = [
            f"- **{p.name}**: " + (f"{p.manifest['rows']} rows" if p.kind == "sink" else p.reason or "passed")
            for p in participants
            if p.kind != "approval"
        ]
        slot = f"Slot {revision.slot}\n\n" if revision.slot else ""
        self.body = f"{slot}Staged, invisible to readers:\n\n" + "\n".join(told)
        return super().execute(context)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Record the vote, in the name of the person who gave it."""
        key = self.worked_on = staged(context, self.stage_task_id)
        if "error" not in event:
            person = (event.get("responded_by_user") or {}).get("name") or "the default after the time-out"
            yes = event["chosen_options"] == [self.APPROVE]
            with tasks.record(context) as record:
                protocol = protocol_of(record, key.pipeline, context)
                revision = protocol.transact(lambda tx: tx.revision(key))
                protocol.vote(revision, APPROVAL, yes=yes, reason=f"by {person}")
            log.info("%s: %s by %s", key, "approved" if yes else "rejected", person)
        return super().execute_complete(context, event)
