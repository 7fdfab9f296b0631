"""The Kafka sink keeps the contract of sinks, on a real broker."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from support.servers.kafka import CONN_ID, make_topic
from support.sinks.kafka_topic import seen
from twophase import sinks
from twophase.local.kafka import Broker
from twophase.sinks.base import Sink
from twophase.sinks.kafka import promotion
from twophase.testing import Read, SinkContract

# The session of all tests, not one of the contract's own, which every later test would get.
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark"), pytest.mark.timeout(900)]


class InKafka(SinkContract):
    """A topic of the test's own, whose markers are in the topic of all."""

    @pytest.fixture
    def sink(self, home: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> Sink:
        monkeypatch.setattr(promotion, "PATIENCE", 0.2)
        return sinks.Kafka(make_topic(kafka, 2), conn_id=CONN_ID, republish=False, path=f"kafka/{uuid.uuid4().hex}")

    @pytest.fixture
    def read(self, sink: Sink, kafka: Broker) -> Read:
        assert isinstance(sink, sinks.Kafka)
        return lambda: [dict(row) for row in seen(kafka, sink.topic)]


class TestKafka(InKafka):
    places = 2


@pytest.mark.slow
class TestKafkaEverywhere(InKafka):
    pass
