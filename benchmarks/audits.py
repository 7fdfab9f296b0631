"""Audits of staged Parquet, beside the same checks as Spark jobs in a warm session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from benchmarks.files import generate
from benchmarks.harness import Figure, Findings, Measure, interleave, medians, step
from benchmarks.place import Place
from twophase import audits
from twophase.audits import Audit, AuditContext
from twophase.core.settings import data_path
from twophase.row_queries.duckdb_rows import DuckDBRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = [
    ["id", "bigint"],
    ["customer", "bigint"],
    ["reference", "string"],
    ["amount", "double"],
    ["quantity", "int"],
    ["word", "string"],
    ["at", "timestamp"],
]
WRONG = "quantity < 0 OR amount * quantity < 0 OR length(word) < 6"
CHECKS: dict[str, Audit] = {
    "row_count": audits.row_count(minimum=1),
    "not_null": audits.not_null("id", "word", "amount"),
    "unique": audits.unique("id"),
    "sql": audits.sql(f"SELECT * FROM staged WHERE {WRONG}"),
}


@dataclass(frozen=True)
class Sizes:
    """How much is staged, and how often it is audited."""

    files: int
    file_mb: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    folder = data_path("staged")
    with step(f"writing {sizes.files} Parquet files of {sizes.file_mb} MB"):
        for seed in range(sizes.files):
            generate(folder / f"{seed:02d}.parquet", sizes.file_mb * 1_000_000, seed)
    files = sorted(map(str, folder.iterdir()))
    size = sum(path.stat().st_size for path in folder.iterdir())
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    context = AuditContext("orders", 1, 1, None, "lake", datetime.now(UTC), None, rows)
    with step("starting Spark"):
        spark = place.spark()
    found = interleave(
        {"ours": lambda: ours(files, context), "peer": lambda: peer(spark, files)}, rounds=sizes.rounds, tell=True
    )
    mine, theirs = found["ours"], found["peer"]
    return Findings(
        compared=f"audits ÷ the same checks as Spark jobs, {size / 1e6:,.0f} MB of Parquet, {rows:,} rows",
        figures=[
            Figure("row_count, not_null, unique and sql", mine["whole"], theirs["whole"], goal=0.5),
            *(Figure(name, mine[name], theirs[name]) for name in CHECKS),
        ],
        profile={"ours": medians(mine), "peer": medians(theirs)},
        notes=[
            "row_count asks the manifest, so it reads nothing; Spark counts by the footers",
            "ours includes starting DuckDB; the peer's session is warm, and its files' footers are read each time",
        ],
    )


def ours(files: list[str], context: AuditContext) -> Mapping[str, float]:
    """Audit as a run does: one relation, every audit in turn."""
    parts = {}
    start = time.perf_counter()
    with DuckDBRows(files, SCHEMA) as relation:
        for name, audit in CHECKS.items():
            before = time.perf_counter()
            verdict = audit.check(relation, context)
            parts[name] = time.perf_counter() - before
            if not verdict.passed:
                raise RuntimeError(verdict.text)
    return {"whole": time.perf_counter() - start, **parts}


def peer(spark: SparkSession, files: list[str]) -> Mapping[str, float]:
    """Check as somebody does it in Spark: a job per check, each written to read no more than it must."""
    parts = {}
    start = time.perf_counter()
    staged = spark.read.parquet(*files)
    for name, check in JOBS.items():
        before = time.perf_counter()
        passed = check(staged)
        parts[name] = time.perf_counter() - before
        if not passed:
            msg = f"{name}: expected to pass, found that it did not"
            raise RuntimeError(msg)
    return {"whole": time.perf_counter() - start, **parts}


def nulls(staged: DataFrame) -> bool:
    """Count the nulls of all columns in one scan."""
    counts = [f"count(*) - count({column}) AS {column}" for column in ("id", "word", "amount")]
    return not any(staged.selectExpr(*counts).collect()[0])


JOBS: dict[str, Callable[[DataFrame], bool]] = {
    "row_count": lambda staged: staged.count() >= 1,
    "not_null": nulls,
    "unique": lambda staged: staged.select("id").distinct().count() == staged.count(),
    "sql": lambda staged: staged.where(WRONG).count() == 0,
}

MEASURE = Measure(
    "audits",
    "What do audits of 1 GB of staged Parquet take, beside Spark jobs?",
    full=Sizes(files=8, file_mb=130, rounds=3),
    quick=Sizes(files=2, file_mb=100, rounds=3),
    tiny=Sizes(files=1, file_mb=1, rounds=1),
    run=run,
)
