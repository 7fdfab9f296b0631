"""The tests themselves: where things are, and what is said of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    """Return the hooks of all tests."""
    loaded = request.config.pluginmanager.get_plugins()
    return next(plugin for plugin in loaded if getattr(plugin, "__file__", None) == str(TESTS / "conftest.py"))


def report(nodeid: str, when: Any, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=seconds)


def test_a_run_says_what_each_folder_took_the_longest_first(conftest: Any, pytestconfig: pytest.Config) -> None:
    said = io.StringIO()
    reporter = pytest.TerminalReporter(pytestconfig, file=said)
    reporter.stats = {
        "": [report("tests/chaos/test_a.py::test_one", "setup", 20)],
        "passed": [report("tests/unit/test_b.py::test_one", "call", 1), report("tests/unit/test_c.py::t", "call", 0.5)],
        "failed": [report("tests/chaos/test_a.py::test_one", "call", 0.25)],
    }
    conftest.pytest_terminal_summary(reporter)

    lines = said.getvalue().splitlines()
    assert [line.split() for line in lines if "tests/" in line] == [["20.2", "tests/chaos"], ["1.5", "tests/unit"]]


def modules() -> list[Path]:
    apart = (TESTS / "support", TESTS / "jobs")
    return [path for path in TESTS.rglob("*.py") if not any(path.is_relative_to(folder) for folder in apart)]


def test_what_tests_share_is_in_support() -> None:
    assert {path.name for path in modules() if not path.name.startswith("test_")} == {"conftest.py"}


def test_no_module_of_tests_is_longer_than_one_sitting() -> None:
    lengths = {str(path.relative_to(TESTS)): len(path.read_text().splitlines()) for path in modules()}

    assert {name: length for name, length in lengths.items() if length > 600} == {}
