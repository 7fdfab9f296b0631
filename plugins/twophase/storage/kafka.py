"""Settings of Kafka clients from an Airflow connection of type `kafka`; sources and sinks call this.

The extra of the connection holds settings of librdkafka, as Airflow's own Kafka provider has it. Checkpoints begin and
are promoted through librdkafka, Spark reads and writes through Kafka's Java client, so what says where the broker is
and who asks is said once and translated. Certificates and keys go along inline: executors need no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twophase.core import connections, secret_texts
from twophase.core.errors import ConfigError

#: Settings that only a consumer has, or that are Python functions; no client here takes them from a connection.
_NOT_SHARED = ("group.", "auto.", "enable.auto.", "fetch.", "max.poll.", "session.timeout", "heartbeat.", "isolation.")
_FUNCTIONS = ("error_cb", "stats_cb", "throttle_cb", "on_commit", "oauth_cb", "logger", "on_delivery")

_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
LOGIN_MODULES = {"PLAIN": _PLAIN, "SCRAM-SHA-256": _SCRAM, "SCRAM-SHA-512": _SCRAM}

#: librdkafka's setting → Java's, where only the name differs.
_RENAMED = {
    "bootstrap.servers": "bootstrap.servers",
    "metadata.broker.list": "bootstrap.servers",
    "client.id": "client.id",
    "ssl.cipher.suites": "ssl.cipher.suites",
    "ssl.keystore.location": "ssl.keystore.location",
    "ssl.keystore.password": "ssl.keystore.password",
    "ssl.key.password": "ssl.key.password",
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
#: Settings that name a file → the same with its content.
_FILES = {"ssl.ca.location": "ssl.ca.pem", "ssl.certificate.location": "ssl.certificate.pem"}
_FILES |= {"ssl.key.location": "ssl.key.pem"}
_IDENTIFIED = "ssl.endpoint.identification.algorithm"
_LOGIN = ("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password", "security.protocol")


def client_settings(conn_id: str) -> dict[str, str]:
    """Return the settings of a librdkafka client; they may hold secrets: never show them.

    It says nothing on stderr. Its errors come back through its calls.
    """
    shared = {name: value for name, value in settings(conn_id).items() if not name.startswith(_NOT_SHARED)}
    return {"log_level": "0", **shared}


def settings(conn_id: str) -> dict[str, str]:
    """Return all settings of a connection as texts, those of consumers too."""
    found = connections.required(conn_id)
    if found.conn_type != "kafka":
        msg = f"connection {conn_id}: expected type kafka, found {found.conn_type or 'none'}; correct it"
        raise ConfigError(msg)
    told = {name: _text(conn_id, name, value) for name, value in found.extra.items() if name not in _FUNCTIONS}
    secret_texts.hide_named(told.items())
    if not (told.get("bootstrap.servers") or told.get("metadata.broker.list")):
        msg = (
            f'connection {conn_id}: expected "bootstrap.servers" in its extra, found none; '
            'its extra holds settings of librdkafka, such as {"bootstrap.servers": "broker:9092"}'
        )
        raise ConfigError(msg)
    return told


def _text(conn_id: str, name: str, value: object) -> str:
    """Return the value of a setting as librdkafka reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    msg = f"connection {conn_id}: setting {name!r}: expected a text or a number, found {type(value).__name__}"
    raise ConfigError(msg)


def spark_options(conn_id: str) -> dict[str, str]:
    """Return the options of Spark's Kafka connector: Java's settings under `kafka.`; never show them."""
    told = settings(conn_id)
    for name, inline in _FILES.items():
        if name in told:
            told[inline] = _content(conn_id, name, told.pop(name))
    java = {_RENAMED[name]: value for name, value in told.items() if name in _RENAMED}
    java |= _login(conn_id, told) | _trust(conn_id, told)
    protections = {name for name in told if name.startswith(("sasl.", "ssl.", "security."))}
    if left := sorted(protections - {*_RENAMED, *_LOGIN, _IDENTIFIED}):
        msg = f"connection {conn_id}: setting {left[0]!r} cannot be given to Spark's Kafka client; leave it out"
        raise ConfigError(msg)
    if _IDENTIFIED in told:
        java[_IDENTIFIED] = "" if told[_IDENTIFIED] == "none" else told[_IDENTIFIED]
    return {f"kafka.{name}": value for name, value in java.items()}


def _content(conn_id: str, name: str, path: str) -> str:
    try:
        found = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text; expected PEM"
        msg = f"connection {conn_id}: setting {name!r}: {path}: {why}"
        raise ConfigError(msg) from error
    secret_texts.hide([found] if name == "ssl.key.location" else [])
    return found


def _login(conn_id: str, told: Mapping[str, str]) -> dict[str, str]:
    """Return who asks: Java's protocol, mechanism and login module."""
    protocol = told.get("security.protocol", "plaintext").upper()
    found = {"security.protocol": protocol}
    if not protocol.startswith("SASL"):
        return found
    mechanism = (told.get("sasl.mechanisms") or told.get("sasl.mechanism") or "GSSAPI").upper()
    if mechanism not in LOGIN_MODULES:
        known = ", ".join(LOGIN_MODULES)
        msg = f"connection {conn_id}: sasl.mechanism {mechanism}: expected one of {known}"
        raise ConfigError(msg)
    missing = [name for name in ("sasl.username", "sasl.password") if not told.get(name)]
    if missing:
        msg = f"connection {conn_id}: {mechanism} needs {missing[0]!r}, found none"
        raise ConfigError(msg)
    login = f"username={_quoted(told['sasl.username'])} password={_quoted(told['sasl.password'])}"
    jaas = f"{LOGIN_MODULES[mechanism]} required {login};"
    secret_texts.hide([jaas, _quoted(told["sasl.password"])[1:-1]])
    return {**found, "sasl.mechanism": mechanism, "sasl.jaas.config": jaas}


def _quoted(value: str) -> str:
    """Return a text as JAAS quotes it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in value) + '"'


def _trust(conn_id: str, told: Mapping[str, str]) -> dict[str, str]:
    """Return the types of Java's stores; refuse what Java cannot do or cannot read."""
    found = {}
    if told.get("enable.ssl.certificate.verification", "true").lower() != "true":
        msg = (
            f"connection {conn_id}: enable.ssl.certificate.verification=false: Spark's Kafka client always verifies; "
            "give it the certificate by ssl.ca.location or ssl.ca.pem"
        )
        raise ConfigError(msg)
    if "ssl.ca.pem" in told:
        found["ssl.truststore.type"] = "PEM"
    if "ssl.key.pem" in told:
        found["ssl.keystore.type"] = "PEM"
        first = told["ssl.key.pem"].strip().splitlines()[0]
        if first not in {"-----BEGIN PRIVATE KEY-----", "-----BEGIN ENCRYPTED PRIVATE KEY-----"}:
            msg = f"connection {conn_id}: ssl.key: expected a key in PKCS#8; convert it by openssl pkcs8 -topk8"
            raise ConfigError(msg)
    elif "ssl.keystore.location" in told:
        found["ssl.keystore.type"] = "PKCS12"
    return found
