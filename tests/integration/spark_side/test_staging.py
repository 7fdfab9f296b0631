"""What the Spark side stages, and what becomes of the job as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from support.servers.spark import CHEAP
from twophase import sinks
from twophase.core import failpoints
from twophase.core.errors import AttemptFailed, ConfigError, SchemaChanged
from twophase.spark.stage import COALESCED, Context, stage
from twophase.spark.submit import MAIN, ROOT, SparkSubmit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
from support.pipelines.spark_plans import Kept, make, plan, put, same, words

pytestmark = pytest.mark.spark


# --- staging ----------------------------------------------------------------------------------------------------------


def test_every_write_is_staged_and_summed_up(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}\n{"n": 2}')

    def transform(words: DataFrame, context: Context) -> DataFrame:
        assert context == Context("wc", 17, 1, None)
        return words

    assert stage(spark, plan(words()), transform) == {"lake": {"rows": 2, "attempt": 3}}


@pytest.mark.parametrize("shape", ["one frame", "a dict of one frame", "a dict of different frames"])
def test_the_input_is_read_once_for_several_writes(spark: SparkSession, landing: Path, shape: str) -> None:
    file = put(landing, "a.json", '{"n": 1}\n{"n": 2}')
    Kept.then = staticmethod(lambda: file.unlink(missing_ok=True))

    def transform(words: DataFrame) -> Any:
        twice = words.selectExpr("n * 2 as n")
        other = words.selectExpr("n * 3 as n") if shape == "a dict of different frames" else twice
        return twice if shape == "one frame" else {"lake": twice, "dwh": other}

    stage(spark, plan(words(schema="n int"), {"lake": make(), "dwh": make()}), transform)

    assert [row["n"] for row in Kept.rows["lake"]] == [2, 4]
    assert [row["n"] for row in Kept.rows["dwh"]] == ([3, 6] if "different" in shape else [2, 4])
    assert spark.sparkContext._jsc.getPersistentRDDs().isEmpty()


def test_several_writes_are_as_many_files_as_one(spark: SparkSession, landing: Path) -> None:
    """What they share is kept in as few partitions as its rows need, not in as many as a shuffle was planned with."""
    put(landing, "a.json", "\n".join(f'{{"n": {number % 5}}}' for number in range(20)))
    before = {name: spark.conf.get(name) for name in ("spark.sql.shuffle.partitions", COALESCED)}
    spark.conf.set("spark.sql.shuffle.partitions", "20")

    def files(*names: str) -> set[tuple[int, int]]:
        tables = {name: sinks.Files(f"lake/{name}") for name in names}
        for table in tables.values():
            table.prepare()
        staged = stage(spark, plan(words(schema="n int"), tables), lambda words: words.groupBy("n").count())
        return {(manifest["files"], manifest["rows"]) for manifest in staged.values()}

    try:
        assert files("alone") == files("one", "two", "three") == {(1, 5)}
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before["spark.sql.shuffle.partitions"] or "2")
    assert spark.conf.get(COALESCED) == before[COALESCED]


def test_a_single_write_is_not_cached(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')

    stage(spark, plan(words()), same)

    assert Kept.cached == {"lake": False}


@pytest.mark.parametrize(
    ("before", "by_position", "message"),
    [
        ([["n", "int"]], False, "column 'n' was int and is now bigint"),
        ([["n", "bigint"], ["gone", "string"]], False, "column 'gone' is missing"),
        ([["z", "string"], ["n", "bigint"]], True, "the order of columns changed"),
    ],
)
def test_a_schema_that_does_not_follow_is_refused_before_anything_is_written(
    spark: SparkSession, landing: Path, before: list[list[str]], by_position: bool, message: str
) -> None:
    put(landing, "a.json", '{"n": 1, "z": "x"}')
    writes = {"first": make(), "lake": make(by_position=by_position)}
    attempt = plan(words(), writes, schema=before)

    with pytest.raises(SchemaChanged, match=rf"checkpoint wc/17 r1: sink '\w+': {message}"):
        stage(spark, attempt, same)

    assert Kept.rows == {}


def test_a_new_column_may_come(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1, "z": "x"}')

    stage(spark, plan(words(), schema=[["n", "bigint"]]), same)

    assert Kept.rows["lake"] == [{"n": 1, "z": "x"}]


def test_two_columns_of_one_name_are_refused(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')

    with pytest.raises(ConfigError, match="more than one column is named n "):
        stage(spark, plan(words()), lambda words: words.selectExpr("n", "n as N"))


def test_the_failpoint_lies_before_the_first_write(spark: SparkSession, landing: Path) -> None:
    put(landing, "a.json", '{"n": 1}')
    failpoints.configure("stage.before=raise")

    try:
        with pytest.raises(failpoints.FailpointError):
            stage(spark, plan(words()), same)
    finally:
        failpoints.configure("")

    assert Kept.rows == {}


# --- the child process ------------------------------------------------------------------------------------------------


JOBS = {
    "plan.py": "VALUE = 'not the package'\n",
    "job.py": """
