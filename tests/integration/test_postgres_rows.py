"""Audits and comparisons of rows in PostgreSQL: they are asked where they are, in SQL."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import PreStaged, Row, land_words, voted
from twophase import Pipeline, audits, sinks, sources
from twophase.audits import Audit, AuditContext
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import AuditFailed
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.core.settings import data_path
from twophase.runner import Runner
from twophase.sinks.postgres.staging_table import Loader
from twophase.spark.plan import Plan
from twophase.storage import database
from twophase.storage.database import TableName

KEY = Key("words", 1, 1)
NOW = dt.datetime(2026, 11, 16, 12, tzinfo=dt.UTC)
CONTEXT = AuditContext("words", 1, 1, None, "dwh", NOW, None, 4)
SCHEMA = (
    Column("id", "bigint"),
    Column("word", "string"),
    Column("at", "timestamp"),
    Column("more", "struct<a:bigint>"),
)


def staged(sink: sinks.Postgres) -> Output:
    """Stage four rows, of which the last ones leave something to be desired."""
    sink.prepare()
    output = Output(KEY, 1, sink.place(KEY, 1, "t0ken"), sink="dwh")
    columns = sink.open(output, SCHEMA)
    batch = pa.RecordBatch.from_pydict({
        "id": pa.array([1, 2, 3, 3], pa.int64()),
        "word": pa.array(["a", 'b"', "a", None]),
        "at": pa.array([NOW - dt.timedelta(hours=hours) for hours in range(4)], pa.timestamp("us", "UTC")),
        "more": pa.array(['{"a": 1}'] * 4),
    })  # fmt: skip
    list(Loader(database.dsn("dwh"), TableName(*output.handle["staging"]))(iter([batch])))
    return replace(output, manifest=sink.seal(output, SCHEMA, columns))


@pytest.mark.parametrize(
    ("audit", "passed", "told"),
    [
        (audits.row_count(minimum=4), True, "found 4 rows"),
        (audits.row_count(maximum=3), False, "found 4 rows"),
        (audits.not_null("id", "at"), True, "found none"),
        (audits.not_null("word"), False, "'word' is null in 1 row"),
        (audits.not_null("nowhere"), False, "no column 'nowhere'"),
        (audits.unique("id", "word"), True, "found nothing in 4 rows"),
        (audits.unique("id"), False, "found 1 doubled"),
        (audits.values_in("word", ["a", 'b"']), True, "found no other"),
        (audits.values_in("word", ["a"]), False, "found another in 1 row"),
        (audits.values_in("id", [1, 2]), False, "found another in 2 rows"),
        (audits.fresh("at", "1h"), True, "found 2026-11-16 12:00:00"),
        (audits.fresh("word", "1h"), False, "column 'word' is text"),
        (audits.sql("SELECT * FROM staged WHERE more ->> 'a' <> '1';"), True, "expected no rows, found none"),
        (audits.sql("WITH x AS (SELECT id FROM staged) SELECT * FROM x WHERE id = 3"), False, "found 2"),
        (audits.sql("SELECT * FROM stagd"), False, 'relation "stagd" does not exist; the table is staged'),
        (audits.sql("WITH x AS (DELETE FROM public.kept RETURNING 1) SELECT * FROM x"), False, "WITH clause"),
        (audits.sql("SELECT pg_notify('a', 'b'), setval('public.numbers', 7)"), False, "read-only transaction"),
        (audits.expression("test_postgres_rows:few"), False, "found 4 rows of 4 columns"),
    ],
    ids=lambda value: value.name if isinstance(value, Audit) else None,
)
def test_every_audit_looks_at_staged_rows_in_the_database(
    target: Any, monkeypatch: pytest.MonkeyPatch, audit: Audit, passed: bool, told: str
) -> None:
    target.execute("CREATE SEQUENCE public.numbers; CREATE TABLE public.kept ()")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    sink = sinks.Postgres("words", conn_id="dwh", create=True)
    output = staged(sink)

    with sink.staged(output) as rows:
        verdict = audit.check(rows, CONTEXT)

    assert (verdict.passed, told in verdict.text) == (passed, True), verdict.text


def few(rows: Any, context: AuditContext) -> str | None:
    found = rows.fetchall()
    return f"found {len(found)} rows of {len(found[0])} columns" if len(found) > 3 else None


def test_rows_that_are_looked_at_do_not_hold_up_their_promotion(target: Any) -> None:
    sink = sinks.Postgres("words", conn_id="dwh", create=True)
    output = staged(sink)

    with sink.staged(output) as rows:
        assert rows.value("SELECT count(*) FROM staged") == 4
        promoted = sink.promote(output)

    assert promoted.outcome is Outcome.PROMOTED


APPENDED = "expected 4 rows of checkpoint, found 3"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, APPENDED),
        ({"attach": True}, APPENDED),
        ({"mode": "replace"}, APPENDED),
        ({"mode": "upsert", "key": ["at"]}, "1 keys of checkpoint are not there any more"),
        ({"mode": "upsert", "key": ["at"], "history": 0}, None),
    ],
    ids=str,
)
def test_verify_tells_rows_and_markers_that_are_gone_as_far_as_rows_say_whose_they_are(
    target: Any, options: dict[str, Any], told: str | None
) -> None:
    sink = sinks.Postgres("words", conn_id="dwh", create=True, **options)
    output = staged(sink)
    assert sink.promote(output).outcome is Outcome.PROMOTED
    assert list(sink.verify(output)) == []
    assert list(sink.strangers([output])) == []

    target.execute("DELETE FROM public.words WHERE word IS NULL")
    assert list(sink.verify(output)) == ([f"table public.words: {told}"] if told else [])
    if sink.mode == "append":
        assert list(sink.strangers([])) == ["table public.words has rows of checkpoint 1, which is not committed"]
    target.execute("DELETE FROM twophase_sinks.promoted")
    assert list(sink.verify(output)) == ["table public.words: expected the marker of attempt 1, found none"]


def test_verify_of_a_replaced_table_counts_the_rows_of_the_last_checkpoint_only(target: Any) -> None:
    sink = sinks.Postgres("words", conn_id="dwh", create=True, mode="replace")
    output = staged(sink)
    sink.promote(output)
    later = "SELECT pipeline, target, 2, 1, 1, manifest, now(), slot_order, kept FROM twophase_sinks.promoted"
    target.execute(f"INSERT INTO twophase_sinks.promoted {later}")
    target.execute("TRUNCATE public.words")

    assert list(sink.verify(output)) == []


# --- whole pipelines -------------------------------------------------------------------------------------------------


def words(sink: sinks.Postgres, *found: Audit) -> Pipeline:
    data_path("landing/words").mkdir(parents=True, exist_ok=True)
    return Pipeline(
        "words",
        reads={"words": sources.Files("landing/words", format="json")},
        transform="word_count:copy",
        writes={"dwh": sink},
        audits=found,
    )


WORDS = (Column("id", "bigint"), Column("word", "string"))
CHANGES = (*WORDS, Column("_change", "string"))


def narrow(rows: list[Row], plan: Plan) -> list[Row]:
    """Leave the first row out of a second revision, change another, and add one."""
    kept = [{"id": row["id"], "word": row["word"]} for row in rows]
    if plan.revision == 1:
        return kept
    return [*({**row, "word": "new"} if row["id"] == 5 else row for row in kept[1:]), {"id": 77, "word": "new"}]


def runner(record: PostgresRecord, sink: sinks.Postgres, *found: Audit, **staging: Any) -> Runner:
    stager = PreStaged(**{"schema": WORDS, "change": narrow, **staging})
    return Runner(words(sink, *found), stager, record=record)


def test_an_audit_that_says_no_keeps_staged_rows_out_of_the_target(
    home: Path, target: Any, record: PostgresRecord
) -> None:
    land_words()
    sink = sinks.Postgres("words", conn_id="dwh", create=True)

    with pytest.raises(AuditFailed, match=r"dwh: values_in\(word\).*found another"):
        runner(record, sink, audits.unique("id"), audits.values_in("word", ["w1"])).run()

    target.execute("SELECT to_regclass('public.words'), count(*) FROM pg_tables WHERE schemaname = 'twophase_staging'")
    assert target.fetchone() == (None, 0)
    assert runner(record, sink, audits.unique("id")).run() is not None


@pytest.mark.parametrize("options", [{}, {"attach": True}, {"mode": "replace"}], ids=str)
def test_a_staged_revision_is_held_against_the_live_rows(
    home: Path, target: Any, record: PostgresRecord, options: dict[str, Any]
) -> None:
    land_words(rows=10)
    running = runner(record, sinks.Postgres("words", conn_id="dwh", create=True, **options))
    running.run()
    (first,) = listed("diff", "words", "1")
    voted(running, replaces=1)

    (found,) = listed("diff", "words", "1")
    (by_key,) = listed("diff", "words", "1", "--key", "id", "--samples", "3")

    assert (first["against"], first["added"], first["removed"]) == (None, 10, 0)
    assert (found["revision"], found["against"], found["added"], found["removed"]) == (2, 1, 2, 2)
    assert (by_key["added"], by_key["removed"], by_key["changed"]) == (1, 1, 1)
    assert by_key["samples"]["changed"] == [{"key": {"id": 5}, "old": {"word": "w5"}, "new": {"word": "new"}}]


def test_what_was_replaced_in_the_database_cannot_be_compared(home: Path, target: Any, record: PostgresRecord) -> None:
    land_words(rows=10)
    running = runner(record, sinks.Postgres("words", conn_id="dwh", create=True))
    running.run()
    running.replace(1)

    assert "were replaced since and are not kept" in one_line_error(twophase("diff", "words", "1"))


def test_a_staged_upsert_is_held_against_the_rows_that_it_would_change(
    home: Path, target: Any, record: PostgresRecord
) -> None:
    land_words(rows=10)
    sink = sinks.Postgres("words", conn_id="dwh", create=True, mode="upsert", key=["id"])
    runner(record, sink).run()
    land_words(start=1, rows=5)  # ids 5 to 9, all there
    more = runner(record, sink, change=lambda rows, _: [{"id": row["id"] + 2, "word": "W"} for row in rows])
    voted(more)

    (found,) = listed("diff", "words", "2", "--key", "id")

    assert (found["old_rows"], found["new_rows"]) == (3, 5)
    assert (found["added"], found["removed"], found["changed"]) == (2, 0, 3)


def test_a_staged_changelog_is_held_against_the_rows_that_it_would_change(
    home: Path, target: Any, record: PostgresRecord
) -> None:
    land_words(rows=3)
    sink = sinks.Postgres("words", conn_id="dwh", create=True, mode="retract", key=["id"])
    first = [{"id": number, "word": "a", "_change": "+I"} for number in range(3)]
    runner(record, sink, schema=CHANGES, change=lambda *_: first).run()
    land_words(start=1)
    changes = [(0, "a", "-D"), (1, "a", "-U"), (1, "b", "+U"), (9, "c", "+I")]
    then = [dict(zip(("id", "word", "_change"), change, strict=True)) for change in changes]
    voted(runner(record, sink, schema=CHANGES, change=lambda *_: then))

    (found,) = listed("diff", "words", "2", "--key", "id")

    assert (found["old_rows"], found["new_rows"]) == (2, 2)
    assert (found["added"], found["removed"], found["changed"]) == (1, 1, 1)
