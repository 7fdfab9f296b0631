"""The commands that only look: what they print, in pages, filtered, as JSON."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.words_runs import commit
from twophase.committer.queries import COLUMNS
from twophase.committer.record import PostgresRecord
from twophase.core import failpoints


def test_pipelines_says_what_was_committed_last(home: Path) -> None:
    assert twophase("pipelines").stdout == ""
    assert listed("pipelines") == []
    commit(2)

    (found,) = listed("pipelines")

    assert found["pipeline"] == "words"
    assert found["last_checkpoint"] == found["last_commit_seq"] == 2
    assert datetime.fromisoformat(found["last_committed_at"]).tzinfo
    assert found["since_last_commit"] >= 0
    assert found["pending"] == 0
    assert "words" in twophase("pipelines").stdout


def test_checkpoints_lists_the_records_own_columns(home: Path) -> None:
    commit(3)

    found = listed("checkpoints", "words")

    assert [row["checkpoint_id"] for row in found] == [3, 2, 1]
    assert all(tuple(row) == COLUMNS for row in found)
    assert {row["state"] for row in found} == {"COMMITTED"}
    assert datetime.fromisoformat(found[0]["committed_at"]).tzinfo
    assert "COMMITTED" in twophase("checkpoints", "words").stdout


def test_checkpoints_come_in_pages(home: Path) -> None:
    commit(3)

    first = twophase("checkpoints", "words", "--limit", "2")

    assert "--before 2" in first.stderr
    assert [row["checkpoint_id"] for row in listed("checkpoints", "words", "--before", "2")] == [1]


def test_checkpoints_are_filtered_by_state_in_any_case(home: Path) -> None:
    commit()

    assert len(listed("checkpoints", "words", "--state", "committed")) == 1
    assert listed("checkpoints", "words", "--state", "ABORTED") == []


def test_an_unknown_state_is_a_usage_error_that_lists_them(home: Path) -> None:
    result = twophase("checkpoints", "words", "--state", "done")

    assert result.exit_code == 2
    assert all(name in result.stderr.upper() for name in ("OPEN", "PRECOMMITTED", "SUPERSEDED", "ABORTED"))


def test_show_tells_all_of_a_checkpoint(home: Path) -> None:
    commit()

    found = listed("show", "words", "1")

    told = ("failed", "inputs", "participants", "events", "lacking", "behind", "advice", "command")
    assert tuple(found) == (*COLUMNS, *told)
    assert found["inputs"]["words"]["files"] == 1
    assert [p["name"] for p in found["participants"]] == ["lake"]
    assert [event["to_state"] for event in found["events"] if event["to_state"]][-1] == "COMMITTED"
    shown = twophase("show", "words", "1", "--revision", "1").stdout
    for word in ("words/1 r1", "COMMITTED", "000000.json", "lake", "the commit point"):
        assert word in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("show", "words", "9"), "checkpoint words/9: it is not in the record"),
        (("show", "words", "1", "--revision", "7"), "checkpoint words/1 r7: it is not in the record"),
        (("show", "orders", "1"), "pipeline 'orders': it is not in the record"),
        (("checkpoints", "orders"), "pipeline 'orders': it is not in the record"),
        (("verify", "orders"), "pipeline 'orders': it is not in the record"),
        (("recover", "orders"), "pipeline 'orders': it is not in the record"),
        (("sweep", "orders"), "pipeline 'orders': it is not in the record"),
    ],
)
def test_what_is_not_in_the_record_is_one_line(home: Path, command: tuple[str, ...], message: str) -> None:
    commit()

    assert one_line_error(twophase(*command)).startswith(message)


@pytest.mark.parametrize(
    "command", [("show", "words", "zero"), ("show", "words"), ("checkpoints", "w", "--limit", "0")]
)
def test_wrong_arguments_are_usage_errors(home: Path, command: tuple[str, ...]) -> None:
    assert twophase(*command).exit_code == 2


def test_failpoints_are_listed_with_what_they_mean() -> None:
    found = listed("failpoints")

    assert {"name": "commit.after", "description": failpoints.FAILPOINTS["commit.after"]} in found
    assert "commit.after" in twophase("failpoints").stdout


def test_nothing_is_cut_off_when_it_is_piped(home: Path, record: PostgresRecord) -> None:
    commit()
    reason = "because " * 100 + "of this"
    with record.engine.begin() as connection:
        connection.execute(text("UPDATE twophase.revision SET error = :reason"), {"reason": reason})

    assert reason in twophase("checkpoints", "words").stdout
    assert reason in twophase("show", "words", "1").stdout


def test_colours_are_for_terminals_and_can_be_turned_off(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit()
    green = "\x1b[32mCOMMITTED"

    assert "\x1b" not in twophase("checkpoints", "words").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert green in twophase("checkpoints", "words").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert green not in twophase("checkpoints", "words").stdout
