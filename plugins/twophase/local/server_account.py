"""Choose the account that runs the embedded PostgreSQL, which refuses to run as root; `local.postgres` uses it.

For a plain user it is that user's own account. Root runs it as the owner of the data, the first time as `nobody`. That
account may be unable to reach the folders, so this is checked before any data is made.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

UNPRIVILEGED = "nobody"


@dataclass(frozen=True)
class Account:
    """The account of the server; `user`, `group` and `extra_groups` go to subprocess, where None changes nothing."""

    uid: int
    gid: int
    switches: bool

    @property
    def user(self) -> int | None:
        """Return the user to become."""
        return self.uid if self.switches else None

    @property
    def group(self) -> int | None:
        """Return the group to become."""
        return self.gid if self.switches else None

    @property
    def extra_groups(self) -> list[int] | None:
        """Return the further groups to have: none, when the account is another one."""
        return [] if self.switches else None

    def own(self, path: Path) -> None:
        """Give a file or folder to the account."""
        if self.switches:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def of(data: Path) -> Account:
    """Return the account that runs the server on this data folder, which need not exist yet."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), switches=False)
    if data.exists() and data.stat().st_uid != 0:
        return Account(data.stat().st_uid, data.stat().st_gid, switches=True)
    try:
        entry = pwd.getpwnam(UNPRIVILEGED)
    except KeyError:
        msg = (
            f"embedded postgres: postgres refuses to be root: expected the account {UNPRIVILEGED}, found none; "
            "run as a plain user, or set TWOPHASE_DSN"
        )
        raise ConfigError(msg) from None
    return Account(entry.pw_uid, entry.pw_gid, switches=True)


def check(account: Account, folder: Path, program: Path) -> None:
    """Refuse, naming the folder and the remedy, when the account cannot enter `folder` or execute `program`."""
    if not account.switches:
        return
    who = f"embedded postgres: started by root it runs as uid {account.uid}, which cannot"
    if not can_pass(account, folder):
        msg = f"{who} enter {_barrier(account, folder)}; set TWOPHASE_HOME to a folder others may enter"
        raise ConfigError(msg)
    if not can_pass(account, program):
        msg = (
            f"{who} execute {program} because of {_barrier(account, program)}; "
            "install the package in a folder others may enter, or set TWOPHASE_DSN"
        )
        raise ConfigError(msg)


def can_pass(account: Account, path: Path) -> bool:
    """Ask the system itself, as that account: mode bits are not the whole truth."""
    command = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(path)]
    done = subprocess.run(
        command,
        cwd="/",
        check=False,
        capture_output=True,
        user=account.user,
        group=account.group,
        extra_groups=account.extra_groups,
    )
    return done.returncode == 0


def _barrier(account: Account, path: Path) -> Path:
    """Return the outermost part of the path that the account cannot pass."""
    for part in [*reversed(path.parents), path]:
        if not can_pass(account, part):
            return part
    return path
