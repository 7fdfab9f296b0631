"""What the topic would refuse is refused before the vote; what it takes arrives as it was declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.servers.kafka import CONN_ID, connection, delete_records, delete_topic, make_topic, read
from support.sinks.kafka_topic import PIPELINE, kafka_sink, rows_of, staged
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import BadValue, ConfigError, SinkUnavailable, TwophaseError
from twophase.core.manifest import Column
from twophase.core.ports import Outcome
from twophase.local.kafka import Broker
from twophase.sinks.kafka import promotion
from twophase.sinks.kafka.records import RecordColumns

pytestmark = pytest.mark.timeout(300)

NOW = datetime.now(UTC).replace(microsecond=0)


def attempt(sink: sinks.Kafka, table: pa.Table, revision: int = 1) -> Output:
    """Stage a table as it is, check it, and decide it."""
    key = Key(PIPELINE, 1, revision)
    output = Output(key, 1, sink.place(key, 1, "7c1e"), sink="out")
    place = Path(output.handle["table"] + ".twophase") / "staging" / output.handle["name"]
    place.mkdir(parents=True)
    pq.write_table(table, place / f"part-r{revision}-a1-0.parquet")
    output = replace(output, manifest=sink.seal(output, tuple(Column(name, "string") for name in table.column_names)))
    sink.check(output)
    return replace(output, commit_seq=revision)


# --- what is refused before the vote ---------------------------------------------------------------------------------


def column(**values: Sequence[Any]) -> pa.Table:
    made = {name: pa.array(value, pa.int32() if name == "p" else None) for name, value in values.items()}
    return pa.table({"v": ["a"] * len(next(iter(values.values()))), **made})


REFUSED = {
    "null key on a compacted topic": (
        {"key": "k"},
        {"cleanup_policy": "compact"},
        column(k=["x", None]),
        r"is compacted: column 'k' is null in some rows; filter them out",
    ),
    "no key on a compacted topic": ({}, {"cleanup_policy": "compact"}, column(k=["x"]), r"needs a key; declare key="),
    "partition out of range": ({"partition": "p"}, {}, column(p=[0, 2]), r"a partition from 0 to 1, found 2"),
    "negative partition": ({"partition": "p"}, {}, column(p=[-1]), r"a partition from 0 to 1, found -1"),
    "time too far ahead": (
        {"timestamp": "t"},
        {},
        column(t=[NOW, NOW + timedelta(days=2)]),
        r"column 't': a time 1\d{5} s ahead, expected at most 3540 s; .*message.timestamp.after.max.ms",
    ),
    "time before 1970": ({"timestamp": "t"}, {}, column(t=[datetime(1969, 1, 1, tzinfo=UTC)]), r"a time before 1970"),
    "message too large": (
        {},
        {"max_message_bytes": "2000"},
        pa.table({"v": ["a", "b" * 1800]}),
        r"a record of 1800 bytes, expected at most 1744; raise max.message.bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_the_topic_would_refuse_are_refused_before_the_vote(case: str, folder: Path, kafka: Broker) -> None:
    options, config, table, said = REFUSED[case]
    declared: dict[str, Any] = {"value": "v", **options}
    sink = kafka_sink(kafka, topic=make_topic(kafka, 2, **config), **declared)

    with pytest.raises(BadValue, match=rf"^checkpoint orders/1 r1: sink 'out': kafka topic .*{said}"):
        attempt(sink, table)
    assert read(kafka, sink.topic) == []


def test_a_broker_would_refuse_what_the_vote_refuses(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check the rows would be decided and parked; it is not stricter than the broker by much."""
    sink = kafka_sink(kafka, topic=make_topic(kafka, 2, max_message_bytes="2000"), value="v")
    monkeypatch.setattr("twophase.sinks.kafka.acceptance.check_rows", lambda *_: None)

    found = sink.promote(attempt(sink, pa.table({"v": ["b" * 2100]})))

    assert (found.outcome, str(found.hindrance)) == (Outcome.FAILED, "refused")
    assert read(kafka, sink.topic) == []


