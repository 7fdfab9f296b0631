"""What the tests of slots, chains and retention in the record share."""

from __future__ import annotations

import uuid

import pytest

from support.pipelines.record_book import Book
from twophase.committer.record import PostgresRecord


@pytest.fixture(scope="module")
def record(shared_record: PostgresRecord) -> PostgresRecord:
    """Return one record for the module: each test has pipelines of its own in it."""
    return shared_record


@pytest.fixture
def book(record: PostgresRecord) -> Book:
    return Book(record, f"p_{uuid.uuid4().hex[:12]}")


@pytest.fixture
def reader(book: Book) -> Book:
    """Return a pipeline that reads the other one."""
    reads = {"rows": {"class": "twophase.sources.committed:Committed", "pipeline": book.name, "sink": "lake"}}
    return Book(book.record, f"d_{uuid.uuid4().hex[:12]}", reads)
