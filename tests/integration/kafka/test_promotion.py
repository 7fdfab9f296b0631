"""A promotion into Kafka is sent once, whatever dies, waits or wakes up; where nobody can know, a person decides."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from support.faults.processes import Child, polls, start, stopped_at_end
from support.servers.kafka import (
    client,
    delete_records,
    delete_topic,
    ends,
    environment,
    make_topic,
    read,
    serving,
    set_policy,
)
from support.sinks.kafka_topic import PIPELINE, kafka_sink, rows_of, seen, staged
from twophase import sinks
from twophase.core.checkpoint import Output
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome
from twophase.local.kafka import Broker, console_consumer
from twophase.sinks.base import Sink
from twophase.sinks.kafka import promotion, transaction
from twophase.sinks.kafka.markers import PARTITIONS, Markers

pytestmark = pytest.mark.timeout(300)

#: Each durable step of a promotion.
STEPS = ("kafka.fenced", "kafka.begun", "kafka.sent", "kafka.marked", "kafka.committed")


def promote(declaration: dict[str, Any], output: dict[str, Any], settings: dict[str, Any] | None = None) -> None:
    """Promote in a process of its own; say how it ended."""
    for name, value in (settings or {}).items():
        setattr(promotion, name, value)
    found = Sink.load(declaration).promote(Output.of_json(output))
    print("outcome:", found.outcome.name, found.reason)  # noqa: T201 - the test reads it


def promoting(sink: sinks.Kafka, output: Output, log: Path, failpoints: str, **settings: Any) -> Child:
    """Start a promotion that stops, or dies, at a failpoint."""
    return start(promote, sink.declaration(), output.to_json(), settings, log=log, failpoints=failpoints)


def finish(sink: sinks.Kafka, output: Output) -> Outcome:
    """Promote until it is promoted, as recovery does."""
    reasons = []
    for _ in polls(120):
        found = sink.promote(output)
        if found.outcome not in {Outcome.RETRY_LATER, Outcome.UNKNOWN}:
            return found.outcome
        reasons.append(found.reason)
    msg = f"not promoted: {reasons[-1]}"
    raise AssertionError(msg)


def test_promoting_twice_sends_once_and_the_marker_says_so(folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka)
    output = staged(sink, 1)
    assert (sink.find(output).outcome, seen(kafka, sink.topic)) == (Outcome.RETRY_LATER, [])

    outcomes = [sink.promote(output).outcome, sink.promote(output).outcome, sink.find(output).outcome]

    assert outcomes == [Outcome.PROMOTED, Outcome.ALREADY_PROMOTED, Outcome.ALREADY_PROMOTED]
    assert seen(kafka, sink.topic) == rows_of(1)
    assert list(sink.verify(output)) == []


@pytest.mark.parametrize("lineage", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("step", STEPS)
def test_a_promoter_that_dies_or_wakes_late_at_any_step_sends_nothing_twice(
    step: str, action: str, lineage: bool, kafka: Broker, monkeypatch: pytest.MonkeyPatch, *, folder: Path
) -> None:
    """With headers the records are sent one by one, without them as columns."""
    monkeypatch.setattr(promotion, "_alone", lambda *_: nullcontext())  # a stopped one holds the lock
    sink = kafka_sink(kafka, lineage=lineage)
    output, later = staged(sink, 1), staged(sink, 2)
    child = promoting(sink, output, folder / "child.log", f"{step}={action}")
    with stopped_at_end(child):
        if action == "stop":
            assert child.until_stopped()
        else:
            child.wait()
        assert child.hit(step)
        assert seen(kafka, sink.topic) == (rows_of(1) if step == "kafka.committed" else [])

        assert finish(sink, output) in {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}
        assert sink.promote(later).outcome is Outcome.PROMOTED
        if action == "stop":
            child.wake()
            child.wait()
            assert step == "kafka.committed" or "outcome: PROMOTED" not in child.said

    assert seen(kafka, sink.topic) == rows_of(1) + rows_of(2)
    assert [one for output in (output, later) for one in sink.verify(output)] == []


def test_a_transaction_that_the_broker_ends_before_it_is_sent_is_sent_again(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time-out is shorter than the send: the broker aborts it, and nothing of it is ever seen."""
    monkeypatch.setattr(promotion, "_alone", lambda *_: nullcontext())
    sink = kafka_sink(kafka)
    output = staged(sink, 1)
    child = promoting(sink, output, folder / "child.log", "kafka.sent=stop", SHORTEST=1.0)
    with stopped_at_end(child):
        assert child.until_stopped()
        assert any(ends(kafka, sink.topic) == ends(kafka, sink.topic, committed=False) for _ in polls(60))
        child.wake()
        child.wait()

    assert "outcome: PROMOTED" not in child.said
    assert seen(kafka, sink.topic) == []
    assert finish(sink, output) is Outcome.PROMOTED
    assert seen(kafka, sink.topic) == rows_of(1)


