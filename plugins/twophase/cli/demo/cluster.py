"""The demo on a Spark standalone cluster: two workers, and one of them is killed while it works."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from twophase.cli.demo.airflow import AirflowStory
from twophase.cli.demo.story import CONF, PIPELINE
from twophase.cli.output import busy
from twophase.core import settings
from twophase.local.spark_cluster import Cluster

if TYPE_CHECKING:
    from rich.console import Console

CONNECTION = "spark_demo"
_WORKER = "worker-1"


class ClusterStory(AirflowStory):
    """Lets the same Airflow submit the same DAG to a cluster."""

    killed = "a worker of the Spark cluster, a task and the database are killed"

    def __init__(self, say: Console) -> None:
        """Choose the cluster's folder."""
        super().__init__(say)
        self._cluster = Cluster(settings.home() / "cluster")
        # Small executors, and a task for each file, so that both workers have one.
        conf = CONF | {"spark.executor.memory": "512m", "spark.sql.files.maxPartitionBytes": "1k"}
        self.spark = {"conf": conf, "conn_id": CONNECTION, "properties_file": str(self._cluster.properties)}

    def play(self) -> bool:
        """Play it; say whether the proof holds."""
        try:
            return super().play()
        finally:
            self._cluster.stop()

    def start(self) -> None:
        """Start the cluster, then everything else, with a connection to it."""
        with busy(self.say, "starting a Spark master and two workers"):
            self._cluster.start()
        self.tell(f"Spark runs: {self._cluster.url} with {self._cluster.alive()} workers", "dim")
        connection = {"conn_type": "spark", "host": self._cluster.url, "extra": {"deploy-mode": "client"}}
        os.environ[f"AIRFLOW_CONN_{CONNECTION.upper()}"] = json.dumps(connection)
        super().start()

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        """Return what happens, in order."""
        first, *others = super().parts()
        return [first, ("A worker of the cluster is killed while it works", self._killed_worker), *others]

    def _killed_worker(self) -> None:
        done = self._cluster.tasks(_WORKER)
        self.land()
        run = self.trigger(PIPELINE)
        self.follow(run, lambda: self._cluster.tasks(_WORKER) > done)
        self.killing(self._cluster.kill(_WORKER), f"{_WORKER} and its executor, in the middle of a task")
        self.look()
        self.finish(run)
        self.tell(f"Spark did its tasks again on the other; workers now: {self._cluster.alive()}.")
        self.look()
