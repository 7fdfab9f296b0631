"""The tests themselves: where things are, and what is said of a run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
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


NOTE = "from pathlib import Path\n\nnotes = Path({notes!r}).open('a', buffering=1)\n"
SHARING = """
import pytest
from support.servers.folder_end import finish_at_the_end_of_its_folder

@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    finish_at_the_end_of_its_folder("shared", item, nextitem)

@pytest.fixture(scope="session")
def shared():
    print("start", file=notes)
    yield
    print("end", file=notes)

@pytest.fixture(scope="module")
def upon(shared):
    yield
    print("upon", file=notes)
"""


def test_what_a_folder_shares_ends_with_its_last_test_and_starts_again_if_it_is_asked_for(tmp_path: Path) -> None:
    note = NOTE.format(notes=str(tmp_path / "notes"))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "conftest.py").write_text(note + SHARING)
    (tmp_path / "one" / "test_one.py").write_text(
        note + "def test_a(shared, upon): print('a', file=notes)\ndef test_b(): print('b', file=notes)\n"
    )
    (tmp_path / "one" / "test_more.py").write_text(note + "def test_c(shared): print('c', file=notes)\n")
    (tmp_path / "two" / "test_two.py").write_text(note + "def test_d(): print('d', file=notes)\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "one/test_one.py", "two", "one/test_more.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "notes").read_text().split() == ["start", "a", "b", "upon", "end", "d", "start", "c", "end"]


def modules() -> list[Path]:
    apart = (TESTS / "support", TESTS / "jobs")
    return [path for path in TESTS.rglob("*.py") if not any(path.is_relative_to(folder) for folder in apart)]


def test_what_tests_share_is_in_support() -> None:
    assert {path.name for path in modules() if not path.name.startswith("test_")} == {"conftest.py"}


def test_no_module_of_tests_is_longer_than_one_sitting() -> None:
    lengths = {str(path.relative_to(TESTS)): len(path.read_text().splitlines()) for path in modules()}

    assert {name: length for name, length in lengths.items() if length > 600} == {}
