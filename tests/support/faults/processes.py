"""Run parts of the product as OS processes of their own that can be killed, stopped and woken.

A fork server that has everything imported makes a process in a few milliseconds, so hundreds of crashes fit in minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: Also what makes barriers and queues that such processes share.
_context = context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["support.crashes.scenarios", "support.faults.processes", "support.crashes.several_sinks"]
)


def _start_server() -> None:
    """Start the fork server with this process's path, so that it finds what it imports beforehand."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


#: What of the environment a process gets from the one that starts it.
OURS = ("TWOPHASE_", "AIRFLOW_CONN_")
#: Nothing here takes this long unless it hangs.
PATIENCE = 60.0


@dataclass
class Child:
    """One process; what it wrote to stderr tells whether a failpoint was hit."""

    process: BaseProcess
    log: Path

    def wait(self, patience: float = PATIENCE) -> int:
        """Wait for the end; return the exit code (negative: the signal that killed it)."""
        self.process.join(patience)
        if self.process.exitcode is None:
            self.process.kill()
            msg = f"process {self.process.pid} did not end within {patience} s:\n{self.said}"
            raise AssertionError(msg)
        return self.process.exitcode

    @property
    def said(self) -> str:
        """Return what it wrote so far."""
        return self.log.read_text() if self.log.exists() else ""

    def hit(self, failpoint: str) -> bool:
        """Say whether it reached a failpoint that was set for it."""
        return f"failpoint {failpoint}:" in self.said

    def until_stopped(self, patience: float = PATIENCE) -> bool:
        """Wait until it stopped itself; False: it ended instead."""
        for _ in polls(patience):
            if self.process.exitcode is not None:
                return False
            if _state(self.process.pid) == "T":
                return True
        msg = f"process {self.process.pid} neither stopped nor ended:\n{self.said}"
        raise AssertionError(msg)

    def wake(self) -> None:
        """Let a stopped process go on."""
        os.kill(self.process.pid or 0, signal.SIGCONT)


def _state(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def polls(patience: float) -> Iterator[None]:
    """Yield until the patience is over, with short pauses between two looks."""
    end = time.monotonic() + patience
    pause = multiprocessing.Event()
    while time.monotonic() < end:
        yield
        pause.wait(0.01)


def start(
    function: Callable[..., Any], *arguments: Any, log: Path, failpoints: str = "", env: Mapping[str, str] | None = None
) -> Child:
    """Start a function in a process of its own."""
    wanted = {name: value for name, value in os.environ.items() if name.startswith(OURS)} | dict(env or {})
    _start_server()
    process = _context.Process(target=_enter, args=(function, arguments, str(log), failpoints, wanted), daemon=True)
    process.start()
    return Child(process, log)


def call(function: Callable[..., Any], *arguments: Any, log: Path, failpoints: str = "") -> Child:
    """Start a function in a process of its own, and wait for its end."""
    child = start(function, *arguments, log=log, failpoints=failpoints)
    child.wait()
    return child


def _enter(
    function: Callable[..., Any], arguments: tuple[Any, ...], log: str, failpoints: str, env: Mapping[str, str]
) -> None:
    from twophase.core.failpoints import configure

    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]
    os.environ.update(env)
    configure(failpoints)
    try:
        function(*arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, the test reads it in the log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def stopped_at_end(*children: Child) -> Iterator[None]:
    """Kill what is left of some processes, whatever happens."""
    try:
        yield
    finally:
        for child in children:
            if child.process.exitcode is None:
                child.process.kill()
                child.process.join()
