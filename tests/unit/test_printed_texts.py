"""What is printed: others' texts, which must not command a terminal."""

from __future__ import annotations

import json
import logging

import pytest
from rich.text import Text

from twophase.cli import output

#: Clears the screen, twice; the second time by a single character.
EVIL = "a\x1b[2Jb\x9b2Jc\x7fd"
SHOWN = "a␛[2Jb\ufffd2Jc␡d"


@pytest.mark.parametrize("terminal", [False, True])
def test_escape_sequences_in_names_values_and_errors_do_not_reach_a_terminal(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever way a text takes; what it was is still to be seen."""
    monkeypatch.setenv("COLUMNS", "200")
    if terminal:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
    output.say(EVIL)
    output.say(Text(EVIL, style="red"))
    output.complain(EVIL)
    output.print_error(ValueError(EVIL))
    output.table(["name", "error"], [[EVIL, Text(EVIL)]], title=EVIL)
    output.listing([{"slot": EVIL}], [("slot", "slot")])
    entry = logging.LogRecord("twophase", logging.WARNING, __file__, 1, "%s", (EVIL,), None)
    output.Complaints().emit(entry)
    with output.progress() as bar:
        bar.console.print(EVIL)
        bar.add_task(EVIL, total=1)
    said = "".join(capsys.readouterr())

    assert said.count(SHOWN) >= 9
    assert "\x1b[2J" not in said
    assert not {"\x9b", "\x7f"} & set(said)
    assert terminal or "\x1b" not in said


def test_json_stays_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads back what was there; a terminal is not commanded either."""
    output.print_json({"path": EVIL})
    said = capsys.readouterr().out

    assert json.loads(said) == {"path": EVIL}
    assert not {"\x1b", "\x9b", "\x7f"} & set(said)
