"""Hand a table over to another pipeline; `twophase hand-over` calls it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twophase.core.errors import ConfigError
from twophase.core.failpoints import hit

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def hand_over(record: PostgresRecord, pipeline: Pipeline, write: str, to: str, reason: str) -> None:
    """Let the table of a write belong to another pipeline; a second call changes nothing.

    It is refused while the pipeline has pending revisions. The record's transaction, which also keeps the reason, is
    committed only after the target names the new owner; if the process is killed in between, call it again.
    """
    from twophase.committer import registry, revisions

    if write not in pipeline.sinks:
        msg = f"pipeline {pipeline.name!r}: expected one of its writes, {', '.join(pipeline.sinks)}; found {write!r}"
        raise ConfigError(msg)
    if to == pipeline.name or not _NAME.fullmatch(to):
        msg = f"pipeline {pipeline.name!r}: expected the name of another pipeline, found {to!r}"
        raise ConfigError(msg)
    sink = pipeline.sinks[write]
    with record.transaction() as tx:
        registry.give_up(tx.connection, pipeline.name, write)
        if (newest := revisions.newest(tx.connection, pipeline.name)) is not None:
            tx.note(newest, f"the table of {write} was handed over to {to}", reason)
        if sink.owner() != to:
            hit("hand_over.before")
            sink.hand_over(to)
        hit("hand_over.inside")
