"""The demo, as a user runs it: real PostgreSQL, real Spark, real kills. That its proof can fail is a unit test."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.postgres import open_folder


@pytest.fixture
def home() -> Iterator[Path]:
    """Make a folder for everything, and see that nothing of it runs at the end."""
    folder = open_folder("twophase-demo-")
    try:
        yield folder
        left = subprocess.run(["pgrep", "-af", str(folder)], capture_output=True, text=True, check=False).stdout
    finally:
        shutil.rmtree(folder)

    assert left == "", "a process of the demo is still there"


def demo(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "twophase.cli", "demo", *arguments],
        env={**os.environ, "TWOPHASE_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - tests in the background ignore it
    )


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_demo_without_airflow_survives_every_kill_and_proves_it(home: Path) -> None:
    with demo(home, "--no-airflow") as running:
        told, _ = running.communicate()

    assert running.returncode == 0, told
    for failpoint in ("vote.before", "commit.after", "promote.visible"):
        assert f"failpoint {failpoint}: kill" in told
    assert "record: checkpoint 1 is OPEN   reader: an empty table" in told
    assert "record: checkpoint 2 is COMMITTING   reader: 8 rows, checkpoint 1\n" in told
    assert "record: checkpoint 3 is COMMITTED   reader: 24 rows, checkpoints 1, 2, 3\n" in told
    assert told.count("✓") == 4
    assert "exactly once: the proof holds" in told


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_the_demo_on_kafka_survives_the_kill_of_run_database_and_broker_and_proves_it(home: Path) -> None:
    with demo(home, "--kafka", "--records", "3000", "--kills", "3") as running:
        told, _ = running.communicate()

    assert running.returncode == 0, told
    for victim in ("the run, and its Spark", "PostgreSQL: the record", "the broker: the input"):
        assert len(re.findall(rf"kill -9 \d+: {victim}", told)) == 1, told
    assert told.count("9,000 of 9,000 words)") == 3
    assert told.count("✓") == 7
    assert "exactly once: the proof holds" in told


@pytest.mark.airflow
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_on_airflow_survives_both_kills_and_proves_it(home: Path) -> None:
    with demo(home) as running:
        told, _ = running.communicate()

    assert running.returncode == 0, told
    assert len(re.findall(r"kill -9 \d+: ", told)) == 2
    for line in (
        "record: checkpoint 2 is OPEN   reader: 8 rows, checkpoint 1\n",
        "airflow: task stage is running, try 2\n",
        "record: checkpoint 2 is COMMITTED by attempt 2   reader: 16 rows, checkpoints 1, 2\n",
        "record: cannot be read   reader: 16 rows, checkpoints 1, 2\n",
        "record: checkpoint 1, revision 2, is COMMITTED   reader: 24 rows, checkpoints 1, 2, 3\n",
    ):
        assert line in told
    assert told.count("✓") == 5
    assert "exactly once: the proof holds" in told


@pytest.mark.airflow
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_on_a_cluster_survives_the_kill_of_a_worker_too_and_proves_it(home: Path) -> None:
    with demo(home, "--cluster") as running:
        told, _ = running.communicate()

    assert running.returncode == 0, told
    assert len(re.findall(r"kill -9 \d+: ", told)) == 3
    for line in (
        "with 2 workers\n",
        "record: checkpoint 2 is OPEN   reader: 8 rows, checkpoint 1\n",
        "workers now: 1.\n",
        "record: checkpoint 2 is COMMITTED   reader: 16 rows, checkpoints 1, 2\n",
        "record: checkpoint 1, revision 2, is COMMITTED   reader: 32 rows, checkpoints 1, 2, 3, 4\n",
    ):
        assert line in told
    assert told.count("✓") == 5
    assert "exactly once: the proof holds" in told


def test_a_cluster_without_airflow_is_refused(home: Path) -> None:
    with demo(home, "--cluster", "--no-airflow") as running:
        told, _ = running.communicate()

    assert running.returncode == 1
    expected = "expected one of --no-airflow, --cluster, --kafka, found --no-airflow and --cluster"
    assert told == f"error: demo: {expected}\n"


@pytest.mark.airflow
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_nothing_running(home: Path, signum: signal.Signals) -> None:
    with demo(home) as running:
        assert running.stdout is not None
        said = next(line for line in running.stdout if "is healthy" in line or line.startswith("error"))
        running.send_signal(signum)
        rest = running.stdout.read()

    assert running.returncode == 130, said + rest
    assert rest.endswith("interrupted\n")
