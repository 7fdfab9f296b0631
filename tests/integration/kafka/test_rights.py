"""An account that lacks a right is told so before the vote, with the right that it lacks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faults.processes import polls
from support.servers.kafka import CONN_ID, admin, connection, make_topic, serving
from support.sinks.kafka_topic import PIPELINE, staged
from twophase import sinks
from twophase.core.errors import ConfigError
from twophase.core.ports import Outcome
from twophase.local.kafka import Broker
from twophase.sinks.kafka.markers import PARTITIONS

pytestmark = pytest.mark.timeout(300)

PASSWORD = "canary-5d1be2"
LISTENER = "listener.name.sasl_plaintext"
#: Whoever comes without a password may do everything, `app` what it was granted.
GUARDED = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    f"{LISTENER}.sasl.enabled.mechanisms": "PLAIN",
    f"{LISTENER}.plain.sasl.jaas.config": (
        f'org.apache.kafka.common.security.plain.PlainLoginModule required user_app="{PASSWORD}";'
    ),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Broker]:
    with serving(settings=GUARDED, listeners=("SASL_PLAINTEXT",)) as broker:
        yield broker


def grant(broker: Broker, kind: str, name: str, *operations: str) -> None:
    """Let the account do something with a topic, or with transactional ids of a prefix."""
    from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

    pattern = ResourcePatternType.PREFIXED if kind == "TRANSACTIONAL_ID" else ResourcePatternType.LITERAL
    rest = ("User:app", "*")
    wanted = [
        AclBinding(ResourceType[kind], name, pattern, *rest, AclOperation[one], AclPermissionType.ALLOW)
        for one in operations
    ]
    asked = admin(broker)
    for future in asked.create_acls(wanted).values():
        future.result(30)


def as_app(broker: Broker, password: str = PASSWORD) -> str:
    login: dict[str, Any] = {"sasl.mechanism": "PLAIN", "sasl.username": "app", "sasl.password": password}
    return connection(broker.address("SASL_PLAINTEXT"), **{"security.protocol": "SASL_PLAINTEXT"}, **login)


def refused(act: Callable[[], object], said: str) -> bool:
    """Expect a refusal; what was granted reaches the broker a moment later."""
    for _ in polls(30):
        with pytest.raises(ConfigError) as failed:
            act()
        if re.search(said, str(failed.value)):
            return True
    return False


def test_each_missing_right_is_named_until_all_are_there(
    guarded: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", as_app(guarded))
    topic, markers = make_topic(guarded), make_topic(guarded, PARTITIONS, cleanup_policy="compact")
    sink = sinks.Kafka(topic, conn_id=CONN_ID, markers=markers)
    sink.join(PIPELINE, "guarded")

    assert refused(sink.prepare, f"{topic}: .*authorization failed.*; give this account the right to it")
    grant(guarded, "TOPIC", topic, "DESCRIBE")
    assert refused(sink.prepare, r"expected the right WRITE, found DESCRIBE; grant it by kafka-acls")
    grant(guarded, "TOPIC", topic, "WRITE")
    grant(guarded, "TOPIC", markers, "READ")
    assert refused(sink.prepare, r"expected the rights READ and WRITE, missing WRITE; grant them")
    grant(guarded, "TOPIC", markers, "WRITE")
    assert any(is_prepared(sink) for _ in polls(30))
    checkpoints = itertools.count(1)
    assert refused(
        lambda: staged(sink, next(checkpoints)), r"grant WRITE and DESCRIBE on transactional ids .* twophase"
    )
    grant(guarded, "TRANSACTIONAL_ID", "twophase.orders.guarded", "WRITE", "DESCRIBE")

    assert any(is_sent(sink, next(checkpoints)) for _ in polls(30))


def is_prepared(sink: sinks.Kafka) -> bool:
    try:
        sink.prepare()
    except ConfigError:
        return False
    return True


def is_sent(sink: sinks.Kafka, checkpoint_id: int) -> bool:
    try:
        return sink.promote(staged(sink, checkpoint_id)).outcome is Outcome.PROMOTED
    except ConfigError:
        return False


def test_a_wrong_password_is_said_within_seconds_and_not_shown(
    guarded: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", as_app(guarded, "canary-wrong"))
    sink = sinks.Kafka("words", conn_id=CONN_ID)
    sink.join(PIPELINE, "guarded")

    with pytest.raises(ConfigError, match=r"connection kafka: .*[Aa]uthentication.*correct login, password") as failed:
        sink.prepare()
    assert "canary" not in str(failed.value)
