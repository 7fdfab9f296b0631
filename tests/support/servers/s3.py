"""A real S3 server for the tests, versitygw over a folder: built once from its Go module, and kept in the user's cache.

An object is a file below the folder, so that a test can look at it, damage it and remove it behind everybody's back.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from support.faults.processes import polls

MODULE = "github.com/versity/versitygw/cmd/versitygw"
VERSION = "v1.8.0"
BUCKET = "lake"
CONN_ID = "lake_s3"
#: What must be seen nowhere.
SECRET = "canary-83c1f0aa6d"
#: Where the server's folder is, for processes of a test.
ROOT = "TWOPHASE_TEST_S3_ROOT"
#: A build from nothing takes two to six minutes of one core.
PATIENCE = 1200.0

_building: list[subprocess.Popen[bytes]] = []


def program() -> Path:
    """Return where the program is, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "twophase", f"versitygw-{VERSION}")


def build() -> None:
    """Start to build the program in the background, unless it is there or another process does: other tests run on."""
    if program().exists() or _building:
        return
    go = shutil.which("go") or shutil.which("go", path=Path(sys.executable).parent)
    assert go, "the tests on S3 need Go; `make` installs one where there is none"
    program().parent.mkdir(parents=True, exist_ok=True)
    lock = (program().parent / "building").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return
    folder = Path(tempfile.mkdtemp(dir=program().parent, prefix="building-"))
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-buildvcs=false"}
        command = ["nice", "-n", "10", go, "install", f"{MODULE}@{VERSION}"]
        _building.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
    threading.Thread(target=_finish, args=[_building[0], folder, lock], daemon=True).start()


def _finish(made: subprocess.Popen[bytes], folder: Path, lock: IO[bytes]) -> None:
    with lock:
        if made.wait() == 0:
            (folder / "versitygw").replace(program())
            shutil.rmtree(folder)


def built() -> Path:
    """Wait for the program, whoever builds it."""
    for _ in polls(PATIENCE):
        if program().exists():
            return program()
        build()
        said = f"building {MODULE}@{VERSION} failed, see {program().parent}"
        assert not _building or _building[0].poll() in {None, 0}, said
    msg = f"building {MODULE}@{VERSION} took longer than {PATIENCE} s"
    raise AssertionError(msg)


def local(url: str) -> Path:
    """Return the file or folder behind a URL; a path is one itself."""
    return Path(os.environ[ROOT], url.removeprefix("s3://")) if url.startswith("s3://") else Path(url)


class S3Server:
    """One server, which can be stopped, killed and started again on the same port and folder."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="twophase-s3-"))
        self.root = self.home / "root"
        (self.root / BUCKET).mkdir(parents=True)
        (self.home / "meta").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        arguments = ["--port", f"127.0.0.1:{self.port}", "--quiet", "posix", "--sidecar", str(self.home / "meta")]
        secrets = {"ROOT_ACCESS_KEY": "twophase", "ROOT_SECRET_KEY": SECRET}
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(built()), *arguments, str(self.root)], env={**os.environ, **secrets}, stdout=log, stderr=log
            )
        for _ in polls(60):
            assert self.process.poll() is None, (self.home / "log").read_text()
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
        msg = "the S3 server did not start"
        raise AssertionError(msg)

    def kill(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Stop it: connections are taken, and nothing is ever answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def restore(self) -> None:
        """Let it work again, whatever was done to it."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        else:
            self.start()

    def connection(self, port: int | None = None, **config: float) -> str:
        """Return the Airflow connection, as an environment variable has it; whoever waits does not wait long."""
        extra = {
            "endpoint_url": f"http://127.0.0.1:{port or self.port}",
            "region_name": "us-east-1",
            "config_kwargs": {"connect_timeout": 2, "read_timeout": 10, **config},
        }
        return json.dumps({"conn_type": "aws", "login": "twophase", "password": SECRET, "extra": extra})

    def environment(self) -> Mapping[str, str]:
        """Return what a user sets."""
        return {f"AIRFLOW_CONN_{CONN_ID.upper()}": self.connection(), ROOT: str(self.root)}

    @staticmethod
    def place() -> str:
        """Return a folder of one test's own."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"


@contextmanager
def serving() -> Iterator[S3Server]:
    """Start a server; remove it and its folder at the end."""
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(server.home)


class Relay:
    """Stands before the server, and loses the reply to the first request whose head has some bytes in it.

    The server has done what it was asked by then; the client sees its connection cut.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self.port, self.request = port, request
        self.asked, self.lost = threading.Event(), threading.Event()

    def serve(self, client: socket.socket) -> None:
        """Forward one connection both ways until either side ends."""
        meant = threading.Event()

        def replies() -> None:
            with suppress(OSError):
                while data := server.recv(65536):
                    if meant.is_set() and b"100 Continue" not in data:
                        self.lost.set()
                        break
                    client.sendall(data)
            _cut(client, server)

        with client, socket.create_connection(("127.0.0.1", self.port)) as server:
            back = threading.Thread(target=replies, daemon=True)
            back.start()
            with suppress(OSError):
                while data := client.recv(65536):
                    if self.request in data and not self.asked.is_set():
                        self.asked.set()
                        meant.set()
                    server.sendall(data)
            _cut(client, server)
            back.join()


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def losing_reply(port: int, request: bytes) -> Iterator[tuple[int, threading.Event]]:
    """Put a relay before the server; yield its port, and what is set once the reply was lost."""
    relay = Relay(port, request)
    clients: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                clients.append(listening.accept()[0])
                threads.append(threading.Thread(target=relay.serve, args=clients[-1:], daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield listening.getsockname()[1], relay.lost
        _cut(listening, *clients)
        for thread in (accepting, *threads):
            thread.join(30)
