"""Real Spark, killed: the driver at each step of staging, its JVM, an executor, or the process that submitted it.

Then a second run: every record is in every table, once, and nothing is left beside them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.crashes import scenarios
from support.faults.processes import Child, polls, start, stopped_at_end
from support.pipelines.factories import Row, land_words
from twophase.committer.record import PostgresRecord
from twophase.core.failpoints import FAILPOINTS

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.timeout(900)]

JOBS = Path(__file__).parents[1] / "jobs"
#: A JVM starts in seconds, on a busy machine in many.
PATIENCE = 240.0
#: Reached inside Spark's driver.
STAGE = [name for name in FAILPOINTS if name.startswith("stage.")]


@pytest.fixture(autouse=True)
def _jobs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(JOBS))
    monkeypatch.setenv("TWOPHASE_LEASE", "2")


def spark(log: Path, transform: str = "copy", *, master: str = "local[2]", failpoints: str = "") -> Child:
    env = {"TWOPHASE_FAILPOINTS": failpoints} if failpoints else {}
    return start(scenarios.spark_drain, transform, master, log=log, env=env)


def check_again(record: PostgresRecord, rows: list[Row], home: Path) -> None:
    """Run once more; what the crash left is dead, and goes."""
    again = spark(home / "again.log")
    with stopped_at_end(again):
        assert again.wait(PATIENCE) == 0, again.said
    scenarios.check_end(record, rows)
    assert not list((home / "runs" / "words").iterdir())


@pytest.mark.parametrize(
    "failpoint", [pytest.param(name, marks=[] if name == "stage.marked" else [pytest.mark.slow]) for name in STAGE]
)
def test_a_driver_that_was_killed_while_it_staged_leaves_nothing(
    failpoint: str, record: PostgresRecord, home: Path
) -> None:
    rows = land_words(files=2)

    run = spark(home / "run.log", failpoints=f"{failpoint}=kill")
    with stopped_at_end(run):
        code = run.wait(PATIENCE)

    if failpoint == "stage.after":  # it had reported its result: that is all it was needed for
        assert code == 0, run.said
    else:
        assert code == 1, run.said
        assert "Spark ended with code" in run.said
        with scenarios.looking(record) as connection:
            scenarios.check_never_wrong(rows, connection)
            scenarios.check_story(connection)
    check_again(record, rows, home)


def at_work(home: Path, child: Child, count: int = 1) -> list[tuple[int, int]]:
    """Wait until as many Python processes are at work inside Spark; return each with the JVM above it."""
    for _ in polls(PATIENCE):
        found = [path.name.split(".")[1:] for path in home.glob("at_work.*")]
        if len(found) >= count:
            return [(int(python), int(java)) for python, java in found]
        assert child.process.exitcode is None, child.said
    msg = f"Spark did not get to work:\n{child.said}"
    raise AssertionError(msg)


def session_of(pid: int) -> list[psutil.Process]:
    """Return every process of the session that a submission started."""
    leader, found = os.getsid(pid), []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def kill_submitter(child: Child, jvm: int) -> None:
    child.process.kill()


def kill_jvm(child: Child, jvm: int) -> None:
    os.kill(jvm, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "code"),
    [pytest.param(kill_submitter, -9, id="submitter"), pytest.param(kill_jvm, 1, id="jvm")],
)
def test_nothing_of_spark_outlives_what_was_killed(
    kill: Callable[[Child, int], None], code: int, record: PostgresRecord, home: Path
) -> None:
    rows = land_words(files=2)
    run = spark(home / "run.log", "waits_in_driver")
    with stopped_at_end(run):
        ((python, jvm),) = at_work(home, run)
        belonging = session_of(jvm)
        assert {python, jvm} <= {process.pid for process in belonging}

        kill(run, jvm)

        assert run.wait(PATIENCE) == code, run.said
    _, alive = psutil.wait_procs(belonging, timeout=30)
    assert alive == []
    with scenarios.looking(record) as connection:
        scenarios.check_never_wrong(rows, connection)
    check_again(record, rows, home)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 2])
def test_a_job_whose_executors_were_killed_is_right_in_the_end(
    victims: int, record: PostgresRecord, home: Path
) -> None:
    """Spark may start its tasks again and succeed, or fail: either way each record is there once."""
    rows = land_words(files=2, rows=10)
    run = spark(home / "run.log", "waits_in_executor", master="local-cluster[2,1,1024]")
    with stopped_at_end(run):
        executors = sorted({jvm for _, jvm in at_work(home, run, count=2)})
        assert len(executors) == 2
        for executor in executors[:victims]:
            assert "CoarseGrainedExecutorBackend" in " ".join(psutil.Process(executor).cmdline())
            os.kill(executor, signal.SIGKILL)
        (home / "go").touch()
        code = run.wait(PATIENCE)

    assert code in {0, 1}, run.said
    if code == 0:
        scenarios.check_all_there(rows)
    check_again(record, rows, home)
