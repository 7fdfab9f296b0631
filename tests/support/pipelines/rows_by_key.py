"""A pipeline that writes rows by key, what each of its revisions writes, and what a fold makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.pipelines.factories import PreStaged, Row, words_pipeline
from twophase import Pipeline, sinks
from twophase.backfill import Backfill, Selection
from twophase.core.manifest import Column
from twophase.local.record_access import open_record
from twophase.spark.plan import Plan

SCHEMA = (Column("id", "bigint"), Column("word", "string"))
CHANGES = (*SCHEMA, Column("_change", "string"))
#: What is done while a revision of a checkpoint is staged.
meanwhile: dict[tuple[int, int], Callable[[], object]] = {}
Found = dict[int, str]


def rows_of(checkpoint: int, revision: int) -> list[Row]:
    """Return what a revision writes: each changes a key of the one before it, and later revisions other ones."""
    mine = [checkpoint, checkpoint + revision, 100]
    return [{"id": key, "word": f"{checkpoint} r{revision}"} for key in dict.fromkeys(mine)]


def changelog_of(checkpoint: int, revision: int) -> list[Row]:
    """Return the same as a changelog that knows what comes before it, of its own revision."""
    before = folded(dict.fromkeys(range(1, checkpoint), revision))
    found: list[Row] = []
    for row in rows_of(checkpoint, revision):
        if row["id"] in before:
            found.append({"id": row["id"], "word": before[row["id"]], "_change": "-U"})
        found.append({**row, "_change": "+U" if row["id"] in before else "+I"})
    return found


def folded(revisions: dict[int, int]) -> Found:
    """Return what revisions make one after the other."""
    found: Found = {}
    for checkpoint, revision in sorted(revisions.items()):
        found |= {row["id"]: row["word"] for row in rows_of(checkpoint, revision)}
    return found


class Staging(PreStaged):
    """Writes what is made up for each revision, in the pipeline's mode."""

    def __init__(self, mode: str) -> None:
        made = changelog_of if mode == "retract" else rows_of

        def change(_rows: list[Row], plan: Plan) -> list[Row]:
            meanwhile.pop((plan.checkpoint_id, plan.revision), bool)()
            return made(plan.checkpoint_id, plan.revision)

        super().__init__(1, CHANGES if mode == "retract" else SCHEMA, change)


def by_key(mode: str = "upsert", **more: Any) -> Pipeline:
    """Declare a pipeline of one file a checkpoint into a table by key."""
    key = [] if mode == "replace" else ["id"]
    sink = sinks.Postgres("words", conn_id="dwh", mode=mode, key=key, create=True, **more)
    return words_pipeline(writes={"dwh": sink}, max_files=1)


def replay(first: int, last: int) -> None:
    """Replay checkpoints, in a process that may be killed."""
    work = Backfill(open_record(), "words", Selection((first, last)), lambda _: Staging("upsert"))
    assert not [done for done in work.run(parallel=3) if done.failed]
    work.end()
