"""Others at work in the tables of a pipeline: writers with rows of their own, and readers of each engine.

Strangers write rows with negative ids and take only such rows out again; they also rewrite, optimize, vacuum and expire
whatever is there. So of the pipeline's own rows a reader must find, at any moment, whole checkpoints of one revision.
"""

from __future__ import annotations

import fcntl
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import psycopg2
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyiceberg.exceptions import CommitFailedException, ValidationException

from support.crashes import several_sinks
from support.faults.processes import polls
from support.pipelines.factories import PreStaged, Row, land_words
from support.sinks.log_tables import opened, restored_as_the_page_says, set_back, table
from twophase.core.coordinator import Coordinator
from twophase.core.errors import ConfigError, ManifestMismatch, Parked
from twophase.core.hindrances import Hindrance
from twophase.core.settings import home
from twophase.runner import Runner
from twophase.sinks.log_tables.base import LogTableSink

KINDS = "upserted+delta+iceberg"
TABLE = several_sinks.TABLES["upserted"]
#: A file that lets nobody begin anything at the tables.
PAUSE = "pause"
#: What a library says when another writer was faster.
OVERTAKEN = (CommitFailedError, CommitFailedException, ValidationException)
Look = Callable[[], Iterable[tuple[int, str]]]


def lake(kind: str) -> LogTableSink:
    found = several_sinks.DECLARED[kind]()
    assert isinstance(found, LogTableSink)
    return found


def target() -> str:
    return os.environ[several_sinks.TARGET].replace("postgres://", "postgresql://")


# --- the pipeline itself ---------------------------------------------------------------------------------------------


def work(rounds: int, seed: int) -> None:
    """Take checkpoints through, and every other time another revision of the one before; say what became of each."""
    chosen = random.Random(seed)
    with Runner(several_sinks.pipeline(KINDS), PreStaged(change=several_sinks._marked)) as runner:
        for number in range(1, rounds):
            if chosen.random() < 0.5:
                told(_replace(runner, chosen))
                continue
            land_words(files=2, start=2 * number)
            runner.run()
            told("committed")


def _replace(runner: Runner, chosen: random.Random) -> str:
    """Replace the latest, or one that is not: keys that came later stand in its way, and so do rewritten files."""
    found = runner.coordinator.transact(lambda tx: tx.newest("words", None))
    assert found is not None
    earlier = found.checkpoint_id > 1 and chosen.random() < 0.2
    try:
        runner.replace(found.checkpoint_id - earlier)
    except (ManifestMismatch, ConfigError):
        return "refused"
    except Parked:  # it was rewritten between the vote and the promotion
        _restore(runner.coordinator)
        return "restored"
    return "replaced"


def _restore(coordinator: Coordinator) -> None:
    """Do what a parked revision's message says, as somebody who looks after the tables: restore, and recover."""
    (home() / PAUSE).touch()
    with at_tables(fcntl.LOCK_EX):
        (parked,) = coordinator.transact(lambda tx: tx.unfinished("words"))
        with suppress(Parked):
            coordinator.finish(parked.key)  # what the strangers did meanwhile counts, too
        (parked,) = coordinator.transact(lambda tx: tx.unfinished("words"))
        assert set(parked.hindrances.values()) == {Hindrance.REWRITTEN}
        for kind in parked.hindrances:
            _RESTORE[kind](f"/{parked.checkpoint_id:08d}.r")
        coordinator.finish(parked.key)
    (home() / PAUSE).unlink()


