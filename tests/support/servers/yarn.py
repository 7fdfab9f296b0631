"""A real YARN on this machine: a ResourceManager and a NodeManager, from Maven's jars and those of pyspark."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyspark

from support.faults.processes import polls
from twophase.local import jars, processes
from twophase.spark.submit import find_java

HOST = "127.0.0.1"
#: What Maven calls each, and its sha256.
JARS = """
org.apache.hadoop:hadoop-client-minicluster:3.5.0
    06772d24529e59939915979b3edba204d367750ef7dc5120411f35221dd4818c
org.bouncycastle:bcpkix-jdk18on:1.82
    bdc723e20834832ac6af136cb5b5ff05e43b71d4fa151cc6510d9212ee086e63
org.bouncycastle:bcprov-jdk18on:1.82
    14cde2fdfaa8890480a8e5b67aceef0c90f96682c1e23c133bafdc9e0b3255ce
org.bouncycastle:bcutil-jdk18on:1.82
    4420691958ad1c0ba275a6d6d8a6317adbdbdc9277055b6a72aa89c88cda8c7d
"""
_SPARK = Path(pyspark.__file__).parent
_SERVERS = {
    "resourcemanager": "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager",
    "nodemanager": "org.apache.hadoop.yarn.server.nodemanager.NodeManager",
}
_ADDRESSES = (
    *("resourcemanager.address", "resourcemanager.scheduler.address", "resourcemanager.resource-tracker.address"),
    *("resourcemanager.admin.address", "resourcemanager.webapp.address"),
    *("nodemanager.address", "nodemanager.localizer.address", "nodemanager.webapp.address"),
)
_SETTINGS = {
    "yarn.resourcemanager.scheduler.class": (
        "org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler"
    ),
    "yarn.resourcemanager.am.max-attempts": "2",
    "yarn.scheduler.minimum-allocation-mb": "256",
    "yarn.nodemanager.resource.memory-mb": "4096",
    "yarn.nodemanager.resource.cpu-vcores": "4",
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.disk-health-checker.enable": "false",
}


class Yarn(NamedTuple):
    """A cluster that runs."""

    folder: Path
    web: str

    @property
    def conf(self) -> Path:
        """Return what `HADOOP_CONF_DIR` names."""
        return self.folder / "conf"

    def submission(self, home: Path) -> dict[str, str]:
        """Return the settings by which a driver of pip's pyspark runs on it."""
        environment = {
            "SPARK_LOCAL_IP": HOST,
            "PYSPARK_PYTHON": sys.executable,
            "TWOPHASE_HOME": str(home),
            "JAVA_HOME": str(find_java(sys.executable)[0].parents[1]),
            "SPARK_HOME": str(_SPARK),
        }
        return {
            "spark.submit.deployMode": "cluster",
            "spark.yarn.jars": f"local:{_SPARK}/jars/*",
            "spark.yarn.stagingDir": f"file://{self.folder}/staging",
            "spark.executor.instances": "1",
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.yarn.am.waitTime": "300s",
            **{f"spark.yarn.appMasterEnv.{name}": value for name, value in environment.items()},
            "spark.executorEnv.SPARK_LOCAL_IP": HOST,
        }

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.web}/ws/v1/cluster/{path}", timeout=30) as reply:
            return json.load(reply)

    def applications(self) -> dict[str, dict[str, Any]]:
        """Return what the ResourceManager knows of each application."""
        found = self.get("apps")["apps"] or {"app": []}
        return {app["id"]: app for app in found["app"]}

    def tries(self, application: str) -> int:
        """Return how often a driver was started."""
        return len(self.get(f"apps/{application}/appattempts")["appAttempts"]["appAttempt"])


@contextmanager
def running(folder: Path) -> Iterator[Yarn]:
    """Start both servers; they die with this process."""
    with ExitStack() as free:
        sockets = [free.enter_context(socket.create_server((HOST, 0))) for _ in _ADDRESSES]
        ports = [found.getsockname()[1] for found in sockets]
    settings = {f"yarn.{name}": f"{HOST}:{port}" for name, port in zip(_ADDRESSES, ports, strict=True)}
    places = {f"yarn.nodemanager.{name}-dirs": str(folder / name) for name in ("local", "log")}
    conf = folder / "conf"
    conf.mkdir(parents=True)
    (folder / "staging").mkdir()
    _write(conf / "core-site.xml", {"fs.defaultFS": "file:///", "hadoop.tmp.dir": str(folder / "tmp")})
    _write(conf / "yarn-site.xml", {**_SETTINGS, **settings, **places})
    started = []
    try:
        for name, main in _SERVERS.items():
            started.append(_start(folder, name, main))
        yarn = Yarn(folder, f"http://{settings['yarn.resourcemanager.webapp.address']}")
        _wait(yarn, started)
        yield yarn
    finally:
        for process in started:
            processes.send(signal.SIGKILL, processes.members(process.pid))
            process.wait()


def _write(path: Path, settings: dict[str, str]) -> None:
    lines = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>\n" for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{lines}</configuration>\n")


def _start(folder: Path, name: str, main: str) -> subprocess.Popen[bytes]:
    java, _ = find_java(sys.executable)
    hadoop = map(str, jars.fetched("yarn-3.5.0", JARS))
    classes = os.pathsep.join([str(folder / "conf"), *hadoop, f"{_SPARK}/jars/*"])
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.lang", "java.net", "java.nio")]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(java), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *opened, "-cp", classes, main],
            env={**os.environ, "HADOOP_CONF_DIR": str(folder / "conf")},
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.dies_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one system call
        )


def _wait(yarn: Yarn, started: list[subprocess.Popen[bytes]]) -> None:
    for _ in polls(180):
        for process in started:
            assert process.poll() is None, "\n".join(log.read_text()[-2000:] for log in yarn.folder.glob("*.log"))
        try:
            if yarn.get("metrics")["clusterMetrics"]["activeNodes"]:
                return
        except (OSError, urllib.error.HTTPError, ValueError):
            continue
    msg = "YARN did not start: " + "\n".join(log.read_text()[-2000:] for log in yarn.folder.glob("*.log"))
    raise AssertionError(msg)
