"""The database of a Postgres sink dies, loses its reply, is locked, full or in conflict: each promotion settles, once.

It has a server of its own, apart from the committer's. Each kill takes its server process and all that belong to it at
one instant, as a power failure would.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg2
import pytest
from adbc_driver_postgresql import dbapi as adbc
from sqlalchemy import make_url, text

from support.crashes import several_sinks
from support.faults.lossy_proxy import LOSE_COMMIT, LOSE_REPLY, Plan, proxy
from support.faults.processes import polls
from support.faults.statements import Watched, watching
from support.pipelines.factories import PreStaged, Row, counted, land_words
from support.servers.target import Server, asked, session
from twophase import Pipeline
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints
from twophase.core.checkpoint import Revision
from twophase.core.errors import PromotionPending, SinkUnavailable
from twophase.core.failpoints import FailpointError
from twophase.core.recovery import Decision, RollForward
from twophase.runner import Runner
from twophase.sinks.postgres import staging_table
from twophase.storage import database
from twophase.storage.session_pool import POOL
from twophase.verification import verify
from twophase.wiring import coordinator_of

pytestmark = pytest.mark.chaos

KINDS = tuple(kind for kind in several_sinks.TABLES if kind not in several_sinks.CONSTRAINED)
REPLACEABLE = ("postgres", "attached", "replaced")
EACH = pytest.mark.parametrize(
    "table",
    [pytest.param(kind, marks=() if kind == "postgres" else pytest.mark.slow) for kind in KINDS],
    indirect=True,
)


@pytest.fixture(scope="module")
def server_of_target() -> Iterator[Server]:
    server = Server()
    yield server
    server.remove()


@pytest.fixture
def target(server_of_target: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server_of_target.become_target(monkeypatch)
    return server_of_target


class Table:
    """A pipeline into one table of the target, and all that must be in it."""

    def __init__(self, kind: str, record: PostgresRecord) -> None:
        self.kind = kind
        self.record = record
        self.rows: list[Row] = []
        self.checkpoints = self.replacements = 0
        self.padding = ""

    @property
    def pipeline(self) -> Pipeline:
        return several_sinks.pipeline(self.kind)

    def take(self, *, again: bool = False) -> str | None:
        """Take the next checkpoint through, or replace the last one; return why it waits for its promotion."""
        if again:
            self.replacements += 1
            self.rows[-several_sinks.ROWS :] = self._renamed(self.rows[-several_sinks.ROWS :])
        else:
            self.rows += land_words(files=2, start=2 * self.checkpoints)
            self.checkpoints += 1
        return self.run(again=again)

    def run(self, *, again: bool = False) -> str | None:
        """Take through what there is to take."""
        stager = PreStaged(change=lambda rows, _: self._renamed(rows) if again or self.padding else rows)
        with Runner(self.pipeline, stager, record=self.record) as runner:
            try:
                assert runner.replace(self.checkpoints) if again else runner.run()
            except PromotionPending as waiting:
                return str(waiting)
        return None

    def _renamed(self, rows: list[Row]) -> list[Row]:
        return [{**row, "word": f"replacement {self.replacements}{self.padding}"} for row in rows]

    def decide(self) -> None:
        """Take the next checkpoint to its commit point, and no further."""
        failpoints.configure("commit.after=raise")
        with pytest.raises(FailpointError):
            self.take()
        failpoints.configure("")

    def recover(self) -> list[tuple[Revision, Decision]]:
        """Finish what is decided, from the record alone."""
        return coordinator_of(self.record, self.pipeline).recover(decided_only=True)

    def settle(self) -> None:
        """Finish what is decided; all of it is there, once, and nothing is left."""
        self.recover()
        with self.record.transaction() as tx:
            assert not tx.unfinished("words")
        with self.record.engine.connect() as connection:
            decided = connection.execute(text("SELECT count(*) FROM twophase.revision WHERE commit_seq > 0")).scalar()
        assert decided == self.checkpoints + self.replacements
        assert asked("SELECT count(*) FROM twophase_sinks.promoted") == [(decided,)]
        assert asked("SELECT tablename FROM pg_tables WHERE tablename ~ '^s_[0-9a-f]{8}_'") == []
        assert counted(several_sinks.held(self.kind)) == counted(several_sinks.expected(self.kind, self.rows))
        assert not any(verify(self.record, self.pipeline))


@pytest.fixture
def table(target: Server, record: PostgresRecord, request: pytest.FixtureRequest) -> Iterator[Table]:
    """Return a table with one checkpoint in it."""
    made = Table(request.param, record)
    assert made.take() is None
    yield made
    failpoints.configure("")


# --- at each statement ------------------------------------------------------------------------------------------------

Fault = Callable[[Server, Watched], object]
FAULTS: dict[str, Fault] = {
    "killed": lambda server, _: server.kill(),
    "cut": lambda _, session: asked(f"SELECT pg_terminate_backend({session.info.backend_pid}, 5000)"),
}


def meet(fault: Fault, table: Table, target: Server, *, again: bool, every: bool) -> None:
    """Promote once for each moment of a promotion, with the fault in it.

    A table with statistics is promoted to by other statements than one without. The server takes them when it likes,
    so they are taken half-way, and each promotion is judged by the moments that it had itself.
    """
    known: list[str] = []
    with watching(lambda what, _: known.append(what)):
        assert table.take(again=again) is None
    assert known.count("before COMMIT") == known.count("after COMMIT") == 1
    commit = known.index("before COMMIT") + 1
    inside = known.index("after INSERT INTO") + 1
    for nth in count(1) if every else (inside, commit, commit + 1):
        if every and nth == len(known) // 2:
            asked("ANALYZE")
        met: list[str] = []

        def moment(what: str, session: Watched, nth: int = nth, met: list[str] = met) -> None:
            met.append(what)
            if len(met) == nth:
                fault(target, session)

        with watching(moment):
            waits = table.take(again=again)
        target.back()

        committed = "after COMMIT" in met[:nth]
        assert (waits is None) == committed, f"moment {nth}, {met[: nth + 1][-1]}: {waits}"
        table.settle()
        if len(met) < nth:  # it had fewer moments: each has been met
            assert nth > commit + 1
            return


def _cases() -> Iterator[Any]:
    few = {"postgres", "attached again"}
    for name in (*KINDS, *(f"{kind} again" for kind in REPLACEABLE)):
        for fault in FAULTS:
            arguments = (name.split()[0], name.endswith("again"), fault)
            if fault == "killed" and name in few:
                yield pytest.param(*arguments, False, id=f"{name}-{fault}")
            yield pytest.param(*arguments, True, id=f"{name}-{fault}-everywhere", marks=pytest.mark.slow)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("table", "again", "fault", "every"), list(_cases()), indirect=["table"])
def test_a_promotion_survives_its_database_at_any_statement(
    table: Table, again: bool, fault: str, every: bool, target: Server
) -> None:
    meet(FAULTS[fault], table, target, again=again, every=every)


@EACH
def test_staged_rows_survive_the_death_of_the_database_after_the_vote(table: Table, target: Server) -> None:
    table.decide()

    target.kill()
    target.back()

    table.settle()


# --- a COMMIT, or the reply to it -------------------------------------------------------------------------------------


@pytest.fixture
def plan(target: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """Put a proxy before the target that loses what the plan says."""
    made = Plan()
    url = make_url(target.dsn)
    assert url.port is not None
    with proxy(url.port, made) as port:
        behind = os.environ[several_sinks.TARGET].replace(f":{url.port}/", f":{port}/")
        monkeypatch.setenv(several_sinks.TARGET, behind)
        monkeypatch.setenv("AIRFLOW_CONN_DWH", behind)
        yield made


@pytest.mark.parametrize("how", [LOSE_COMMIT, LOSE_REPLY], ids=["commit", "reply"])
@pytest.mark.parametrize(
    ("table", "every"),
    [("postgres", False), *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS)],
    indirect=["table"],
)
def test_a_lost_commit_or_reply_of_any_transaction_is_found_out(
    how: str, plan: Plan, table: Table, every: bool
) -> None:
    """Of staging: it is staged again. Of the promotion: the marker tells."""
    plan.lose(how, 0)
    assert table.take() is None
    known = plan.seen
    assert known > len(("prepare", "open", "load", "seal", "check", "promote"))
    for nth in range(1, known + 1) if every else (known // 2, known):
        plan.lose(how, nth)
        try:
            waits = table.take()
        except (SinkUnavailable, psycopg2.OperationalError, adbc.OperationalError, adbc.InternalError):
            assert nth < known
            waits = table.run()

        assert plan.seen >= nth
        assert (waits is None) == (nth < known or how == LOSE_REPLY), f"COMMIT {nth} of {known}: {waits}"
        table.settle()


# --- in its way -------------------------------------------------------------------------------------------------------


WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@EACH
def test_a_locked_table_is_promoted_later(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT", "200ms")
    with session() as somebody:
        # Who may still look at the table stages; a lock that forbids that, too, is met before anything is recorded.
        somebody.execute(f"LOCK TABLE {several_sinks.TABLES[table.kind]} IN SHARE ROW EXCLUSIVE MODE")

        if table.kind in several_sinks.TRIED:
            with pytest.raises(SinkUnavailable, match="lock timeout; nothing was changed"):
                table.take()
        else:
            assert "lock timeout" in (table.take() or "")

    if table.kind in several_sinks.TRIED:
        assert table.run() is None
    table.settle()


@EACH
def test_whoever_is_the_victim_of_a_deadlock_promotes_later(table: Table) -> None:
    """Somebody locks the table, then wants the markers; the promoter has those, and wants the table."""
    threads: list[Thread] = []
    with session() as somebody:
        somebody.execute("SET deadlock_timeout = '1h'")  # the promoter finds out, and gives way

        def moment(what: str, _: Watched) -> None:
            if what == "after INSERT INTO" and not threads:
                somebody.execute(f"LOCK TABLE {several_sinks.TABLES[table.kind]} IN ACCESS EXCLUSIVE MODE")
                threads.append(Thread(target=somebody.execute, args=["LOCK TABLE twophase_sinks.promoted"]))
                threads[0].start()
                assert any(asked(WAITING) == [(1,)] for _ in polls(30))

        with watching(moment):
            assert "deadlock detected" in (table.take() or "")
        threads[0].join()

    table.settle()


@pytest.mark.parametrize("table", ["upserted", "retracted"], indirect=True)
def test_who_rebuilds_the_indexes_waits_for_the_promotion(table: Table) -> None:
    """They get in each other's way only if the promotion has read the table before it locks it for its changes."""
    threads: list[Thread] = []

    def moment(what: str, _: Watched) -> None:
        if what == "before MERGE INTO" and not threads:
            threads.append(Thread(target=asked, args=[f"REINDEX TABLE {several_sinks.TABLES[table.kind]}"]))
            threads[0].start()
            assert any(asked(WAITING) == [(1,)] for _ in polls(30))

    with watching(moment):
        assert table.take() is None
    threads[0].join()

    table.settle()


