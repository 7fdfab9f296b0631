"""The link from a task of ours to its checkpoint in the commit table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

    from twophase.core.checkpoint import Key


class CheckpointLink(BaseOperatorLink):
    """A button on the task that opens its checkpoint."""

    name = "Checkpoint"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        """Return the page of the checkpoint that the task worked on; empty if it worked on none."""
        key: Key | None = getattr(operator, "worked_on", None)
        return f"/twophase/pipelines/{key.pipeline}/checkpoints/{key.checkpoint_id}" if key else ""
