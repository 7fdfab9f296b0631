"""Audits vote on what is staged: one no, and nothing becomes visible; the fixed run commits the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.pipelines.commands import listed, twophase
from support.pipelines.factories import PreStaged, Row, land_words, visible, words_pipeline
from twophase import Pipeline, audits, sinks
from twophase.committer import queries
from twophase.committer.record import PostgresRecord
from twophase.core.errors import AuditFailed, ConfigError
from twophase.core.settings import data_path
from twophase.core.states import State
from twophase.runner import Runner
from twophase.spark.plan import Plan


def audited(*found: audits.Audit, **writes: sinks.Files) -> Pipeline:
    made = words_pipeline(writes=writes or None)
    return Pipeline("words", reads=made.reads, transform=made.transform, writes=made.writes, audits=found)


def runner_of(record: PostgresRecord, *found: audits.Audit, change: Any = None, **writes: sinks.Files) -> Runner:
    return Runner(audited(*found, **writes), PreStaged(change=change), record=record)


def voted(record: PostgresRecord, checkpoint_id: int = 1, revision: int | None = None) -> dict[str, dict[str, Any]]:
    with record.engine.connect() as connection:
        found = queries.show(connection, "words", checkpoint_id, revision)
    return {p["name"]: p for p in found["participants"] if p["kind"] == "audit"}


@pytest.fixture(autouse=True)
def _landed(home: Path) -> None:
    land_words(rows=10)


def without_words(rows: list[Row], plan: Plan) -> list[Row]:
    return [{**row, "word": None} if row["id"] == 3 else row for row in rows]


def test_audits_that_pass_are_votes_in_the_record(record: PostgresRecord) -> None:
    done = runner_of(record, audits.row_count(minimum=1), audits.not_null("word"), audits.unique("id")).run()

    assert done is not None
    assert (done.state, done.rows) == (State.COMMITTED, 10)
    found = voted(record)
    assert sorted(found) == ["lake: not_null(word)", "lake: row_count", "lake: unique(id)"]
    assert all(p["vote"] and p["manifest"]["passed"] for p in found.values())


def test_one_no_leaves_nothing_visible_and_says_why_with_rows(record: PostgresRecord) -> None:
    runner = runner_of(record, audits.not_null("word"), audits.row_count(minimum=99), change=without_words)

    once = r"r1: lake: not_null\(word\): expected .*; lake: row_count: expected .*99.*nothing became visible"
    with pytest.raises(AuditFailed, match=once):
        runner.run()

    assert visible("lake/words") == []
    assert list(data_path("lake/words").iterdir()) == []
    assert list(data_path("lake/words.twophase/staging").iterdir()) == []
    no = voted(record)["lake: not_null(word)"]
    assert no["vote"] is False
    assert "1 row" in no["reason"]
    assert no["manifest"]["sample"][0]["id"] == 3
    assert listed("checkpoints", "words")[0]["error"].startswith("AuditFailed: checkpoint words/1 r1: lake: not_null")


def test_the_fixed_run_commits_the_same_checkpoint(record: PostgresRecord) -> None:
    with pytest.raises(AuditFailed):
        runner_of(record, audits.not_null("word"), change=without_words).run()

    done = runner_of(record, audits.not_null("word")).run()

    assert done is not None
    assert (done.checkpoint_id, done.revision, done.state) == (1, 2, State.COMMITTED)
    assert len(visible("lake/words")) == 10


def test_a_warning_is_recorded_and_votes_yes(record: PostgresRecord) -> None:
    done = runner_of(record, audits.not_null("word", severity="warn"), change=without_words).run()

    assert done is not None
    found = voted(record)["lake: not_null(word)"]
    assert found["vote"] is True
    assert found["reason"].startswith("warning: ")
    assert found["manifest"]["passed"] is False


def test_an_audit_may_look_at_one_write_only(record: PostgresRecord) -> None:
    runner = runner_of(record, audits.row_count(minimum=1, on="copy"), lake=sinks.Files("a"), copy=sinks.Files("b"))

    runner.run()

    assert list(voted(record)) == ["copy: row_count"]


def test_a_failed_audit_of_a_replacement_leaves_the_committed_revision(record: PostgresRecord) -> None:
    runner_of(record).run()

    with pytest.raises(AuditFailed):
        runner_of(record, audits.not_null("word"), change=without_words).replace(1)

    assert len(visible("lake/words")) == 10
    assert all(row["word"] for row in visible("lake/words"))
    assert [row["state"] for row in listed("checkpoints", "words")] == ["ABORTED", "COMMITTED"]


@pytest.mark.parametrize("replacing", [True, False])
def test_rows_are_held_against_those_of_what_is_replaced_or_was_committed_before(
    record: PostgresRecord, replacing: bool
) -> None:
    runner_of(record).run()
    half = runner_of(record, audits.row_count(ratio_to_previous=(0.9, 1.1)), change=lambda rows, _: rows[:5])
    land_words(start=1, rows=10)

    with pytest.raises(AuditFailed, match=r"row_count.*10.*5|row_count.*5.*10"):
        half.replace(1) if replacing else half.run()


def test_a_query_that_returns_rows_is_a_no(record: PostgresRecord) -> None:
    runner = runner_of(record, audits.sql("SELECT id FROM staged WHERE frequency > 8", name="no_giants"))

    with pytest.raises(AuditFailed, match="lake: no_giants"):
        runner.run()

    assert voted(record)["lake: no_giants"]["manifest"]["sample"] == [{"id": 9}]


def test_a_query_with_a_mistake_is_a_no_in_words(record: PostgresRecord) -> None:
    with pytest.raises(AuditFailed, match=r"(?i)nonsense"):
        runner_of(record, audits.sql("SELECT nonsense FROM staged")).run()


def test_an_audit_on_no_write_is_named() -> None:
    with pytest.raises(ConfigError, match=r"audit row_count: no write 'sea', expected lake"):
        audited(audits.row_count(minimum=1, on="sea"))


def test_audits_are_in_the_declaration_and_come_back_from_it(record: PostgresRecord) -> None:
    pipeline = audited(audits.row_count(minimum=1), audits.values_in("word", ["a", "b"]), audits.fresh("at", "2h"))

    again = Pipeline.from_declaration("words", pipeline.declaration())

    assert [audit.name for audit in again.audits] == [audit.name for audit in pipeline.audits]
    assert again.declaration() == pipeline.declaration()


def test_show_tells_what_an_audit_found(record: PostgresRecord) -> None:
    runner_of(record, audits.row_count(minimum=1)).run()

    shown = twophase("show", "words", "1").stdout

    assert "lake: row_count" in shown
    assert "audit" in shown