@EACH
def test_who_waits_for_another_promoter_finds_its_marker_in_a_serializable_database(
    table: Table, target: Server
) -> None:
    """Where a transaction would see only what was there when it began, the other one's marker would be a conflict."""
    asked(f"ALTER DATABASE {make_url(target.dsn).database} SET default_transaction_isolation = 'serializable'")
    threads: list[Thread] = []
    told: list[Decision] = []

    def other() -> None:
        told.extend(decision for _, decision in table.recover())

    def moment(what: str, _: Watched) -> None:
        if what == "after INSERT INTO" and not threads:
            threads.append(Thread(target=other))
            threads[0].start()
            assert any(asked(WAITING) == [(1,)] for _ in polls(30))

    with watching(moment):
        assert table.take() is None
    threads[0].join()

    assert told == [RollForward()]
    table.settle()


@pytest.fixture
def small(target: Server) -> Iterator[Path]:
    """Mount a small file system, and make a tablespace of the target's in it."""
    folder = target.home / "small"
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        (folder / "data").mkdir()
        owner = (target.home / "postgres" / "data").stat()
        os.chown(folder / "data", owner.st_uid, owner.st_gid)
        asked(f"CREATE TABLESPACE small LOCATION '{folder / 'data'}'")
        yield folder
        asked("ALTER TABLE IF EXISTS words SET TABLESPACE pg_default")
        asked("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill a file system to its last byte."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


@pytest.mark.parametrize("table", ["postgres"], indirect=True)
def test_a_full_disk_is_promoted_to_when_there_is_room_again(small: Path, table: Table) -> None:
    asked("ALTER TABLE words SET (fillfactor = 10)")  # what comes needs pages of its own
    asked("ALTER TABLE words SET TABLESPACE small")
    with full(small):
        assert "No space left on device" in (table.take() or "")
        table.recover()

    table.settle()


@pytest.mark.parametrize("table", ["postgres"], indirect=True)
def test_a_full_disk_while_rows_are_staged_is_no_fault_of_the_rows(small: Path, table: Table, target: Server) -> None:
    asked(f"ALTER DATABASE {make_url(target.dsn).database} SET default_tablespace = 'small'")
    POOL.close()  # only a new session has the setting
    table.padding = os.urandom(500_000).hex()
    with pytest.raises(adbc.Error) as failed:
        table.take()
    table.padding = ""

    assert isinstance(staging_table._explained("checkpoint words/2 r1", failed.value), SinkUnavailable)
    assert table.run() is None
    asked(f"ALTER DATABASE {make_url(target.dsn).database} RESET default_tablespace")
    table.settle()
