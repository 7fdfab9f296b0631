"""Identify processes, find those of a session, and let children die with their parent; the supervisor uses it.

A pid is given out again, so a process is identified by its pid and its start time. What a component has started is
found by its session, which children inherit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from twophase.local import postgres_programs

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")
_BOOT = _PROC / "sys/kernel/random/boot_id"
_POLL = 0.05


class Identity(NamedTuple):
    """The identity of a process: its pid, and when it was started (in ticks of this boot)."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        """Tell whether that very process still runs."""
        return identity(self.pid) == self


class _Stat(NamedTuple):
    state: str
    parent: int
    session: int
    started: str


def identity(pid: int) -> Identity | None:
    """Return who has this pid now; None when nobody has, or only a zombie."""
    stat = _stat(pid)
    return Identity(pid, f"{_boot()}/{stat.started}") if stat and stat.state != "Z" else None


def members(session: int) -> list[int]:
    """Return the processes of a session, zombies left out."""
    return [pid for pid, stat in _all().items() if stat.session == session and stat.state != "Z"]


def parents_of(text: str, session: int) -> list[Identity]:
    """Return who in a session started processes with this text in their commands, without those who have it too."""
    there = _all()
    named = [pid for pid in there if text in postgres_programs.command_line(pid)]
    parents = {there[pid].parent for pid in named} - set(named)
    return [found for pid in sorted(parents) if pid in members(session) and (found := identity(pid))]


def send(signum: signal.Signals, pids: list[int]) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def end_session(session: int, grace: float) -> None:
    """End what is left of a session: first ask, and after `grace` seconds kill."""
    deadline = time.monotonic() + grace
    send(signal.SIGTERM, members(session))
    while left := members(session):
        if time.monotonic() > deadline:
            send(signal.SIGKILL, left)
        time.sleep(_POLL)


def dies_with_parent(signum: signal.Signals) -> Callable[[], None] | None:
    """Return a function for a child to run before exec, so that it gets a signal when its parent dies."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _boot() -> str:
    """Return an id of the machine's current boot; start times are only comparable within one boot."""
    return _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""


def _all() -> dict[int, _Stat]:
    if not _PROC.exists():
        return _ps("-A")
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    return {pid: stat for pid in pids if (stat := _stat(pid))}


def _stat(pid: int) -> _Stat | None:
    """Read what the kernel says; the name of the program, in brackets, may hold anything."""
    if not _PROC.exists():
        return _ps("-p", str(pid)).get(pid)
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], parent=int(fields[1]), session=int(fields[3]), started=fields[19])


def _ps(*which: str) -> dict[int, _Stat]:
    """Ask `ps` where there is no /proc; a process group then stands for the session."""
    command = ["/bin/ps", *which, "-o", "pid=,stat=,ppid=,pgid=,lstart="]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    return {int(pid): _Stat(state[0], int(parent), int(group), started) for pid, state, parent, group, started in rows}
