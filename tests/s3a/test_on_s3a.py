"""A Spark job of one's own that reaches the object store by s3a, whose connector is too large for every run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.servers.s3 import CONN_ID, SECRET, S3Server
from support.servers.spark import CHEAP
from support.sinks.log_table_outputs import PIPELINE
from support.sinks.log_tables import CATALOG, DeltaFormat, IcebergFormat
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome
from twophase.sinks import Delta, Iceberg

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.s3a, pytest.mark.spark, pytest.mark.timeout(1800)]

#: As new as the Hadoop in pyspark.
CONNECTOR = "org.apache.hadoop:hadoop-aws:3.5.0"


@pytest.fixture(scope="module")
def with_s3a(s3_server: S3Server) -> Iterator[SparkSession]:
    """Start a Spark that knows `s3://` by its own connector."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        **CHEAP,
        "spark.jars.packages": CONNECTOR,
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        "spark.hadoop.fs.s3a.endpoint": f"http://127.0.0.1:{s3_server.port}",
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": "twophase",
        "spark.hadoop.fs.s3a.secret.key": SECRET,
    }
    builder = SparkSession.builder.master("local[2]").appName("s3a")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.usefixtures("s3")
def test_what_a_job_writes_by_s3a_is_sealed_promoted_and_read_by_s3a(
    kind: str, with_s3a: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    path = f"{S3Server.place()}/words"
    sink = (
        Delta(path, conn_id=CONN_ID)
        if kind == "delta"
        else Iceberg("db.w", path=path, conn_id=CONN_ID, catalog=CATALOG)
    )
    form = DeltaFormat() if kind == "delta" else IcebergFormat()
    sink.prepare()
    key = Key(PIPELINE, 1, 1)
    output = Output(key, 1, sink.place(key, 1, "7c1e"), commit_seq=1, sink="lake")
    with_s3a.range(1000, numPartitions=3).write.parquet(sink.staging_path(output))

    output = replace(output, manifest=sink.inspect(output))
    sink.check(output)
    promotion = sink.promote(output)

    assert promotion.outcome is Outcome.PROMOTED
    assert output.manifest["rows"] == 1000
    assert {row["id"] for row in form.content(sink)} == set(range(1000))
    assert with_s3a.read.parquet(*sink.files(output)).distinct().count() == 1000
    assert not list(sink.verify(output))