def test_a_checkpoint_without_rows_is_sent_as_its_marker_alone(folder: Path, kafka: Broker) -> None:
    """Otherwise nobody could tell that it is promoted, and the next one would wait for it."""
    sink = kafka_sink(kafka)
    empty, later = staged(sink, 1, []), staged(sink, 2)

    outcomes = [sink.promote(output).outcome for output in (empty, empty, later)]

    assert outcomes == [Outcome.PROMOTED, Outcome.ALREADY_PROMOTED, Outcome.PROMOTED]
    assert seen(kafka, sink.topic) == rows_of(2)
    assert list(sink.markers(PIPELINE)) == [(1, 1), (2, 1)]
    assert [one for output in (empty, later) for one in sink.verify(output)] == []


def test_two_promoters_without_the_lock_send_once(folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "_alone", lambda *_: nullcontext())
    sink = kafka_sink(kafka)
    expected = []
    for number in range(1, 4):
        output = staged(sink, number)
        with ThreadPoolExecutor(2) as pool:
            outcomes = [found.outcome for found in pool.map(sink.promote, [output] * 2)]
        expected += rows_of(number)
        assert outcomes.count(Outcome.PROMOTED) <= 1
        assert finish(sink, output) in {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}
        assert seen(kafka, sink.topic) == expected


def test_a_stopped_promoter_holds_others_up_only_as_long_as_its_transaction_may_last(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "PATIENCE", 0.1)
    sink = kafka_sink(kafka)
    output = staged(sink, 1)
    child = promoting(sink, output, folder / "child.log", "kafka.begun=stop", SHORTEST=8.0)
    with stopped_at_end(child):
        assert child.until_stopped()
        held = sink.promote(output)
        assert (held.outcome, "another process has been promoting" in str(held.reason)) == (Outcome.RETRY_LATER, True)

        assert finish(sink, output) is Outcome.PROMOTED
        child.wake()
        child.wait()
    assert seen(kafka, sink.topic) == rows_of(1)


@contextmanager
def open_transaction(broker: Broker, topic: str, partition: int) -> Iterator[Any]:
    """Hold a stranger's transaction open on a partition."""
    from confluent_kafka import Producer

    producer = Producer(client(broker, **{"transactional.id": f"stranger-{topic}-{partition}"}))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"x", b"stranger", partition)
    producer.flush(30)
    yield producer
    producer.abort_transaction(30)


def test_a_strangers_open_transaction_delays_a_promotion_and_loses_nothing(
    folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "SETTLE", 0.3)
    sink = kafka_sink(kafka)
    output = staged(sink, 1)
    partition = Markers(sink._cluster(), PIPELINE, sink._write, sink.markers_topic).partition
    with open_transaction(kafka, sink.markers_topic, partition):
        for found in (sink.find(output), sink.promote(output)):
            assert found.outcome is Outcome.RETRY_LATER
            assert "a transaction is open" in str(found.reason)

    assert finish(sink, output) is Outcome.PROMOTED
    assert seen(kafka, sink.topic) == rows_of(1)