@contextmanager
def at_tables(how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Be at the tables together with others, or alone: nobody reads or writes while a table is restored."""
    with (home() / "tables.lock").open("ab") as file:
        fcntl.flock(file, how)
        yield


def _restore_delta(replaced: str) -> None:
    found = opened(lake("delta"))
    version = next(
        version
        for version in range(found.version(), 0, -1)
        if any(replaced in uri for uri in DeltaTable(found.table_uri, version=version).file_uris())
    )
    restored_as_the_page_says(found, version)


def _restore_iceberg(replaced: str) -> None:
    found = table(lake("iceberg"))
    snapshot = next(
        snapshot
        for snapshot in reversed(found.snapshots())
        if any(replaced in task.file.file_path for task in found.scan(snapshot_id=snapshot.snapshot_id).plan_files())
    )
    set_back(found, snapshot.snapshot_id)


_RESTORE = {"delta": _restore_delta, "iceberg": _restore_iceberg}


def told(what: str) -> None:
    print(what, flush=True)  # noqa: T201 - for the test that waits


def assist(flag: Path) -> None:
    """Promote whatever is decided, as recovery does, until it is told to end."""
    with Runner(several_sinks.pipeline(KINDS), PreStaged()) as runner:
        for _ in until(flag):
            with at_tables():
                runner.coordinator.recover(decided_only=True)


def until(flag: Path) -> Iterable[int]:
    """Count until the flag is there, but not while a table is restored."""
    for number, _ in zip(count(1), polls(3600), strict=False):
        if flag.exists():
            return
        if not (home() / PAUSE).exists():
            yield number


# --- strangers that write --------------------------------------------------------------------------------------------


def row(number: int) -> Row:
    return {"id": -number, "word": "stranger", "frequency": 0}


def disturb(kind: str, flag: Path, seed: int) -> None:
    """Do one thing after the other to a table; one that was overtaken by a commit is not done."""
    chosen = random.Random(seed)
    deeds = DEEDS[kind]
    names, weights = zip(*((name, weight) for name, (weight, _) in deeds.items()), strict=True)
    for number in until(flag):
        name = chosen.choices(names, weights)[0]
        try:
            with at_tables():
                deeds[name][1](number)
            told(name)
        except OVERTAKEN:
            told(f"{name} overtaken")


def _delta(deed: Callable[[DeltaTable, int], object]) -> Callable[[int], object]:
    return lambda number: deed(opened(lake("delta")), number)


def _append_delta(found: DeltaTable, number: int) -> None:
    write_deltalake(found, pa.Table.from_pylist([row(number)]), mode="append")


def _iceberg(deed: Callable[[Any, int], object]) -> Callable[[int], object]:
    return lambda number: deed(table(lake("iceberg")), number)


def _postgres(*statements: str) -> Callable[[int], object]:
    def deed(number: int) -> None:
        with closing(psycopg2.connect(target())) as session, session.cursor() as cursor:
            session.autocommit = True
            for statement in statements:
                cursor.execute(statement.format(table=TABLE, id=-number))

    return deed


#: What each of them does, and how often compared with the others.
DEEDS: Mapping[str, Mapping[str, tuple[int, Callable[[int], object]]]] = {
    "delta": {
        "append": (80, _delta(_append_delta)),
        "delete": (40, _delta(lambda found, number: found.delete(f"id < 0 AND id > -{number} AND id % 2 = 0"))),
        "optimize": (1, _delta(lambda found, _: found.optimize.compact())),
        "vacuum": (
            10,
            _delta(lambda found, _: found.vacuum(0, dry_run=False, enforce_retention_duration=False)),
        ),
    },
    "iceberg": {
        "append": (80, _iceberg(lambda found, number: found.append(pa.Table.from_pylist([row(number)])))),
        "delete": (40, _iceberg(lambda found, number: found.delete(f"id < 0 and id > -{number}"))),
        "rewrite": (1, _iceberg(lambda found, _: found.overwrite(found.scan().to_arrow()))),
    },
    "upserted": {
        "append": (80, _postgres("INSERT INTO {table} VALUES ({id}, 'stranger', 0) ON CONFLICT DO NOTHING")),
        "delete": (40, _postgres("DELETE FROM {table} WHERE id < 0 AND id > {id}")),
        "optimize": (1, _postgres("REINDEX TABLE {table}", "VACUUM FULL {table}")),
        "vacuum": (10, _postgres("VACUUM ANALYZE {table}")),
    },
}


# --- readers ---------------------------------------------------------------------------------------------------------


def _arrow_rows(found: pa.Table) -> list[tuple[int, str]]:
    return list(zip(found["id"].to_pylist(), found["word"].to_pylist(), strict=True))


def _by_duckdb() -> list[tuple[int, str]]:
    words = opened(lake("delta")).to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("words", words)
        return connection.execute("SELECT id, word FROM words").fetchall()


def _by_psycopg2() -> list[tuple[int, str]]:
    with closing(psycopg2.connect(target())) as session, session.cursor() as cursor:
        cursor.execute(f"SELECT id, word FROM {TABLE}")
        return list(cursor.fetchall())


def _by_adbc() -> list[tuple[int, str]]:
    with dbapi.connect(target()) as session, session.cursor() as cursor:
        cursor.execute(f"SELECT id, word FROM {TABLE}")
        return _arrow_rows(cursor.fetch_arrow_table())


READERS: Mapping[str, Look] = {
    "polars of delta": lambda: pl.read_delta(lake("delta").location()).select("id", "word").rows(),
    "duckdb of delta": _by_duckdb,
    "pyiceberg": lambda: _arrow_rows(table(lake("iceberg")).scan(selected_fields=("id", "word")).to_arrow()),
    "psycopg2": _by_psycopg2,
    "adbc": _by_adbc,
}


def read(flag: Path) -> None:
    """Read every table in turn, and say what is wrong with what was seen."""
    seen: dict[str, int] = defaultdict(int)
    for _ in until(flag):
        for name, look in READERS.items():
            try:
                with at_tables():
                    found = list(look())
            except Exception as error:  # noqa: BLE001 - said, and judged by the test
                told(f"failed {name}: {type(error).__name__} {error}".replace("\n", " "))
                continue
            problems = wrong(found)
            whole = len({number // several_sinks.ROWS for number, _ in found if number >= 0})
            if whole < seen[name]:
                problems.append(f"{seen[name]} checkpoints were there, {whole} are")
            seen[name] = max(whole, seen[name])
            for problem in problems:
                told(f"wrong {name}: {problem}")
            told(f"read {name}")


def wrong(found: Iterable[tuple[int, str]]) -> list[str]:
    """Say which checkpoint is not there whole, once, and of one revision."""
    checkpoints: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for number, word in found:
        if number >= 0:
            checkpoints[number // several_sinks.ROWS].append((number, word.partition(" ")[2]))
    problems = []
    for first, rows in checkpoints.items():
        ids, revisions = {number for number, _ in rows}, {revision for _, revision in rows}
        if (len(rows), len(ids), len(revisions)) != (several_sinks.ROWS, several_sinks.ROWS, 1):
            problems.append(
                f"rows from {first * several_sinks.ROWS}: {len(rows)}, {len(ids)} ids, of {sorted(revisions)}"
            )
    return problems
