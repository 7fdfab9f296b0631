"""Pipelines whose checkpoints are replaced, adopted, passed on or set aside, and what processes do with them.

Checkpoint n of every pipeline has the same ids, and each row says which revision wrote it: what a table shows can be
held against the record alone. A pipeline that reads another one adds its own revision behind the other's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.faults.processes import PATIENCE
from support.pipelines.factories import PreStaged, Row
from twophase import Pipeline, Retention, audits, sinks, sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import AuditFailed
from twophase.core.failpoints import FailpointError, configure
from twophase.core.settings import data_path
from twophase.local.record_access import open_record
from twophase.runner import Runner
from twophase.spark.plan import Plan
from twophase.storage import disk
from twophase.sweep import sweep as sweep_all
from twophase.wiring import coordinator_of, load

#: Rows of a checkpoint, and lines of it that are none.
ROWS, BAD = 12, 2
SCHEMA = "id bigint, word string, frequency bigint"
DAY = "dt={start:%Y-%m-%d}"


def ids(checkpoint_id: int) -> list[int]:
    """Return the ids of a checkpoint, whichever revision and pipeline."""
    return [100 * checkpoint_id + i for i in range(ROWS)]


def bad_lines(checkpoint_id: int) -> list[str]:
    """Return the lines of a checkpoint that are no records."""
    return [f"bad {checkpoint_id}.{i}" for i in range(BAD)]


def day(number: int) -> date:
    """Return the day whose interval becomes checkpoint `number` when intervals are run in order."""
    return date(2026, 11, 1) + timedelta(days=number)


def slot(number: int) -> str:
    """Return that interval."""
    return f"{day(number)}/{day(number + 1)}"


def rows(checkpoint_id: int, word: str) -> list[Row]:
    """Return the rows of a checkpoint, as a revision writes them."""
    return [{"id": number, "word": word, "frequency": number % 7} for number in ids(checkpoint_id)]


# --- what is declared ------------------------------------------------------------------------------------------------


def words() -> Pipeline:
    """Declare a landing folder, two tables and an audit."""
    return Pipeline(
        "words",
        reads={"words": sources.Files("landing/words", format="json", max_files=1)},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/words"), "copy": sinks.Files("lake/copy")},
        audits=[audits.row_count(minimum=1, on="lake")],
        retention=Retention(superseded="1d"),
    )


def days() -> Pipeline:
    """Declare intervals, each with a folder of its own in a table that may have been there before."""
    return Pipeline(
        "days",
        reads={"words": sources.Interval(f"landing/days/{DAY}", "json")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/days", slot_folder=DAY, adopt=True), "log": sinks.Files("lake/days_log")},
        audits=[audits.row_count(minimum=1, on="lake")],
    )


def hop() -> Pipeline:
    """Declare what reads another pipeline's commits."""
    return Pipeline(
        "hop",
        reads={"words": sources.Committed("words", "lake")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/hop")},
        audits=[audits.row_count(minimum=1)],
    )


def sifted() -> Pipeline:
    """Declare a landing folder whose bad records are set aside."""
    source = sources.Files("landing/sifted", format="json", max_files=1, schema=SCHEMA, on_bad_record="quarantine")
    return Pipeline(
        "sifted",
        reads={"words": source},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/sifted")},
        audits=[audits.row_count(minimum=1)],
    )


PIPELINES: dict[str, Callable[[], Pipeline]] = {"words": words, "days": days, "hop": hop, "sifted": sifted}


# --- what is there before --------------------------------------------------------------------------------------------


def land(pipeline: str, number: int) -> None:
    """Let the input of a checkpoint come."""
    folder = f"landing/days/dt={day(number)}" if pipeline == "days" else f"landing/{pipeline}"
    lines = [json.dumps(row) for row in rows(number, "")] + (bad_lines(number) if pipeline == "sifted" else [])
    path = data_path(folder) / f"{number:03d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def leave_a_folder(number: int) -> None:
    """Write the folder of a slot as somebody else would have: what revision 0 is made of."""
    folder = data_path(f"lake/days/dt={day(number)}")
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows(number, "r0")), folder / "somebody.parquet")
    data_path("left").mkdir(exist_ok=True)
    (data_path("left") / str(number)).touch()


