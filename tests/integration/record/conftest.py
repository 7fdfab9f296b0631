"""What the tests of the record share: one record for a module, a pipeline for a test."""

from __future__ import annotations

import uuid

import pytest

from support.pipelines.record_steps import put
from twophase.committer.record import PostgresRecord


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has a pipeline of its own in it."""
    return shared_record


@pytest.fixture
def pipeline(record: PostgresRecord) -> str:
    """Return the name of a pipeline that is in the record."""
    name = f"p_{uuid.uuid4().hex[:12]}"
    put(record, name)
    return name
