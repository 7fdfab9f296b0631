"""What a new revision would change, or has changed: rows added, removed, changed by key, and columns."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import SCHEMA, PreStaged, Row, land_words, voted, words_pipeline
from twophase.committer.record import PostgresRecord
from twophase.core.manifest import Column
from twophase.runner import Runner
from twophase.spark.plan import Plan
from twophase.sweep import sweep


def changed(rows: list[Row], plan: Plan) -> list[Row]:
    """Leave the first row out of a second revision, change another, and add one."""
    if plan.revision == 1:
        return rows
    kept = [{**row, "frequency": 99} if row["id"] == 5 else row for row in rows if row["id"] != 0]
    return [*kept, {"id": 77, "word": "new", "frequency": 1}]


@pytest.fixture
def runner(home: Path, record: PostgresRecord) -> Runner:
    land_words(rows=10)
    made = Runner(words_pipeline(), PreStaged(change=changed), record=record)
    made.run()
    return made


def test_a_committed_revision_is_held_against_the_one_it_replaced(runner: Runner) -> None:
    runner.replace(1)

    (found,) = listed("diff", "words", "1")
    (by_key,) = listed("diff", "words", "1", "--key", "id", "--samples", "3")

    assert (found["revision"], found["against"]) == (2, 1)
    assert (found["added"], found["removed"], found["changed"]) == (2, 2, None)
    assert (by_key["added"], by_key["removed"], by_key["changed"]) == (1, 1, 1)
    assert by_key["samples"]["added"][0]["id"] == 77
    assert found["samples"] == {}


def test_a_staged_revision_is_held_against_the_live_one_before_anything_is_decided(runner: Runner) -> None:
    voted(runner, replaces=1)

    result = twophase("diff", "words", "1", "--key", "id")

    assert result.exit_code == 0
    assert "lake: words/1 r2 against r1" in result.stdout
    assert "rows: 10 before, 10 now: 1 added, 1 removed, 1 changed" in result.stdout


def test_the_first_revision_has_nothing_to_be_held_against(runner: Runner) -> None:
    (found,) = listed("diff", "words", "1")

    assert (found["against"], found["added"], found["removed"]) == (None, 10, 0)


def test_new_columns_are_told(runner: Runner) -> None:
    runner.stager = PreStaged(schema=(*SCHEMA, Column("note", "string")))
    runner.replace(1)

    (found,) = listed("diff", "words", "1")

    assert any("note" in change for change in found["schema"])
    assert (found["added"], found["removed"]) == (0, 0)


def test_what_was_swept_cannot_be_compared(runner: Runner) -> None:
    runner.replace(1)
    with runner.record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET superseded_at = superseded_at - interval '30 days'"))
    list(sweep(runner.record, runner.pipeline))

    assert "its retention is over" in one_line_error(twophase("diff", "words", "1"))


def test_a_wrong_question_is_one_line(runner: Runner) -> None:
    assert "no write 'sea', expected lake" in one_line_error(twophase("diff", "words", "1", "--sink", "sea"))
    assert "words/1 r9: it is not in the record" in one_line_error(twophase("diff", "words", "1", "--revision", "9"))
    assert "words/7" in one_line_error(twophase("diff", "words", "7"))
    assert "nokey" in one_line_error(twophase("diff", "words", "1", "--key", "nokey"))
