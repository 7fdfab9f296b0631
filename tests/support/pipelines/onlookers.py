"""What anybody could see of a run: command lines, files, and the record as text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from sqlalchemy import text

from twophase.committer.record import PostgresRecord


class Seen:
    """What could be seen from outside while something ran."""

    def __init__(self) -> None:
        self.command_lines: set[str] = set()
        self.files: dict[str, bytes] = {}

    def look(self, home: Path) -> None:
        for process in psutil.process_iter(["cmdline"]):
            self.command_lines.update(process.info["cmdline"] or ())
        for path in (home / "runs").rglob("*.*"):  # gone when all is done
            with suppress(FileNotFoundError, IsADirectoryError):
                self.files[path.name] = path.read_bytes()


@contextmanager
def watching(home: Path) -> Iterator[Seen]:
    """Look again and again, from another thread."""
    seen, over = Seen(), threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            seen.look(home)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded(record: PostgresRecord) -> str:
    """Return every row of the record as text."""
    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'twophase'"
    with record.engine.connect() as connection:
        names = connection.execute(text(tables)).scalars().all()
        rows = [connection.execute(text(f'SELECT t::text FROM twophase."{name}" t')).scalars().all() for name in names]
    return "\n".join(row for table in rows for row in table)
