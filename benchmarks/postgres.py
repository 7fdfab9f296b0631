"""Rows from Spark to PostgreSQL, staged and promoted, beside Spark's own JDBC writer in the same session."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import psycopg2

from benchmarks.files import generate
from benchmarks.harness import Figure, Findings, Measure, Stopwatch, Turn, interleave, medians, step
from benchmarks.place import Place
from twophase.core.checkpoint import Key, Output
from twophase.core.ports import Outcome
from twophase.core.settings import data_path
from twophase.sinks import Postgres
from twophase.sinks.postgres import staging_table
from twophase.sinks.postgres.changes import Changes
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: PostgreSQL's JDBC driver: what the peer writes with.
DRIVER = "org.postgresql:postgresql:42.7.13"
CONN_ID = "bench"
COLUMNS = ("id", "customer", "amount", "quantity", "word", "at")
CREATED = "id bigint, customer bigint, amount double precision, quantity integer, word text, at timestamptz"
#: About what one row takes in the Parquet files, whose longest column is not written.
ROW_BYTES = 58
FILES = 4


@dataclass(frozen=True)
class Sizes:
    """How many rows one checkpoint has, how many keys are there before an upsert, and how often it is done."""

    rows: int
    rounds: int
    there: int = 0


class Bench:
    """One target database, the rows to write, and a table's name for each turn."""

    def __init__(self, place: Place, sizes: Sizes, mode: Mapping[str, Any]) -> None:
        self.sizes, self.mode = sizes, mode
        landing = data_path("landing/orders")
        with step(f"writing {sizes.rows:,} rows as {FILES} Parquet files"):
            for seed in range(FILES):
                generate(landing / f"{seed:02d}.parquet", sizes.rows // FILES * ROW_BYTES, seed)
        with step("starting Spark"):
            self.spark: SparkSession = place.spark({"spark.jars.packages": DRIVER})
        self.dsn = place.database("target").replace("postgresql+psycopg2", "postgresql")
        os.environ[f"AIRFLOW_CONN_{CONN_ID.upper()}"] = self.dsn.replace("postgresql://", "postgres://")
        self.landing = str(landing)
        self.names = (f"public.orders_{turn}" for turn in count())

    @property
    def frame(self) -> DataFrame:
        return self.spark.read.parquet(self.landing).select(*COLUMNS)

    def execute(self, *statements: str) -> None:
        session = psycopg2.connect(self.dsn)
        session.autocommit = True
        with session.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        session.close()

    def target(self) -> str:
        """Make an empty target, or one with every other key; what came before is charged to nobody."""
        name, key = next(self.names), self.mode.get("key")
        made = [f"CREATE TABLE {name} ({CREATED}{', PRIMARY KEY (id)' if key else ''})"]
        if self.mode.get("mode", "append") == "append":
            by = " PARTITION BY LIST (_checkpoint)" if self.mode.get("attach") else ""
            made = [f"CREATE TABLE {name} ({CREATED}, _checkpoint bigint NOT NULL){by}"]
        if self.sizes.there:
            filled = f"SELECT n * 2, n, n, 1, 'old', now() FROM generate_series(1, {self.sizes.there}) AS n"
            made += [f"INSERT INTO {name} {filled}", f"VACUUM ANALYZE {name}"]
        self.execute(*made, "CHECKPOINT")
        os.sync()
        return name

    # --- the sides ---------------------------------------------------------------------------------------------------

    def ours(self, *, history: int | None = None) -> Mapping[str, float]:
        """Stage, check and promote one checkpoint."""
        name = self.target()
        sink, key = Postgres(name, conn_id=CONN_ID, history=history, **self.mode), Key("bench", 1, 1)
        watch = Stopwatch(load=(staging_table, "load"), finish=(staging_table, "finish"), check=(Postgres, "check"))
        start = time.perf_counter()
        with watch:
            sink.prepare()
            output = Output(key, 1, sink.place(key, 1, "t0ken"), sink="dwh")
            output = replace(output, manifest=sink.stage(self.frame, output))
            sink.check(output)
            staged = time.perf_counter() - start
            promoted = sink.promote(output)
            parts = watch.take()
        whole = time.perf_counter() - start
        if promoted.outcome is not Outcome.PROMOTED:
            raise RuntimeError(promoted)
        self.execute(f"DROP TABLE {name}")
        return {"whole": whole, **parts, "promote": whole - staged}

    def peer(self, *, rewrite: bool, merge_as_we_do: bool = False) -> Mapping[str, float]:
        """Do what a user does without us: the JDBC writer, and for an upsert a merge by hand behind it."""
        name = self.target()
        by_key = "key" in self.mode
        to = f"{name}_new" if by_key else name
        if by_key:
            self.execute(f"CREATE TABLE {to} ({CREATED})")
        elif self.mode.get("attach"):  # a user without us has a plain table
            self.execute(f"DROP TABLE {name}", f"CREATE TABLE {name} ({CREATED})")
        else:
            self.execute(f"ALTER TABLE {name} ALTER COLUMN _checkpoint SET DEFAULT 1")
        start = time.perf_counter()
        write_jdbc(self.frame, self.dsn, to, rewrite=rewrite)
        written = time.perf_counter() - start
        if merge_as_we_do:
            self.merge(name, to)
        elif by_key:
            changes = ", ".join(f"{column} = EXCLUDED.{column}" for column in COLUMNS if column != "id")
            merge = f"INSERT INTO {name} SELECT * FROM {to} ON CONFLICT (id) DO UPDATE SET {changes}"
            self.execute(f"{merge}; DROP TABLE {to}")
        whole = time.perf_counter() - start
        self.execute(f"DROP TABLE {name}")
        return {"whole": whole, "write": written, "merge": whole - written}

    def merge(self, name: str, new: str) -> None:
        """Merge a table into another as our promotion does, which needs an index by key on both."""
        target, staged = TableName.parse(name), TableName.parse(new)
        with psycopg2.connect(self.dsn) as session, session.cursor() as cursor:
            cursor.execute(f"CREATE UNIQUE INDEX ON {new} (id); ANALYZE {new}")
            columns = database.columns_of(cursor, staged) or {}
            changes = Changes(target, staged, tuple(self.mode["key"]), columns)
            changes.read_in_order(cursor)
            changes.apply(cursor)
            cursor.execute(f"DROP TABLE {new}")
        session.close()


def write_jdbc(frame: DataFrame, dsn: str, table: str, *, rewrite: bool) -> None:
    """Write with Spark's JDBC writer as it comes; `rewrite` is what a user who reads the driver's manual adds."""
    login, _, place = dsn.removeprefix("postgresql://").partition("@")
    user, _, password = login.partition(":")
    options = {"user": user, "password": password, "driver": "org.postgresql.Driver"}
    if rewrite:
        options["reWriteBatchedInserts"] = "true"
    frame.write.jdbc(f"jdbc:postgresql://{place}", table, mode="append", properties=options)


def run(place: Place, sizes: Sizes, *, mode: Mapping[str, Any], goal: float, by_hand: str) -> Findings:
    """Measure."""
    bench = Bench(place, sizes, mode)
    sides: dict[str, Turn] = {
        "ours": bench.ours,
        "jdbc": partial(bench.peer, rewrite=False),
        "rewriting": partial(bench.peer, rewrite=True),
    }
    if "key" in mode:
        sides["forgetting"] = partial(bench.ours, history=0)
        sides["merging"] = partial(bench.peer, rewrite=False, merge_as_we_do=True)
    found = interleave(sides, rounds=sizes.rounds, tell=True)
    whole = {name: parts["whole"] for name, parts in found.items()}
    ours, jdbc = whole["ours"], whole["jdbc"]
    figures = [
        Figure("ours ÷ the JDBC writer as it comes", ours, jdbc, goal=goal),
        Figure("ours ÷ the JDBC writer with reWriteBatchedInserts", ours, whole["rewriting"]),
    ]
    if "key" in mode:
        figures += [
            Figure("ours ÷ the JDBC writer as it comes, and our merge", ours, whole["merging"]),
            Figure("without a history ÷ the JDBC writer as it comes", whole["forgetting"], jdbc),
            Figure(
                "without a history ÷ the JDBC writer as it comes, and our merge", whole["forgetting"], whole["merging"]
            ),
        ]
    rates = {name: sizes.rows / values.median for name, values in whole.items()}
    return Findings(
        compared=f"{sizes.rows:,} rows of {len(COLUMNS)} columns, staged, checked and promoted ÷ {by_hand}",
        figures=figures,
        profile={name: medians(parts) for name, parts in found.items()},
        notes=[
            f"rows a second: {', '.join(f'{name} {rate:,.0f}' for name, rate in rates.items())}",
            "the peer's options: user, password, driver; so batchsize 1000, and a transaction per partition",
            "the peer's rows are visible partition by partition; a task that is run again may write them twice",
        ],
    )


ATTACH = Measure(
    "postgres-attach",
    "How fast are rows in PostgreSQL as a partition, beside Spark's JDBC writer?",
    full=Sizes(rows=5_000_000, rounds=3),
    quick=Sizes(rows=500_000, rounds=3),
    tiny=Sizes(rows=1000, rounds=1),
    run=partial(run, mode={"attach": True}, goal=0.5, by_hand="the JDBC writer"),
)
APPEND = Measure(
    "postgres-append",
    "How fast are rows appended in PostgreSQL, beside Spark's JDBC writer?",
    full=Sizes(rows=5_000_000, rounds=3),
    quick=Sizes(rows=500_000, rounds=3),
    tiny=Sizes(rows=1000, rounds=1),
    run=partial(run, mode={}, goal=0.71, by_hand="the JDBC writer"),
)
UPSERT = Measure(
    "postgres-upsert",
    "How fast are rows merged by key in PostgreSQL, beside the JDBC writer and the same merge by hand?",
    full=Sizes(rows=2_000_000, rounds=3, there=1_000_000),
    quick=Sizes(rows=200_000, rounds=3, there=100_000),
    tiny=Sizes(rows=1000, rounds=1, there=500),
    run=partial(
        run, mode={"mode": "upsert", "key": ["id"]}, goal=0.71, by_hand="the JDBC writer and the same merge by hand"
    ),
)
