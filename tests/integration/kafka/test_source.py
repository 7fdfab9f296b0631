"""The Kafka source at begin, on a real broker and a real record: where it starts, what it takes, what it refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from support.faults.processes import polls
from support.pipelines.rules_bench import ME, Bench
from support.servers import kafka as server
from twophase import Pipeline, positions, sources
from twophase.committer.record import PostgresRecord
from twophase.core.checkpoint import Input, Position
from twophase.core.errors import ConfigError, InputChanged, InputMissing, SinkUnavailable
from twophase.local.kafka import Broker
from twophase.sources.kafka import Kafka

Make = Callable[..., "Reading"]


class Reading:
    """One pipeline that reads topics, without Spark: its rows are made up."""

    def __init__(self, record: PostgresRecord, source: Kafka) -> None:
        self.bench = Bench(record)
        self.source = source
        self.bench.coordinator = self.bench.process(sources={"words": source})

    def begin(self) -> dict[str, tuple[int, int]] | None:
        """Begin a checkpoint and commit it; return its ranges, or None if there is nothing to read."""
        taken = self.bench.coordinator.begin(ME)
        if taken is None:
            return None
        self.bench.coordinator.commit(self.bench.precommitted(taken))
        with self.bench.record.transaction() as tx:
            return dict(tx.inputs(taken.key)["words"].ranges)

    @property
    def positions(self) -> dict[str, Position]:
        with self.bench.record.transaction() as tx:
            return dict(tx.outlook(self.bench.name, None).look.positions.get("words", {}))

    def move(self, wanted: dict[str, str], *forgotten: str) -> None:
        positions.move(self.bench.coordinator, self.declared, wanted, forgotten, "a test")

    @property
    def declared(self) -> Pipeline:
        return Pipeline(
            self.bench.name, reads={"words": self.source}, transform=None, writes=self.bench.pipeline.writes
        )


@pytest.fixture
def make(
    record: PostgresRecord, kafka: Broker, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Make:
    """Return a function that declares a pipeline with tables of its own."""

    def one(topics: str | None = None, **arguments: Any) -> Reading:
        monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path_factory.mktemp("home")))
        return Reading(record, Kafka(topics, conn_id=server.CONN_ID, **arguments))

    return one


def topic_of(broker: Broker, *records: str, partitions: int = 1, **config: str) -> str:
    topic = server.make_topic(broker, partitions, **config)
    server.produce(broker, topic, list(records))
    return topic


# --- where it starts -------------------------------------------------------------------------------------------------


def test_ranges_are_half_open_and_the_last_record_read_gives_the_next_position(kafka: Broker, make: Make) -> None:
    """With offsets 0 to 3 read, the committed position is 4."""
    topic = topic_of(kafka, "a", "b", "c", "d")
    reading = make(topic)

    assert reading.begin() == {f"{topic}/0": (0, 4)}
    assert reading.begin() is None
    server.produce(kafka, topic, ["e"])
    assert reading.begin() == {f"{topic}/0": (4, 5)}
    assert reading.positions[f"{topic}/0"].offset == 5


def test_a_range_ends_before_a_transaction_that_is_still_open(kafka: Broker, make: Make) -> None:
    """Its records may yet be aborted, so they belong to the checkpoint that begins after its end."""
    from confluent_kafka import Producer

    topic = topic_of(kafka, "a")
    reading = make(topic)
    stranger = Producer(server.client(kafka, **{"transactional.id": f"stranger of {topic}"}))
    stranger.init_transactions(30)
    stranger.begin_transaction()
    stranger.produce(topic, "b")
    stranger.flush(30)

    assert reading.begin() == {f"{topic}/0": (0, 1)}
    assert reading.begin() is None
    stranger.commit_transaction(30)
    assert any(server.ends(kafka, topic)[0] == 3 for _ in polls(30))
    assert reading.begin() == {f"{topic}/0": (1, 3)}


def test_latest_is_pinned_by_an_empty_first_begin(kafka: Broker, make: Make) -> None:
    topic = topic_of(kafka, "a", "b")
    reading = make(topic, start="latest")

    assert reading.begin() is None
    server.produce(kafka, topic, ["c"])
    assert reading.begin() == {f"{topic}/0": (2, 3)}


def test_each_start_begins_where_it_says(kafka: Broker, make: Make) -> None:
    topic = topic_of(kafka, "a", "b")
    written = max(message.timestamp()[1] for message in server.read(kafka, topic))
    between = datetime.fromtimestamp(written / 1000 + 0.001, UTC)
    for _ in polls(5):
        if datetime.now(UTC) > between:
            break
    server.produce(kafka, topic, ["c", "d"])
    starts: dict[Any, int | None] = {"earliest": 0, "latest": None, "group": 0, between: 2, between.isoformat(): 2}

    for start, first in starts.items():
        assert make(topic, start=start).begin() == (None if first is None else {f"{topic}/0": (first, 4)}), start
    assert make(topic, start={f"{topic}/0": 3}).begin() == {f"{topic}/0": (3, 4)}


def test_a_group_says_where_to_begin_and_earliest_where_it_has_no_offset(kafka: Broker, make: Make) -> None:
    topic = server.make_topic(kafka, 2)
    produce_to(kafka, topic, {0: 2, 1: 3})
    make(topic).source.cluster().commit_group(f"g-{topic}", {_place(topic, 0): 1})

    assert make(topic, group=f"g-{topic}").begin() == {f"{topic}/0": (1, 2), f"{topic}/1": (0, 3)}


def test_a_start_beyond_the_log_is_refused(kafka: Broker, make: Make) -> None:
    topic = topic_of(kafka, "a")

    with pytest.raises(ConfigError, match=f"start: {topic}/0: expected 0 to 1, found 5"):
        make(topic, start={f"{topic}/0": 5}).begin()
    with pytest.raises(InputMissing, match="topic no-such-topic: there is none; create it, or correct the name"):
        make("no-such-topic").begin()
    with pytest.raises(InputMissing, match="no topic matches; create one, or correct the pattern"):
        make(pattern="no-such-.*").begin()


# --- what appears later ----------------------------------------------------------------------------------------------


def test_new_partitions_are_read_from_their_beginning(kafka: Broker, make: Make) -> None:
    from confluent_kafka.admin import NewPartitions

    topic = server.make_topic(kafka, 2)
    reading = make(topic, start="latest")
    assert reading.begin() is None
    admin = server.admin(kafka)
    admin.create_partitions([NewPartitions(topic, 4)])[topic].result(30)
    for _ in polls(30):
        if len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 4:
            break
    produce_to(kafka, topic, {2: 3, 3: 1})

    assert reading.begin() == {f"{topic}/2": (0, 3), f"{topic}/3": (0, 1)}


def test_a_topic_that_a_pattern_finds_later_is_read_from_its_beginning(kafka: Broker, make: Make) -> None:
    first = topic_of(kafka, "a")
    reading = make(pattern=f"{first}.*", start="latest")
    assert reading.begin() is None
    later = server.make_topic(kafka, name=f"{first}-later")
    server.produce(kafka, later, ["b", "c"])

    assert reading.begin() == {f"{later}/0": (0, 2)}


def test_max_records_are_shared_by_what_waits(kafka: Broker, make: Make) -> None:
    topic = server.make_topic(kafka, 3)
    produce_to(kafka, topic, {0: 60, 1: 30})
    reading = make(topic, max_records=30)

    assert reading.begin() == {f"{topic}/0": (0, 20), f"{topic}/1": (0, 10)}
    assert reading.begin() == {f"{topic}/0": (20, 40), f"{topic}/1": (10, 20)}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_topic_that_was_created_again_is_refused_though_it_has_more_records(kafka: Broker, make: Make) -> None:
    topic = topic_of(kafka, "a", "b")
    reading = make(topic)
    reading.begin()
    recreate(kafka, topic, 3)

    with pytest.raises(
        InputChanged, match=r"it was deleted or created again: expected id .*=earliest --reason"
    ) as told:
        reading.begin()
    assert f"--set READ/{topic}=earliest" in str(told.value)
    reading.move({f"words/{topic}": "earliest"})
    assert reading.begin() == {f"{topic}/0": (0, 3)}


def test_a_topic_that_is_gone_is_refused_until_it_is_forgotten(kafka: Broker, make: Make) -> None:
    kept = topic_of(kafka, "a")
    gone = server.make_topic(kafka, name=f"{kept}-gone")
    reading = make(pattern=f"{kept}.*")
    reading.begin()
    remove(kafka, gone)

    with pytest.raises(InputChanged, match=f"topic {gone}: it was read before and is gone; .*--forget READ/{gone}"):
        reading.begin()
    reading.move({}, f"words/{gone}")
    server.produce(kafka, kept, ["b"])
    assert reading.begin() == {f"{kept}/0": (1, 2)}


def test_expired_offsets_are_refused_before_and_during_a_checkpoint(kafka: Broker, make: Make) -> None:
    from confluent_kafka import TopicPartition

    topic = topic_of(kafka, *"abcdef")
    reading = make(topic, max_records=2)
    reading.begin()
    fixed = Input(ranges={f"{topic}/0": (2, 4)}, marks={f"{topic}/0": reading.positions[f"{topic}/0"].mark or {}})
    reading.source.check_unread(fixed)
    admin = server.admin(kafka)
    for done in admin.delete_records([TopicPartition(topic, 0, 4)]).values():
        done.result(30)

    with pytest.raises(InputChanged, match=r"offsets 2 to 3 have expired unread: the log begins at 4; .*=earliest"):
        reading.begin()
    with pytest.raises(InputChanged, match=r"offsets 2 to 3 have expired unread.*`twophase release`"):
        reading.source.check_unread(fixed)
    reading.source.check(fixed)  # once it is read, expiry does not matter
    reading.move({f"words/{topic}/0": "earliest"})
    assert reading.begin() == {f"{topic}/0": (4, 6)}


def test_an_end_beyond_the_log_is_refused(kafka: Broker, make: Make) -> None:
    topic = topic_of(kafka, "a", "b")
    reading = make(topic)
    reading.begin()
    mark = reading.positions[f"{topic}/0"].mark or {}

    with pytest.raises(InputChanged, match="its log was truncated: records before offset 9 are gone"):
        reading.source.check(Input(ranges={f"{topic}/0": (0, 9)}, marks={f"{topic}/0": mark}))


def test_a_broker_that_cannot_be_reached_is_an_error_within_seconds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA", server.connection("127.0.0.1:1"))
    began = time.monotonic()

    with pytest.raises(SinkUnavailable, match=r"connection kafka: .*Connection refused.*check the broker"):
        make("words").begin()
    assert time.monotonic() - began < 30


# --- positions and groups --------------------------------------------------------------------------------------------


def test_positions_are_shown_with_their_lag_and_not_moved_while_something_is_undecided(
    kafka: Broker, make: Make
) -> None:
    topic = topic_of(kafka, *"abcd")
    reading = make(topic, max_records=3)
    reading.begin()
    rows, problems = positions.listed(reading.bench.coordinator, reading.declared)
    taken = reading.bench.coordinator.begin(ME)
    assert taken is not None

    assert (rows, problems) == (
        [{"source": "words", "partition": f"{topic}/0", "offset": 3, "end": 4, "lag": 1}],
        [],
    )
    with pytest.raises(ConfigError, match="it is undecided, and its input is its own; abort it"):
        reading.move({f"words/{topic}/0": "1"})
    reading.bench.coordinator.abort(taken, "a test")
    reading.bench.coordinator.release(taken.checkpoint_id, "a test")
    with pytest.raises(ConfigError, match="expected earliest, latest or an offset from 0 to 4, found 7"):
        reading.move({f"words/{topic}/0": "7"})
    reading.move({f"words/{topic}/0": "1"})
    assert reading.begin() == {f"{topic}/0": (1, 4)}


def test_committed_offsets_are_written_back_to_the_group(kafka: Broker, make: Make) -> None:
    topic = topic_of(kafka, *"abcd")
    reading = make(topic, group=f"g-{topic}")
    reading.begin()

    assert reading.source.cluster().group_offsets(f"g-{topic}", [_place(topic, 0)]) == {_place(topic, 0): 4}


def test_offsets_that_cannot_be_written_back_are_a_warning(
    kafka: Broker, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker refuses them while a consumer of the group reads."""
    from confluent_kafka import Consumer

    topic = topic_of(kafka, *"abcd")
    settings = server.client(kafka, **{"group.id": f"g-{topic}", "auto.offset.reset": "earliest"})
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    for _ in polls(30):
        if consumer.consume(10, 0.2):
            break
    try:
        with caplog.at_level(logging.WARNING, "twophase"):
            assert make(topic, group=f"g-{topic}", start="earliest").begin() == {f"{topic}/0": (0, 4)}
    finally:
        consumer.close()

    assert "source 'words': what is committed is not reported: kafka source" in caplog.text


