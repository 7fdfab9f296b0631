"""How tests of Delta and Iceberg get at a table of either format, and the fixtures that their promises share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from support.pipelines.factories import SCHEMA, Row
from twophase.core import failpoints
from twophase.core.manifest import Column
from twophase.sinks.log_tables.base import LogTableSink

WIDER = (*SCHEMA, Column("city", "string"))
DAYS = (*SCHEMA, Column("day", "date"))


class Format(Protocol):
    """How a test declares such a table, looks at it, and writes to it as somebody else."""

    def make(self, path: str, **options: Any) -> LogTableSink:
        """Declare a table."""
        ...

    def content(self, sink: LogTableSink) -> list[Row]:
        """Read the table with an engine that wrote none of it."""
        ...

    def commits(self, sink: LogTableSink) -> object:
        """Return what changes with every commit."""
        ...

    def marker(self, sink: LogTableSink) -> int | None:
        """Return the high-water mark."""
        ...

    def append(self, sink: LogTableSink, row: Row) -> None:
        """Append a row as another writer."""
        ...

    def rewrite(self, sink: LogTableSink) -> None:
        """Rewrite the files as another writer."""
        ...

    def restore(self, sink: LogTableSink) -> None:
        """Undo the rewriting as somebody who looks after the table."""
        ...

    def committing(self, monkeypatch: pytest.MonkeyPatch, around: Callable[[Callable[[], object]], None]) -> None:
        """Let something happen around the library's commit of a promotion, and of nobody else."""
        ...


def foreign(form: Format, sink: LogTableSink, number: int = 1) -> list[Row]:
    row = {"id": -number, "word": "foreign", "frequency": 0}
    form.append(sink, row)
    return [row]


def alter(victim: Path) -> None:
    """Change a byte of a file, at another time than it was written: an object store tells seconds."""
    later = victim.stat().st_mtime + 2
    victim.write_bytes(victim.read_bytes()[:-1] + b"X")
    os.utime(victim, (later, later))


class GivenTable:
    """A subclass gives the fixture `form`."""

    @pytest.fixture
    def sink(self, form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogTableSink:
        monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
        table = form.make("lake/words")
        table.prepare()
        return table

    @pytest.fixture(autouse=True)
    def _no_failpoints(self) -> Iterator[None]:
        yield
        failpoints.configure("")
