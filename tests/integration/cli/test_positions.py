"""`twophase positions` on a real broker: it shows what waits, moves deliberately, and says why not."""

from __future__ import annotations

import json
from pathlib import Path

from support.pipelines.commands import listed, twophase
from support.pipelines.factories import words_pipeline
from support.servers import kafka as server
from twophase import Pipeline, sources
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Position
from twophase.local.kafka import Broker
from twophase.wiring import enter


def test_positions_are_listed_and_moved(kafka: Broker, home: Path, record: PostgresRecord) -> None:
    topic = server.make_topic(kafka)
    server.produce(kafka, topic, ["a", "b", "c"])
    reads = {"words": sources.Kafka(topic, conn_id=server.CONN_ID)}
    enter(record, Pipeline("orders", reads=reads, transform="word_count:copy", writes=words_pipeline().writes))
    with record.transaction() as tx:
        tx.pin("orders", "words", {f"{topic}/0": Position(1)})

    shown = listed("positions", "orders")
    unexplained = twophase("positions", "orders", "--set", f"words/{topic}=earliest")
    moved = twophase("positions", "orders", "--set", f"words/{topic}/0=2", "--reason", "a test", "--json")
    wrong = twophase("positions", "orders", "--set", "other/0=2", "--reason", "a test")

    assert shown == [{"source": "words", "partition": f"{topic}/0", "offset": 1, "end": 3, "lag": 2}]
    assert "--reason: expected one with --set and --forget" in unexplained.stderr
    assert f"words/{topic}/0: moved to 2" in moved.stderr
    assert json.loads(moved.stdout)[0]["lag"] == 1
    assert "position 'other/0': expected READ/PARTITION, with a read of words" in wrong.stderr
    assert (unexplained.exit_code, moved.exit_code, wrong.exit_code) == (1, 0, 1)
