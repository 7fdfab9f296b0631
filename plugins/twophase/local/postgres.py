"""The embedded PostgreSQL: a real server below `TWOPHASE_HOME`, for one machine; `up` and commands start it.

    postgres/data       the cluster; appears complete or not at all
    postgres/password   of the role `twophase`, readable by its owner only
    postgres/port       the port it had last, taken again if it is free
    postgres/log        what the server says
    postgres/lock       held while somebody creates, starts or stops it

It listens on 127.0.0.1 only, without a unix socket, asks for a password (scram-sha-256), and is durable. Every process
gets the same server, which outlives the process that started it. Whatever is killed at whatever moment, the next
`ensure()` works: the cluster is made in a folder of its own and then renamed. A server counts as running if a process
that was started on this data folder accepts connections, not because a file says so.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from twophase.core import settings
from twophase.core.errors import ConfigError, StoreUnavailable
from twophase.local import postgres_programs, shared_files
from twophase.local import server_account as accounts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from twophase.local.server_account import Account

ROLE = "twophase"
DATABASE = "twophase"

_HOST = "127.0.0.1"
_POLL = 0.05
#: Where services keep their state; used only by root, and only if the run folder is closed to the server's account.
_ELSEWHERE = Path("/var/lib/twophase")
_START_SECONDS = 90.0
#: Longer than anything its holder does, so that it ends only when a holder hangs.
_LOCK_SECONDS = 240.0
_LOG_BYTES = 8 * 1024 * 1024
#: No process has it on any system: a pid file that names it is stale to PostgreSQL too.
_NO_PID = 2**31 - 1
#: Why PostgreSQL refuses to start when it has only to wait: remains of a killed server, or another one that starts.
_PASSES = re.compile(r"shared memory block .* is still in use|lock file .* already exists")

_CONF = """\
# Written at each start; put your own settings into postgresql.conf, below the include.
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
password_encryption = 'scram-sha-256'
max_connections = 200
shared_buffers = '64MB'
max_wal_size = '512MB'
fsync = on
synchronous_commit = on
full_page_writes = on
logging_collector = off
log_destination = 'stderr'
log_line_prefix = '%m [%p] '
lc_messages = 'C'
timezone = 'UTC'
log_timezone = 'UTC'
"""
_HBA = "# Only over the loopback interface, only with the password.\nhost all all 127.0.0.1/32 scram-sha-256\n"


class Status(TypedDict):
    """What `status()` tells; nothing in it is secret."""

    running: bool
    pid: int | None
    port: int | None
    version: str
    data: str


@dataclass(frozen=True)
class _Postmaster:
    """A live server process on our data folder; it has no port before it has written one."""

    pid: int
    port: int | None


def ensure() -> str:
    """Return the DSN of the server, which is created and started first when need be."""
    dsn = running()
    if dsn is not None:
        return dsn
    _settle(settings.home() / "postgres")
    folder = _folder()
    with _locked(folder) as lock:
        account = accounts.of(folder / "data")
        if account.switches:
            folder.chmod(folder.stat().st_mode | 0o711)
        accounts.check(account, folder, postgres_programs.program("postgres"))
        _sweep(folder)
        if not (folder / "data").exists():
            _create(folder, account, lock)
        _check_version(folder)
        return _dsn(folder, _start(folder, account))


def running() -> str | None:
    """Return the DSN of the server if it accepts connections; never start it."""
    folder = _folder()
    postmaster = _postmaster(folder)
    if postmaster is None or not _accepts(postmaster):
        return None
    return _dsn(folder, postmaster)


def pid() -> int | None:
    """Return the pid of the server process, whether or not it accepts connections already."""
    postmaster = _postmaster(_folder())
    return postmaster.pid if postmaster else None


def stop() -> bool:
    """Stop the server, ending its connections, and tell whether there was one to stop."""
    folder = _folder()
    if not folder.exists():
        return False
    with _locked(folder):
        if _postmaster(folder) is None:
            return False
        command = ["pg_ctl", "stop", "-D", str(folder / "data"), "-m", "fast", "-w", "-t", str(int(_START_SECONDS))]
        done = postgres_programs.run(command, accounts.of(folder / "data"))
        if _postmaster(folder) is not None:
            why = postgres_programs.last_line(done.stderr)
            msg = f"embedded postgres: did not stop within {_START_SECONDS:.0f} s: {why}; see {folder / 'log'}"
            raise StoreUnavailable(msg)
        return True


def status() -> Status:
    """Describe the server without starting it."""
    folder = _folder()
    postmaster = _postmaster(folder)
    accepts = postmaster is not None and _accepts(postmaster)
    return Status(
        running=accepts,
        pid=postmaster.pid if postmaster else None,
        port=postmaster.port if postmaster else None,
        version=postgres_programs.run(["postgres", "--version"]).stdout.split()[-1],
        data=str(folder / "data"),
    )


def create_database(name: str) -> str:
    """Create a further database on the running server unless it is there, and return its DSN."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name):
        msg = f"database {name!r}: expected lower-case letters, digits and _, at most 63 of them"
        raise ConfigError(msg)
    folder = _folder()
    with _locked(folder):
        postmaster = _postmaster(folder)
        if postmaster is None or not _accepts(postmaster):
            msg = f"database {name}: the embedded postgres is not running; start it with: twophase up"
            raise StoreUnavailable(msg)
        # The name is checked above; there is no CREATE DATABASE IF NOT EXISTS.
        if not _sql(folder, postmaster, f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):  # noqa: S608
            _sql(folder, postmaster, f'CREATE DATABASE "{name}"')
        return _dsn(folder, postmaster, name)


