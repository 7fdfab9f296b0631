"""A store or a catalog is away, or refuses and repeats what it was told: no secret is in an error, log or record."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.pipelines.factories import PreStaged, land_words, words_pipeline
from support.pipelines.onlookers import recorded
from support.servers.s3 import SECRET
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.core.errors import SinkUnavailable, TwophaseError
from twophase.runner import Runner
from twophase.sinks.base import Sink

#: As people choose them, with all that has a meaning in a URL.
ODD = f"{SECRET}@/?#%41: ü"


class Repeating(BaseHTTPRequestHandler):
    """Refuses every request, and repeats it whole in its answer."""

    def answer(self) -> None:
        told = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        message = f"no: {self.path} {dict(self.headers)} {told}"
        body = json.dumps({"error": {"message": message, "type": "NotAuthorized", "code": 401}}).encode()
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815 - as http.server calls them

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def repeating() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Repeating)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def store(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Sink:
    extra = {"endpoint_url": endpoint, "config_kwargs": {"connect_timeout": 1, "read_timeout": 2}}
    connection = {"conn_type": "aws", "login": "twophase", "password": ODD, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(connection))
    return sinks.Delta("s3://bucket/words", conn_id="lake")


def catalog(monkeypatch: pytest.MonkeyPatch, endpoint: str, **extra: str) -> Sink:
    login = {} if extra else {"login": "twophase", "password": ODD}
    extra = extra or {"oauth2-server-uri": f"{endpoint}/v1/oauth/tokens"}
    connection = {"conn_type": "iceberg", "host": endpoint, **login, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_CATALOG", json.dumps(connection))
    return sinks.Iceberg("lake.words", catalog="catalog", path="lake/words")


@pytest.mark.parametrize(
    "away", ["http://127.0.0.1:9", "http://no such host/ü", None], ids=["closed", "odd", "repeats"]
)
@pytest.mark.parametrize("kind", ["store", "credential", "token"])
def test_what_a_run_fails_with_holds_no_secret(  # noqa: PLR0917 - fixtures
    home: Path,
    record: PostgresRecord,
    repeating: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    away: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint = away or repeating
    if kind == "store":
        sink = store(monkeypatch, endpoint)
    else:
        sink = catalog(monkeypatch, endpoint, **({"token": SECRET} if kind == "token" else {}))
    land_words(files=1, rows=1)
    pipeline = words_pipeline(writes={"lake": sink})

    with pytest.raises(TwophaseError) as failed:
        Runner(pipeline, PreStaged(), record=record).run()

    said = "".join(traceback.format_exception(failed.value))
    assert "\n" not in str(failed.value)
    for where in (said, caplog.text, recorded(record), repr(sink), json.dumps(sink.declaration())):
        assert SECRET not in where


@pytest.mark.parametrize("away", ["http://127.0.0.1:9", ""], ids=["closed", "repeats"])
def test_a_catalog_that_an_interval_is_read_by_is_explained_without_its_secret(
    home: Path, record: PostgresRecord, repeating: str, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """What it raises is sorted like a sink's: the run may be tried again."""
    catalog(monkeypatch, away or repeating)
    pipeline = Pipeline(
        "days",
        reads={"days": sources.Interval("lake.words", "iceberg", column="dt", catalog="catalog")},
        transform="word_count:copy",
        writes={"lake": sinks.Files("lake/days")},
    )

    with pytest.raises(SinkUnavailable) as failed:
        Runner(pipeline, PreStaged(), record=record).run("2026-11-15/2026-11-16")

    assert SECRET not in "".join(traceback.format_exception(failed.value)) + recorded(record)
