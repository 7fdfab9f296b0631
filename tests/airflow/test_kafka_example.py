"""The Kafka example on the local stack: `twophase up --kafka` gives it all that it needs, on Airflow and without."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import psycopg2
import pytest

from support.pipelines.airflow_case import CONF
from support.servers.airflow import AirflowServer
from support.servers.kafka import connection, produce, read
from twophase.local import postgres
from twophase.local.kafka_component import DATABASE

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NAME = "kafka_word_count"


def in_topic(address: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for message in read(address, "word-counts"):
        found[message.key().decode()] += json.loads(message.value())["frequency"]
    return found


def in_postgres(dsn: str) -> Counter[str]:
    target = psycopg2.connect(dsn.replace("postgresql+psycopg2", "postgresql"))
    try:
        with target.cursor() as cursor:
            cursor.execute("SELECT word, sum(frequency)::bigint FROM word_counts GROUP BY word")
            return Counter(dict(cursor.fetchall()))
    finally:
        target.close()


def in_files(home: Path) -> Counter[str]:
    files = [str(path) for path in (home / "data" / "lake" / NAME).rglob("*.parquet")]
    with duckdb.connect() as reader:
        query = "SELECT word, sum(frequency)::bigint FROM read_parquet(?) GROUP BY word"
        return Counter(dict(reader.execute(query, [files]).fetchall()))


def test_the_example_counts_into_three_outputs_by_airflow_and_by_the_command_line(
    airflow: AirflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record knows both: what a task has read is not read again by `twophase run`."""
    address = airflow.status()["kafka"]
    (airflow.home / "spark_jobs").mkdir(exist_ok=True)
    shutil.copy(ROOT / "spark_jobs" / f"{NAME}.py", airflow.home / "spark_jobs")
    shipped = (ROOT / "dags" / f"{NAME}.py").read_text()
    assert len(shipped.splitlines()) < 40
    started = f"schedule=None, spark={{'conf': {CONF!r}}}"
    airflow.add_dag("case_kafka.py", shipped.replace('schedule="*/5 * * * *"', started), NAME)
    produce(address, "lines", ["to be or", "not to be"])

    assert airflow.wait(NAME, airflow.trigger(NAME), 300) == "success"
    produce(address, "lines", ["be it so"])
    environment = {"AIRFLOW_CONN_KAFKA_DEFAULT": connection(address), "SPARK_CONF_DIR": str(airflow.home / "spark")}
    with monkeypatch.context() as here:
        here.setenv("TWOPHASE_HOME", str(airflow.home))
        target = postgres.create_database(DATABASE)
    environment["AIRFLOW_CONN_POSTGRES_DEFAULT"] = target.replace("postgresql+psycopg2", "postgres")
    with monkeypatch.context() as here:
        for name, value in environment.items():
            here.setitem(airflow.environment, name, value)
        told = airflow.twophase("run", str(ROOT / "dags" / f"{NAME}.py"), "--master", "local[2]", "--json")

    assert [(one["checkpoint_id"], one["state"]) for one in json.loads(told)] == [(2, "COMMITTED")]
    expected = Counter(["to", "be", "or", "not", "to", "be", "be", "it", "so"])
    found = {"topic": in_topic(address), "table": in_postgres(target), "files": in_files(airflow.home)}
    assert found == dict.fromkeys(found, expected)
