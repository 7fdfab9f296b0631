"""A Spark standalone cluster on this machine, for the demo: a master and workers from the installed pyspark.

    cluster/conf/spark-defaults.conf    the secret that master, workers and drivers share, readable by its owner only
    cluster/logs/                       what each of them says
    cluster/work/                       what the workers keep

It listens on 127.0.0.1 only, and every process of it dies with the one that started it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from twophase.core import private_files
from twophase.core.errors import StoreUnavailable
from twophase.local import processes, shared_files
from twophase.spark.submit import child_environment, find_java, find_spark_home

HOST = "127.0.0.1"
_START_SECONDS = 60.0
_POLL = 0.2
_STOP_SECONDS = 10.0
#: What an executor says when it begins a task.
_BEGUN = ": Running task "


@dataclass
class Cluster:
    """One cluster, from `start` to `stop`."""

    folder: Path
    workers: int = 2
    cores: int = 1
    memory: str = "1g"
    #: Drivers in cluster mode are submitted, asked for and killed by REST, which knows no secret.
    rest: bool = False
    port: int = field(init=False, default=0)
    rest_port: int = field(init=False, default=0)
    ui_port: int = field(init=False, default=0)
    running: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)

    @property
    def url(self) -> str:
        """Return what a driver connects to."""
        return f"spark://{HOST}:{self.port}"

    @property
    def properties(self) -> Path:
        """Return the file that a driver has to be given: `--properties-file`, never the secret itself."""
        return self.folder / "conf" / "spark-defaults.conf"

    def start(self) -> Self:
        """Start the master, then the workers; return when all workers are there."""
        self.port, self.rest_port, self.ui_port = (_free_port() for _ in range(3))
        for name in ("conf", "logs", "work"):
            private_files.make_folder(self.folder / name)
        shared_files.write(
            self.properties,
            (
                f"spark.master.rest.enabled true\nspark.master.rest.port {self.rest_port}\n"
                if self.rest
                else f"spark.authenticate true\nspark.authenticate.secret {secrets.token_hex(16)}\n"
            )
            + f"spark.driver.host {HOST}\n"
            f"spark.driver.bindAddress {HOST}\n"
            "spark.ui.enabled false\n",
        )
        self._run(
            "master", "master.Master", "--host", HOST, "--port", str(self.port), "--webui-port", str(self.ui_port)
        )
        for number in range(1, self.workers + 1):
            self.start_worker(f"worker-{number}")
        deadline = time.monotonic() + _START_SECONDS
        while self.alive() < self.workers:
            if time.monotonic() > deadline:
                found = f"{self.alive()} of {self.workers} workers within {_START_SECONDS:.0f} s"
                msg = f"spark cluster: {found}; see {self.folder / 'logs'}"
                raise StoreUnavailable(msg)
            time.sleep(_POLL)
        return self

    def start_worker(self, name: str) -> None:
        """Start one worker more."""
        size = ("--cores", str(self.cores), "--memory", self.memory)
        place = ("--host", HOST, "--webui-port", "0", "--work-dir", str(self.folder / "work" / name))
        self._run(name, "worker.Worker", *place, *size, self.url)

    def _run(self, name: str, main: str, *arguments: str) -> None:
        spark_home = find_spark_home(sys.executable)
        java, _ = find_java(sys.executable)
        environment = child_environment(os.environ, sys.executable, spark_home, java)
        environment |= {
            "SPARK_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "512m",
            "SPARK_NO_DAEMONIZE": "1",
        }
        with private_files.open_file(self.folder / "logs" / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [str(spark_home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.dies_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one system call
            )

    def alive(self) -> int:
        """Return how many workers the master has, by its own page."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.ui_port}/json/", timeout=5) as reply:
                found = json.load(reply)
        except (OSError, urllib.error.HTTPError, ValueError):
            return 0
        return sum(worker["state"] == "ALIVE" for worker in found["workers"])

    def tasks(self, name: str) -> int:
        """Return how many tasks the executors of a worker have begun, by their own logs."""
        logs = (self.folder / "work" / name).glob("app-*/*/stderr")
        return sum(log.read_text(encoding="utf-8", errors="replace").count(_BEGUN) for log in logs)

    def kill(self, name: str) -> int:
        """Kill a worker or the master at once, a worker with its executors; return its pid."""
        process = self.running.pop(name)
        processes.send(signal.SIGKILL, processes.members(process.pid))
        process.wait()
        return process.pid

    def stop(self) -> None:
        """Stop all of it."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()

    def __enter__(self) -> Self:
        """Start it."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
