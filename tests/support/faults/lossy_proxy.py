"""A proxy before PostgreSQL that loses what it is told to lose: a COMMIT, or only the reply to it.

It is told so by the client itself, in the same connection, so that it is known which COMMIT is meant; or by a plan,
for all clients together, of the how manyth COMMIT it is.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

#: What a client says right before the COMMIT that is meant.
LOSE_REPLY = "SELECT 'lose the reply to the next COMMIT'"
LOSE_COMMIT = "SELECT 'lose the next COMMIT'"

_SSL, _GSS = 80877103, 80877104


@dataclass
class Plan:
    """Says what happens to the nth COMMIT of all clients together, and counts them."""

    how: str | None = None
    nth: int = 0
    seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lose(self, how: str, nth: int) -> None:
        """Begin to count anew."""
        with self._lock:
            self.how, self.nth, self.seen = how, nth, 0

    def meet(self) -> str | None:
        """Count a COMMIT; return what happens to it."""
        with self._lock:
            self.seen += 1
            return self.how if self.seen == self.nth else None


class Connection:
    """One client's connection and the server's other end of it."""

    def __init__(self, client: socket.socket, server: socket.socket, plan: Plan) -> None:
        self.client, self.server = client, server
        self.plan = plan
        self.losing: str | None = None
        self.answered = threading.Event()
        self.lost = False

    def from_client(self) -> None:
        """Forward messages to the server until the one that is lost."""
        while True:
            code, message = _startup(self.client)
            self.server.sendall(message)
            if code not in {_SSL, _GSS}:  # those are asked first, and answered with one letter
                break
        for kind, message in _messages(self.client):
            text = message[5:].rstrip(b"\0").decode(errors="replace") if kind == b"Q" else ""
            if text == "COMMIT":
                self.losing = self.plan.meet() or self.losing
            if text == "COMMIT" and self.losing == LOSE_COMMIT:
                self.lost = True
                return
            if text == "COMMIT" and self.losing == LOSE_REPLY:
                self.lost = True
                self.server.sendall(message)
                self.answered.wait(30)
                return
            if text in {LOSE_REPLY, LOSE_COMMIT}:
                self.losing = text
            self.server.sendall(message)

    def from_server(self) -> None:
        """Forward whatever the server says, but not the reply that is lost."""
        while data := self.server.recv(65536):
            if self.lost:
                self.answered.set()
                return
            self.client.sendall(data)

    def run(self) -> None:
        """Forward both ways until either side ends, then cut both."""
        answers = threading.Thread(target=self._end_with, args=[self.from_server], daemon=True)
        answers.start()
        self._end_with(self.from_client)
        answers.join()
        self.client.close()
        self.server.close()

    def _end_with(self, forward: object) -> None:
        assert callable(forward)
        with suppress(OSError, EOFError):
            forward()
        if self.lost and not self.answered.is_set() and forward == self.from_server:
            self.answered.set()
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _startup(end: socket.socket) -> tuple[int, bytes]:
    """Read a message without a type: what a connection begins with."""
    head = _exactly(end, 8)
    length, code = struct.unpack("!II", head)
    return code, head + _exactly(end, length - 8)


def _messages(end: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    while True:
        head = _exactly(end, 5)
        (length,) = struct.unpack("!I", head[1:])
        yield head[:1], head + _exactly(end, length - 4)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


@contextmanager
def proxy(port: int, plan: Plan | None = None) -> Iterator[int]:
    """Listen before a server on this machine; yield the port to connect to."""
    plan = plan or Plan()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    server = socket.create_connection(("127.0.0.1", port))
                    threading.Thread(target=Connection(client, server, plan).run, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
