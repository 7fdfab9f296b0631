"""A sink of one's own, as the how-to shows it: complete, short, and it keeps the contract."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "own-sink.md"


def blocks() -> dict[str, str]:
    """Return the Python files of the page by their names."""
    found = re.findall(r"```python\n(# (\w+\.py).*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)
    return {name: code for code, name in found}


def test_the_example_has_less_than_sixty_lines_of_code() -> None:
    lines = [line for line in blocks()["sqlite_sink.py"].splitlines() if line.strip() and not line.startswith("#")]

    assert len(lines) < 60


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("places", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_the_example_keeps_the_contract(tmp_path: Path, places: int) -> None:
    for name, code in blocks().items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        f"from twophase.testing import SinkContract\nSinkContract.places = {places}\n"
    )

    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout)


#: A sink that breaks one promise, and the case that is named for it.
WRONG = {
    "MarkerInMemory": "test_a_repeated_promotion_changes_nothing",
    "MarkerInASecondStep": "test_a_promotion_that_is_killed_anywhere_is_finished_by_the_next",
    "MarkerInAnEarlierStep": "test_a_lost_reply_is_settled_by_the_marker",
    "HighWaterMark": "test_what_overtakes_does_not_hide_what_it_overtook",
    "LookingBeforehand": "test_a_late_promoter_shows_nothing_twice",
    "VisibleAtOnce": "test_what_is_staged_is_invisible",
    "OneRowAfterTheOther": "test_a_promotion_that_is_killed_anywhere_is_finished_by_the_next",
    "NeverTakingOut": "test_a_replacement_takes_the_place_of_the_older_revision",
    "NeverDiscarding": "test_what_is_discarded_is_gone_and_cannot_be_promoted",
    "EmptyIsNothing": "test_an_output_without_rows_is_promoted_too",
    "EveryAttempt": "test_the_attempt_that_was_voted_for_is_promoted_and_no_other",
    "SilentVerify": "test_verify_tells_of_what_is_not_there",
    "LastMarkerOnly": "test_a_promotion_is_repeated_harmlessly_after_later_ones",
    "ReplacingInTwoSteps": "test_a_replacement_that_is_killed_anywhere_shows_one_revision_whole",
    "BringingBack": "test_a_late_promoter_does_not_bring_back_what_was_replaced",
    "DiscardingTheCheckpoint": "test_discarding_a_revision_leaves_the_others",
    "DiscardingEveryRevision": "test_discarding_a_revision_leaves_the_others",
    "SweepingEveryAttempt": "test_what_is_swept_is_one_attempt",
    "KeepingEarlierAttempts": "test_what_is_staged_again_leaves_nothing_earlier_to_be_promoted",
    "PromotingAgain": "test_an_earlier_attempt_that_was_promoted_after_all_counts",
    "ReceiptAfterwards": "test_a_receipt_is_kept_before_anything_is_shown",
    "LastReceiptOnly": "test_what_it_was_given_is_known_by_receipts",
    "AnyNumber": "test_a_number_that_is_another_decisions_is_refused",
}
#: The same cases, kept by the sink that the wrong ones are made of.
RIGHT = "Receipted"


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_sink_that_breaks_a_promise_fails_the_case_that_is_named_for_it(tmp_path: Path) -> None:
    (tmp_path / "sqlite_sink.py").write_text(blocks()["sqlite_sink.py"], encoding="utf-8")
    for name in ("wrong_sinks.py", "wrong_sinks_contract.py"):
        shutil.copy(Path(__file__).parents[1] / "support" / "sinks" / name, tmp_path)
    chosen = {f"Test{sink}::{case}" for sink, case in (*WRONG.items(), *((RIGHT, case) for case in WRONG.values()))}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "--rootdir", "."]

    done = subprocess.run(
        [*command, *(f"wrong_sinks_contract.py::{case}" for case in sorted(chosen))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    ended = {case: state for state, case in re.findall(r"^(PASSED|FAILED) \S+?::(\S+)", done.stdout, re.MULTILINE)}
    assert {f"Test{sink}::{case}": "FAILED" for sink, case in WRONG.items()}.items() <= ended.items(), done.stdout
    assert {f"Test{RIGHT}::{case}": "PASSED" for case in WRONG.values()}.items() <= ended.items(), done.stdout