import os, time
from pathlib import Path

def works(words, spark):
    import plan
    assert plan.VALUE == 'not the package'
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    return words.groupBy("word").sum("n").withColumnRenamed("sum(n)", "n")

def fails(words):
    raise ValueError(f"dsn is {os.environ.get('TWOPHASE_DSN')}")

def hangs(words):
    Path(os.environ["TWOPHASE_HOME"], "pids").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)
""",
}


@pytest.fixture
def jobs(tmp_path: Path, landing: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "spark_jobs"
    for name, text in JOBS.items():
        put(folder, name, text)
    put(landing, "a [1].json", '{"word": "ü", "n": 1}\n{"word": "ü", "n": 2}\n')
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(folder))
    monkeypatch.setenv("TWOPHASE_DSN", "postgresql://secret")
    monkeypatch.setenv("LC_ALL", "C")
    return folder


def written_plan(tmp_path: Path, function: str) -> Path:
    lake = sinks.Files("lake/wc")
    lake.prepare()
    path = tmp_path / "attempt" / "plan.json"
    plan(words(), {"lake": lake}, transform=f"job:{function}").write(path)
    return path


def submitted(tmp_path: Path, function: str) -> tuple[int, dict[str, Any], str]:
    path = written_plan(tmp_path, function)
    result, log = path.with_name("result.json"), path.with_name("log.txt")
    code = SparkSubmit().submit(path, result, log, master="local[2]", conf=SUBMIT).wait(timeout=200)
    return code, json.loads(result.read_text()), log.read_text()


SUBMIT = {name: value for name, value in CHEAP.items() if name != "spark.sql.session.timeZone"}


def test_a_submitted_plan_is_staged(tmp_path: Path, jobs: Path) -> None:
    """The transform comes from spark_jobs, and no module of the package hides the user's."""
    code, result, log = submitted(tmp_path, "works")

    assert code == 0, log[-3000:]
    assert result["status"] == "staged"
    assert "process" in (tmp_path / "attempt" / "started").read_text()
    assert (result["writes"]["lake"]["rows"], result["writes"]["lake"]["schema"]) == (
        1,
        [["word", "string"], ["n", "bigint"]],
    )


def test_a_driver_that_a_cluster_starts_again_ends_and_writes_nothing(tmp_path: Path, jobs: Path) -> None:
    """Two drivers of one attempt would share a staging place; the second is no retry of the first."""
    path = written_plan(tmp_path, "works")
    path.with_name("started").write_text("container_17_0001_01_000001 on another machine")

    done = subprocess.run(
        [sys.executable, str(MAIN), str(path), str(path.with_name("result.json"))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "started before, as container_17_0001_01_000001 on another machine" in done.stderr
    assert sorted(file.name for file in path.parent.iterdir()) == ["plan.json", "started"]
    assert list((tmp_path / "data" / "lake").rglob("*.parquet")) == []


def test_a_failed_transform_is_reported_in_one_line(tmp_path: Path, jobs: Path) -> None:
    """And the job held no way to the committer database."""
    code, result, log = submitted(tmp_path, "fails")

    assert code == 1
    assert result == {"status": "failed", "type": "ValueError", "error": "ValueError: dsn is None (job.py:12)"}
    assert "Traceback (most recent call last)" in log


SUBMITTER = """
import sys
from pathlib import Path
from twophase.spark.submit import SparkSubmit

folder = Path(sys.argv[1])
conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
paths = [folder / name for name in ("plan.json", "result.json", "log.txt")]
job = SparkSubmit().submit(*paths, master="local[2]", conf=conf)
job.wait(should_stop=(folder / "stop").exists)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("how", ["killed", "asked to stop"])
def test_nothing_of_a_job_outlives_its_submitter(tmp_path: Path, jobs: Path, how: str) -> None:
    """Neither the JVM nor the Python driver turns into a zombie writer."""
    folder = written_plan(tmp_path, "hangs").parent
    submitter = subprocess.Popen(
        [sys.executable, "-c", SUBMITTER, str(folder)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    pids = tmp_path / "pids"
    while not pids.exists() or len(pids.read_text().split()) != 2:
        with pytest.raises(subprocess.TimeoutExpired):
            submitter.wait(0.2)
    running = [psutil.Process(int(pid)) for pid in pids.read_text().split()]

    if how == "killed":
        submitter.send_signal(signal.SIGKILL)
    else:
        (folder / "stop").touch()
    submitter.wait(30)

    _, alive = psutil.wait_procs(running, timeout=10)
    assert alive == []
    assert not (folder / "result.json").exists()


def test_a_job_that_takes_too_long_is_killed(tmp_path: Path, jobs: Path) -> None:
    path = written_plan(tmp_path, "hangs")
    job = SparkSubmit().submit(path, path.with_name("result.json"), path.with_name("log.txt"), master="local[2]")

    with pytest.raises(AttemptFailed, match=r"expected to end within 1 s, was killed; its output is in .*log\.txt"):
        job.wait(timeout=1)

    assert job.process.poll() is not None