def own_markers(broker: Broker, **options: Any) -> sinks.Kafka:
    """Return a sink whose markers are in a topic of its own, which a test may damage."""
    topic = make_topic(broker, PARTITIONS, cleanup_policy="compact")
    return kafka_sink(broker, markers=topic, **options)


def parked(sink: sinks.Kafka, output: Output, said: str) -> None:
    for found in (sink.find(output), sink.promote(output)):
        assert (found.outcome, found.hindrance) == (Outcome.FAILED, Hindrance.FOREIGN)
        assert said in str(found.reason)


def test_a_topic_of_markers_that_was_created_again_is_left_to_a_person(folder: Path, kafka: Broker) -> None:
    sink = own_markers(kafka)
    first = staged(sink, 1)
    sink.promote(first)
    delete_topic(kafka, sink.markers_topic)
    parked(sink, first, "was deleted, so nobody can tell")
    make_topic(kafka, PARTITIONS, sink.markers_topic, cleanup_policy="compact")

    parked(sink, first, "the topic was deleted and created again")
    assert seen(kafka, sink.topic) == rows_of(1)


def test_deleted_markers_are_left_to_a_person(folder: Path, kafka: Broker) -> None:
    sink = own_markers(kafka)
    first, second = staged(sink, 1), staged(sink, 2)
    for output in (first, second):
        sink.promote(output)
    partition = Markers(sink._cluster(), PIPELINE, sink._write, sink.markers_topic).partition
    set_policy(kafka, sink.markers_topic, "delete")  # of a compacted topic the broker deletes no records
    delete_records(kafka, sink.markers_topic, partition, ends(kafka, sink.markers_topic)[partition])
    set_policy(kafka, sink.markers_topic, "compact")

    parked(sink, second, "were deleted")
    assert seen(kafka, sink.topic) == rows_of(1) + rows_of(2)


def test_two_records_with_one_pipeline_name_notice_each_other(folder: Path, kafka: Broker) -> None:
    """Both decide their first checkpoint before either has sent; the second finds the marker of the first."""
    mine = kafka_sink(kafka, write="shared", path="mine")
    theirs = kafka_sink(kafka, write="shared", path="theirs", topic=mine.topic)
    first, second = staged(mine, 1), staged(theirs, 1, rows_of(7))
    assert mine.promote(first).outcome is Outcome.PROMOTED

    parked(theirs, second, "another record has a pipeline of this name")
    assert theirs.newest(PIPELINE) == 1
    assert seen(kafka, mine.topic) == rows_of(1)


def test_a_decision_below_what_was_sent_is_left_to_a_person(folder: Path, kafka: Broker) -> None:
    """A record that was restored from a backup gives numbers out again."""
    sink = kafka_sink(kafka)
    sink.promote(staged(sink, 1, seq=5))

    parked(sink, staged(sink, 2, seq=3), "commit_seq 5 was sent, 3 was not")


def test_lost_rows_are_failed_only_once_it_is_sure_that_they_were_not_sent(folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka)
    sent, lost = staged(sink, 1), staged(sink, 2)
    sink.promote(sent)
    for output in (sent, lost):
        sink.discard(output)

    assert sink.find(sent).outcome is Outcome.ALREADY_PROMOTED
    for found in (sink.find(lost), sink.promote(lost)):
        assert (found.outcome, found.hindrance) == (Outcome.FAILED, Hindrance.LOST)


