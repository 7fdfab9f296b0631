"""Each sink of a pipeline as an Airflow asset, with an event per commit; DAG files and the commit task use it.

An event only wakes a consumer. If one is lost or merged with another nothing is lost: a consumer with a Committed
source reads what the record says is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

if TYPE_CHECKING:
    from twophase.core.checkpoint import Revision
    from twophase.pipeline import Pipeline


def asset(pipeline: Pipeline | str, sink: str) -> Asset:
    """Return the asset of one sink, for the schedule of a consumer's DAG."""
    name = pipeline if isinstance(pipeline, str) else pipeline.name
    return Asset(name=f"{name}.{sink}", uri=f"twophase://{name}/{sink}")


def event(revision: Revision) -> dict[str, Any]:
    """Return the content of an asset event for a commit."""
    return {
        "pipeline": revision.key.pipeline,
        "checkpoint_id": revision.checkpoint_id,
        "revision": revision.revision,
        "commit_seq": revision.commit_seq,
        "rows": revision.rows,
    }
