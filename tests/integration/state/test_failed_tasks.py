"""Spark runs failed tasks again, and each key is in the state once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

TESTS = Path(__file__).parents[2]
JOB = TESTS / "jobs" / "state_retries.py"


@pytest.mark.parametrize("output", ["same", pytest.param("other", marks=pytest.mark.slow)])
def test_a_task_that_fails_after_it_wrote_its_run_leaves_a_stray_that_nobody_lists(tmp_path: Path, output: str) -> None:
    """In the sink's job its report is lost with it; in a job before that, it is not run again."""
    done = subprocess.run(
        [sys.executable, JOB, tmp_path, output],
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "plugins"), str(TESTS), str(TESTS.parent)]),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == sorted([[key, 3] for key in range(400)], key=lambda row: repr(tuple(row)))
    assert found["failed"] == 2
    assert found["written"] == [400, 400]
    if output == "same":
        assert found["strays"] == 2
