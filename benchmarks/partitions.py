"""A table of PostgreSQL with many partitions: what attaching one more takes, and what planning a query takes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import psycopg2
import pyarrow as pa

from benchmarks.harness import Figure, Findings, Measure, interleave, medians, step, timed
from benchmarks.place import Place
from twophase.core.checkpoint import Key, Output
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.sinks import Postgres
from twophase.sinks.postgres.staging_table import Loader
from twophase.storage import database
from twophase.storage.database import TableName

CONN_ID = "bench"
SCHEMA = (Column("id", "bigint"), Column("word", "string"))
ROWS = pa.RecordBatch.from_pydict({"id": pa.array(range(1000), pa.int64()), "word": pa.array(["word"] * 1000)})
QUERIES = {
    "plan of a query by checkpoint": "EXPLAIN SELECT count(*) FROM {} WHERE _checkpoint = 7",
    "plan of a query by anything else": "EXPLAIN SELECT count(*) FROM {} WHERE id = 7",
}


@dataclass(frozen=True)
class Sizes:
    """How many partitions there are, and how often one more is attached."""

    many: int
    some: int
    few: int
    rounds: int


def run(place: Place, sizes: Sizes) -> Findings:
    """Measure."""
    dsn = place.database("target").replace("postgresql+psycopg2", "postgresql")
    os.environ[f"AIRFLOW_CONN_{CONN_ID.upper()}"] = dsn.replace("postgresql://", "postgres://")
    session = psycopg2.connect(dsn)
    session.autocommit = True
    cursor = session.cursor()
    for partitions in (sizes.many, sizes.some, sizes.few):
        with step(f"making {partitions:,} partitions"):
            fill(cursor, partitions)
    Postgres(f"t{sizes.few}", conn_id=CONN_ID, attach=True).prepare()
    names = {"many": sizes.many, "some": sizes.some, "few": sizes.few}
    found = interleave(
        {name: partial(turn, cursor, partitions, count(partitions + 1)) for name, partitions in names.items()},
        rounds=sizes.rounds,
    )
    session.close()
    many, few = found["many"], found["few"]
    return Findings(
        compared=f"{sizes.many:,} partitions ÷ {sizes.few:,}",
        figures=[Figure(part, many[part], few[part]) for part in ("promotion", *QUERIES)],
        profile={f"{names[name]:,} partitions": medians(parts) for name, parts in found.items()},
    )


def fill(cursor: Any, partitions: int) -> None:  # noqa: ANN401 - a cursor
    """Make a table with so many partitions, as promotions would have."""
    table = f"public.t{partitions}"
    cursor.execute(
        f"CREATE TABLE {table} (id bigint, word text, _checkpoint bigint NOT NULL) PARTITION BY LIST (_checkpoint)"
    )
    for n in range(1, partitions + 1):
        cursor.execute(f"CREATE TABLE {table}_{n} PARTITION OF {table} FOR VALUES IN ({n})")
    cursor.execute(f"ANALYZE {table}")


def turn(cursor: Any, partitions: int, checkpoints: count[int]) -> Mapping[str, float]:  # noqa: ANN401 - a cursor
    """Attach one more partition and take it out again; then plan."""
    sink = Postgres(f"t{partitions}", conn_id=CONN_ID, attach=True)
    key = Key("bench", next(checkpoints), 1)
    output = Output(key, 1, sink.place(key, 1, "t0ken"), sink="dwh")
    columns = sink.open(output, SCHEMA)
    list(Loader(database.dsn(CONN_ID), TableName(*output.handle["staging"]))(iter([ROWS])))
    output = replace(output, manifest=sink.seal(output, SCHEMA, columns))
    start = time.perf_counter()
    promoted = sink.promote(output)
    found = {"promotion": time.perf_counter() - start}
    if promoted.outcome is not Outcome.PROMOTED:
        raise RuntimeError(promoted)
    for what, query in QUERIES.items():
        found[what] = timed(partial(cursor.execute, query.format(f"public.t{partitions}")))
    cursor.execute(f"DROP TABLE twophase_staging.t{partitions}_{key.checkpoint_id:08d}_r1")
    return found


MEASURE = Measure(
    "postgres-partitions",
    "What do 1,000 partitions cost, beside 10: attaching one more, and planning a query?",
    full=Sizes(many=1000, some=100, few=10, rounds=30),
    quick=Sizes(many=1000, some=100, few=10, rounds=10),
    tiny=Sizes(many=12, some=11, few=10, rounds=1),
    run=run,
)
