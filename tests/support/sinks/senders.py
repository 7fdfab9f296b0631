"""Systems that rows are sent to, and senders for them: a file that keeps whatever comes, an HTTP service with ids."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from support.faults.processes import PATIENCE
from support.pipelines.factories import PreStaged
from twophase.committers import CheckpointCommitter
from twophase.core.checkpoint import Output
from twophase.local.record_access import open_record
from twophase.pipeline import Pipeline
from twophase.runner import Runner
from twophase.sinks import Sender, Sink
from twophase.wiring import coordinator_of, load

Row = dict[str, Any]


class Appending(Sender):
    """Appends to a file, which is a system without markers: what is sent twice is there twice.

    It says "not now" while a file `down` lies beside it: after so many rows as that file says, and with an exception if
    that file says so.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.down = self.path.with_name("down")

    def send_values(self, rows: Iterator[Row], checkpoint_id: int, timestamp: datetime) -> bool:
        first, _, how = self.down.read_text().partition(" ") if self.down.exists() else ("", "", "")
        with self.path.open("a") as file:
            for number, row in enumerate(rows):
                if first and number >= int(first):
                    return self._not_now(how)
                said = {"checkpoint": checkpoint_id, "at": timestamp.isoformat(), "row": row}
                file.write(json.dumps(said, default=shown) + "\n")
                file.flush()
        return True

    def _not_now(self, how: str) -> bool:
        if how:
            raise ConnectionError(how)
        return False

    def close(self) -> None:
        with self.path.with_name("closed").open("a") as file:
            file.write("closed\n")


class Keeping(Sender):
    """Keeps rows in SQLite together with their ids, a subtask at a time: what is sent twice is there once."""

    def __init__(self, path: str) -> None:
        self.database = sqlite3.connect(path)
        self.database.execute("CREATE TABLE IF NOT EXISTS kept (id TEXT PRIMARY KEY, row TEXT)")

    def send_values(self, rows: Iterator[Row], checkpoint_id: int, timestamp: datetime) -> bool:
        with self.database:
            for row in rows:
                key = row.pop("_twophase_id")
                self.database.execute("INSERT OR IGNORE INTO kept VALUES (?, ?)", (key, json.dumps(row)))
        return True

    def close(self) -> None:
        self.database.close()


def kept(path: Path) -> list[Row]:
    """Return what such a database holds."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as database:
        return [json.loads(row) for (row,) in database.execute("SELECT row FROM kept")]


def shown(value: object) -> str:
    """Write down what JSON has no word for."""
    return value.isoformat() if isinstance(value, date) else repr(value)


class Careless(Sender):
    """Returns what it is told, and takes so many rows."""

    def __init__(self, returns: bool | None = None, takes: int = 0) -> None:
        self.returns = returns
        self.takes = takes

    def send_values(self, rows: Iterator[Row], checkpoint_id: int, timestamp: datetime) -> bool:
        for _ in range(self.takes):
            next(rows)
        return self.returns  # type: ignore[return-value]


class NoSender:
    """Sends nothing."""


def received(path: Path) -> list[Row]:
    """Return what the file has received, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Sqlite(CheckpointCommitter):
    """A committer of a user's own; it fails to commit while a file `broken` lies beside its database."""

    def __init__(self, job_id: str = "", operator_id: str = "", *, path: str = "") -> None:
        super().__init__(job_id, operator_id)
        self.path = path

    def config(self) -> dict[str, Any]:
        return {"path": self.path}

    def create_resource(self) -> None:
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS committed (job, operator, subtask, checkpoint, revision)")

    def open(self) -> None:
        self.database = sqlite3.connect(self.path)

    def close(self) -> None:
        self.database.close()

    def is_committed(self, subtask: int, checkpoint: int, revision: int) -> bool:
        query = "SELECT 1 FROM committed WHERE (job, operator, subtask, checkpoint, revision) = (?, ?, ?, ?, ?)"
        mine = (self.job_id, self.operator_id, subtask, checkpoint, revision)
        return self.database.execute(query, mine).fetchone() is not None

    def commit(self, subtask: int, checkpoint: int, revision: int) -> None:
        if subtask >= 0 and Path(self.path).with_name("broken").exists():
            msg = "the committer is broken, as it was told to"
            raise ConnectionError(msg)
        mine = (self.job_id, self.operator_id, subtask, checkpoint, revision)
        with self.database:
            self.database.execute("INSERT INTO committed VALUES (?, ?, ?, ?, ?)", mine)


class Service:
    """An HTTP service that keeps rows and their ids in SQLite, in one transaction per request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests = 0
        self.authorization: str | None = None
        #: What happens to the next requests: `down` answers 503, `lose` keeps the rows and hangs up without an answer.
        self.trouble: list[str] = []
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE received (id TEXT PRIMARY KEY, row TEXT, seq INTEGER)")

    def keep(self, rows: list[Row]) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            for row in rows:
                key = row.pop("_twophase_id")
                database.execute(
                    "INSERT OR IGNORE INTO received SELECT ?, ?, count(*) FROM received", (key, json.dumps(row))
                )

    def rows(self) -> list[Row]:
        """Return what it has kept, in the order in which it came."""
        with closing(sqlite3.connect(self.path)) as database:
            return [json.loads(row) for (row,) in database.execute("SELECT row FROM received ORDER BY seq")]


@contextmanager
def serving(path: Path) -> Iterator[tuple[Service, str]]:
    """Run the service; yield it and its address."""
    service = Service(path)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.requests += 1
            service.authorization = self.headers["Authorization"]
            trouble = service.trouble.pop(0) if service.trouble else ""
            if trouble != "down":
                service.keep(rows)
            if trouble == "lose":
                self.close_connection = True
                return
            self.send_response(503 if trouble == "down" else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service, f"http://127.0.0.1:{server.server_port}/rows"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- what processes do -----------------------------------------------------------------------------------------------


def hold(committer: CheckpointCommitter, ready: str) -> None:
    """Hold a committer's lock until killed."""
    with committer, committer.lock(5.0):
        Path(ready).write_text(str(os.getpid()))
        threading.Event().wait()


def take(declaration: dict[str, Any], files: int = 2) -> None:
    """Take one checkpoint of the pipeline `words` through."""
    with Runner(Pipeline.from_declaration("words", declaration), PreStaged(files=files)) as runner:
        runner.run()


def recover() -> None:
    """Finish what others left, from the record alone."""
    record = open_record()
    coordinator_of(record, load(record, "words")).recover(decided_only=True)


def promote(declaration: dict[str, Any], output: Output, results: SimpleQueue[str]) -> None:
    """Promote one output; say how that ended."""
    promotion = Sink.load(declaration).promote(output)
    results.put(promotion.outcome.value)


def race(declaration: dict[str, Any], outputs: list[Output], barrier: Barrier, results: SimpleQueue[str]) -> None:
    """Promote outputs, one after the other, each at the same time as others do."""
    sink = Sink.load(declaration)
    for output in outputs:
        barrier.wait(PATIENCE)
        results.put(sink.promote(output).outcome.value)
