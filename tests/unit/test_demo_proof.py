"""The demo's proof must fail when it should: it is worth only as much as what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twophase.cli.demo.proof import Counted, Finding, expected, prove
from twophase.cli.demo.reader import PollingReader

ROWS = [Counted(1, "apple", 3), Counted(1, "fig", 4), Counted(2, "apple", 3)]


def failing(made: list[Counted], seen: list[Counted], committed: list[int]) -> list[str]:
    return [check.claim for check in prove(made, seen, committed) if not check.holds]


def test_equal_rows_in_any_order_hold() -> None:
    assert failing(ROWS, ROWS[::-1], [2, 1]) == []


def test_a_doubled_row_fails_the_proof() -> None:
    assert failing(ROWS, [*ROWS, ROWS[0]], [1, 2]) == [
        "totals per word equal those of the input",
        "every row is there once: none lost, none doubled",
    ]


def test_a_lost_row_fails_the_proof() -> None:
    assert len(failing(ROWS, ROWS[:-1], [1, 2])) == 2


def test_a_row_in_the_wrong_checkpoint_fails_though_the_totals_agree() -> None:
    moved = [Counted(2, "apple", 3), Counted(1, "fig", 4), Counted(2, "apple", 3)]

    assert failing(ROWS, moved, [1, 2]) == ["every row is there once: none lost, none doubled"]


def test_a_checkpoint_that_is_committed_twice_or_never_fails_the_proof() -> None:
    claim = ["every checkpoint is committed once"]

    assert failing(ROWS, ROWS, [1, 2, 2]) == claim
    assert failing(ROWS, ROWS, [1]) == claim


def test_the_input_is_counted_per_checkpoint(tmp_path: Path) -> None:
    files = []
    for number, rows in enumerate([[("apple", 1), ("fig", 4)], [("apple", 2)], [("apple", 3)]]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text("".join(json.dumps({"word": word, "frequency": n}) + "\n" for word, n in rows))

    assert sorted(expected({1: files[:2], 2: files[2:]})) == ROWS


def looked_at(folder: Path, words: list[str]) -> Finding:
    """Have a reader look at a table that holds these words as checkpoint 1, whose input is an apple and a fig."""
    landed = folder / "1.json"
    landed.write_text("".join(json.dumps({"word": word, "frequency": 1}) + "\n" for word in ("apple", "fig")))
    table = folder / "table"
    (table / "checkpoint=00000001").mkdir(parents=True)
    rows = pa.table({"word": words, "frequency": [1] * len(words)})
    pq.write_table(rows, table / "checkpoint=00000001" / "part.parquet")
    with PollingReader(table, {1: [landed]}) as reader:
        deadline = time.monotonic() + 60
        while "looked 0 times" in reader.check().found and time.monotonic() < deadline:
            time.sleep(0.01)
    return reader.check()


def test_a_reader_that_sees_whole_checkpoints_has_nothing_to_say(tmp_path: Path) -> None:
    assert looked_at(tmp_path, ["fig", "apple"]).holds


@pytest.mark.parametrize("words", [["apple"], ["apple", "fig", "fig"]], ids=["a part", "a row twice"])
def test_a_reader_that_sees_something_else_fails_the_proof(tmp_path: Path, words: list[str]) -> None:
    assert not looked_at(tmp_path, words).holds


def test_a_reader_that_never_looked_proves_nothing(tmp_path: Path) -> None:
    assert not PollingReader(tmp_path, {}).check().holds
