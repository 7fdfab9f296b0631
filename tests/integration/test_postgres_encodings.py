"""Texts are what they were, whatever the encoding of the target's database is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
from sqlalchemy.engine import make_url

from support.servers.postgres import administer
from support.sinks.postgres_table import Words
from twophase.committer.record import PostgresRecord
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def encoding(request: pytest.FixtureRequest) -> str:
    """Return the encoding of `other`."""
    found: str = request.param
    return found


@pytest.fixture
def other(dsn: str, encoding: str) -> Iterator[str]:
    """Return the address of an empty database of another encoding."""
    name = f"{make_url(dsn).database}_{encoding.lower()}"
    how = "TEMPLATE template0 LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'"
    administer(dsn, f"CREATE DATABASE {name} ENCODING '{encoding}' {how}")
    yield make_url(dsn).set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    administer(dsn, f"DROP DATABASE {name} WITH (FORCE)")


def test_texts_are_the_same_in_a_database_of_another_encoding(
    other: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It converts them, or refuses them before the vote; a receipt may name a file in letters that it does not have."""
    monkeypatch.setenv("AIRFLOW_CONN_DWH", other)
    with closing(psycopg2.connect(other, client_encoding="UTF8")) as session, session.cursor() as cursor:
        session.autocommit = True
        table = Words(cursor, "CREATE TABLE public.words (id bigint, word text, _checkpoint bigint, é text)")
        staged = table.stage([{"id": 1, "word": "é"}])
        told = {"pipeline": "words", "commit_seq": 1, "epoch": 1, "inputs": {"words": ["語.json"]}}
        staged = replace(staged, receipt=told)
        table.check(staged)

        assert table.promote(staged).outcome is Outcome.PROMOTED
        cursor.execute("SELECT word, length(word) FROM public.words")
        assert cursor.fetchall() == [("é", 2 if encoding == "SQL_ASCII" else 1)]
        assert list(table.sink.receipts("words", 1)) == [told]
        if encoding == "LATIN1":
            with pytest.raises(Exception, match="has no equivalent in encoding"):
                table.stage([{"id": 2, "word": "語"}], 2)


def test_no_record_is_made_where_a_path_may_have_letters_that_the_database_lacks(other: str, encoding: str) -> None:
    """It is said when the record is to be made, not at the first file with such a name."""
    with pytest.raises(ConfigError, match=f"committer database: expected the encoding UTF8, found {encoding}; make"):
        PostgresRecord.open(other, create=True)