# --- declared --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected topics or pattern=…, one of the two"),
        ({"topics": "a", "pattern": "a"}, "expected topics or pattern=…, one of the two"),
        ({"topics": "a", "format": "avro"}, "format 'avro': expected one of text, json, binary"),
        ({"topics": "a", "format": "json"}, "expected schema=… with format='json', and only there"),
        ({"topics": "a", "max_records": 0}, "max_records 0: expected a whole number above 0"),
        ({"pattern": "("}, "expected a regular expression of whole names of topics"),
        ({"topics": "a", "start": "noon"}, "start 'noon': expected earliest, latest, group, a time with its zone"),
        ({"topics": "a", "start": {"a": 1}}, "partition 'a': expected the topic and the number, such as 'orders/0'"),
        ({"topics": "a", "on_bad_record": "quarantine"}, "expected quarantine_path=…"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sources.Kafka(**arguments)

    assert message in str(refused.value)


def test_a_declaration_comes_back_from_the_record_as_it_was() -> None:
    declared = sources.Kafka(["a", "b"], start={"a/0": 3}, format="json", schema="word string", max_records=5)

    again = Kafka.load(declared.declaration())

    assert again.declaration() == declared.declaration()
    assert Kafka("a", start=datetime(2026, 11, 18, tzinfo=UTC)).config()["start"] == "2026-11-18T00:00:00+00:00"


def _place(topic: str, partition: int) -> Any:
    from twophase.storage.kafka_cluster import Place

    return Place(topic, partition)


def produce_to(broker: Broker, topic: str, counts: dict[int, int]) -> None:
    """Send records to chosen partitions."""
    from confluent_kafka import Producer

    producer = Producer(server.client(broker))
    for partition, count in counts.items():
        for number in range(count):
            producer.produce(topic, str(number), partition=partition)
    assert producer.flush(60) == 0


def remove(broker: Broker, topic: str) -> None:
    admin = server.admin(broker)
    admin.delete_topics([topic])[topic].result(30)
    for _ in polls(30):
        if topic not in admin.list_topics(timeout=30).topics:
            return


def recreate(broker: Broker, topic: str, records: int) -> None:
    """Delete a topic and create another of its name, with more records than it had."""
    from confluent_kafka import KafkaException

    remove(broker, topic)
    for _ in polls(30):
        try:
            server.make_topic(broker, name=topic)
        except KafkaException:  # it is still being deleted
            continue
        break
    server.produce(broker, topic, ["x"] * records)
