"""A small supervisor for `twophase up`: starts components, restarts what dies, and stops everything when it ends.

    supervisor/lock     held as long as the supervisor lives: how it is found
    supervisor/state    who it is, and each component's pid, since when, and how often it was started again (JSON)

Each child component has a session of its own. What it leaves running when it dies is ended before it starts again, as
an init system does. Components get SIGTERM when the supervisor is killed. The next `clear` ends what is still running;
it is called first whenever a supervisor is started or stopped.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from twophase.core.errors import StoreUnavailable, TwophaseError
from twophase.local import processes, shared_files
from twophase.local.processes import Identity

log = logging.getLogger(__name__)

_POLL = 0.5
#: Seconds that a component has to end by itself, and once more after all that it started was asked to end.
_GRACE = 8.0
#: Pauses before restarts: the first is at once, later ones are longer; a component that lived long starts over.
_BACKOFF = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
_LIVED = 60.0
_LOG_BYTES = 8 * 1024 * 1024


class Component(Protocol):
    """Something that should run."""

    name: str
    #: The components that must run before it is started.
    needs: tuple[str, ...]
    #: The session of its processes, if it is a child.
    session: int | None

    def start(self) -> None:
        """Start it; it is not running."""

    def pid(self) -> int | None:
        """Return its pid, or None when it does not run."""

    def ask_to_stop(self) -> None:
        """Begin to stop it, without waiting."""

    def stop(self) -> None:
        """Stop it and all that it has started, and wait until it is gone."""


@dataclass
class Child:
    """A component that is a child process; its environment is computed at each start."""

    name: str
    command: Sequence[str]
    environment: Callable[[], Mapping[str, str]]
    log: Path
    needs: tuple[str, ...] = ()
    session: int | None = None
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own, told to end when this process is killed."""
        with open_log(self.log) as output:
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environment()),
                start_new_session=True,
                preexec_fn=processes.dies_with_parent(signal.SIGTERM),  # noqa: PLW1509 - one system call
            )
        self.session = self._process.pid

    def pid(self) -> int | None:
        """Return its pid while it lives; once it has died, end what it left."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            return self._process.pid
        log.warning("%s ended with exit code %d", self.name, code)
        processes.end_session(self._process.pid, 0)
        self._process = None
        return None

    def ask_to_stop(self) -> None:
        """Ask the process itself, which tells its own children."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Ask it to end, wait, ask everything that it has started, and at last kill."""
        if self._process is None:
            return
        self.ask_to_stop()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            log.warning("%s does not stop; asking all that it has started", self.name)
            processes.end_session(self._process.pid, _GRACE)
        self._process.wait()
        processes.end_session(self._process.pid, 0)
        self._process = None


@dataclass
class Told:
    """What the state file says about a component."""

    pid: int | None = None
    since: str | None = None
    restarts: int = 0
    session: int | None = None
    started: str = ""

    @property
    def leader(self) -> Identity | None:
        """Return the first process of its session."""
        return Identity(self.session, self.started) if self.session else None


