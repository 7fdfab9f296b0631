"""Attempts on a real Kubernetes API server: a driver's pod is found again, and deleted, by what the record keeps."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.kubernetes import Kubernetes, running
from twophase import Pipeline, sinks, sources
from twophase.airflow.operators import kill_job
from twophase.airflow.spark_submit import StageOperator
from twophase.airflow.stage_task import Job
from twophase.core.checkpoint import Key, Revision
from twophase.core.states import State
from twophase.local import stack
from twophase.spark.submit import MAIN

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]

PIPELINE = Pipeline(
    "words",
    reads={"words": sources.Files("landing", format="json", schema="word string")},
    transform="words:transform",
    writes={"lake": sinks.Files("lake")},
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    with running(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


@pytest.fixture
def known(cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    """Tell Airflow of the cluster, as the page on clusters says."""
    connect(monkeypatch, cluster.url)
    monkeypatch.setenv("AIRFLOW__KUBERNETES_EXECUTOR__IN_CLUSTER", "False")
    monkeypatch.setenv("AIRFLOW__KUBERNETES_EXECUTOR__CONFIG_FILE", str(cluster.config))
    return cluster


def connect(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    extra = {"deploy-mode": "cluster", "namespace": "default"}
    connection = {"conn_type": "spark", "host": f"k8s://{url}", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_KUBERNETES", json.dumps(connection))


def submit(cluster: Kubernetes, home: Path, kept: list[str]) -> StageOperator:
    """Submit an attempt as the stage task does, and do not wait for what no node will run."""
    credentials = {"caCertFile": str(cluster.authority), "oauthTokenFile": str(cluster.folder / "token")}
    conf = {
        "spark.kubernetes.container.image": "none",
        "spark.kubernetes.file.upload.path": f"file://{home}",
        **{f"spark.kubernetes.authenticate.submission.{name}": value for name, value in credentials.items()},
    }
    operator = StageOperator(
        task_id="stage", pipeline=PIPELINE, conn_id="spark_kubernetes", conf=conf, track_driver_via_k8s_api=True
    )
    plan, result = str(home / "plan.json"), str(home / "result.json")
    operator._job = Job(Key("words", 1, 1), 1, str(MAIN), [plan, result], kept.append, lambda value: value)
    operator.application, operator.application_args = str(MAIN), [plan, result]
    operator.name = "twophase words/1 r1 a1"
    assert operator.submit_job({}) == kept[0]
    hook: Any = operator._hook
    hook._submit_sp.stdout.close()  # it leaves that open
    return operator


def of_record(job_id: str) -> Revision:
    """Return a revision whose job the record keeps."""
    job = {"id": job_id, "conn_id": "spark_kubernetes", "operator": f"{StageOperator.__module__}:StageOperator"}
    return Revision(Key("words", 1, 1), State.ABORTING, 1, job=job)


def test_a_kill_by_what_the_record_keeps_deletes_the_drivers_pod(
    known: Kubernetes, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the abort task and recovery do it: by another operator, which has submitted nothing. Twice, it is gone."""
    kept: list[str] = []
    operator = submit(known, home, kept)
    context: Any = {}
    (pod,) = known.pods()

    assert kept == [f"default:{pod}"]
    assert known.pods()[pod]["spark-role"] == "driver"
    assert operator.outlives(kept[0], context)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "twophase"):
        kill_job(of_record(kept[0]))
        kill_job(of_record(kept[0]))

    assert known.pods() == {}
    assert not operator.outlives(kept[0], context)
    assert caplog.messages == []


def test_a_cluster_that_does_not_answer_keeps_nothing_from_being_aborted(
    known: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job could not be killed: that is said, and nothing more depends on it."""
    gone = f"https://127.0.0.1:{stack.free_port()}"
    config = tmp_path / "config"
    config.write_text(known.config.read_text().replace(known.url, gone))
    connect(monkeypatch, gone)
    monkeypatch.setenv("AIRFLOW__KUBERNETES_EXECUTOR__CONFIG_FILE", str(config))

    with caplog.at_level(logging.WARNING, "twophase"):
        kill_job(of_record("default:words-driver"))

    (said,) = [text for text in caplog.messages if "could not be killed" in text]
    assert said.startswith("words/1 r1: its job default:words-driver could not be killed: ")
    assert known.token not in said
