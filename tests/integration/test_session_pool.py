"""Sessions in a target database are used again, by one user at a time, and never with anything left of the last one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg2
import pytest

from integration.test_postgres_sink import Staged, declared, rows
from twophase import committers
from twophase.core import failpoints
from twophase.core.checkpoint import Key
from twophase.core.errors import Busy
from twophase.core.failpoints import FailpointError
from twophase.core.ports import Outcome
from twophase.storage import database, session_pool
from twophase.storage.session_pool import POOL

#: Sessions that the driver which loads rows opens for a load.
LOADER = 2
#: What a promotion relies on, as a new session has it.
SETTINGS = (
    "search_path",
    "row_security",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "default_transaction_isolation",
    "synchronous_commit",
    "client_encoding",
    "role",
)


@pytest.fixture(autouse=True)
def _no_sessions_of_others(target: Any) -> Iterator[None]:
    POOL.close()
    yield
    POOL.close()


def backend() -> int:
    """Return the process that serves the session of `dwh`."""
    with database.transaction("dwh") as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        found: int = cursor.fetchone()[0]
    return found


def opened(target: Any) -> int:
    """Return how many sessions were ever opened in the target database, by the server's own count."""
    target.execute("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
    target.execute("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
    found: int = target.fetchone()[0]
    return found


def ours(target: Any) -> list[tuple[int, str]]:
    target.execute(
        "SELECT pid, state FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'twophase'"
    )
    return list(target.fetchall())


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the server has noticed."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def checkpoint(number: int, word: str = "w") -> Outcome:
    """Stage, check and promote one checkpoint."""
    staged = Staged(declared(), [(number, word)], Key("words", number, 1))
    staged.check()
    return staged.promote()


def test_ten_checkpoints_open_one_session(target: Any) -> None:
    """Besides those of the driver that loads the rows: one for its types, and one for each load."""
    checkpoint(1)
    ((pid, _),) = ours(target)
    before = opened(target)

    assert {checkpoint(number) for number in range(2, 12)} == {Outcome.PROMOTED}

    assert opened(target) - before == 10 * LOADER
    assert ours(target) == [(pid, "idle")]


def test_a_session_that_was_ended_meanwhile_is_replaced(target: Any) -> None:
    """The server may be restarted between two checkpoints; the second one does not even notice."""
    checkpoint(1)
    ((pid, _),) = ours(target)
    target.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    assert checkpoint(2) is Outcome.PROMOTED

    assert rows(target) == [(1, "w"), (2, "w")]
    assert backend() != pid


def test_a_session_that_does_not_answer_is_given_up(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that vanished without a word costs a wait, as a connection to it would."""
    monkeypatch.setattr(session_pool, "ANSWER_SECONDS", 0.2)
    pid = backend()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert backend() != pid
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("where", ["promote.marked", "promote.applied", "promote.durable"])
def test_a_session_in_which_something_failed_is_not_used_again(target: Any, where: str) -> None:
    sink = declared()
    staged = Staged(sink, [(1, "a")])
    pid = backend()
    failpoints.configure(f"{where}=raise")
    with pytest.raises(FailpointError):
        staged.promote()
    failpoints.configure("")

    eventually(lambda: pid not in dict(ours(target)))

    expected = Outcome.ALREADY_PROMOTED if where == "promote.durable" else Outcome.PROMOTED
    assert staged.promote() is expected
    assert rows(target) == [(1, "a")]


def test_a_session_that_an_error_of_the_server_ended_is_not_used_again(target: Any) -> None:
    pid = backend()
    with pytest.raises(psycopg2.Error), database.transaction("dwh") as cursor:
        cursor.execute("SELECT 1/0")

    assert backend() != pid


def test_what_the_last_user_left_in_a_session_is_gone(target: Any) -> None:
    """A trigger of the target runs in the promoter's session: it may set, lock and create there whatever it wants."""
    before = settings()
    pid = backend()
    with database.transaction("dwh") as cursor:
        cursor.execute("SET search_path = public; SET row_security = on; SET lock_timeout = 0")
        cursor.execute("SET default_transaction_isolation = 'serializable'; SET synchronous_commit = off")
        cursor.execute("SET session_replication_role = replica; SET client_encoding = 'LATIN1'; SET DateStyle = 'SQL'")
        cursor.execute("CREATE TEMP TABLE pg_class (oid int); SELECT pg_advisory_lock(17); LISTEN words")
        cursor.execute("PREPARE words AS SELECT 1; DECLARE words CURSOR WITH HOLD FOR SELECT 1")
        cursor.execute("SET role = 'pg_monitor'")

    target.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 17")
    assert target.fetchone() == (0,), "not even while it waits"
    assert settings() == before
    with database.session("dwh") as session, session.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), current_date, to_regclass('pg_temp.pg_class')")
        ((found, today, table),) = cursor.fetchall()
        assert (found, table) == (pid, None)
        assert today.year > 2000, "the driver reads dates in the ISO style"
        cursor.execute("SELECT (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors)")
        assert cursor.fetchall() == [(0, 0)]
        assert session.encoding == "UTF8"


def settings() -> dict[str, str]:
    with database.session("dwh") as session, session.cursor() as cursor:
        assert not session.autocommit
        cursor.execute("SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", (list(SETTINGS),))
        return dict(cursor.fetchall())


def test_a_role_that_the_connection_names_is_kept(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset gives the session the role that it was opened with, not the account's own."""
    uri = os.environ["AIRFLOW_CONN_DWH"]
    monkeypatch.setenv("AIRFLOW_CONN_DWH", f"{uri}{'&' if '?' in uri else '?'}options=-c%20role%3Dpg_monitor")

    pid = backend()
    for _ in range(2):
        with database.transaction("dwh") as cursor:
            cursor.execute("SELECT current_user, pg_backend_pid()")
            assert cursor.fetchall() == [("pg_monitor", pid)]


def test_a_transaction_that_was_left_open_is_rolled_back(target: Any) -> None:
    target.execute("CREATE TABLE public.words (id int)")
    pid = backend()
    with database.session("dwh") as session, session.cursor() as cursor:
        cursor.execute("INSERT INTO public.words VALUES (1)")

    assert ours(target) == [(pid, "idle")]
    assert rows(target, "SELECT id FROM public.words") == []


def test_autocommit_ends_with_its_user(target: Any) -> None:
    with database.session("dwh") as session:
        session.autocommit = True

    assert settings()


def test_two_threads_never_have_one_session(target: Any) -> None:
    """Each has its own while it works; one of them waits for the next user afterwards."""
    meet = threading.Barrier(4, timeout=30)

    def work(_: int) -> int:
        with database.transaction("dwh") as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            found: int = cursor.fetchone()[0]
            meet.wait()
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))

    assert len(set(found)) == 4
    eventually(lambda: len(ours(target)) == 1)
    assert backend() in found


def test_a_child_process_leaves_the_session_of_its_parent_alone(target: Any) -> None:
    """It opens its own, and neither its work nor its end reaches the parent's."""
    mine = backend()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(writing, str(backend()).encode())
            status = 0
        finally:
            POOL.close()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

    theirs = int(os.read(reading, 100))
    os.close(reading)
    os.close(writing)

    assert theirs != mine
    assert backend() == mine


def test_a_child_process_that_is_forked_inside_a_transaction_cannot_end_it(target: Any) -> None:
    target.execute("CREATE TABLE public.words (id int)")
    child = -1
    with database.transaction("dwh") as cursor:
        cursor.execute("INSERT INTO public.words VALUES (1)")
        child = os.fork()
        if not child:
            try:
                POOL.give_back("dwh", cursor.connection, keep=True)
                POOL.give_back("dwh", cursor.connection, keep=False)
                backend()
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    assert rows(target, "SELECT id FROM public.words") == [(1,)]


def test_an_idle_session_is_closed_though_nobody_asks(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pool, "IDLE_SECONDS", 0.05)

    backend()

    eventually(lambda: not ours(target))


def test_an_old_session_is_not_used_again(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an ALTER ROLE set holds soon, in a process that never rests, too."""
    pid = backend()
    monkeypatch.setattr(session_pool, "MOST_SECONDS", 0.0)

    assert backend() != pid


def test_a_connection_that_leads_elsewhere_gets_a_session_there(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = backend()
    uri = os.environ["AIRFLOW_CONN_DWH"]
    monkeypatch.setenv("AIRFLOW_CONN_DWH", f"{uri}{'&' if '?' in uri else '?'}connect_timeout=9")

    assert backend() != pid
    eventually(lambda: len(ours(target)) == 1)


def test_a_committer_that_is_closed_has_no_lock_any_more(target: Any) -> None:
    """Its session waits for the next checkpoint; another promoter does not wait for it."""
    first = committers.Postgres("job", "operator", conn_id="dwh")
    first.create_resource()
    with first, first.lock(1):
        first.commit(0, 1, 1)
        with committers.Postgres("job", "operator", conn_id="dwh") as other, pytest.raises(Busy), other.lock(0.05):
            pass
    before = opened(target)

    for _ in range(3):
        with committers.Postgres("job", "operator", conn_id="dwh") as again, again.lock(1):
            assert again.is_committed(0, 1, 1)

    assert opened(target) == before
    target.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    assert target.fetchone() == (0,)
