"""A log that lost records and grew again, on a real broker: no offset tells, the leader epoch does."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.servers import kafka as server
from twophase.core.checkpoint import Input, Position
from twophase.core.errors import InputChanged
from twophase.local.kafka import Broker
from twophase.sources.kafka import Kafka


def cut(log: Path, batches: int) -> None:
    """Keep the first batches of a segment, as a disk does that lost the last ones."""
    raw, end = log.read_bytes(), 0
    for _ in range(batches):
        end += 12 + int.from_bytes(raw[end + 8 : end + 12], "big")
    with log.open("r+b") as file:
        file.truncate(end)
    for index in (*log.parent.glob("*.index"), *log.parent.glob("*.timeindex")):
        index.unlink()


def test_a_truncated_log_is_refused_though_it_has_grown_beyond_the_position(mortal_kafka: Broker) -> None:
    """Without the epoch, other records would be read as if nothing had happened."""
    topic = server.make_topic(mortal_kafka)
    for number in range(4):
        server.produce(mortal_kafka, topic, [f"old {number}"])
    source, place = Kafka(topic, conn_id=server.CONN_ID, start="earliest"), f"{topic}/0"
    (mark,) = source.discover().marks.values()
    mortal_kafka.kill()
    cut(next(mortal_kafka.folder.glob(f"data/{topic}-0/*.log")), 2)
    mortal_kafka.start()
    for number in range(5):
        server.produce(mortal_kafka, topic, [f"new {number}"])

    lost = "its log was truncated: records before offset 4 are gone or others now, it ends at 7"
    with pytest.raises(InputChanged, match=lost):
        source.discover(position={place: Position(4, mark)})
    with pytest.raises(InputChanged, match=lost):
        source.check(Input(ranges={place: (0, 4)}, marks={place: mark}))
    assert [str(at) for at in source.discover(position={place: Position(2, mark)}).renewed] == [place]
