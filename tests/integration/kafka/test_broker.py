"""The broker that tests, demo and benchmarks start: it keeps what it acknowledged, and goes with its owner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from support.faults.processes import polls
from support.servers.kafka import make_topic, produce, values
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


def test_the_jars_of_sparks_connector_are_there() -> None:
    assert [path.name.rpartition("-")[0] for path in connector() if path.exists()] == [
        "commons-pool2",
        "kafka-clients",
        "spark-sql-kafka-0-10_2.13",
        "spark-token-provider-kafka-0-10_2.13",
    ]
