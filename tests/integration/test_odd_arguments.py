"""The command line given what nobody means: one line says what is wrong, and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from support.pipelines.commands import one_line_error, twophase
from support.pipelines.factories import PreStaged, land_words, words_pipeline
from twophase.committer.record import PostgresRecord
from twophase.runner import Runner

if TYPE_CHECKING:
    import pytest

HUGE = "9" * 20
LONG = "x" * 5000
NUL = "a\0b"
HALF = "\udcff"
NAMES = ("", LONG, NUL, HALF, "a\nb", "a%sb", "../x", "-1")
#: Wrong calls whatever the record holds.
CASES = [
    *(["checkpoints", "words", option, HUGE] for option in ("--limit", "--before")),
    *([command, "words", number] for command in ("show", "diff") for number in (HUGE, "-1", "0", "", "x")),
    *(["show", "words", "1", "--revision", number] for number in (HUGE, str(2**31), "-1")),
    ["diff", "words", "1", "--against", HUGE],
    *(["up", "--port", port] for port in ("-1", "0", "65536", HUGE)),
    *([command, "words", HUGE, "--reason", "why"] for command in ("abort", "commit", "restage", "release")),
    *(
        [command, name]
        for command in ("checkpoints", "verify", "stale", "pending", "sweep", "recover")
        for name in NAMES
    ),
    *(["run", name] for name in NAMES if name != "-1"),
    *(["backfill", "words", "--checkpoints", numbers] for numbers in (f"1..{HUGE}", "5..1", "..", HUGE, NUL)),
    ["backfill", "words", "--from", "0000-00-00", "--to", HUGE],
]


def test_an_odd_value_is_refused_without_a_traceback(home: Path, record: PostgresRecord) -> None:
    """Negative, huge, empty, no text: an exit code of 1 or 2, and nothing that nobody expected."""
    land_words(rows=1)
    with Runner(words_pipeline(), PreStaged(), record=record) as runner:
        runner.run()

    for case in CASES:
        result = twophase(*case)

        assert result.exit_code in {0, 1, 2}, case
        assert result.exception is None or isinstance(result.exception, SystemExit), (case, result.exception)
        assert "Traceback" not in result.stderr, case


def test_a_home_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "home"
    file.touch()
    monkeypatch.setenv("TWOPHASE_HOME", str(file))
    monkeypatch.delenv("TWOPHASE_DSN", raising=False)

    error = one_line_error(twophase("up", "--no-airflow"))

    assert str(file) in error
