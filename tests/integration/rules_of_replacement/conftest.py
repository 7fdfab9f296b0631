"""What the tests of the rules of replacement share: a pipeline with a table, exchanged or renamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pipelines.replacement_bench import Bench
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def bench(record: PostgresRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Return a pipeline of this test's own, with two tables."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    yield Bench(record)
    failpoints.configure("")