def test_large_receipts_go_along_in_pieces(folder: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twophase.sinks.kafka.markers._PIECE", 40)
    sink = kafka_sink(kafka)
    outputs = [staged(sink, number) for number in (1, 2)]
    for output in outputs:
        sink.promote(output)

    assert list(sink.receipts(PIPELINE, 1)) == [output.receipt for output in outputs]
    assert list(sink.receipts(PIPELINE, 2)) == [outputs[1].receipt]
    assert list(sink.markers(PIPELINE)) == [(1, 1), (2, 1)]


def test_no_two_writes_have_one_transactional_id() -> None:
    names = [("a.b", "c"), ("a", "b.c"), ("a%2Eb", "c"), ("a", "b"), ("ab", "")]

    assert len({transaction.transactional_id(*name) for name in names}) == len(names)


def killed_after_commit(broker: Broker, folder: Path, times: int) -> None:
    sink = kafka_sink(broker)
    expected = []
    for number in range(1, times + 1):
        output = staged(sink, number)
        child = promoting(sink, output, folder / f"{number}.log", "kafka.committed=stop")
        with stopped_at_end(child):
            assert child.until_stopped()
            broker.kill()
            child.process.kill()
            child.wait()
        broker.start()
        expected += rows_of(number)
        assert finish(sink, output) is Outcome.ALREADY_PROMOTED
        assert seen(broker, sink.topic) == expected


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_broker_that_is_killed_right_after_the_commit_has_it_once(
    times: int, mortal_kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))

    killed_after_commit(mortal_kafka, tmp_path, times)


def test_a_broker_that_is_down_says_so_within_seconds_and_the_rows_wait(
    mortal_kafka: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    sink = kafka_sink(mortal_kafka)
    output = staged(sink, 1)
    mortal_kafka.kill()

    for found in (sink.find(output), sink.promote(output)):
        assert found.outcome is Outcome.RETRY_LATER
        assert "connection kafka: " in str(found.reason)
    mortal_kafka.start()
    assert finish(sink, output) is Outcome.PROMOTED
    assert len(read(mortal_kafka, sink.topic)) == 3


def test_a_java_reader_of_committed_records_sees_all_of_a_checkpoint_or_nothing(folder: Path, kafka: Broker) -> None:
    sink = kafka_sink(kafka)
    output, last = staged(sink, 1, rows_of(1, 5000)), staged(sink, 2, rows_of(2, 1))
    child = promoting(sink, output, folder / "child.log", "kafka.sent=stop,kafka.marked=stop")
    with (folder / "read").open("wb") as log, stopped_at_end(child):
        command = console_consumer(kafka.address(), sink.topic)
        reader = subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL)
        try:
            for _ in ("kafka.sent", "kafka.marked"):
                assert child.until_stopped()
                assert ends(kafka, sink.topic) == {0: 0, 1: 0}
                assert (folder / "read").read_bytes() == b""
                child.wake()
            child.wait()
            assert finish(sink, last) is Outcome.PROMOTED
            assert any((folder / "read").read_bytes().count(b"\n") == 5001 for _ in polls(60))
        finally:
            reader.kill()
            reader.wait()

    read_back = sorted(json.loads(line)["id"] for line in (folder / "read").read_text().splitlines())
    assert read_back == sorted(row["id"] for row in rows_of(1, 5000) + rows_of(2, 1))


def transactional_ids(broker: Broker) -> str:
    """Return what Kafka's own command line lists."""
    command = console_consumer(broker.address(), "-")
    java = command[: command.index("-cp") + 2]
    asked = [*java, "org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", broker.address(), "list"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("step", ["kafka.fenced", "kafka.begun"])
def test_a_promoter_whose_transactional_id_has_expired_sends_nothing_when_it_wakes(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has forgotten its producer, so nothing but an error of the broker can stop it."""
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    monkeypatch.setattr(promotion, "_alone", lambda *_: nullcontext())
    quickly = {
        "transactional.id.expiration.ms": "2000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    }
    with serving(settings=quickly) as broker:
        for name, value in environment(broker).items():
            monkeypatch.setenv(name, value)
        sink = kafka_sink(broker)
        output = staged(sink, 1)
        name = transaction.transactional_id(PIPELINE, sink._write)
        child = promoting(sink, output, tmp_path / "child.log", f"{step}=stop")
        with stopped_at_end(child):
            assert child.until_stopped()
            assert any(name not in transactional_ids(broker) for _ in polls(60))
            assert finish(sink, output) is Outcome.PROMOTED
            child.wake()
            child.wait()

        assert "outcome: PROMOTED" not in child.said
        assert seen(broker, sink.topic) == rows_of(1)
