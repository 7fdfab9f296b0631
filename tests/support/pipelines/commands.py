"""The command line as a test uses it."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner, Result

from twophase.cli import app


def twophase(*arguments: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, list(arguments), prog_name="twophase")


def listed(*arguments: str, code: int = 0) -> Any:
    """Return what a command prints as JSON."""
    result = twophase(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def one_line_error(result: Result, *, code: int = 1) -> str:
    """Return what follows `error: `, the only line there is."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr.removeprefix("error: ").strip()
