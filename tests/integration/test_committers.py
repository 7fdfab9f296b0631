"""Committers: what was committed is remembered by membership, durably, and only one promoter at a time sends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from support.faults.processes import PATIENCE, call, polls, start, stopped_at_end
from support.sinks import senders
from twophase import committers
from twophase.committers import CheckpointCommitter
from twophase.core import connections
from twophase.core.errors import Busy, ConfigError, SinkUnavailable
from twophase.sinks.write_ahead.committers import Mark, declared

Make = Callable[[str, str], CheckpointCommitter]


@pytest.fixture(params=["postgres", "file", "own"])
def make(request: pytest.FixtureRequest, home: Path) -> Make:
    """Return what builds a committer for a job and an operator, as any process would."""
    kinds: dict[str, CheckpointCommitter] = {
        "postgres": committers.Postgres(),
        "file": committers.File(),
        "own": senders.Sqlite(path=str(home / "own.db")),
    }
    kind = kinds[request.param]
    kind.create_resource()
    return kind.of


def test_what_was_committed_is_remembered_by_whoever_comes_next(make: Make) -> None:
    with make("orders", "mail") as first:
        first.commit(0, 17, 1)
        first.commit(0, 17, 1)

    with make("orders", "mail") as second:
        assert second.is_committed(0, 17, 1)


@pytest.mark.parametrize(
    ("job", "operator", "subtask", "checkpoint", "revision"),
    [
        ("orders", "mail", 1, 17, 1),
        ("orders", "mail", 0, 16, 1),
        ("orders", "mail", 0, 18, 1),
        ("orders", "mail", 0, 17, 2),
        ("orders", "mail", -1, 17, 1),
        ("orders", "other", 0, 17, 1),
        ("other", "mail", 0, 17, 1),
    ],
)
def test_committed_is_membership_and_no_high_water_mark(  # noqa: PLR0917 - the parts of the key
    make: Make, job: str, operator: str, subtask: int, checkpoint: int, revision: int
) -> None:
    """R6: neither an older checkpoint nor another revision, subtask, operator or job counts."""
    with make("orders", "mail") as committer:
        committer.commit(0, 17, 1)

    with make(job, operator) as other:
        assert not other.is_committed(subtask, checkpoint, revision)


def test_creating_what_it_needs_twice_changes_nothing(make: Make) -> None:
    with make("orders", "mail") as committer:
        committer.commit(0, 17, 1)

    make("orders", "mail").create_resource()

    with make("orders", "mail") as committer:
        assert committer.is_committed(0, 17, 1)


def test_the_record_keeps_all_that_builds_an_equal_one(make: Make) -> None:
    committer = make("", "")

    again = CheckpointCommitter.load(committer.declaration())

    assert type(again) is type(committer)
    assert again.config() == committer.config()


def test_only_one_process_at_a_time_sends_and_the_others_are_told_who(make: Make, home: Path) -> None:
    holder = start(senders.hold, make("orders", "mail"), str(home / "ready"), log=home / "holder.log")
    with stopped_at_end(holder):
        pid = _said(home / "ready")
        with (
            make("orders", "mail") as mine,
            pytest.raises(Busy, match=rf"another promoter is sending: .*:{pid}"),
            mine.lock(0.1),
        ):
            pytest.fail("two hold it")
        with make("orders", "other") as other, other.lock(0.1):
            pass  # another operator has a lock of its own


def test_the_lock_of_a_killed_process_is_free(make: Make, home: Path) -> None:
    holder = start(senders.hold, make("orders", "mail"), str(home / "ready"), log=home / "holder.log")
    with stopped_at_end(holder):
        _said(home / "ready")
        holder.process.kill()
        assert holder.wait() == -signal.SIGKILL

        with make("orders", "mail") as mine, mine.lock(PATIENCE):
            mine.commit(0, 17, 1)


def test_a_lock_is_given_back_at_the_end_also_after_an_error(make: Make) -> None:
    with make("orders", "mail") as first, pytest.raises(ConnectionError), first.lock(1.0):
        raise ConnectionError

    with make("orders", "mail") as second, second.lock(0.1):
        pass


def _said(path: Path) -> str:
    for _ in polls(PATIENCE):
        if path.exists() and path.read_text():
            return path.read_text()
    msg = f"{path} was not written"
    raise AssertionError(msg)


# --- Postgres --------------------------------------------------------------------------------------------------------


def test_whoever_lost_the_session_has_lost_the_lock_and_can_neither_ask_nor_commit(home: Path, dsn: str) -> None:
    committer = committers.Postgres("orders", "mail")
    committer.create_resource()
    engine = create_engine(dsn, isolation_level="AUTOCOMMIT")
    with committer, committer.lock(1.0):
        with engine.connect() as connection:
            connection.execute(
                text("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE :name"),
                {"name": "twophase write-ahead%"},
            )

        with pytest.raises(SinkUnavailable, match=r"committers\.Postgres of orders/mail"):
            committer.is_committed(0, 17, 1)
        with pytest.raises(SinkUnavailable):
            committer.commit(0, 17, 1)
        with committers.Postgres("orders", "mail") as other, other.lock(1.0):
            assert not other.is_committed(0, 17, 1)
    engine.dispose()


def test_a_database_of_ones_own_is_named_by_a_connection(dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", dsn.replace("postgresql+psycopg2", "postgres"))
    monkeypatch.delenv("TWOPHASE_DSN")
    kept = committers.Postgres("orders", "mail", conn_id="shop", table="Shop's.sent rows")
    kept.create_resource()

    with kept:
        kept.commit(3, 17, 1)

    engine = create_engine(dsn)
    with engine.connect() as connection:
        rows = connection.execute(
            text("""SELECT job_id, operator_id, subtask_id, checkpoint_id, revision
            FROM "Shop's"."sent rows" """)
        ).all()
    engine.dispose()
    assert [tuple(row) for row in rows] == [("orders", "mail", 3, 17, 1)]


def test_a_table_that_a_crash_empties_is_refused(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembers would all be sent again; the remedy that is named helps."""
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
    committer = committers.Postgres(conn_id="dwh")
    committer.create_resource()
    engine = create_engine(dsn, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("ALTER TABLE twophase_write_ahead.committed SET UNLOGGED"))
        with pytest.raises(ConfigError, match=r"is UNLOGGED, .*: ALTER TABLE .*committed\S* SET LOGGED") as refused:
            committer.create_resource()
        connection.execute(text(str(refused.value).rpartition(": ")[2]))
    engine.dispose()
    committer.create_resource()


