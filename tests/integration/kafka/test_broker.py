"""The broker that tests, demo and benchmarks start: it keeps what it acknowledged, and goes with its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.faults.processes import polls
from support.servers.kafka import admin, make_topic, produce, values
from twophase.core.errors import ConfigError
from twophase.local import kafka_component
from twophase.local.kafka import Broker, connector

OWNER = """
import sys
from pathlib import Path
from twophase.local.kafka import Broker

broker = Broker(Path(sys.argv[1])).start()
print(broker.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_broker_comes_back_on_its_port_with_what_it_acknowledged(mortal_kafka: Broker) -> None:
    topic, address = make_topic(mortal_kafka, partitions=2), mortal_kafka.address()
    produce(mortal_kafka, topic, ["a", "b", "c"], acks="all")

    mortal_kafka.kill()
    mortal_kafka.start()

    assert mortal_kafka.address() == address
    assert values(mortal_kafka, topic) == ["a", "b", "c"]


def test_a_broker_dies_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert psutil.pid_exists(pid)

    owner.kill()
    owner.communicate()

    assert any(not psutil.pid_exists(pid) for _ in polls(30))


def test_the_broker_of_the_local_stack_has_its_topics_and_keeps_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is started beside Airflow: tasks find the broker by a connection, Spark its connector by SPARK_CONF_DIR."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", "")  # put back at the end
    component = kafka_component.KafkaComponent(["lines"])
    component.start()
    try:
        first, topics = (
            kafka_component.address(),
            set(admin(str(kafka_component.address())).list_topics(timeout=30).topics),
        )
        told = json.loads(os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"])["extra"]["bootstrap.servers"]
    finally:
        component.stop()
    again = kafka_component.KafkaComponent(["lines", "counts"])
    again.start()
    try:
        kept, more = (
            kafka_component.address(),
            set(admin(str(kafka_component.address())).list_topics(timeout=30).topics),
        )
    finally:
        again.stop()

    assert (told, kept, component.pid()) == (first, first, None)
    assert ({"lines"} <= topics, {"lines", "counts"} <= more) == (True, True)
    defaults = (tmp_path / "spark" / "spark-defaults.conf").read_text()
    assert defaults == f"spark.jars {','.join(map(str, connector()))}\n"
    with pytest.raises(ConfigError, match="names a broker already; leave --kafka out, or unset it"):
        kafka_component.check_environment()


def test_the_jars_of_sparks_connector_are_there() -> None:
    assert [path.name.rpartition("-")[0] for path in connector() if path.exists()] == [
        "commons-pool2",
        "kafka-clients",
        "spark-sql-kafka-0-10_2.13",
        "spark-token-provider-kafka-0-10_2.13",
    ]
