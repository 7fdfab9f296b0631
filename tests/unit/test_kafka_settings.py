"""What an Airflow connection of type `kafka` becomes: settings of librdkafka, and of Java's client for Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twophase.core.errors import ConfigError
from twophase.core.secret_texts import without_secrets
from twophase.storage.kafka import client_settings, settings, spark_options

KEY = "-----BEGIN PRIVATE KEY-----\nbm90IGEga2V5IGF0IGFsbA==\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that declares the connection `events` with an extra."""

    def one(conn_type: str = "kafka", **extra: Any) -> None:
        named = {name.replace("_", "."): value for name, value in extra.items()}
        told = {"conn_type": conn_type, "extra": {"bootstrap.servers": "one:9092,two:9092", **named}}
        monkeypatch.setenv("AIRFLOW_CONN_EVENTS", json.dumps(told))

    return one


def test_a_plain_connection_says_where_the_broker_is_to_both_clients(declare: Any) -> None:
    declare(client_id="words", socket_keepalive_enable=True, request_timeout_ms=5000)

    assert client_settings("events") == {
        "log_level": "0",
        "bootstrap.servers": "one:9092,two:9092",
        "client.id": "words",
        "socket.keepalive.enable": "true",
        "request.timeout.ms": "5000",
    }
    assert spark_options("events") == {
        "kafka.bootstrap.servers": "one:9092,two:9092",
        "kafka.client.id": "words",
        "kafka.security.protocol": "PLAINTEXT",
    }


def test_what_only_a_consumer_has_is_kept_from_other_clients(declare: Any) -> None:
    """A producer or an admin client would complain of them."""
    declare(group_id="words", auto_offset_reset="latest", enable_auto_commit=False)

    assert client_settings("events") == {"log_level": "0", "bootstrap.servers": "one:9092,two:9092"}
    assert settings("events")["group.id"] == "words"


@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule"),
        ("SCRAM-SHA-512", "org.apache.kafka.common.security.scram.ScramLoginModule"),
    ],
)
def test_a_password_with_quotes_is_quoted_for_java_and_shown_nowhere(declare: Any, mechanism: str, module: str) -> None:
    declare(security_protocol="sasl_ssl", sasl_mechanisms=mechanism, sasl_username="me", sasl_password="a\"b\\c d'e")

    found = spark_options("events")
    assert found["kafka.security.protocol"] == "SASL_SSL"
    assert found["kafka.sasl.mechanism"] == mechanism
    assert found["kafka.sasl.jaas.config"] == f'{module} required username="me" password="a\\"b\\\\c d\'e";'
    assert "b\\" not in without_secrets(str(found))


def test_certificates_and_keys_go_along_inline(declare: Any, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("ca\n")
    declare(
        security_protocol="ssl",
        ssl_ca_location=str(tmp_path / "ca"),
        ssl_certificate_pem="cert\n",
        ssl_key_pem=KEY,
        ssl_endpoint_identification_algorithm="none",
    )

    assert spark_options("events") == {
        "kafka.bootstrap.servers": "one:9092,two:9092",
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": "ca\n",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": "cert\n",
        "kafka.ssl.keystore.key": KEY,
        "kafka.ssl.endpoint.identification.algorithm": "",
    }
    assert "bm90IGEga2V5" not in without_secrets(KEY)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"conn_type": "http"}, "connection events: expected type kafka, found http; correct it"),
        ({"bootstrap_servers": ""}, 'connection events: expected "bootstrap.servers" in its extra, found none'),
        ({"client_id": ["a"]}, "connection events: setting 'client.id': expected a text or a number, found list"),
        (
            {"security_protocol": "sasl_ssl"},
            "GSSAPI: expected one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512",
        ),
        (
            {"security_protocol": "sasl_ssl", "sasl_mechanism": "PLAIN", "sasl_username": "me"},
            "PLAIN needs 'sasl.password', found none",
        ),
        (
            {"ssl_crl_location": "/a"},
            "setting 'ssl.crl.location' cannot be given to Spark's Kafka client",
        ),
        ({"ssl_ca_location": "/no/such"}, "setting 'ssl.ca.location': /no/such: No such file or directory"),
        (
            {"ssl_key_pem": "-----BEGIN RSA PRIVATE KEY-----"},
            "expected a key in PKCS#8; convert it by openssl pkcs8",
        ),
        ({"enable_ssl_certificate_verification": False}, "Spark's Kafka client always verifies"),
    ],
)
def test_a_connection_that_a_client_cannot_use_is_refused_in_one_line(
    declare: Any, extra: dict[str, Any], message: str
) -> None:
    declare(**extra)

    with pytest.raises(ConfigError) as refused:
        spark_options("events")

    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
