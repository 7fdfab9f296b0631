"""Each sink of a pipeline as an asset, with an event per commit.

An event wakes a consumer up and says nothing that the record does not: one that is lost or merged with another costs
nothing, since a consumer with a Committed source reads what the record says is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

if TYPE_CHECKING:
    from twophase.core.checkpoint import Revision
    from twophase.pipeline import Pipeline


def asset(pipeline: Pipeline | str, sink: str) -> Asset:
    """Return the asset of one sink: what a consumer's DAG is scheduled by."""
    name = pipeline if isinstance(pipeline, str) else pipeline.name
    return Asset(name=f"{name}.{sink}", uri=f"twophase://{name}/{sink}")


def event(revision: Revision) -> dict[str, Any]:
    """Return what an event tells of a commit."""
    return {
        "pipeline": revision.key.pipeline,
        "checkpoint_id": revision.checkpoint_id,
        "revision": revision.revision,
        "commit_seq": revision.commit_seq,
        "rows": revision.rows,
    }