def test_a_database_that_is_down_cannot_tell(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://nobody:hidden@127.0.0.1:1/nothing")

    with pytest.raises(SinkUnavailable, match=r"table twophase_write_ahead\.committed: .*refused") as down:
        committers.Postgres("orders", "mail").open()

    assert "hidden" not in str(down.value)


def test_a_table_that_may_not_be_created_is_an_error_for_a_person(
    dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody else has created it, no right to create anything is needed."""
    engine = create_engine(dsn, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("DROP ROLE IF EXISTS sender_only"))
        connection.execute(text("CREATE ROLE sender_only LOGIN PASSWORD 'known'"))
        try:
            place = dsn.rpartition("@")[2]
            monkeypatch.setenv("AIRFLOW_CONN_SHOP", f"postgres://sender_only:known@{place}")
            kept = committers.Postgres("orders", "mail", conn_id="shop")
            with pytest.raises(ConfigError, match=r"permission denied .*; create it by hand, or grant what is missing"):
                kept.create_resource()

            committers.Postgres().create_resource()
            connection.execute(text("GRANT USAGE ON SCHEMA twophase_write_ahead TO sender_only"))
            connection.execute(text("GRANT SELECT, INSERT ON twophase_write_ahead.committed TO sender_only"))
            kept.create_resource()
            with kept, kept.lock(1.0):
                kept.commit(0, 17, 1)
                assert kept.is_committed(0, 17, 1)
        finally:
            connection.execute(text("DROP OWNED BY sender_only"))
            connection.execute(text("DROP ROLE sender_only"))
    engine.dispose()


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: committers.Postgres(table="committed"), "expected `schema.name`"),
        (lambda: declared("support.sinks.senders:NoSender"), "expected a subclass"),
        (lambda: declared(17), "expected one of twophase.committers"),  # type: ignore[arg-type]
        (lambda: committers.Postgres(conn_id="nowhere").open(), "AIRFLOW_CONN_NOWHERE"),
    ],
)
def test_what_cannot_be_a_committer_is_refused(build: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build()


# --- File ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(home: Path) -> committers.File:
    made = committers.File("orders", "mail")
    made.create_resource()
    return made


def test_one_small_file_per_subtask_holds_what_is_on_its_way(file: committers.File, home: Path) -> None:
    with file:
        for checkpoint in (17, 18):
            for subtask in (0, 1):
                file.commit(subtask, checkpoint, 1)
        file.forget(Mark(17, 1))
        left = list(file.marks())

    folder = home / "data/committers/orders/mail"
    assert left == [(18, 1)]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"subtask.0": "18 1\n", "subtask.1": "18 1\n"}


def test_what_is_all_forgotten_leaves_no_file(file: committers.File, home: Path) -> None:
    with file:
        file.commit(0, 17, 1)
        file.forget(Mark(17, 1))

    assert list((home / "data/committers/orders/mail").iterdir()) == []


def test_a_folder_that_is_away_cannot_tell(file: committers.File, home: Path) -> None:
    """Nothing would seem to have been sent."""
    (home / "data/committers").rename(home / "data/away")

    with pytest.raises(SinkUnavailable, match="is it mounted"):
        file.open()


def test_a_file_that_was_altered_cannot_tell(file: committers.File, home: Path) -> None:
    with file:
        file.commit(0, 17, 1)
    (home / "data/committers/orders/mail/subtask.0").write_text("17 1\n18")

    with file, pytest.raises(SinkUnavailable, match="something else than lines of checkpoint and revision"):
        file.is_committed(0, 17, 1)


def _commit_all(path: str, subtask: int, first: int) -> None:
    with committers.File("orders", "mail", path=path) as file:
        for checkpoint in range(first, first + 50):
            file.commit(subtask, checkpoint, 1)


def test_two_processes_that_commit_to_one_file_lose_nothing_of_each_other(file: committers.File, home: Path) -> None:
    path = str(home / "data/committers")
    both = [start(_commit_all, path, 0, first, log=home / f"{first}.log") for first in (1, 51)]
    with stopped_at_end(*both):
        assert [child.wait() for child in both] == [0, 0]

    with file:
        assert [mark.checkpoint for mark in file.marks()] == list(range(1, 101))


def test_a_commit_that_was_killed_leaves_the_file_whole(file: committers.File, home: Path) -> None:
    call(_commit_all, str(home / "data/committers"), 0, 1, log=home / "first.log")
    (home / "data/committers/orders/mail/.subtask.0.torn").write_text("1 1\n2")

    with file:
        assert len(list(file.marks())) == 50
        file.forget(Mark(1, 1))

    assert [path.name for path in (home / "data/committers/orders/mail").iterdir()] == ["subtask.0"]


def test_a_process_that_has_not_opened_the_record_is_told_to_name_a_connection(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Spark job, for example: it has no way to the committer database, and one that is named is enough."""
    monkeypatch.setattr(connections, "committer_dsn", connections.no_committer)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", dsn.replace("postgresql+psycopg2", "postgres"))

    with pytest.raises(ConfigError, match="not known in a process that has not opened the record; name a connection"):
        committers.Postgres("orders", "mail").create_resource()
    committers.Postgres("orders", "mail", conn_id="shop").create_resource()
