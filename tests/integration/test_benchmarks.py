"""The benchmarks are code that is run rarely: here they run with sizes whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import code_before
from benchmarks.__main__ import MEASURES

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TWOPHASE_")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_measure_keeps_its_figures_with_the_machine_that_they_were_taken_on(tmp_path: Path) -> None:
    done = run("promotion", "replacement", "verify", "landing", "--tiny", "--results", str(tmp_path))

    assert done.returncode == 0, done.stderr
    found = {result["name"]: result for result in map(json.loads, (p.read_text() for p in tmp_path.glob("*.json")))}
    assert set(found) == {"promotion", "replacement", "verify", "landing"}
    for result in found.values():
        assert all(result["machine"].values())
        assert all(figure["ratio"] > 0 for figure in result["figures"])
        assert result["profile"]
    assert found["promotion"]["figures"][0]["goal"] == 1.2
    assert "## promotion (tiny sizes)" in (tmp_path / "latest.md").read_text()
    assert "promotion: 20 staged files ÷ 10" in done.stdout


def test_an_unknown_measure_is_an_error_that_names_the_known_ones() -> None:
    done = run("speed")

    assert done.returncode != 0
    assert "promotion" in done.stderr


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_documented(name: str) -> None:
    assert MEASURES[name].question
    assert f"| `{name}` |" in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.slow
def test_the_code_before_and_todays_run_side_by_side(tmp_path: Path) -> None:
    """A checkpoint is measured beside the code of an earlier commit, on one server."""
    done = run("commit", "--tiny", "--results", str(tmp_path))

    assert done.returncode == 0, done.stderr
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert found["figures"][0]["what"] == "a checkpoint ÷ the same by the code before"
    assert set(found["profile"]) == {"ours", "before", "plain"}
    assert all(figure["ours"]["median"] > 0 for figure in found["figures"])


@pytest.mark.slow
def test_the_measures_of_kafka_run(tmp_path: Path) -> None:
    names = [name for name in MEASURES if name.startswith("kafka-")]
    done = run(*names, "--tiny", "--results", str(tmp_path))

    assert done.returncode == 0, done.stderr
    found = {result["name"]: result for result in map(json.loads, (p.read_text() for p in tmp_path.glob("*.json")))}
    assert set(found) == set(names)
    goals = sorted(figure["goal"] for result in found.values() for figure in result["figures"] if figure["goal"])
    assert goals == [0.25, 1.0, 1.05, 1.1, 1.5, 1.5, 2.5]


def test_a_clone_without_the_code_before_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_before, "COMMIT", "0123456789abcdef")

    with pytest.raises(code_before.NotHere, match="not in this clone") as caught:
        code_before.tree()

    assert "\n" not in str(caught.value)
