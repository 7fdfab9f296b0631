"""Attempts on a real YARN: a driver that it starts again writes nothing, and a kill by the record reaches it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.faults.processes import polls
from support.pipelines.factories import land_words
from support.servers.yarn import Yarn, running
from twophase import sinks
from twophase.airflow.spark_submit import StageOperator
from twophase.core.checkpoint import Input, Key
from twophase.core.settings import data_path
from twophase.sources import Files
from twophase.spark.plan import Plan, PlannedRead, PlannedWrite
from twophase.spark.submit import ChildProcess, SparkSubmit

pytestmark = [pytest.mark.yarn, pytest.mark.timeout(900)]

#: Waits in the driver until it may go on; says first which process it is.
JOB = """
import os, time
from pathlib import Path

def waits(words):
    home = Path(os.environ["TWOPHASE_HOME"])
    (home / f"driver-{os.getpid()}").touch()
    while (home / "hold").exists():
        time.sleep(0.2)
    return words
"""


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yarn]:
    with running(tmp_path_factory.mktemp("yarn")) as started:
        yield started


class Attempt:
    """One attempt, submitted to YARN in cluster mode."""

    def __init__(self, yarn: Yarn, home: Path, **conf: str) -> None:
        land_words(rows=3)
        source, sink = Files("landing/words", "json"), sinks.Files("lake/words")
        sink.prepare()
        self.yarn, self.home = yarn, home
        self.before = set(yarn.applications())
        self.folder = home / "runs" / "attempt"
        (home / "hold").touch()
        (home / "spark_jobs").mkdir()
        (home / "spark_jobs" / "job.py").write_text(JOB)
        key = Key("words", 1, 1)
        files = tuple(sorted(source.discover(None).files))
        plan = Plan(
            *key,
            attempt=1,
            slot=None,
            transform="job:waits",
            reads={"words": PlannedRead(source.declaration(), Input(files=files))},
            writes={"lake": PlannedWrite(sink.declaration(), sink.place(key, 1, "7c1e"))},
        )
        paths = [self.folder / name for name in ("plan.json", "result.json", "spark.log")]
        plan.write(paths[0])
        self.result = paths[1]
        settings = {**yarn.submission(home), **conf}
        self.job: ChildProcess = SparkSubmit().submit(*paths, master="yarn", conf=settings)

    def driver(self) -> psutil.Process:
        """Wait until the transform runs; return its process."""
        for _ in polls(300):
            if found := list(self.home.glob("driver-*")):
                return psutil.Process(int(found[0].name.removeprefix("driver-")))
        log = (self.folder / "spark.log").read_text()[-3000:]
        msg = f"no driver came: {log}"
        raise AssertionError(msg)

    @property
    def application(self) -> str:
        """Return YARN's id of it."""
        (found,) = set(self.yarn.applications()) - self.before
        return found

    def state(self) -> str:
        """Return how YARN says it ended, once it has."""
        for _ in polls(300):
            found: dict[str, Any] = self.yarn.applications()[self.application]
            if found["state"] in {"FINISHED", "FAILED", "KILLED"}:
                return f"{found['state']} {found['finalStatus']}"
        return "it did not end"

    def staged(self) -> list[Path]:
        return list(data_path("lake").rglob("*.parquet"))


@pytest.fixture
def submit(yarn: Yarn, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HADOOP_CONF_DIR", str(yarn.conf))
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(home / "spark_jobs"))
    made: list[Attempt] = []

    def start(**conf: str) -> Attempt:
        made.append(Attempt(yarn, home, **conf))
        return made[-1]

    yield start
    for attempt in made:
        attempt.job.kill()


def test_an_attempt_is_staged_and_says_who_did_it(submit: Any) -> None:
    attempt = submit()
    attempt.driver()
    (attempt.home / "hold").unlink()

    assert attempt.state() == "FINISHED SUCCEEDED"
    assert json.loads(attempt.result.read_text())["status"] == "staged"
    number = attempt.application.removeprefix("application_")
    assert f"container_{number}_01_" in (attempt.folder / "started").read_text()


def test_a_driver_that_yarn_starts_again_writes_nothing(submit: Any) -> None:
    """The user has asked YARN for a second try: it finds the first one's name and ends."""
    attempt = submit(**{"spark.yarn.maxAppAttempts": "2"})
    attempt.driver().parent().send_signal(signal.SIGKILL)
    (attempt.home / "hold").unlink()

    assert attempt.state() == "FAILED FAILED"
    assert attempt.yarn.tries(attempt.application) == 2
    assert len(list(attempt.home.glob("driver-*"))) == 1
    assert not attempt.result.exists()
    assert attempt.staged() == []


def test_yarn_is_asked_not_to_start_a_driver_again(submit: Any) -> None:
    attempt = submit()
    attempt.driver().parent().send_signal(signal.SIGKILL)

    assert attempt.state() == "FAILED FAILED"
    assert attempt.yarn.tries(attempt.application) == 1


def test_a_kill_by_what_the_record_keeps_reaches_the_driver(
    submit: Any, yarn: Yarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the abort task and recovery do it: from another process, which has submitted nothing."""
    attempt = submit()
    driver = attempt.driver()
    connection = {"conn_type": "spark", "host": "yarn", "extra": {"yarn_resourcemanager_webapp_address": yarn.web}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_YARN", json.dumps(connection))

    StageOperator.kill({"id": attempt.application, "conn_id": "spark_yarn"})

    assert attempt.state() == "KILLED KILLED"
    gone, _ = psutil.wait_procs([driver], timeout=60)
    assert gone
    assert not attempt.result.exists()
    assert os.path.lexists(attempt.folder / "plan.json")
