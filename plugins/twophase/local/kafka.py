"""A Kafka broker on this machine, for tests, the demo and benchmarks: Apache Kafka in KRaft mode, one node.

    <folder>/server.properties    written at each start
    <folder>/data/                the log; `meta.properties` in it is written by hand, which saves a format JVM
    <folder>/log                  what the broker says

It listens on 127.0.0.1 only, keeps its ports over restarts, and dies with the process that started it. Users bring a
broker of their own.
"""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from twophase.core import private_files
from twophase.core.errors import StoreUnavailable
from twophase.local import jars, kafka_jars, processes
from twophase.spark.submit import find_java

HOST = "127.0.0.1"
VERSION = "4.2.1"
_NODE = 1
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL = 0.05
#: What the broker says once it answers.
_READY = b"Kafka Server started"
#: A broker for small data: quick to start, little memory.
QUICK = ("-Xmx512m", "-Xss512k", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

_LOGGING = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c{1})%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""

#: One node, few partitions of its own topics, and a broker that is killed is taken back soon after its restart.
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": str(_NODE),
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": ",".join(
        f"{name}:{name}" for name in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
    )
    + ",CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "broker.session.timeout.ms": "1500",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": str(8 << 20),
    "num.network.threads": "2",
    "num.io.threads": "4",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
}


def connector() -> list[Path]:
    """Return the jars of Spark's Kafka connector, for `spark.jars`; they are fetched if need be."""
    return jars.fetched("spark-kafka-4.2.0", kafka_jars.CONNECTOR)


def broker_jars() -> list[Path]:
    """Return the jars of the broker, Java's clients among them; they are fetched if need be."""
    return jars.fetched(f"kafka-{VERSION}", kafka_jars.BROKER)


def console_consumer(address: str, topic: str, partition: int | None = None) -> list[str]:
    """Return the command of Kafka's own consumer, in Java: it prints each committed record of a topic, for ever.

    With a partition it belongs to no group, so nothing ever moves it, and prints offset and key, too.
    """
    java, _ = find_java(sys.executable)
    classes = ":".join(map(str, [*broker_jars(), *jars.fetched(f"kafka-{VERSION}", kafka_jars.TOOLS)]))
    main = "org.apache.kafka.tools.consumer.ConsoleConsumer"
    where = ("--bootstrap-server", address, "--topic", topic, "--isolation-level", "read_committed")
    if partition is None:
        return [str(java), *QUICK, "-cp", classes, main, *where, "--from-beginning"]
    shown = [part for name in ("offset", "key") for part in ("--formatter-property", f"print.{name}=true")]
    return [
        *(str(java), *QUICK, "-cp", classes, main, *where, *shown),
        *("--partition", str(partition), "--offset", "earliest"),
    ]


