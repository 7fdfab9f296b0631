"""The program that `testing.promoter` starts: promote one output, and die, stop or lose the connections at one line.

If there are no connections to lose, it fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import twophase.local.committer_database  # noqa: F401 - a write-ahead sink may keep its memory there
from twophase.core.checkpoint import Output
from twophase.sinks.base import Sink


class Tracer:
    """Counts the lines of a sink's own code, and acts at one of them."""

    def __init__(self, folder: str, action: str, place: int) -> None:
        """Watch the modules in a folder."""
        self.folder = folder
        self.action = action
        self.place = place
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Tracer | None:
        """Trace each call, and each line of the calls into watched modules."""
        if event == "call":
            return self if frame.f_code.co_filename.startswith(self.folder) else None
        if event == "line":
            self.lines += 1
            if self.lines == self.place:
                self._act()
        return self

    def _act(self) -> None:
        match self.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut" if not _cut():
                msg = "the reply was lost, as the contract wants it"
                raise ConnectionError(msg)


def _cut() -> int:
    """Cut the connections of this process so that no reply arrives, though requests still do; return how many."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or not connected
            if entry.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.getpeername():  # a process that talks to itself does so without a name
                        connection.shutdown(socket.SHUT_RD)
                        found += 1
    return found


def _watched(sink: Sink) -> str:
    """Return the folder of a sink's module."""
    return str(Path(sys.modules[type(sink).__module__].__file__ or "").parent)


def main() -> int:
    """Promote the output described on stdin, and print the outcome; return the exit code."""
    task = json.load(sys.stdin)
    sink = Sink.load(task["sink"])
    tracer = Tracer(_watched(sink), task["action"], task["place"])
    sys.settrace(tracer)
    try:
        promoted = sink.promote(Output.of_json(task["output"]))
    except ConnectionError:
        return 1
    finally:
        sys.settrace(None)
    sys.stdout.write(json.dumps({"outcome": promoted.outcome, "lines": tracer.lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
