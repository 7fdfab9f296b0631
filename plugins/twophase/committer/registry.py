"""Pipelines in the record: their declarations, and which locations they write; called before a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert

from twophase.committer import tables as t
from twophase.committer import writes
from twophase.core.errors import ConfigError

Declaration = Mapping[str, Any]

#: The advisory lock held while locations are given to pipelines.
LOCK = int.from_bytes(b"outputs")


def register(
    connection: Connection,
    name: str,
    declaration: Declaration,
    outputs: Mapping[str, str],
    changes: Callable[[Declaration, bool], list[str]],
) -> None:
    """Put a declaration in the record, in the caller's transaction.

    `changes(old, pending)` says in words which changes since the old one are not allowed. It is asked only once the
    pipeline has a checkpoint.
    """
    row = upsert(t.pipeline).values(name=name, declaration=declaration).on_conflict_do_nothing()
    connection.execute(row)
    mine = t.pipeline.c.name == name
    found = connection.execute(select(t.pipeline).where(mine).with_for_update()).one()
    if found.next_checkpoint_id > 1 and found.declaration != declaration:
        problems = changes(found.declaration, _pending(connection, name))
        if problems:
            msg = (
                f"pipeline {name!r}: its declaration changed incompatibly since checkpoint"
                f" {found.next_checkpoint_id - 1}: {'; '.join(problems)}; put it back, or give the pipeline a new name"
            )
            raise ConfigError(msg)
    _own(connection, name, outputs, begun=found.next_checkpoint_id > 1)
    if found.declaration != declaration:
        connection.execute(update(t.pipeline).where(mine).values(declaration=declaration, updated_at=func.now()))


def link(connection: Connection, pipeline: str, dag_id: str) -> None:
    """Note that a DAG runs a pipeline, in the caller's transaction; a second call changes and locks nothing.

    The pipeline must be in the record already. The link stays when the DAG is gone, because its commits stay too.
    """
    mine = (t.pipeline_dag.c.pipeline == pipeline) & (t.pipeline_dag.c.dag_id == dag_id)
    if connection.execute(select(t.pipeline_dag.c.dag_id).where(mine)).first() is None:
        connection.execute(upsert(t.pipeline_dag).values(pipeline=pipeline, dag_id=dag_id).on_conflict_do_nothing())


def give_up(connection: Connection, name: str, sink: str) -> None:
    """Free an output's location for another pipeline, in the caller's transaction; refuse while anything is pending."""
    connection.execute(select(t.pipeline).where(t.pipeline.c.name == name).with_for_update())
    if _pending(connection, name):
        msg = (
            f"pipeline {name!r}: it has revisions that have not ended; finish them first, see `twophase pending {name}`"
        )
        raise ConfigError(msg)
    connection.execute(delete(t.output).where((t.output.c.pipeline == name) & (t.output.c.sink == sink)))


def _pending(connection: Connection, name: str) -> bool:
    r = t.revision.c
    query = select(r.revision).where(
        (r.pipeline == name) & r.state.in_(["OPEN", "PRECOMMITTED", "COMMITTING", "ABORTING"])
    )
    return connection.execute(query.limit(1)).first() is not None


def _own(connection: Connection, name: str, outputs: Mapping[str, str], *, begun: bool) -> None:
    """Record each output's location as this pipeline's; refuse one that is taken, or inside another.

    A location inside another would be read as part of it. Once there are checkpoints, a location keeps the name of its
    write: under another name its output could neither be replaced nor read.
    """
    o = t.output.c
    mine = {row.location: row.sink for row in connection.execute(select(t.output).where(o.pipeline == name))}
    if {sink: location for location, sink in mine.items()} == outputs:
        return
    for sink, location in outputs.items():
        if begun and mine.get(location, sink) != sink:
            msg = (
                f"pipeline {name!r}: write {sink!r} goes to {location}, which is that of write {mine[location]!r}: its"
                " checkpoints are known by that name; put it back"
            )
            raise ConfigError(msg)
    connection.execute(select(func.pg_advisory_xact_lock(LOCK)))  # two at once would not see each other's rows
    writes.declare(connection, name, {sink: location for location, sink in mine.items()}, outputs)
    connection.execute(delete(t.output).where(o.pipeline == name))
    for sink, location in outputs.items():
        inside = o.location.startswith(location + "/", autoescape=True)
        taken = connection.execute(select(t.output).where(o.location.in_(_above(location)) | inside).limit(1)).first()
        if taken is not None:
            msg = (
                f"pipeline {name!r}: write {sink!r} goes to {location}, but {taken.location} belongs to"
                f" pipeline {taken.pipeline!r} (write {taken.sink!r}); two cannot share a table"
            )
            raise ConfigError(msg)
        connection.execute(insert(t.output).values(location=location, pipeline=name, sink=sink))


def _above(location: str) -> list[str]:
    """Return a location and all that it is inside of; the folder `x.twophase` beside a table counts as its `x`."""
    parts = location.split("/")
    above = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return above + [path.removesuffix(".twophase") for path in above if path.endswith(".twophase")]
