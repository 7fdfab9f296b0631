"""The supervisor with small components: what dies comes back, what stops leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from twophase.core.errors import StoreUnavailable
from twophase.local import processes, supervisor

SLEEP = "import time; print('slept', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); {SLEEP}"
BRIEF = "import sys; sys.exit(3)"

#: Argument 1 is the folder, the others are name=code, or name<needed=code.
DRIVER = """
    import logging, os, sys
    from pathlib import Path
    from twophase.local import supervisor

    logging.basicConfig(level=logging.INFO)
    supervisor._GRACE = 0.6
    folder = Path(sys.argv[1])
    components = []
    for argument in sys.argv[2:]:
        names, _, code = argument.partition("=")
        name, _, needed = names.partition("<")
        components.append(supervisor.Child(
            name, [sys.executable, "-c", code], lambda: os.environ, folder / f"{name}.log", (needed,) if needed else ()
        ))
    supervisor.Supervisor(folder, components, {"port": 8080}).run()
"""


def eventually(holds: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Supervised:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = folder.with_name("said")
        self.started: list[subprocess.Popen[bytes]] = []
        self.seen: set[psutil.Process] = set()

    def __call__(self, **components: str) -> subprocess.Popen[bytes]:
        arguments = [f"{name.replace('_needs_', '<')}={code}" for name, code in components.items()]
        with self.said.open("a") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(DRIVER), str(self.folder), *arguments],
                stderr=said,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.started.append(process)
        return process

    def told(self, name: str) -> supervisor.Told:
        state = supervisor.running(self.folder)
        assert state is not None
        return state.components[name]

    def up(self, name: str) -> int:
        """Wait until a component has begun its work, and return its pid."""
        eventually(lambda: supervisor.running(self.folder))
        eventually(lambda: self.told(name).pid and "slept" in self.log(name))
        pid = self.told(name).pid
        assert pid is not None
        self.seen |= {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
        return pid

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    made = Supervised(tmp_path / "run")
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    for seen in made.seen:
        if seen.is_running():
            seen.kill()


def alive(pid: int) -> bool:
    return processes.identity(pid) is not None


def test_a_killed_component_is_back_under_a_new_pid(supervised: Supervised) -> None:
    supervised(one=SLEEP, two=SLEEP)
    first, other = supervised.up("one"), supervised.up("two")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: supervised.told("one").pid not in {None, first})

    assert supervised.told("one").restarts == 1
    assert (supervised.told("two").pid, supervised.told("two").restarts) == (other, 0)


def test_what_a_dead_component_has_left_is_gone_before_it_starts_again(supervised: Supervised) -> None:
    supervised(one=PARENT)
    first = supervised.up("one")
    eventually(lambda: supervised.log("one").count("slept") == 2)
    (left,) = psutil.Process(first).children()
    supervised.seen.add(left)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: supervised.told("one").pid not in {None, first})

    assert not alive(left.pid)


def test_a_component_that_keeps_dying_is_started_ever_more_slowly(supervised: Supervised) -> None:
    supervised(one=BRIEF, two=SLEEP)
    supervised.up("two")
    eventually(lambda: supervised.told("one").restarts >= 3)
    began = time.monotonic()
    eventually(lambda: supervised.told("one").restarts >= 4)

    assert time.monotonic() - began > 1


def test_a_component_waits_for_the_one_that_it_needs(supervised: Supervised) -> None:
    supervised(one=BRIEF, two_needs_one=SLEEP)
    eventually(lambda: supervisor.running(supervised.folder) and supervised.told("one").restarts >= 3)

    assert supervised.log("two").count("slept") <= supervised.told("one").restarts


@pytest.mark.parametrize("code", [SLEEP, STUBBORN, PARENT], ids=["willing", "stubborn", "with a stubborn child"])
def test_sigterm_stops_everything(supervised: Supervised, code: str) -> None:
    process = supervised(one=code, two=SLEEP)
    supervised.up("one")
    supervised.up("two")
    eventually(lambda: supervised.log("one").count("slept") == (2 if code is PARENT else 1))
    supervised.up("one")
    process.terminate()

    assert process.wait(20) == 0
    assert not [seen for seen in supervised.seen if alive(seen.pid)]
    assert supervisor.running(supervised.folder) is None
    assert not (supervised.folder / "state").exists()


def test_components_get_the_news_when_the_supervisor_is_killed(supervised: Supervised) -> None:
    process = supervised(one=SLEEP)
    pid = supervised.up("one")
    process.kill()

    eventually(lambda: not alive(pid))
    assert supervisor.running(supervised.folder) is None


def test_what_outlives_a_killed_supervisor_is_ended_by_the_next(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = supervised(one=STUBBORN)
    left = supervised.up("one")
    process.kill()
    process.wait()
    stayed = alive(left)
    supervised(two=SLEEP)
    supervised.up("two")

    assert stayed
    assert not alive(left)


def test_down_ends_what_outlives_a_killed_supervisor(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_GRACE", 0.2)
    process = supervised(one=STUBBORN)
    left = supervised.up("one")
    process.kill()
    process.wait()

    assert supervisor.stop(supervised.folder, 20)
    assert not alive(left)
    assert not supervisor.stop(supervised.folder, 20)


def test_a_process_that_got_a_dead_ones_pid_is_not_touched(supervised: Supervised) -> None:
    process = supervised(one=SLEEP)
    supervised.up("one")
    process.kill()
    process.wait()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        path = supervised.folder / "state"
        state = json.loads(path.read_text())
        state["components"]["one"] |= {"pid": stranger.pid, "session": stranger.pid}
        path.write_text(json.dumps(state))
        supervisor.clear(supervised.folder)
        spared = stranger.poll() is None
        stranger.kill()

    assert spared


def test_only_one_supervisor_runs_on_a_folder(supervised: Supervised) -> None:
    supervised(one=SLEEP)
    pid = supervised.up("one")
    second = supervised(one=SLEEP)

    assert second.wait(20) != 0
    assert "another process has held" in supervised.said.read_text()
    assert supervised.told("one").pid == pid


def test_stop_is_told_when_nothing_runs_and_makes_nothing(tmp_path: Path) -> None:
    assert not supervisor.stop(tmp_path / "none", 1)
    assert supervisor.running(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


def test_a_supervisor_that_does_not_stop_is_an_error_that_names_it(supervised: Supervised) -> None:
    process = supervised(one=SLEEP)
    supervised.up("one")
    process.send_signal(signal.SIGSTOP)

    with pytest.raises(StoreUnavailable, match=rf"pid {process.pid}\) did not stop within 0 s"):
        supervisor.stop(supervised.folder, 0.1)


def test_logs_are_closed_to_others_and_put_aside_when_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LOG_BYTES", 3)
    path = tmp_path / "logs" / "one.log"
    for text in (b"first", b"second"):
        with supervisor.open_log(path) as file:
            file.write(text)

    assert path.read_bytes() == b"second"
    assert path.with_name("one.log.1").read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_without_proc_a_session_is_found_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path / "none")
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        who = processes.identity(process.pid)
        found = processes.members(process.pid)
        process.kill()

    assert who is not None
    assert found == [process.pid]
    assert not who.alive


def test_the_parent_of_a_command_is_found_in_its_session_only() -> None:
    seconds = f"61.{os.getpid()}"
    with subprocess.Popen(
        ["sh", "-c", "sleep $S; :"], env={**os.environ, "S": seconds}, start_new_session=True
    ) as shell:
        try:
            eventually(lambda: processes.parents_of(seconds, shell.pid))
            found = processes.parents_of(seconds, shell.pid)
            elsewhere = processes.parents_of(seconds, os.getsid(0))
        finally:
            processes.end_session(shell.pid, 0)

    assert [one.pid for one in found] == [shell.pid]
    assert elsewhere == []