def left(number: int) -> bool:
    """Say whether somebody else had written the folder of a slot."""
    return (data_path("left") / str(number)).exists()


# --- what processes do -----------------------------------------------------------------------------------------------


def marked(found: list[Row], plan: Plan) -> list[Row]:
    """Let each row say which revision wrote it, behind what another pipeline's said."""
    return [{**row, "word": f"{row['word']} r{plan.revision}".strip()} for row in found]


def nothing(found: list[Row], plan: Plan) -> list[Row]:
    """Lose every row: an audit will notice."""
    return []


def runner(pipeline: str, *, files: int = 2, change: Any = marked) -> Runner:
    """Return what takes checkpoints of a pipeline through."""
    return Runner(PIPELINES[pipeline](), PreStaged(files, change=change))


def run(pipeline: str, number: int | None = None) -> None:
    """Take one checkpoint through; of intervals that of a number."""
    with runner(pipeline) as running:
        running.run(None if number is None else slot(number))


def replace(pipeline: str, checkpoint_id: int = 1, times: int = 1) -> None:
    """Replace a committed checkpoint."""
    with runner(pipeline) as running:
        for _ in range(times):
            running.replace(checkpoint_id)


def replace_first() -> None:
    """Replace the first checkpoint."""
    replace("words")


def rerun(number: int) -> None:
    """Run an interval that is committed already once more."""
    with runner("days") as running:
        running.run(slot(number), reprocess=True)


def replace_in_turn(checkpoints: Sequence[int], times: int, pace: Semaphore | None = None) -> None:
    """Replace one checkpoint after the other, again and again, with eight files each; each time when it may."""
    with runner("words", files=8) as running:
        for number in range(times):
            if pace is not None:
                assert pace.acquire(timeout=PATIENCE)
            running.replace(checkpoints[number % len(checkpoints)])


def refused() -> None:
    """Stage a replacement that an audit votes against."""
    with runner("words", change=nothing) as running:
        try:
            running.replace(1)
        except AuditFailed:
            return
    msg = "no audit voted no"
    raise AssertionError(msg)


def recover() -> None:
    """Finish what a crash left in any pipeline, from the record alone."""
    record = open_record()
    for declared in known(record):
        coordinator_of(record, declared).recover()
    record.engine.dispose()


def sweep() -> None:
    """Remove what is dead, in any pipeline."""
    record = open_record()
    for declared in known(record):
        for _ in sweep_all(record, declared):
            pass
    record.engine.dispose()


def known(record: PostgresRecord) -> list[Pipeline]:
    """Return every pipeline, from the record alone."""
    with record.engine.connect() as connection:
        names = queries.names(connection)
    return [load(record, name) for name in names]


# --- under which circumstances ---------------------------------------------------------------------------------------


def without_exchange(function: Callable[..., None], *arguments: Any) -> None:
    """Do it as where folders cannot change places in one step."""
    disk._renameat2 = None
    function(*arguments)


def stopping_before_the_exchange(function: Callable[..., None], *arguments: Any) -> None:
    """Do it, but stop once between the last look at what is visible and the step that replaces it."""
    exchange = disk.exchange

    def stop(one: Path, other: Path) -> bool:
        if "superseded" not in one.parts:  # there it is only tried whether folders can change places
            disk.exchange = exchange
            os.kill(os.getpid(), signal.SIGSTOP)
        return exchange(one, other)

    disk.exchange = stop
    function(*arguments)


def dying_while_removing(function: Callable[..., None], *arguments: Any) -> None:
    """Do it, but die when the first thing is about to be removed for good."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = Path.unlink = die  # type: ignore[assignment,method-assign]
    function(*arguments)


def decided_only(function: Callable[..., None], *arguments: Any) -> None:
    """Do it up to the commit point, in this process."""
    configure("commit.after=raise")
    try:
        function(*arguments)
    except FailpointError:
        return
    finally:
        configure("")
    msg = "it never came to the commit point"
    raise AssertionError(msg)
