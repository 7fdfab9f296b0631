"""The broker of `twophase up --kafka`: a component of the local stack, and how its tasks and Spark jobs find it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from twophase.core import settings
from twophase.core.connections import variable
from twophase.core.errors import ConfigError
from twophase.local import kafka, postgres, shared_files
from twophase.local.committer_database import DRIVER

#: The connections that the example names: the broker, and a database for results.
CONNECTION = "kafka_default"
TARGET = "postgres_default"
DATABASE = "examples"
_PARTITIONS = 2


class KafkaComponent:
    """One broker with some topics; it ends with the supervisor, and keeps its data and its port."""

    name = "kafka"
    needs: tuple[str, ...] = ()
    session: int | None = None  # the broker ends with its parent by itself

    def __init__(self, topics: Sequence[str]) -> None:
        """Name the topics to create unless they are there."""
        self._topics = topics
        self._broker = kafka.Broker(_folder())

    def start(self) -> None:
        """Start the broker, and make the topics; return once both are there."""
        from twophase.storage.kafka_cluster import KafkaCluster

        self._broker.start()
        link = settings.home() / "logs" / f"{self.name}.log"
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self._broker.log)
        os.environ[variable(CONNECTION)] = connection(self._broker.address())  # Airflow's processes inherit it
        cluster = KafkaCluster(CONNECTION, "local broker")
        for topic in self._topics:
            cluster.create(topic, _PARTITIONS)
        write_spark_defaults()

    def pid(self) -> int | None:
        """Return the pid of the broker while it lives."""
        process = self._broker.process
        return process.pid if process is not None and process.poll() is None else None

    def ask_to_stop(self) -> None:
        """Wait for the others, which use it to the end."""

    def stop(self) -> None:
        """Stop the broker."""
        self._broker.stop()


def connection(address: str) -> str:
    """Return an Airflow connection to a broker that asks for no password."""
    return json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": address}})


def address() -> str | None:
    """Return where the local broker listens; None: `up --kafka` has never started one here."""
    return kafka.kept_address(_folder())


def check_environment() -> None:
    """Refuse a broker beside the one that the caller's environment names."""
    if os.environ.get(variable(CONNECTION)):
        msg = f"up --kafka: {variable(CONNECTION)} names a broker already; leave --kafka out, or unset it"
        raise ConfigError(msg)


def environment() -> dict[str, str]:
    """Return what Airflow's processes need for the example beside the broker, unless the caller says otherwise."""
    found = {
        variable(TARGET): postgres.create_database(DATABASE).replace(DRIVER, "postgres", 1),
        "SPARK_CONF_DIR": str(_spark_conf()),
    }
    return {name: value for name, value in found.items() if not os.environ.get(name)}


def write_spark_defaults() -> Path:
    """Write settings by which Spark jobs have the Kafka connector; return their folder, for SPARK_CONF_DIR."""
    folder = _spark_conf()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    jars = ",".join(map(str, kafka.connector()))
    shared_files.write(folder / "spark-defaults.conf", f"spark.jars {jars}\n")
    return folder


def _folder() -> Path:
    return settings.home() / "kafka"


def _spark_conf() -> Path:
    return settings.home() / "spark"