@dataclass
class Broker:
    """One broker, from `start` to `stop`; it can be killed and started again on the same ports and data."""

    folder: Path
    #: Further settings of the broker, or other values than ours.
    settings: Mapping[str, str] = field(default_factory=dict)
    #: Listeners beside PLAINTEXT, each named like its protocol: SSL, SASL_PLAINTEXT, SASL_SSL.
    listeners: tuple[str, ...] = ()
    #: Options of its Java.
    java_options: tuple[str, ...] = QUICK
    ports: dict[str, int] = field(init=False, default_factory=dict)
    process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    #: The archive of classes that Java starts from, or that the next start finds.
    _classes: Path = field(init=False, default=Path())

    def address(self, listener: str = "PLAINTEXT") -> str:
        """Return what a client connects to: its `bootstrap.servers`."""
        return f"{HOST}:{self.ports[listener]}"

    @property
    def log(self) -> Path:
        """Return the file of what the broker says."""
        return self.folder / "log"

    def start(self) -> Self:
        """Start it, and return once it answers."""
        self._write()
        said = self.log.stat().st_size if self.log.exists() else 0
        java, _ = find_java(sys.executable)
        classes = ":".join(map(str, broker_jars()))
        options = (
            *self.java_options,
            *self._archive(java),
            f"-Dlog4j2.configurationFile={self.folder / 'logging.properties'}",
        )
        command = [str(java), *options, "-cp", classes, "kafka.Kafka", str(self.folder / "server.properties")]
        with private_files.open_file(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.dies_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one system call
            )
        self._wait(self.process, said)
        return self

    def kill(self) -> None:
        """Kill it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Let it end in order, or kill it."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
            self._keep_archive()
        except subprocess.TimeoutExpired:
            self.kill()
        self.process = None

    def __enter__(self) -> Self:
        """Start it."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    # --- the folder --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write the settings, and what makes an empty folder a formatted one."""
        names = ("PLAINTEXT", *self.listeners, "CONTROLLER")
        self.ports = self.ports or self._kept_ports(names) or dict(zip(names, _free_ports(len(names)), strict=True))
        data = self.folder / "data"
        private_files.make_folder(self.folder)
        private_files.make_folder(data)
        listeners = {name: f"{name}://{HOST}:{port}" for name, port in self.ports.items()}
        offered = [address for name, address in listeners.items() if name != "CONTROLLER"]
        settings = {
            **_SETTINGS,
            "listeners": ",".join(listeners.values()),
            "advertised.listeners": ",".join(offered),
            "controller.quorum.voters": f"{_NODE}@{HOST}:{self.ports['CONTROLLER']}",
            "log.dirs": str(data),
            **self.settings,
        }
        _write_properties(self.folder / "server.properties", settings)
        with private_files.open_file(self.folder / "logging.properties", "w") as file:
            file.write(_LOGGING)
        if not (data / "meta.properties").exists():
            ids = {"cluster.id": _random_id(), "directory.id": _random_id()}
            _write_properties(data / "meta.properties", {"version": "1", "node.id": str(_NODE), **ids})

    def _kept_ports(self, names: tuple[str, ...]) -> dict[str, int] | None:
        """Return the ports of a broker that worked in this folder before, if all of them are free."""
        kept = _kept(self.folder)
        return kept if tuple(kept) == names and all(map(_is_free, kept.values())) else None

    def _wait(self, process: subprocess.Popen[bytes], said: int) -> None:
        """Wait until the broker says that it is ready; what it said before this start does not count."""
        deadline = time.monotonic() + _START_SECONDS
        with self.log.open("rb") as log:
            log.seek(said)
            heard = b""
            while _READY not in heard:
                heard = heard[-len(_READY) :] + log.read()
                if process.poll() is not None:
                    msg = f"kafka broker: ended with exit code {process.returncode}; see {self.log}"
                    raise StoreUnavailable(msg)
                if time.monotonic() > deadline:
                    self.kill()
                    msg = f"kafka broker: not ready within {_START_SECONDS:.0f} s; see {self.log}"
                    raise StoreUnavailable(msg)
                time.sleep(_POLL)

    # --- the class archive -------------------------------------------------------------------------------------------

    def _archive(self, java: Path) -> tuple[str, ...]:
        """Return the option that lets Java start from an archive of the broker's classes, or make one when it ends."""
        release = java.parents[1] / "release"
        which = hashlib.sha256(str(java).encode() + (release.read_bytes() if release.exists() else b""))
        self._classes = jars.cache() / f"kafka-{VERSION}" / f"classes-{which.hexdigest()[:16]}.jsa"
        if self._classes.exists():
            return (f"-XX:SharedArchiveFile={self._classes}", "-Xshare:auto")
        return (f"-XX:ArchiveClassesAtExit={self.folder / 'classes.jsa'}",)

    def _keep_archive(self) -> None:
        """Move the archive that a broker made when it ended to where the next one looks."""
        made = self.folder / "classes.jsa"
        if made.exists():
            new = self._classes.with_name(f".{uuid.uuid4().hex}")
            new.write_bytes(made.read_bytes())
            new.replace(self._classes)
            made.unlink()


def _write_properties(path: Path, properties: Mapping[str, str]) -> None:
    """Write a file of Java properties, readable by its owner only: settings may hold passwords."""
    escaped = {name: value.replace("\\", "\\\\").replace("\n", "\\n") for name, value in properties.items()}
    with private_files.open_file(path, "w") as file:
        file.write("".join(f"{name}={value}\n" for name, value in escaped.items()))


def _random_id() -> str:
    """Return an id as Kafka writes it: 16 bytes in base64 for URLs, never with a leading dash."""
    while (made := base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")).startswith("-"):
        pass
    return made


def kept_address(folder: Path) -> str | None:
    """Return where the broker of a folder listens, or did; None: there was none."""
    port = _kept(folder).get("PLAINTEXT")
    return f"{HOST}:{port}" if port else None


def _kept(folder: Path) -> dict[str, int]:
    """Return the ports that the settings in a folder name."""
    try:
        lines = (folder / "server.properties").read_text().splitlines()
    except FileNotFoundError:
        return {}
    told = next((line.partition("=")[2] for line in lines if line.startswith("listeners=")), "")
    listeners = [one.split("://") for one in told.split(",") if one]
    return {name: int(place.rpartition(":")[2]) for name, place in listeners}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
