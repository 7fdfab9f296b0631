"""The main that spark-submit runs in the driver: `main.py plan.json result.json`.

The result says how it ended. If the process dies there is no result.

A cluster may restart a driver that died, with the same arguments: then two drivers would write to one staging place. So
the first one puts its name beside the result, and a driver that finds another's name there ends at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's folder is first on the path: `import plan` in a user's transform would find our module.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _here]
    if str(_here.parents[1]) not in sys.path:
        sys.path.append(str(_here.parents[1]))

import ctypes
import os
import re
import signal
import socket
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twophase.core import connections, secret_texts
from twophase.core.errors import TwophaseError
from twophase.core.failpoints import hit
from twophase.core.secret_texts import without_secrets
from twophase.spark.plan import Plan, write_json
from twophase.spark.stage import stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIME_ZONE = "spark.sql.session.timeZone"
_PR_SET_PDEATHSIG = 1
_LONGEST = 500
#: Frames in these are ours or Spark's; an error is shown with the last frame of the user's code.
_NOT_THE_USERS = (f"{Path(__file__).resolve().parents[1]}/", "/pyspark/", "/py4j/")


def main(arguments: list[str]) -> int:
    """Stage the plan and report how it went; return the exit code."""
    if len(arguments) != 2:  # noqa: PLR2004 - as the usage says
        sys.stderr.write("usage: main.py plan.json result.json\n")
        return 2
    die_with_parent()
    result = Path(arguments[1])
    if other := claimed(result.with_name("started"), application()):
        sys.stderr.write(f"this attempt was started before, as {other}: nothing is staged; the next try is a new one\n")
        return 1
    try:
        plan = Plan.load(Path(arguments[0]))
        writes = stage(session(plan), plan)
    except Exception as error:  # noqa: BLE001 - whatever it is, the submitter must know; the log has the details
        connections.hide_declared()
        sys.stderr.write(without_secrets(traceback.format_exc()))
        write_json(result, {"status": "failed", "type": type(error).__name__, "error": one_line(error)})
        hit("stage.after")
        return 1
    write_json(result, {"status": "staged", "writes": writes})
    hit("stage.after")
    return 0


def application() -> str:
    """Return a name of this driver for people: its application on a cluster, its machine and its process.

    On YARN it is the container's id, which contains the application and its number of tries.
    """
    known = os.environ.get("CONTAINER_ID") or os.environ.get("SPARK_APPLICATION_ID") or "a driver"
    return f"{known} on {socket.gethostname()}, process {os.getpid()}"


def claimed(path: Path, mine: str) -> str | None:
    """Return the driver that has begun this attempt before; None: this one is the first, and has noted it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(mine)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return path.read_text() or "a driver that died while it said so"
    return None


def session(plan: Plan) -> SparkSession:
    """Return a session named after the attempt, in UTC unless the configuration says otherwise."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    name = f"twophase {plan.pipeline}/{plan.checkpoint_id} r{plan.revision} a{plan.attempt}"
    conf = SparkConf().setIfMissing(_TIME_ZONE, "UTC").setAppName(name)
    secret_texts.hide_named(conf.getAll())
    return SparkSession.builder.config(conf=conf).getOrCreate()


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it (the JVM) ends, however that ends."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def one_line(error: BaseException) -> str:
    """Say in one line what went wrong, without secrets; for a user's exception also where."""
    text = without_secrets(str(error))
    if isinstance(error, TwophaseError):
        return _short(text)
    worker = _from_python_worker(text)
    if worker:
        return _short(*worker)
    place = _place(error.__traceback__)
    return _short(f"{type(error).__name__}: {_message(text)}", place)


def _message(text: str) -> str:
    """Return the line that says the cause; py4j puts a line of its own before Spark's."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        deepest = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
        return deepest[-1] if deepest else lines[1].removeprefix(": ")
    return lines[0] if lines else ""


def _from_python_worker(text: str) -> tuple[str, str] | None:
    """Find what a user's function raised in a Python worker, and where."""
    if "Traceback (most recent call last)" not in text:
        return None
    lines = text.splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Warning|Interrupt|Exit)\b", line)]
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    users = [f"{Path(file).name}:{line}" for file, line in places if _is_users(file)]
    return (raised[-1], users[-1] if users else "") if raised else None


def _place(trace: TracebackType | None) -> str:
    frames = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not any(part in file for part in _NOT_THE_USERS)


def _short(message: str, place: str = "") -> str:
    tail = f" ({place})" if place else ""
    line = " ".join(message.split())
    room = _LONGEST - len(tail)
    return (line if len(line) <= room else line[: room - 1] + "…") + tail


def _run(arguments: list[str]) -> Any:  # noqa: ANN401 - does not return
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


if __name__ == "__main__":
    _run(sys.argv[1:])
