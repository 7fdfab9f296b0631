"""The same DAG on a Spark standalone cluster of two workers, one of them killed; drivers that outlive their task."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from support.pipelines.airflow_case import Case
from support.servers.airflow import AirflowServer, eventually
from twophase.local.spark_cluster import Cluster
from twophase.spark.submit import find_spark_home

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(900)]

#: A Spark job of the JVM: it says that it runs, waits at the gate, and writes ten rows to its output path.
JOB = """
import java.nio.file.*;
import org.apache.spark.sql.*;

public class Ten {
    public static void main(String[] args) throws Exception {
        SparkSession spark = SparkSession.builder().appName("ten").getOrCreate();
        Path gate = Paths.get(args[1]);
        Files.createFile(gate.resolve("running-" + System.nanoTime()));
        while (Files.exists(gate.resolve("hold"))) Thread.sleep(100);
        spark.range(10).write().parquet(args[0]);
        spark.stop();
    }
}
"""


@pytest.fixture(scope="module")
def cluster(airflow: AirflowServer) -> Iterator[Cluster]:
    """Start a master and two workers, and a connection to them in Airflow."""
    with Cluster(airflow.home / "cluster") as started:
        connect(airflow, "spark_cluster", started, "client")
        yield started


@pytest.fixture(scope="module")
def rest_cluster(airflow: AirflowServer) -> Iterator[Cluster]:
    """Start a cluster that runs drivers, too."""
    with Cluster(airflow.home / "rest_cluster", rest=True) as started:
        connect(airflow, "spark_cluster_mode", started, "cluster")
        yield started


def connect(airflow: AirflowServer, conn_id: str, cluster: Cluster, mode: str) -> None:
    extra = json.dumps({"deploy-mode": mode, "rest-port": cluster.rest_port})
    airflow.api(
        "POST", "connections", connection_id=conn_id, conn_type="spark", host=cluster.url, port=None, extra=extra
    )


def test_a_killed_worker_of_the_cluster_changes_nothing(airflow: AirflowServer, cluster: Cluster) -> None:
    case = Case(airflow, spark=f'conn_id="spark_cluster", properties_file={str(cluster.properties)!r}')
    case.land(*range(100))
    case.hold()
    run = case.trigger()
    case.until_running()

    cluster.kill("worker-1")
    case.let_go()

    assert case.wait(run) == "success"
    assert case.rows() == list(range(100))
    cluster.start_worker("worker-1")


@pytest.fixture(scope="module")
def jar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the job; a JDK is needed for that, which Spark itself does without."""
    if shutil.which("javac") is None or shutil.which("jar") is None:
        pytest.skip("javac and jar are missing: install a JDK, for example Debian's default-jdk-headless")
    folder = tmp_path_factory.mktemp("jar")
    (folder / "Ten.java").write_text(JOB)
    classes = f"{find_spark_home(sys.executable)}/jars/*"
    subprocess.run(["javac", "--release", "17", "-cp", classes, "Ten.java"], cwd=folder, check=True)
    subprocess.run(["jar", "cf", "ten.jar", "Ten.class"], cwd=folder, check=True)
    return folder / "ten.jar"


def in_cluster_mode(airflow: AirflowServer, rest_cluster: Cluster, jar: Path, retries: int) -> Case:
    """Declare a pipeline whose driver runs on the cluster."""
    arguments = ["{{ staging('lake') }}", str(airflow.home / "gate" / "NAME")]
    spark = (
        f'conn_id="spark_cluster_mode", properties_file={str(rest_cluster.properties)!r}, application={str(jar)!r},'
        f' java_class="Ten", application_args={arguments!r}, driver_memory="512m", executor_memory="512m"'
    )
    case = Case(airflow, retries=retries, transform=None, spark=spark, name=None)
    case.declare(case.source.replace("NAME", case.name))
    case.land(1)
    case.hold()
    return case


def running(case: Case) -> list[Path]:
    return sorted(case.gate.glob("running-*"))


def test_a_driver_that_outlived_its_task_is_adopted_by_the_next_try(
    airflow: AirflowServer, rest_cluster: Cluster, jar: Path
) -> None:
    case = in_cluster_mode(airflow, rest_cluster, jar, retries=2)
    run = case.trigger()
    eventually(lambda: running(case), 180)

    case.kill_runner(run)
    eventually(lambda: second_try(airflow, case, run), 180, every=1)
    eventually(lambda: "outlived its task" in airflow.log(case.name, run, "stage", 2), 180, every=1)
    case.let_go()

    assert case.wait(run) == "success"
    assert (case.states(), case.show()["epoch"]) == ([(1, 1, "COMMITTED")], 1)
    assert len(running(case)) == 1
    assert case.rows() == list(range(10))


def second_try(airflow: AirflowServer, case: Case, run: str) -> bool:
    tasks = {task["task_id"]: task for task in airflow.tasks(case.name, run)}
    return bool(tasks["stage"]["try_number"] > 1 and tasks["stage"]["state"] == "running")


def test_a_driver_on_the_cluster_is_killed_when_its_stage_is_marked_failed(
    airflow: AirflowServer, rest_cluster: Cluster, jar: Path
) -> None:
    case = in_cluster_mode(airflow, rest_cluster, jar, retries=0)
    run = case.trigger()
    eventually(lambda: running(case), 180)
    with airflow.record() as connection:
        job = connection.execute(text("SELECT job FROM twophase.revision WHERE pipeline = :p"), {"p": case.name})
        driver = job.scalar_one()["id"]

    case.mark(run, "stage", "failed")

    assert case.wait(run) == "failed"
    eventually(lambda: status(rest_cluster, driver)["driverState"] == "KILLED", 60)
    assert case.states() == [(1, 1, "ABORTED")]


def status(cluster: Cluster, driver: str) -> dict[str, Any]:
    address = f"http://127.0.0.1:{cluster.rest_port}/v1/submissions/status/{driver}"
    with urllib.request.urlopen(address, timeout=10) as reply:
        found: dict[str, Any] = json.load(reply)
        return found