# --- the folder ------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    """Return the folder of everything, by its real name: a server is recognised by it."""
    folder = Path(os.path.realpath(settings.home() / "postgres"))
    if re.search(r'["$`\\\n\r]', str(folder)):
        msg = f"TWOPHASE_HOME: expected a folder without quotes, $, \\ and line breaks, found {str(folder)!r}"
        raise ConfigError(msg)
    return folder


def _locked(folder: Path) -> AbstractContextManager[int]:
    """Hold the lock of the server."""
    return shared_files.locked(folder / "lock", _LOCK_SECONDS)


def _password(folder: Path) -> str:
    """Return the password, which is older than the cluster."""
    try:
        return (folder / "password").read_text(encoding="utf-8").strip()
    except OSError as error:
        msg = (
            f"embedded postgres: cannot read {folder / 'password'} ({error.strerror}); "
            "ask as the account that created it, or set TWOPHASE_HOME to a folder of your own"
        )
        raise ConfigError(msg) from error


def _dsn(folder: Path, postmaster: _Postmaster, database: str = DATABASE) -> str:
    """Return the SQLAlchemy URL of a database of the server."""
    return f"postgresql+psycopg2://{ROLE}:{_password(folder)}@{_HOST}:{postmaster.port}/{database}"


# --- the place -------------------------------------------------------------------------------------------------------


