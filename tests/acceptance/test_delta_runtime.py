"""Spark with Delta's own runtime reads what was promoted here without it: the same rows as polars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks.delta import RUNTIME
from support.pipelines.factories import SCHEMA, Row
from support.servers.spark import CHEAP
from support.sinks.log_table_outputs import rows, stage
from twophase.core.manifest import Column
from twophase.sinks import Delta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]

READER = """
import json, sys
from pyspark.sql import SparkSession

settings, tables = json.loads(sys.argv[1])
builder = SparkSession.builder.master("local[2]")
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
found = {table: [row.asDict() for row in spark.read.format("delta").load(table).collect()] for table in tables}
print("found " + json.dumps(found))
"""


def made(name: str, *partition_by: str) -> Delta:
    sink = Delta(f"lake/{name}", partition_by=partition_by)
    sink.prepare()
    return sink


def ordered(content: list[Row]) -> list[Row]:
    return sorted(content, key=lambda row: row["id"])


def test_sparks_delta_runtime_reads_the_rows_that_polars_reads(tmp_path: Path) -> None:
    plain, parted, replaced, widened = made("plain"), made("parted", "word"), made("replaced"), made("widened")
    staged = {sink.location(): stage(sink) for sink in (plain, parted, replaced, widened)}
    for one in staged.values():
        one.promote()
    older = staged[replaced.location()]
    stage(replaced, 1, 2, rows(1, 3, revision=2), revision=2, older=older).promote()
    more = [{**row, "note": "new"} for row in rows(2)]
    stage(widened, 2, content=more, schema=(*SCHEMA, Column("note", "string"))).promote()
    tables = [sink.location() for sink in (plain, parted, replaced, widened)]

    arguments = json.dumps([{**CHEAP, **RUNTIME, "spark.sql.warehouse.dir": str(tmp_path)}, tables])
    done = subprocess.run(
        [sys.executable, "-c", READER, arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    for table in tables:
        assert ordered(found[table]) == ordered(pl.read_delta(table).to_dicts())
    assert len(found[tables[2]]) == 3
    assert {row["note"] for row in found[tables[3]]} == {None, "new"}
