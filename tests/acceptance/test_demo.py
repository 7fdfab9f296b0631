"""The demo, as a user runs it: real PostgreSQL, real Spark, real kills. That its proof can fail is a unit test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from conftest import open_folder


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_demo_survives_every_kill_and_proves_it() -> None:
    home = open_folder("twophase-demo-")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "twophase.cli", "demo"],
            env={**os.environ, "TWOPHASE_HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
        )
        left = subprocess.run(["pgrep", "-f", str(home)], capture_output=True, text=True, check=False).stdout
    finally:
        shutil.rmtree(home)

    assert done.returncode == 0, done.stdout + done.stderr
    for failpoint in ("vote.before", "commit.after", "promote.visible"):
        assert f"failpoint {failpoint}: kill" in done.stdout
    assert "record: checkpoint 1 is OPEN   reader: an empty table" in done.stdout
    assert "record: checkpoint 2 is COMMITTING   reader: 8 rows, checkpoint 1\n" in done.stdout
    assert "record: checkpoint 3 is COMMITTED   reader: 24 rows, checkpoints 1, 2, 3\n" in done.stdout
    assert done.stdout.count("✓") == 4
    assert "exactly once: the proof holds" in done.stdout
    assert left == "", "a process of the demo is still there"