@dataclass
class SupervisorState:
    """What the state file says about a supervisor; `facts` are set by its owner."""

    pid: int
    started: str
    since: str
    facts: dict[str, Any]
    components: dict[str, Told] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Tell whether that supervisor still runs."""
        return Identity(self.pid, self.started).alive


@dataclass
class _Tended:
    """A component and its history."""

    component: Component
    told: Told = field(default_factory=Told)
    failures: int = 0
    born: float = 0.0
    not_before: float = 0.0


class Supervisor:
    """Keeps the components running until it gets SIGTERM or SIGINT."""

    def __init__(self, folder: Path, components: Sequence[Component], facts: Mapping[str, Any]) -> None:
        """Name the folder of the lock and the state; components are started in this order, and stopped in reverse."""
        self._folder = folder
        self._tended = [_Tended(component) for component in components]
        self._stopping = False
        me = processes.identity(os.getpid()) or Identity(os.getpid(), "")
        told = {one.component.name: one.told for one in self._tended}
        self._state = SupervisorState(me.pid, me.started, _now(), dict(facts), told)

    def run(self) -> None:
        """Run until told to stop; refuse if another one runs."""
        with shared_files.locked(self._folder / "lock", _GRACE):
            clear(self._folder)
            wake = self._catch_signals()
            self._save()
            log.info("supervising %s", ", ".join(self._state.components))
            try:
                while not self._stopping:
                    self._tend()
                    if select.select([wake], [], [], _POLL)[0]:
                        os.read(wake, 4096)
            finally:
                self._stop()
        log.info("stopped")

    def _catch_signals(self) -> int:
        """Let signals wake the loop: the ones that mean stop, and the death of a child."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._told_to_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return readable

    def _told_to_stop(self, signum: int, _frame: object) -> None:
        self._stopping = True
        log.info("stopping: %s", signal.Signals(signum).name)

    def _tend(self) -> None:
        """Look at each component once, and start those that should run."""
        for one in self._tended:
            pid = one.component.pid()
            if pid is None and one.told.pid is not None:
                self._note_death(one)
            if pid is None and self._may_start(one):
                self._start(one)

    def _may_start(self, one: _Tended) -> bool:
        told = self._state.components
        return (
            not self._stopping
            and time.monotonic() >= one.not_before
            and all(told[need].pid is not None for need in one.component.needs)
        )

    def _start(self, one: _Tended) -> None:
        log.info("starting %s", one.component.name)
        try:
            one.component.start()
            pid = one.component.pid()
        except (TwophaseError, OSError) as error:
            log.error("%s did not start: %s", one.component.name, error)  # noqa: TRY400 - its message says it all
            self._delay(one)
            return
        if pid is not None:
            self._note_birth(one, pid)

    def _note_birth(self, one: _Tended, pid: int) -> None:
        who = processes.identity(pid)
        one.born = time.monotonic()
        one.told.pid, one.told.since, one.told.session = pid, _now(), one.component.session
        one.told.started = who.started if who else ""
        self._save()

    def _note_death(self, one: _Tended) -> None:
        one.told.pid, one.told.since = None, None
        one.told.restarts += 1
        if time.monotonic() - one.born > _LIVED:
            one.failures = 0
        self._delay(one)

    def _delay(self, one: _Tended) -> None:
        one.not_before = time.monotonic() + _BACKOFF[min(one.failures, len(_BACKOFF) - 1)]
        one.failures += 1
        self._save()

    def _stop(self) -> None:
        components = [one.component for one in reversed(self._tended)]
        for component in components:
            component.ask_to_stop()
        for component in components:
            component.stop()
        (self._folder / "state").unlink(missing_ok=True)

    def _save(self) -> None:
        shared_files.write(self._folder / "state", json.dumps(asdict(self._state), indent=2) + "\n")


# --- from outside ----------------------------------------------------------------------------------------------------


def running(folder: Path) -> SupervisorState | None:
    """Return the state of the supervisor that runs on this folder."""
    state = _read(folder)
    return state if state and state.alive and shared_files.is_locked(folder / "lock") else None


def stop(folder: Path, seconds: float) -> bool:
    """Stop the supervisor and wait until all is gone; tell whether there was anything to stop."""
    state = running(folder)
    if state is None:
        return clear(folder)
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while state.alive or shared_files.is_locked(folder / "lock"):
        if time.monotonic() > deadline:
            msg = f"the supervisor (pid {state.pid}) did not stop within {seconds:.0f} s; try again"
            raise StoreUnavailable(msg)
        time.sleep(0.05)
    return True


def clear(folder: Path) -> bool:
    """End what a killed supervisor has left, and tell whether there was anything; a running one is not touched."""
    state = _read(folder)
    if state is None or (state.alive and state.pid != os.getpid()):
        return False
    left = [told.leader for told in state.components.values() if told.leader]
    ours = [leader for leader in left if processes.identity(leader.pid) in (None, leader)]
    for leader in ours:  # ask all before waiting for any
        processes.send(signal.SIGTERM, processes.members(leader.pid))
    for leader in ours:
        processes.end_session(leader.pid, _GRACE)
    (folder / "state").unlink(missing_ok=True)
    return True


def open_log(path: Path) -> Any:  # noqa: ANN401 - a file
    """Open a log to append to, readable by its owner only; one that has grown long is put aside first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.rename(path.with_name(path.name + ".1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab")


def _read(folder: Path) -> SupervisorState | None:
    try:
        found = json.loads((folder / "state").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the second: the run folder is a file, which is said elsewhere
        return None
    found["components"] = {name: Told(**told) for name, told in found["components"].items()}
    return SupervisorState(**found)


def _now() -> str:
    return datetime.now(UTC).isoformat()
