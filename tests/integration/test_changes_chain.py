"""A chain of three pipelines that hand on changelogs keeps equal tables after each checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import twophase
from support.pipelines.factories import visible
from twophase import Pipeline, changelog, sinks, sources
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import BadValue, ConfigError
from twophase.core.settings import data_path
from twophase.runner import InProcess, Runner
from twophase.storage import database

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

KEY = ["id"]
SCHEMA = "id bigint, name string, score double, _change string"
PAGE = Path(__file__).parents[2] / "docs/how-to/changelogs.md"
#: The tables of the last pipeline.
TABLES = ("log_upserted", "log_retracted", "table_upserted", "table_retracted")


@pytest.fixture(autouse=True)
def _connected(home: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DWH", dsn.replace("postgresql+psycopg2", "postgres"))
    data_path("landing").mkdir(parents=True)


def table(name: str, mode: str) -> sinks.Postgres:
    return sinks.Postgres(name, conn_id="dwh", mode=mode, key=KEY, create=True)


def first(log: str = "retract") -> Pipeline:
    """Declare the pipeline that lands changes: as rows of a table of files, and applied to a table."""
    return Pipeline(
        "landed",
        reads={"changes": sources.Files("landing", "json", schema=SCHEMA, max_files=1)},
        transform=lambda changes: changes,
        writes={"log": sinks.Files("lake/landed", mode=log), "table": table("landed", "upsert")},
    )


def second() -> Pipeline:
    """Declare the pipeline that reads both, and hands both on."""
    return Pipeline(
        "middle",
        reads={name: sources.Committed("landed", name, changes=True) for name in ("log", "table")},
        transform=lambda log, table: {
            "log": changelog.to_retract(log, KEY),
            "table": changelog.to_retract(table, KEY),
        },
        writes={"log": sinks.Files("lake/middle", mode="retract"), "table": table("middle", "retract")},
    )


def third() -> Pipeline:
    """Declare the pipeline whose tables are made by upserts and by retractions, from files and from PostgreSQL."""

    def transform(log: DataFrame, table: DataFrame) -> dict[str, DataFrame]:
        reads = {"log": log, "table": table}
        forms = {"upserted": changelog.to_upsert, "retracted": changelog.to_retract}
        return {f"{read}_{form}": forms[form](reads[read], KEY) for read in reads for form in forms}

    return Pipeline(
        "last",
        reads={name: sources.Committed("middle", name, changes=True) for name in ("log", "table")},
        transform=transform,
        writes={name: table(name, "upsert" if name.endswith("upserted") else "retract") for name in TABLES},
    )


def land(number: int, changes: Iterable[tuple[str, int, str | None, float | None]]) -> None:
    lines = [
        json.dumps({"_change": kind, "id": key, "name": name, "score": score}) for kind, key, name, score in changes
    ]
    data_path(f"landing/{number}.json").write_text("\n".join(lines) or "\n")


def rows_of(name: str) -> dict[int, tuple[Any, ...]]:
    with database.transaction("dwh") as cursor:
        cursor.execute(f'SELECT id, name, score FROM public."{name}"')
        return {row[0]: row[1:] for row in cursor.fetchall()}


#: What comes in each round, one list per checkpoint of the first pipeline, and the table afterwards.
ROUNDS: list[tuple[list[list[tuple[str, int, str | None, float | None]]], dict[int, tuple[Any, ...]]]] = [
    (
        [[("+I", 1, "a", 1.5), ("+I", 2, None, None), ("+I", 3, "c", 0.0)]],
        {1: ("a", 1.5), 2: (None, None), 3: ("c", 0.0)},
    ),
    (
        [[("-U", 1, "a", 1.5), ("+U", 1, None, 2.5), ("-D", 2, None, None), ("+I", 4, "d", None)]],
        {1: (None, 2.5), 3: ("c", 0.0), 4: ("d", None)},
    ),
    (  # a key goes and is back, and one that is new goes again, in checkpoints that the next pipeline reads at once
        [
            [("-D", 3, "c", 0.0), ("+I", 5, "e", 5.0)],
            [("+I", 3, "again", None), ("-U", 5, "e", 5.0), ("+U", 5, "f", 5.0)],
            [("-D", 5, "f", 5.0), ("-U", 4, "d", None), ("+U", 4, "d", None)],
        ],
        {1: (None, 2.5), 3: ("again", None), 4: ("d", None)},
    ),
    ([[("-D", 1, None, 2.5), ("-D", 3, "again", None), ("-D", 4, "d", None)]], {}),
]  # fmt: skip


def test_three_pipelines_keep_equal_tables_after_each_checkpoint(record: PostgresRecord, spark: SparkSession) -> None:
    """Upserts and retractions from files and from PostgreSQL give one and the same table, deletions included."""
    number = 0
    for checkpoints, expected in ROUNDS:
        for changes in checkpoints:
            number += 1
            land(number, changes)
            assert twophase.run(first(), spark=spark) is not None
        for pipeline in (second(), third()):
            assert twophase.run(pipeline, spark=spark) is not None

        found = {name: rows_of(name) for name in ("landed", "middle", *TABLES)}
        assert found == dict.fromkeys(found, expected)

    with Runner(first(), InProcess(spark, first().transform), dsn=None) as runner:
        runner.replace(number)
    with record.engine.connect() as connection:
        stale = {(one["pipeline"], one["checkpoint_id"]) for one in queries.stale(connection, None)}
    assert ("middle", len(ROUNDS)) in stale


def test_appended_rows_are_read_as_inserts_with_their_checkpoints(spark: SparkSession) -> None:
    """A table without a changelog has one all the same: every row came once."""
    for number, word in ((1, "a"), (2, "b")):
        data_path(f"landing/{number}.json").write_text(json.dumps({"id": number, "name": word}))
    upstream = Pipeline(
        "landed",
        reads={"rows": sources.Files("landing", "json", schema="id bigint, name string", max_files=1)},
        transform=lambda rows: rows,
        writes={"log": sinks.Files("lake/landed")},
    )
    read = Pipeline(
        "middle",
        reads={"log": sources.Committed("landed", "log", changes=True)},
        transform=lambda log: log.withColumnRenamed("_change", "kind").withColumnRenamed("_checkpoint", "number"),
        writes={"lake": sinks.Files("lake/middle")},
    )
    for pipeline in (upstream, upstream, read):
        twophase.run(pipeline, spark=spark)

    assert sorted(visible("lake/middle"), key=lambda row: int(row["id"])) == [
        {"id": 1, "name": "a", "kind": "+I", "number": 1},
        {"id": 2, "name": "b", "kind": "+I", "number": 2},
    ]


def test_a_strange_change_fails_the_attempt_with_one_line(spark: SparkSession) -> None:
    """Nothing is committed, and the error says what was found and what was expected."""
    land(1, [("up", 1, "a", None)])

    with pytest.raises(BadValue, match=r"column _change: found up, expected \+I, -U, \+U, -D; correct it") as caught:
        twophase.run(first(), spark=spark)

    assert "\n" not in str(caught.value)


def test_an_append_refuses_a_changelog_before_it_is_written(spark: SparkSession) -> None:
    land(1, [("+I", 1, "a", None)])

    with pytest.raises(ConfigError, match="column _change: with mode 'append' every row is a new one"):
        twophase.run(first(log="append"), spark=spark)


def test_the_functions_of_the_page_do_what_it_says(spark: SparkSession) -> None:
    """The page's example prints what stands below it."""
    text = PAGE.read_text(encoding="utf-8")
    block, printed = re.findall(r"<!-- run -->\n```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)[0]
    told: list[str] = []

    exec(block, {"spark": spark, "print": lambda *parts: told.append(" ".join(map(str, parts)))})
    assert told == printed.splitlines()
