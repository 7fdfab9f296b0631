"""`twophase run`: what it commits and tells, and what a failure looks like."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.pipelines.commands import listed, one_line_error, twophase
from support.pipelines.factories import PreStaged, land_words
from twophase.cli.run import tail
from twophase.committer.queries import COLUMNS
from twophase.core.errors import AttemptFailed
from twophase.core.settings import data_path

DECLARATION = """
from twophase import Pipeline, sinks, sources

words = Pipeline(
    "words",
    reads={"words": sources.Files("landing/words", format="json", max_files=1)},
    transform="word_count:copy",
    writes={"lake": sinks.Files("lake/words")},
)
"""


@pytest.fixture
def file(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Declare a pipeline in a file; its Spark work is done by a stager without Spark."""
    data_path("landing/words").mkdir(parents=True)
    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: PreStaged())
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = home / "declaration.py"
    path.write_text(DECLARATION)
    return str(path)


def test_run_commits_one_checkpoint_and_tells_it(file: str) -> None:
    land_words(files=2)

    result = twophase("run", file)

    assert result.exit_code == 0
    assert re.search(r"words +1 +1 +COMMITTED +1 +10 ", result.stdout)
    assert "words/1 r1: attempt 1, staging" in result.stderr
    assert "words/1 r1: committed, rows 10" in result.stderr


def test_run_gives_what_was_committed_as_json(file: str) -> None:
    land_words(files=2)

    (done,) = listed("run", f"{file}:words")

    assert tuple(done) == COLUMNS
    assert done["rows"] == 10
    assert [done] == listed("checkpoints", "words")


def test_run_drains_until_there_is_no_new_input(file: str) -> None:
    land_words(files=3)

    assert [row["checkpoint_id"] for row in listed("run", file, "--drain")] == [1, 2, 3]
    result = twophase("run", file)
    assert result.exit_code == 0
    assert result.stderr == "words: no new input\n"
    assert listed("run", file) == []


def test_run_hands_spark_settings_on(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def remember(*_: object, **settings: Any) -> PreStaged:
        given.update(settings)
        return PreStaged()

    monkeypatch.setattr("twophase.runner.stager_for", remember)

    twophase("run", file, "--master", "local[1]", "--conf", "a.b=c=d", "--conf", "e=")

    assert given == {"master": "local[1]", "conf": {"a.b": "c=d", "e": ""}}


@pytest.mark.parametrize("conf", ["nonsense", "=x"])
def test_a_setting_without_a_name_or_a_value_is_a_usage_error(file: str, conf: str) -> None:
    assert twophase("run", file, "--conf", conf).exit_code == 2


def test_run_of_a_missing_file_is_one_line(home: Path) -> None:
    assert one_line_error(twophase("run", str(home / "none.py"))) == f"{home / 'none.py'}: no such file"


def test_a_transform_that_raised_is_one_line_with_the_log_and_the_users_traceback(
    file: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = home / "spark.log"
    log.write_text(LOG)
    jobs = home / "spark_jobs"
    jobs.mkdir()
    (jobs / "jobs.py").touch()
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(jobs))

    def fail(*_: object) -> None:
        msg = f"checkpoint words/1 r1: attempt 1: ValueError: no (jobs.py:7); the log is {log}"
        raise AttemptFailed(msg)

    monkeypatch.setattr("twophase.runner.stager_for", lambda *_, **__: fail)
    land_words()

    result = twophase("run", file)

    assert result.exit_code == 1
    *shown, last = result.stderr.splitlines()
    assert last == f"error: checkpoint words/1 r1: attempt 1: ValueError: no (jobs.py:7); the log is {log}"
    assert f'  File "{jobs}/jobs.py", line 7, in transform' in shown
    assert "ValueError: no" in shown
    assert not any("pyspark" in line for line in shown)


LOG = """26/11/16 WARN Utils: something
Traceback (most recent call last):
  File "/x/twophase/spark/main.py", line 50, in main
    writes = stage(session(plan), plan)
  File "/x/pyspark/sql/dataframe.py", line 1, in show
    self._jdf.show()
  File "/tmp/localPyFiles-1f/jobs.py", line 7, in transform
    raise ValueError("no")
ValueError: no
26/11/16 INFO ShutdownHookManager: bye
"""


def test_a_log_without_a_traceback_ends_with_its_last_lines() -> None:
    assert tail("\n".join(map(str, range(100))))[-1] == "99"
    assert tail(LOG)[0] == "Traceback (most recent call last):"
