"""A record with something of everything in it, for whoever shows it: each state, a parked, a stale, a failed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import text, update

from twophase.committer import tables as t
from twophase.committer.record import PostgresRecord, PostgresTransaction
from twophase.committer.registry import link, register
from twophase.committer.revision_rows import r
from twophase.core.checkpoint import Input, InputFile, Key, Output, Participant, Run
from twophase.core.hindrances import Hindrance
from twophase.core.states import State

DECLARATION = {
    "reads": {"orders": {"class": "twophase.sources.files:Files"}},
    "writes": {
        "lake": {"class": "twophase.sinks:Files"},
        "mart": {"class": "twophase.sinks:Files"},
    },
}
AUDIT = "row_count: 1,200 rows, expected at least 1"
PARKED = "sink lake: staged folder staging/00000009.r1.a1.7c1e is gone, and no marker says that it was promoted"
FAILED = "AuditFailed: lake: not_null(customer): 3 of 1,200 rows have no customer; the first: {'order_id': 4711}"
#: The same as the record keeps it: pages leave out whose it is.
RECORDED = FAILED.replace(": ", ": checkpoint orders/10 r1: ", 1)


class Story(NamedTuple):
    """How far one revision went."""

    slot: str
    state: State
    kind: str = "regular"
    parked: str | None = None
    error: str | None = None


STORIES = (
    Story("2026-11-01T00:00:00Z/2026-11-02T00:00:00Z", State.COMMITTED),
    Story("2026-11-01T00:00:00Z/2026-11-02T00:00:00Z", State.COMMITTED, "backfill"),
    *(Story(f"2026-11-{day:02}T00:00:00Z/2026-11-{day + 1:02}T00:00:00Z", State.COMMITTED) for day in range(2, 9)),
    Story("2026-11-09T00:00:00Z/2026-11-10T00:00:00Z", State.COMMITTING, parked=PARKED),
    Story("2026-11-10T00:00:00Z/2026-11-11T00:00:00Z", State.ABORTED, error=RECORDED),
    Story("2026-11-11T00:00:00Z/2026-11-12T00:00:00Z", State.ABORTING, error=RECORDED),
    Story("2026-11-12T00:00:00Z/2026-11-13T00:00:00Z", State.PRECOMMITTED),
    Story("2026-11-13T00:00:00Z/2026-11-14T00:00:00Z", State.OPEN),
)


def fill(record: PostgresRecord, pipeline: str = "orders", dag_id: str | None = "orders") -> None:
    """Enter a pipeline, and the stories of its checkpoints."""
    enter(record, pipeline, dag_id)
    numbers: dict[str, int] = {}
    for story in STORIES:
        run = Run(dag_id, f"{'backfill' if story.kind == 'backfill' else 'scheduled'}__{story.slot[:20]}")
        with record.transaction() as tx:
            tx.lock(pipeline)
            if story.slot not in numbers:
                numbers[story.slot] = tx.add_checkpoint(pipeline, story.slot, {"orders": files(pipeline, story)})
            key = tx.add_revision(pipeline, numbers[story.slot], story.kind, run, 3600).key
        tell(record, key, story)


def enter(
    record: PostgresRecord,
    pipeline: str,
    dag_id: str | None,
    reads: Sequence[str] = ("orders",),
    writes: Sequence[str] = (),
) -> None:
    """Put a pipeline into the record, as one that a DAG runs (None: that nobody has run with Airflow)."""
    declaration: dict[str, dict[str, Any]] = {**DECLARATION, "reads": {name: {} for name in reads}}
    if writes:
        declaration["writes"] = {name: {} for name in writes}
    places = {name: f"/lake/{pipeline}/{name}" for name in writes}
    with record.transaction() as tx:
        register(tx.connection, pipeline, declaration, places, lambda _old, _pending: [])
        if dag_id:
            link(tx.connection, pipeline, dag_id)


def fill_downstream(record: PostgresRecord, pipeline: str = "daily_totals", upstream: str = "orders") -> Key:
    """Enter a pipeline with one commit that was made from what was replaced since: it is stale."""
    enter(record, pipeline, pipeline, [upstream])
    with record.transaction() as tx:
        tx.lock(pipeline)
        source = {
            upstream: Input(ranges={upstream: (1, 2)}, outputs=(Output(Key(upstream, 1, 1), 1, {}, {}),)),
        }
        number = tx.add_checkpoint(pipeline, None, source)
        key = tx.add_revision(pipeline, number, "regular", Run(pipeline, "asset_triggered__1"), 3600).key
        tx.fix_inputs(key, source)
        # Whoever replaced what it reads would have marked it: here that came first.
        mine = (r.pipeline == key.pipeline) & (r.checkpoint_id == key.checkpoint_id)
        tx.connection.execute(update(t.revision).where(mine).values(outdated=True))
    tell(record, key, Story("", State.COMMITTED))
    return key


def files(pipeline: str, story: Story) -> Input:
    """Return what a checkpoint reads: a dozen files of its day."""
    day = story.slot[:10]
    return Input(files=tuple(InputFile(f"{day}/{pipeline}-{n:02}.json", 18_000 + n, 1) for n in range(12)))


def tell(record: PostgresRecord, key: Key, story: Story) -> None:
    """Take a revision as far as its story goes, a transaction a step."""
    for step in STEPS[story.state]:
        with record.transaction() as tx:
            step(tx, key, story)
    if story.parked:
        with record.transaction() as tx:
            tx.park(key, story.parked, {"lake": Hindrance.LOST})


def opened(tx: PostgresTransaction, key: Key, story: Story) -> None:
    tx.move(key, State.OPEN, epoch=0, bump=True, why="attempt 1")
    vote = None if story.state is State.OPEN else True
    manifest = {"rows": 1200, "bytes": 96_400, "files": 4, "schema": []} if vote else {}
    sinks = [Participant(name, "sink", 1, vote=vote, manifest=manifest) for name in ("lake", "mart")]
    audit = Participant("row_count", "audit", 1, vote=vote, reason=AUDIT if vote else None)
    tx.replace_participants(key, [*sinks, audit])


def voted(tx: PostgresTransaction, key: Key, _story: Story) -> None:
    tx.move(key, State.PRECOMMITTED, epoch=1, lease=None, why="3 of 3 voted yes")


def decided(tx: PostgresTransaction, key: Key, _story: Story) -> None:
    tx.lock(key.pipeline)
    seq = tx.take_commit_seq(key.pipeline)
    tx.move(key, State.COMMITTING, epoch=1, commit_seq=seq, rows=1200, bytes=192_800, why="the commit point")


def finished(tx: PostgresTransaction, key: Key, _story: Story) -> None:
    older = tx.committed_revision(key.pipeline, key.checkpoint_id)
    if older:
        tx.move(older.key, State.SUPERSEDED, epoch=older.epoch, why=f"replaced by r{key.revision}")
    for sink in ("lake", "mart"):
        tx.mark_committed(key, sink)
    tx.move(key, State.COMMITTED, epoch=1, lease=None, why="promoted to lake, mart")


def aborting(tx: PostgresTransaction, key: Key, story: Story) -> None:
    tx.move(key, State.ABORTING, epoch=1, lease=None, error=story.error, why=story.error or "its run failed")


def aborted(tx: PostgresTransaction, key: Key, _story: Story) -> None:
    tx.move(key, State.ABORTED, epoch=1, why="staged output discarded")


STEPS: dict[State, list[Callable[[PostgresTransaction, Key, Story], None]]] = {
    State.OPEN: [opened],
    State.PRECOMMITTED: [opened, voted],
    State.COMMITTING: [opened, voted, decided],
    State.COMMITTED: [opened, voted, decided, finished],
    State.ABORTING: [opened, aborting],
    State.ABORTED: [opened, aborting, aborted],
}


def fill_everything(dsn: str) -> None:
    """Fill a record with what the tests of the pages look at.

    - `orders`: every state, run by the DAG `orders` and, too, by `shared`;
    - `daily_totals`: one stale commit, run by the DAG of its name;
    - `secret`: run by the DAG `somebody_elses`;
    - `scratch`: never run by Airflow, and its record is older than its sinks;
    - `waiting`: of two slots one could not begin, the other waits for its input;
    - `growing`: the write `mart` was dropped after two checkpoints, `archive` was added before the third.
    """
    record = PostgresRecord.open(dsn, who="test")
    fill(record)
    with record.transaction() as tx:
        link(tx.connection, "orders", "shared")
    fill_downstream(record)
    enter(record, "secret", "somebody_elses")
    enter(record, "scratch", None)
    with record.transaction() as tx:
        tx.say_behind("scratch", "sink 'lake' was given commit_seq 9; the record knows up to 6")
    fill_unbegun(record)
    fill_changed(record)
    with record.engine.begin() as connection:
        connection.execute(text("ANALYZE"))
    record.engine.dispose()


def fill_unbegun(record: PostgresRecord, pipeline: str = "waiting") -> None:
    """Enter a pipeline of which nothing could begin yet."""
    enter(record, pipeline, pipeline)
    failed, waits = "InputMissing: nothing there", "waiting for input: /landing/dt=2026-11-02"
    with record.transaction() as tx:
        slots = (
            "2026-11-01T00:00:00+00:00/2026-11-02T00:00:00+00:00",
            "2026-11-02T00:00:00+00:00/2026-11-03T00:00:00+00:00",
        )
        tx.not_begun(pipeline, slots[0], Run(pipeline, "scheduled__1"), failed, failed=True)
        tx.not_begun(pipeline, slots[0], Run(pipeline, "scheduled__1"), failed, failed=True)
        tx.not_begun(pipeline, slots[1], Run(pipeline, "scheduled__2"), waits, failed=False)


def fill_changed(record: PostgresRecord, pipeline: str = "growing") -> None:
    """Enter a pipeline with three commits, whose writes have changed before the last."""
    enter(record, pipeline, pipeline, writes=("lake", "mart"))
    for number in range(3):
        if number == 2:
            enter(record, pipeline, pipeline, writes=("lake", "archive"))
        with record.transaction() as tx:
            tx.lock(pipeline)
            made = tx.add_checkpoint(pipeline, None, {"orders": Input()})
            key = tx.add_revision(pipeline, made, "regular", Run(pipeline, f"scheduled__{number}"), 3600).key
        tell(record, key, Story("", State.COMMITTED))


def fill_many(record: PostgresRecord, pipeline: str, checkpoints: int) -> None:
    """Enter a pipeline with so many checkpoints, each just begun and ended."""
    enter(record, pipeline, pipeline)
    for number in range(checkpoints):
        with record.transaction() as tx:
            tx.lock(pipeline)
            made = tx.add_checkpoint(pipeline, None, {"orders": Input()})
            key = tx.add_revision(pipeline, made, "regular", Run(pipeline, f"manual__{number}"), 3600).key
            tx.move(key, State.ABORTING, epoch=0, lease=None, why="no reason")
            tx.move(key, State.ABORTED, epoch=0)