def _settle(link: Path) -> None:
    """Give the server a place that its account can enter, if it is to be another one and the run folder is closed.

    Run as root, PostgreSQL works as an unprivileged account. A run folder that only root may enter stays closed: the
    server's own folder goes where services keep theirs, and the run folder gets a link to it.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    account = accounts.of(link / "data")
    if not account.switches or os.path.lexists(link) or accounts.can_pass(account, link.parent):
        return
    try:
        _ELSEWHERE.mkdir(mode=0o755, parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="postgres-", dir=_ELSEWHERE))
    except OSError:
        return  # then `accounts.check` says which folder is closed
    place.chmod(0o711)
    try:
        link.symlink_to(place)
    except FileExistsError:  # another process was faster
        place.rmdir()


# --- creating --------------------------------------------------------------------------------------------------------


def _sweep(folder: Path) -> None:
    """Remove what a killed process has left half made."""
    for left in folder.glob("new-*"):
        shutil.rmtree(left)
    for left in folder.glob(shared_files.TEMPORARY.format("*") + "*"):
        left.unlink()


def _create(folder: Path, account: Account, lock: int) -> None:
    """Make the cluster aside and rename it, so that a killed process leaves none rather than half of one.

    The helpers inherit the lock: when this process is killed, the next one waits until they are gone too.
    """
    if not (folder / "password").exists():
        shared_files.write(folder / "password", secrets.token_urlsafe(32) + "\n")
    staging = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
    account.own(staging)
    data = staging / "data"
    shared_files.write(staging / "password", _password(folder) + "\n")
    command = ["initdb", "-D", str(data), "-U", ROLE, "--auth=scram-sha-256", f"--pwfile={staging / 'password'}"]
    # The builtin C.UTF-8 sorts alike everywhere and needs no locale of the system.
    command += ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    postgres_programs.must(postgres_programs.run(command, account, lock=lock))
    single = ["postgres", "--single", "-D", str(data), "-c", "exit_on_error=on", "postgres"]
    postgres_programs.must(postgres_programs.run(single, account, lock=lock, text=f"CREATE DATABASE {DATABASE}\n"))
    shared_files.write(data / "pg_hba.conf", _HBA)
    shared_files.write(data / "twophase.conf", _CONF.format(port=_free_port(None)))
    conf = data / "postgresql.conf"
    shared_files.write(conf, conf.read_text(encoding="utf-8") + "\ninclude = 'twophase.conf'\n")
    data.rename(folder / "data")
    shared_files.sync_folder(folder)
    shutil.rmtree(staging)


def _check_version(folder: Path) -> None:
    """Refuse data of another major version, which the server could not read."""
    found = (folder / "data" / "PG_VERSION").read_text(encoding="utf-8").strip()
    if found != postgres_programs.MAJOR:
        msg = (
            f"embedded postgres: {folder / 'data'}: expected data of PostgreSQL {postgres_programs.MAJOR},"
            f" found {found}; move it with pg_dump, or set TWOPHASE_HOME to a new folder"
        )
        raise ConfigError(msg)


# --- starting --------------------------------------------------------------------------------------------------------


def _start(folder: Path, account: Account) -> _Postmaster:
    """Start the server and wait until it accepts connections.

    A server that a killed `ensure()` has left starting is waited for; so are processes that a killed server has left,
    since PostgreSQL refuses to start beside them.
    """
    deadline = time.monotonic() + _START_SECONDS
    remembered = _remembered_port(folder)
    reason = "it does not accept connections"
    while time.monotonic() < deadline:
        postmaster = _postmaster(folder)
        if postmaster is None:
            port = _free_port(remembered)
            said = _launch(folder, account, port)
            if "could not create any TCP/IP sockets" in said:
                remembered = None
            elif "FATAL" in said and not _PASSES.search(said):
                msg = f"embedded postgres: did not start: {_fatal(said)}; see {folder / 'log'}"
                raise StoreUnavailable(msg)
            reason = _fatal(said) or reason
        elif _accepts(postmaster):
            if postmaster.port != _remembered_port(folder):
                shared_files.write(folder / "port", f"{postmaster.port}\n")
            return postmaster
        time.sleep(_POLL)
    msg = f"embedded postgres: not ready within {_START_SECONDS:.0f} s: {reason}; see {folder / 'log'}"
    raise StoreUnavailable(msg)


def _launch(folder: Path, account: Account, port: int) -> str:
    """Let pg_ctl start the server in a session of its own; return what the log gained if that failed, else nothing."""
    data, log = folder / "data", folder / "log"
    _disarm(data / "postmaster.pid")
    shared_files.write(data / "twophase.conf", _CONF.format(port=port))
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.rename(folder / "log.1")
    os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    account.own(log)
    before = log.stat().st_size
    done = postgres_programs.run(["pg_ctl", "start", "-D", str(data), "-l", str(log), "-w", "-t", "30"], account)
    if done.returncode == 0:
        return ""
    with log.open("rb") as file:
        file.seek(before)
        return file.read().decode("utf-8", errors="replace") or f"FATAL:  {postgres_programs.last_line(done.stderr)}"


def _disarm(pid_file: Path) -> None:
    """Make a stale pid file harmless whose pid has been given to another process, or to a zombie.

    PostgreSQL would take that process for a server. Only the pid is replaced: the rest of the file tells PostgreSQL
    which shared memory to look at, which keeps it from starting beside the remains of a killed server.
    """
    lines = shared_files.lines(pid_file)
    if lines and lines[0].isdecimal() and postgres_programs.exists(int(lines[0])):
        shared_files.write(pid_file, "\n".join([str(_NO_PID), *lines[1:], ""]))


def _remembered_port(folder: Path) -> int | None:
    """Return the port the server had last."""
    lines = shared_files.lines(folder / "port")
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _free_port(wanted: int | None) -> int:
    """Return the wanted port if it is free, else another one that is."""
    for port in (wanted, 0):
        if port is None:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    msg = f"embedded postgres: no free port on {_HOST}"
    raise StoreUnavailable(msg)


# --- looking ---------------------------------------------------------------------------------------------------------


def _postmaster(folder: Path) -> _Postmaster | None:
    """Return the live server process of our data folder: the pid file says which, its command line proves it."""
    lines = shared_files.lines(folder / "data" / "postmaster.pid")
    if not lines or not lines[0].isdecimal():
        return None
    pid = int(lines[0])
    if not postgres_programs.command_line(pid).endswith(f" -D {folder / 'data'}"):
        return None
    port = lines[3] if len(lines) > 3 else ""  # noqa: PLR2004 - the fourth line is the port
    return _Postmaster(pid, int(port) if port.isdecimal() else None)


def _accepts(postmaster: _Postmaster) -> bool:
    """Ask the server itself; a full server accepts connections too."""
    if postmaster.port is None:
        return False
    return (
        postgres_programs.run(["pg_isready", "-q", "-h", _HOST, "-p", str(postmaster.port), "-t", "5"]).returncode == 0
    )


def _fatal(said: str) -> str:
    """Return why the server gave up, as its log says it."""
    return next((line.partition("FATAL:")[2].strip() for line in said.splitlines() if "FATAL:" in line), "")


def _sql(folder: Path, postmaster: _Postmaster, statement: str) -> str:
    """Run one statement as the owner of everything; the password goes by the environment, which others cannot read."""
    command = ["psql", "-X", "-A", "-t", "-w", "-v", "ON_ERROR_STOP=1", "-h", _HOST, "-p", str(postmaster.port)]
    command += ["-U", ROLE, "-d", DATABASE, "-f", "-"]
    environment = {"PGPASSWORD": _password(folder)}
    return postgres_programs.must(
        postgres_programs.run(command, text=statement + ";\n", environment=environment)
    ).strip()
