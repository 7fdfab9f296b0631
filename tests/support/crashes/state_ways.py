"""What the crash tests of a pipeline with state do in processes of their own, and what must hold after each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sqlalchemy import text

from support.pipelines.factories import Row, counted, visible
from support.pipelines.kept_counts import Counted, counting_pipeline, state_of
from twophase import Pipeline, State
from twophase.backfill import Backfill, Selection
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Json
from twophase.core.errors import AttemptFailed
from twophase.local.record_access import open_record
from twophase.runner import Runner
from twophase.spark.plan import Plan
from twophase.sweep import sweep as sweep_all
from twophase.verification import verify
from twophase.wiring import coordinator_of

NAME = "counts"
TABLE = f"lake/{NAME}"


def pipeline() -> Pipeline:
    """Declare the word count with state; its states are kept for a minute, and those of the last ten checkpoints."""
    return counting_pipeline(NAME, state=State(key=["word"], schema="word string, frequency bigint", retain="1m"))


class Refusing(Counted):
    """Stages everything, then fails: the revision is aborted with its state in place."""

    def __call__(self, plan: Plan, folder: Path, lost: Callable[[], bool]) -> Mapping[str, Json]:
        super().__call__(plan, folder, lost)
        msg = "the transform failed, as it was told to"
        raise AttemptFailed(msg)


def run() -> None:
    """Take one checkpoint through."""
    with Runner(pipeline(), Counted()) as runner:
        runner.run()


def drain() -> None:
    """Take checkpoints through until there is no new input."""
    with Runner(pipeline(), Counted()) as runner:
        while runner.run():
            pass


def fail() -> None:
    """Take one checkpoint up to its vote, and fail."""
    with Runner(pipeline(), Refusing()) as runner:
        try:
            runner.run()
        except AttemptFailed as error:
            if "as it was told to" not in str(error):
                raise


def recover() -> None:
    """Finish what a crash left, from the record alone."""
    coordinator_of(open_record(), pipeline()).recover()


def replay() -> None:
    """Replay everything from checkpoint 2 on, with another transform; again, if that was killed."""
    work = Backfill(open_record(), NAME, Selection((2, 3)), lambda _: Counted(weight=2))
    for done in work.run():
        if done.failed:
            raise AttemptFailed(done.failed)
    work.end()


def sweep() -> None:
    """Remove what is dead, and states that are too old."""
    for _ in sweep_all(open_record(), pipeline()):
        pass


def age(record: PostgresRecord) -> None:
    """Let an hour go by since everything was decided."""
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET decided_at = decided_at - interval '1 hour'"))


def check(record: PostgresRecord, rows: Iterable[Row], replayed: Iterable[Row] = ()) -> None:
    """At the end the table has every record once, and the state is what a straight count of all of them gives."""
    expected: Counter[str] = Counter()
    for weight, some in ((1, list(rows)), (2, list(replayed))):
        for row in some:
            expected[row["word"]] += weight * row["frequency"]
    assert counted(visible(TABLE)) == counted([*rows, *replayed])
    assert state_of(record, pipeline()) == expected
    assert not [found for found in verify(record, pipeline()) if found]
