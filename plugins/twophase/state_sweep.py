"""Forget the states of a pipeline whose retention is over, and remove their dead files; `sweep` calls it (S3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.core.checkpoint import Key
from twophase.core.failpoints import hit
from twophase.core.slots import duration

if TYPE_CHECKING:
    from twophase.committer.record import PostgresRecord
    from twophase.pipeline import Pipeline

RETAINED = "its state is older than `retain`"
STRAY = "no task that succeeded wrote it"


def sweep_states(
    record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool, everything: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield state, path and reason of each file that is removed, or would be. May be killed anywhere and run again."""
    from twophase.committer import state_retention as retention

    if not pipeline.states:
        return
    if everything:
        yield from _strays(record, pipeline, dry_run=dry_run)
    age = max(duration(state.declared.retain, "state: retain") for state in pipeline.states.values())
    if dry_run:
        return
    while True:
        with record.transaction() as tx:
            tx.lock(pipeline.name)
            old = retention.expired(tx.connection, pipeline.name, age)
            retention.mark(tx.connection, old)
        hit("state.expired")
        yield from _remove(record, pipeline)
        if len(old) < retention.BATCH:
            return


def _remove(record: PostgresRecord, pipeline: Pipeline) -> Iterator[tuple[str, str, str]]:
    """Remove the files that only states list whose retention is over, then forget the lists."""
    from twophase.committer import state_retention as retention

    while True:
        with record.engine.connect() as connection:
            swept = retention.swept(connection, pipeline.name)
            listed = {
                (one.name, run["path"])
                for one in swept
                for run in (*one.manifest.get("runs", ()), *one.manifest.get("own", ()))
            }
            kept = retention.kept(connection, pipeline.name, sorted({path for _, path in listed}))
        for name, path in sorted(listed):
            state = pipeline.states.get(name)
            if path not in kept and state is not None:
                file = state.home / "runs" / path
                file.unlink(missing_ok=True)
                hit("state.removed")
                yield name, str(file), RETAINED
        with record.transaction() as tx:
            retention.forget(tx.connection, swept)
        if len(swept) < retention.BATCH:
            return


def _strays(record: PostgresRecord, pipeline: Pipeline, *, dry_run: bool) -> Iterator[tuple[str, str, str]]:
    """Remove runs of committed attempts that no manifest lists: a task that failed or ran twice wrote them."""
    from twophase.committer import state_retention as retention

    for name, state in pipeline.states.items():
        files: dict[Key, list[str]] = {}
        for left in state.attempts():
            files.setdefault(Key(pipeline.name, left.checkpoint_id, left.revision), []).append(left.path)
        with record.engine.connect() as connection:
            listed = dict(retention.unlisted(connection, pipeline.name, name, list(files)))
            strays = [path for key in listed for path in files.get(key, ()) if Path(path).name not in listed[key]]
            kept = retention.kept(connection, pipeline.name, [Path(path).name for path in strays])
        for path in strays:
            if Path(path).name not in kept:
                if not dry_run:
                    Path(path).unlink(missing_ok=True)
                yield name, path, STRAY
