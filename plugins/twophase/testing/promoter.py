"""Start a process that promotes, and dies, stops or loses its connections on the way; the contract uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from twophase.core.ports import Outcome
from twophase.testing.outputs import PATIENCE, Staged, path


class Promoting:
    """A process that promotes one output, up to some line of the sink's own code."""

    def __init__(self, staged: Staged, action: str, place: int) -> None:
        """Start it."""
        task = {
            "sink": staged.sink.declaration(),
            "output": staged.output.to_json(),
            "action": action,
            "place": place,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "twophase.testing"],
            env={**os.environ, "PYTHONPATH": path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task))
        self._process.stdin.close()
        self._process.stdin = None
        self._told: str | None = None

    def until_stopped(self) -> None:
        """Wait until it has stopped itself, or has ended before."""
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def wake(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def ended(self) -> int:
        """Wait for its end; return the exit code, negative: the signal that killed it."""
        self._tell()
        return self._process.returncode

    def outcome(self) -> Outcome:
        """Return the outcome that the sink reported to it."""
        return Outcome(self._tell()["outcome"])

    def count(self) -> int:
        """Return how many lines of the sink's code it ran."""
        found: int = self._tell()["lines"]
        return found

    def _tell(self) -> dict[str, Any]:
        """Wait for its end, and return what it printed."""
        if self._told is None:
            try:
                self._told, _ = self._process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
                pytest.fail(f"a promotion did not come to its end within {PATIENCE:g} s")
        found: dict[str, Any] = json.loads(self._told) if self._told else {}
        return found