def test_a_topic_that_takes_small_batches_only_gets_them(folder: Path, kafka: Broker) -> None:
    """Its limit holds for batches, not for the marker, which is larger here."""
    sink = kafka_sink(kafka, topic=make_topic(kafka, 1, max_message_bytes="400"), value="v")
    table = pa.table({"v": ["x" * 100] * 200, **{f"column {number}": ["y"] * 200 for number in range(20)}})

    assert sink.promote(attempt(sink, table)).outcome is Outcome.PROMOTED

    assert len(read(kafka, sink.topic)) == 200


def test_rows_that_need_a_longer_transaction_than_the_broker_grants_are_refused(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = kafka_sink(kafka)
    monkeypatch.setattr(promotion, "ROWS", 0.001)

    with pytest.raises(ConfigError, match=r"3 rows need a transaction of up to 9000 s: .* transaction.max.timeout.ms"):
        staged(sink, 1)


def test_an_unknown_topic_is_refused_before_anything_is_recorded(folder: Path, kafka: Broker) -> None:
    with pytest.raises(ConfigError, match=r"sinks.Kafka nowhere: kafka topic nowhere: expected a topic .* create it"):
        kafka_sink(kafka, topic="nowhere")


def test_a_topic_that_was_deleted_after_the_begin_is_refused_at_the_vote(folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka)
    delete_topic(kafka, sink.topic)

    with pytest.raises(ConfigError, match="expected a topic that this account may see, found none"):
        staged(sink, 1)


@pytest.mark.parametrize(
    ("config", "partitions", "said"),
    [
        ({"cleanup_policy": "delete"}, 16, "expected cleanup.policy compact, found delete"),
        ({"cleanup_policy": "compact"}, 3, "expected 16 partitions or more, found 3"),
    ],
)
def test_a_topic_that_is_not_fit_for_markers_is_refused(
    config: dict[str, str], partitions: int, said: str, folder: Path, kafka: Broker
) -> None:
    with pytest.raises(ConfigError, match=said):
        kafka_sink(kafka, markers=make_topic(kafka, partitions, **config))


def test_a_broker_that_nobody_reaches_is_named_within_seconds(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN_ID.upper()}", connection("127.0.0.1:1"))

    with pytest.raises(SinkUnavailable, match=r"^sinks.Kafka words: connection kafka: .*127.0.0.1:1"):
        kafka_sink(kafka, topic="words")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topic": "a b"}, "topic 'a b': expected letters"),
        ({"topic": "twophase-markers"}, "need topics of their own"),
        ({"topic": "t", "lineage": "yes"}, "lineage: expected True or False"),
        ({"topic": "t", "key": ""}, "key: expected the name of a column"),
        ({"topic": "t", "value": []}, "value: expected the name of a column"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sinks.Kafka(**arguments)


@pytest.mark.parametrize(
    ("columns", "schema", "said"),
    [
        (RecordColumns(key="k"), {"v": "string"}, r"key='k': expected a column of that name, found v"),
        (
            RecordColumns(key="k"),
            {"k": "bigint", "v": "string"},
            r"key='k': expected string or binary, found bigint; cast it",
        ),
        (RecordColumns(value="v"), {"v": "int"}, r"value='v': expected string or binary, found int; cast it"),
        (RecordColumns(key="k"), {"k": "string"}, r"no column is left for the value"),
        (RecordColumns(value=["x"]), {"v": "string"}, r"value: expected a column 'x', found v"),
    ],
)
def test_columns_that_make_no_record_are_refused(columns: RecordColumns, schema: dict[str, str], said: str) -> None:
    with pytest.raises(TwophaseError, match=said):
        columns.check("checkpoint orders/1 r1: sink 'out'", schema)


# --- what arrives ----------------------------------------------------------------------------------------------------


def murmur2(data: bytes) -> int:
    """Hash as Kafka's Java client does."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(data)) & mask
    for at in range(0, len(data) & ~3, 4):
        k = (int.from_bytes(data[at : at + 4], "little") * m) & mask
        h = ((h * m) & mask) ^ (((k ^ (k >> 24)) * m) & mask)
    rest = data[len(data) & ~3 :]
    if rest:
        h = ((h ^ int.from_bytes(rest, "little")) * m) & mask
    h = ((h ^ (h >> 13)) * m) & mask
    return h ^ (h >> 15)


def test_keys_are_placed_as_the_java_client_places_them(folder: Path, kafka: Broker) -> None:
    assert murmur2(b"21") == (-973932308) & 0xFFFFFFFF  # from the tests of Kafka's own client
    sink = kafka_sink(kafka, partitions=5, key="k", value="v")
    keys = [f"key {number}" for number in range(50)]

    sink.promote(attempt(sink, pa.table({"v": keys, "k": keys})))

    found = {message.key(): message.partition() for message in read(kafka, sink.topic)}
    assert found == {key.encode(): (murmur2(key.encode()) & 0x7FFFFFFF) % 5 for key in keys}


def test_key_value_headers_partition_and_time_arrive_as_declared(folder: Path, kafka: Broker) -> None:
    names = {name: name for name in ("key", "value", "headers", "partition", "timestamp")}
    sink = kafka_sink(kafka, partitions=3, lineage=True, **names)
    headers = pa.array([[("a", "1")], None], pa.map_(pa.string(), pa.string()))
    table = pa.table(
        {
            "key": pa.array([b"\xff", None], pa.binary()),
            "value": ["x", None],
            "headers": headers,
            "partition": pa.array([2, 1], pa.int32()),
            "timestamp": pa.array([NOW, NOW], pa.timestamp("us", "UTC")),
        }
    )
    sink.promote(attempt(sink, table))

    tombstone, record = read(kafka, sink.topic)
    ours = [("twophase.pipeline", b"orders"), ("twophase.checkpoint", b"1"), ("twophase.revision", b"1")]
    assert (record.key(), record.value(), record.headers()) == (b"\xff", b"x", [("a", b"1"), *ours])
    assert (record.partition(), record.timestamp()[1]) == (2, NOW.timestamp() * 1000)
    assert (tombstone.partition(), tombstone.key(), tombstone.value()) == (1, None, None)


def test_a_replacement_is_refused_unless_it_may_be_sent_again_and_then_it_is_marked(
    folder: Path, kafka: Broker
) -> None:
    assert "republish=True" in str(kafka_sink(kafka).objection(latest=True))
    sink = kafka_sink(kafka, republish=True)
    assert sink.objection(latest=True) is None
    for revision in (1, 2):
        assert sink.promote(staged(sink, 1, revision=revision, seq=revision)).outcome is Outcome.PROMOTED

    revisions = [dict(message.headers() or ()).get("twophase.revision") for message in read(kafka, sink.topic)]
    assert sorted(revisions, key=str) == [None] * 3 + [b"2"] * 3


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lineage", [False, True])
def test_verify_counts_the_records_of_each_checkpoint(lineage: bool, folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka, lineage=lineage)
    outputs = [staged(sink, number, rows_of(number, 5)) for number in (1, 2)]
    for output in outputs:
        sink.promote(output)
    assert [said for output in outputs for said in sink.verify(output)] == []

    assert sink._sent is not None
    told = sink._sent[2]
    sink._sent[2] = replace(told, manifest={**told.manifest, "rows": 6})
    assert list(sink.verify(outputs[1])) == [f"kafka topic {sink.topic}: expected 6 records of orders/2 r1, found 5"]


def test_verify_tells_of_a_topic_that_was_created_again(folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka)
    output = staged(sink, 1)
    sink.promote(output)
    delete_topic(kafka, sink.topic)
    make_topic(kafka, 2, sink.topic)

    assert list(sink.verify(output)) == [f"kafka topic {sink.topic} was deleted and created again"]


def test_what_retention_took_is_no_difference(folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka, partitions=1)
    output = staged(sink, 1)
    sink.promote(output)
    delete_records(kafka, sink.topic, 0, 2)

    assert list(sink.verify(output)) == []
