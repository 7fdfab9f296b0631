"""Texts are what they were, whatever the encoding of the target's database is."""

from __future__ import annotations

from contextlib import closing

import psycopg2
import pytest
from sqlalchemy.engine import make_url

from conftest import administer
from postgres_words import Words
from twophase.core.ports import Outcome


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_texts_are_the_same_in_a_database_of_another_encoding(
    dsn: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """It converts them, or refuses them before the vote; a receipt may name a file in letters that it does not have."""
    name = f"{make_url(dsn).database}_{encoding.lower()}"
    how = f"ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    provider = " LOCALE_PROVIDER libc" if _version(dsn) >= 150000 else ""
    administer(dsn, f"CREATE DATABASE {name} {how}{provider}")
    url = make_url(dsn).set(drivername="postgresql", database=name).render_as_string(hide_password=False)
    monkeypatch.setenv("AIRFLOW_CONN_DWH", url)
    with closing(psycopg2.connect(url, client_encoding="UTF8")) as session, session.cursor() as cursor:
        session.autocommit = True
        table = Words(cursor, "CREATE TABLE public.words (id bigint, word text, _checkpoint bigint, é text)")
        staged = table.stage([{"id": 1, "word": "é"}])
        told = {"pipeline": "words", "commit_seq": 1, "epoch": 1, "inputs": {"words": ["語.json"]}}
        staged = staged._replace(handle={**staged.handle, "receipt": told})
        table.check(staged)

        assert table.promote(staged).outcome is Outcome.PROMOTED
        cursor.execute("SELECT word, length(word) FROM public.words")
        assert cursor.fetchall() == [("é", 2 if encoding == "SQL_ASCII" else 1)]
        assert list(table.sink.receipts("words", 1)) == [told]
        if encoding == "LATIN1":
            with pytest.raises(Exception, match="has no equivalent in encoding"):
                table.stage([{"id": 2, "word": "語"}], 2)
    administer(dsn, f"DROP DATABASE {name}")


def _version(dsn: str) -> int:
    with closing(
        psycopg2.connect(make_url(dsn).set(drivername="postgresql").render_as_string(hide_password=False))
    ) as one:
        found: int = one.server_version
        return found
