"""A run fails, and what failed repeats the secrets it was given: none is in a file, command line, record or log."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.pipelines.onlookers import contents, recorded, watching
from support.servers.s3 import CONN_ID, SECRET, S3Server
from twophase import sinks
from twophase.committer.record import PostgresRecord
from twophase.core.connections import required
from twophase.core.errors import PromotionPending, TwophaseError
from twophase.runner import Runner, stager_for
from twophase.sinks import Sender

#: As people choose them, with all that has a meaning in a URL, in JSON and in Python.
PASSWORD = 'odd-pass@/w:rd?#%41"\\ü'
SETTING = 'odd-setting@/=w rd#\\"ü'

#: What a user's code may say of what it was given, in each of the places where it can fail.
JOB = """
import os
import psycopg2
from urllib.parse import quote

def said(spark):
    given = spark.sparkContext.getConf().get("spark.mine.password")
    texts = [given, repr(given)] + [value for name, value in os.environ.items() if name.startswith("AIRFLOW_CONN_")]
    return " and ".join([*texts, quote({password!r}), quote({password!r}, safe=""), {password!r}, repr({password!r})])

def driver(words, spark):
    raise ValueError(said(spark))

def worker(words, spark):
    message = said(spark)

    def fail(batches):
        raise ValueError(message)

    return words.mapInArrow(fail, words.schema)

def load(words, spark):
    with psycopg2.connect({dsn!r}) as session, session.cursor() as cursor:
        cursor.execute("ALTER ROLE odd PASSWORD 'another'")
    return words
"""


def spellings(secret: str) -> list[str]:
    """Return a part of a secret that every spelling of it keeps, and the secret as JSON and Python write it."""
    return [secret, secret[:8], json.dumps(secret)[1:-1], repr(secret)[1:-1]]


@pytest.fixture
def odd(home: Path, dsn: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the connection `dwh` have a password with every odd sign."""
    target.execute("DROP ROLE IF EXISTS odd")
    target.execute("CREATE ROLE odd SUPERUSER LOGIN PASSWORD %s", [PASSWORD])
    address, _, database = dsn.rpartition("@")[2].partition("/")
    host, _, port = address.partition(":")
    parts = {"conn_type": "postgres", "host": host, "port": port, "schema": database}
    monkeypatch.setenv("AIRFLOW_CONN_DWH", json.dumps({**parts, "login": "odd", "password": PASSWORD}))
    (home / "spark_jobs").mkdir()
    plain = dsn.replace("postgresql+psycopg2", "postgresql")
    (home / "spark_jobs" / "repeating.py").write_text(JOB.format(password=PASSWORD, dsn=plain))
    (home / "spark_jobs" / "importing.py").write_text(f"raise ValueError({PASSWORD!r})\ntransform = None\n")
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(home / "spark_jobs"))
    yield
    target.execute("REASSIGN OWNED BY odd TO CURRENT_USER")
    target.execute("DROP ROLE odd")


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("transform", "master", "says"),
    [
        pytest.param("repeating:worker", "local[1]", r"ValueError: \*\*\*", id="worker"),
        pytest.param("repeating:driver", "local[1]", r"ValueError: \*\*\*", id="driver", marks=pytest.mark.slow),
        pytest.param("importing:transform", "local[1]", r"ValueError: \*\*\*", id="import", marks=pytest.mark.slow),
        pytest.param("repeating:load", "local[1]", "password authentication failed", id="load", marks=pytest.mark.slow),
        pytest.param("repeating:load", "nowhere", "no result", id="submission", marks=pytest.mark.slow),
    ],
)
def test_a_submission_that_fails_shows_no_secret(  # noqa: PLR0917 - fixtures
    home: Path,
    record: PostgresRecord,
    odd: None,
    s3: S3Server,
    caplog: pytest.LogCaptureFixture,
    transform: str,
    master: str,
    says: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    land_words(files=1, rows=1)
    writes = {
        "dwh": sinks.Postgres("words", conn_id="dwh", create=True),
        "lake": sinks.Delta(f"{S3Server.place()}/words", conn_id=CONN_ID),
    }
    pipeline = words_pipeline(transform=transform, writes=writes)
    stager = stager_for(pipeline, master=master, conf={"spark.mine.password": SETTING})

    with (
        watching(home) as seen,
        Runner(pipeline, stager, record=record) as runner,
        pytest.raises(TwophaseError, match=says) as failed,
    ):
        runner.run()

    said = "".join(traceback.format_exception(failed.value))
    seen.files.pop("spark.log", None)  # private while the job runs; secrets are removed once it has failed
    files = {**seen.files, **contents(home / "runs"), **contents(s3.root)}
    assert {"plan.json", "spark.log"} <= {Path(name).name for name in files}
    for secret in (PASSWORD, SETTING, SECRET):
        for spelt in spellings(secret):
            assert not [part for part in seen.command_lines if spelt in part]
            assert not [name for name, content in files.items() if spelt.encode() in content]
            assert not [what for what in (said, caplog.text, recorded(record)) if spelt in what]


class Repeating(Sender):
    """Cannot send, and says what it was to log in with; the connection is looked up by whoever it likes."""

    def __init__(self, builds: bool) -> None:
        if not builds:
            raise ConnectionError(required("dwh").url())

    def send_values(self, rows: Iterator[Any], checkpoint_id: int, timestamp: datetime) -> bool:
        raise ConnectionError(os.environ["AIRFLOW_CONN_DWH"])


@pytest.mark.parametrize("builds", [True, False])
def test_a_promotion_that_fails_shows_no_secret(
    home: Path, record: PostgresRecord, odd: None, caplog: pytest.LogCaptureFixture, builds: bool
) -> None:
    """What a sender raises is logged with its traceback, and is the reason why the promotion waits."""
    caplog.set_level(logging.DEBUG)
    land_words(files=1, rows=1)
    sink = sinks.WriteAhead(f"{__name__}:Repeating", arguments={"builds": builds})
    pipeline = words_pipeline(writes={"out": sink})

    with Runner(pipeline, PreStaged(), record=record) as runner, pytest.raises(PromotionPending) as failed:
        runner.run()

    assert "ConnectionError" in str(failed.value)
    assert ("Traceback" in caplog.text) == builds
    for spelt in spellings(PASSWORD):
        for where in (str(failed.value), caplog.text, recorded(record)):
            assert spelt not in where
