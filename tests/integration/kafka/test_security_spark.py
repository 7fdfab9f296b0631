"""TLS with a client certificate, PLAIN and SCRAM: one connection serves begin's own client and Spark's, in Java."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from support.servers import kafka as server
from support.servers.certificates import Authority
from twophase import Pipeline, sinks, sources
from twophase.core.errors import ConfigError
from twophase.local.kafka import Broker, connector
from twophase.runner import Runner, stager_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

#: Each has to be quoted somewhere on its way; none may be seen anywhere.
PLAIN, SCRAM = 'canary "plain" \\ 7f', "canary 'scram', 3e; $x"
JOBS = """
def transform(ssl, plain, scram):
    for frame in (ssl, plain, scram):
        frame.explain(True)
    return ssl.union(plain).union(scram).select("value")
"""


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def guarded(authority: Authority) -> Iterator[Broker]:
    """Start a broker with a listener for each way in."""
    from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

    certificate, key = authority.certify("broker")
    modules = "org.apache.kafka.common.security"
    settings = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": certificate,
        "ssl.keystore.key": key,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": authority.pem,
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
            f"{modules}.plain.PlainLoginModule required user_app={quoted(PLAIN)};"
        ),
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{modules}.scram.ScramLoginModule required;",
    }
    with server.serving(settings=settings, listeners=("SSL", "SASL_PLAINTEXT", "SASL_SSL")) as broker:
        asked = server.admin(broker)
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion("app", info, SCRAM.encode())
        asked.alter_user_scram_credentials([wanted])["app"].result(30)
        yield broker


def ways_in(broker: Broker, authority: Authority) -> dict[str, str]:
    """Return a connection for each way in."""
    mine = authority.certify("client")
    login = {"sasl.username": "app"}
    extras: dict[str, tuple[str, dict[str, str]]] = {
        "ssl": ("SSL", {"ssl.certificate.pem": mine.certificate, "ssl.key.pem": mine.key, "ssl.ca.pem": authority.pem}),
        "plain": ("SASL_PLAINTEXT", {**login, "sasl.mechanism": "PLAIN", "sasl.password": PLAIN}),
        "scram": (
            "SASL_SSL",
            {**login, "sasl.mechanism": "SCRAM-SHA-512", "sasl.password": SCRAM, "ssl.ca.pem": authority.pem},
        ),
    }
    return {
        name: server.connection(broker.address(listener), **{"security.protocol": listener}, **extra)
        for name, (listener, extra) in extras.items()
    }


def test_each_way_in_works_in_both_clients_and_no_secret_is_seen(
    guarded: Broker,
    authority: Authority,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One run begins and reads by all three; plans, logs and what is printed hold neither password nor key."""
    (home / "jobs").mkdir()
    (home / "jobs" / "kafka_jobs.py").write_text(JOBS)
    monkeypatch.setenv("TWOPHASE_SPARK_JOBS", str(home / "jobs"))
    ways = ways_in(guarded, authority)
    for name, connection in ways.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", connection)
    topics = {name: server.make_topic(guarded) for name in ways}
    for name, topic in topics.items():
        server.produce(guarded, topic, [f"by {name}"])
    pipeline = Pipeline(
        "kafka_ways",
        reads={name: sources.Kafka(topic, conn_id=name, start="earliest") for name, topic in topics.items()},
        transform="kafka_jobs:transform",
        writes={"lake": sinks.Files("lake/ways")},
    )

    conf = {"spark.jars": ",".join(map(str, connector()))}
    with Runner(pipeline, stager_for(pipeline, master="local[2]", conf=conf)) as runner:
        done = runner.run(None)

    assert done is not None
    found = duckdb.execute(f"SELECT value FROM '{home}/data/lake/ways/*/*.parquet' ORDER BY 1").fetchall()
    assert [value for (value,) in found] == ["by plain", "by scram", "by ssl"]
    secrets = [word.encode() for word in ("canary", "PRIVATE KEY")]
    printed = "".join(capfd.readouterr()).encode()
    kept = {path: path.read_bytes() for path in home.rglob("*") if path.is_file() and "jobs" not in path.parts}
    assert [str(path) for path, text in kept.items() if any(word in text for word in secrets)] == []
    assert not any(word in printed for word in secrets)


@pytest.mark.parametrize(("way", "broken"), [("plain", "canary"), ("scram", "canary"), ("ssl", "")])
def test_a_wrong_password_or_no_certificate_is_said_within_seconds(
    guarded: Broker, authority: Authority, monkeypatch: pytest.MonkeyPatch, way: str, broken: str
) -> None:
    """The error names the connection and the reason, and shows no secret."""
    address = guarded.address({"plain": "SASL_PLAINTEXT", "scram": "SASL_SSL", "ssl": "SSL"}[way])
    extra: dict[str, Any] = {
        "plain": {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"},
        "scram": {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "ssl.ca.pem": authority.pem},
        "ssl": {"security.protocol": "SSL", "ssl.ca.pem": authority.pem},
    }[way]
    if broken:
        extra |= {"sasl.username": "app", "sasl.password": f"{broken} wrong"}
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", server.connection(address, **extra))
    started = time.monotonic()

    with pytest.raises(ConfigError, match=r"connection wrong: .*; correct login, password and certificates") as failed:
        sources.Kafka("words", conn_id="wrong").discover()

    assert time.monotonic() - started < 20
    assert "canary" not in str(failed.value)
    assert str(failed.value).count("\n") == 0
