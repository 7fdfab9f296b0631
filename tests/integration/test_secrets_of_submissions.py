"""What a Spark job reads and stages by is seen nowhere: in no command line, plan, log, record or page of Spark's."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from support.pipelines.factories import counted
from support.pipelines.onlookers import contents, recorded, watching
from support.servers.s3 import BUCKET, CONN_ID, SECRET, S3Server
from support.sinks.log_tables import DeltaFormat
from twophase import Pipeline, sinks, sources
from twophase.committer.record import PostgresRecord
from twophase.runner import Runner, stager_for

#: Whatever Spark's pages show they show from these events.
EVENTS = {f"spark.eventLog.{name}": value for name, value in (("enabled", "true"), ("compress", "false"))}


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_submission_reads_and_stages_by_credentials_that_are_seen_nowhere(
    home: Path, record: PostgresRecord, target: Any, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {SECRET, urlsplit(os.environ["AIRFLOW_CONN_DWH"]).password or ""}
    (home / "spark_jobs").mkdir()
    (home / "spark_jobs" / "copying.py").write_text("def transform(words):\n    return words\n")
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(home / "spark_jobs"))
    events = home / "events"
    events.mkdir()
    place = S3Server.place()
    rows = [{"id": number, "word": "ü", "dt": date(2026, 11, 15)} for number in range(3)]
    landed = sinks.Delta(f"{place}/landed", conn_id=CONN_ID)
    write_deltalake(landed.location(), pa.Table.from_pylist(rows), storage_options=landed.storage.for_delta())
    lake = sinks.Delta(f"{place}/words", conn_id=CONN_ID, partition_by=["word"])
    pipeline = Pipeline(
        "words",
        reads={"words": sources.Interval(landed.location(), "delta", column="dt", conn_id=CONN_ID)},
        transform="copying:transform",
        writes={"lake": lake, "dwh": sinks.Postgres("words", conn_id="dwh", create=True)},
    )
    conf = {**EVENTS, "spark.eventLog.dir": events.as_uri()}

    with watching(home) as seen, Runner(pipeline, stager_for(pipeline, conf=conf), record=record) as runner:
        done = runner.run("2026-11-15/2026-11-16")

    assert done is not None
    assert counted(DeltaFormat().content(lake)) == counted(rows)
    target.execute("SELECT count(*) FROM public.words")
    assert target.fetchone() == (len(rows),)
    files = {**seen.files, **contents(home), **contents(s3.root)}
    assert {"plan.json", "spark.log"} <= files.keys()
    assert any("plan.json" in part for part in seen.command_lines)
    assert any(b"SparkListenerSQLExecutionStart" in content for content in contents(events).values())
    told = recorded(record)
    assert all(name in told for name in ("dwh", CONN_ID, BUCKET))
    for secret in secrets:
        assert len(secret) > 8
        assert not [part for part in seen.command_lines if secret in part]
        assert not [name for name, content in files.items() if secret.encode() in content]
        assert secret not in told
    assert os.environ.get("AWS_SECRET_ACCESS_KEY") is None
