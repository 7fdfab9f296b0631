"""One producer for one Kafka transaction. Promotion sends through it; the vote tries one, a restage fences with one.

Every error of the client becomes what its caller has to do: nothing was sent and it may be tried again, the topic
refuses the rows, or only the marker can tell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from twophase.core.checkpoint import Output
from twophase.core.hindrances import Refused
from twophase.sinks.kafka import native
from twophase.sinks.kafka.native import NativeProducer
from twophase.sinks.kafka.records import Batch, RecordColumns, batch_of
from twophase.storage.kafka_cluster import KafkaCluster

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes of a batch, and of a record unless the topic takes larger ones.
_LARGEST = 1_000_000
#: Seconds to wait while the client's queue is full: until some of it is sent, or in which a batch is sent.
_POLL, _SHORTLY = 0.05, 0.005
_ANSWER = 10.0


class NotSent(Exception):
    """Nothing was committed; the same call may succeed later. The reason in words."""

    #: Whether the broker does not allow it to this account.
    forbidden = False


class Unknown(Exception):
    """It may be committed: only the marker can tell. The reason in words."""


def transactional_id(pipeline: str, write: str) -> str:
    """Return the name by which a write's producers fence each other; no two writes have the same."""
    escaped = (name.replace("%", "%25").replace(".", "%2E") for name in (pipeline, write))
    return ".".join(("twophase", *escaped))


class Producing:
    """One producer for one transaction; every error of the client becomes what the promoter has to do."""

    def __init__(
        self, cluster: KafkaCluster, name: str, seconds: float, largest: int | None = None, *, one_by_one: bool = False
    ) -> None:
        """Make the producer, and fence those before it; `one_by_one`: for records that are not sent as columns."""
        from confluent_kafka import Producer

        self._cluster = cluster
        self._seconds = seconds
        self._partitions = 1
        #: Why the broker did not take a record; the client then refuses all that follows without saying why.
        self._refusal: Any = None
        settings = cluster.settings(
            delivery_report_only_error=True,
            transactional_id=name,
            transaction_timeout_ms=round(seconds * 1000),
            partitioner="murmur2_random",
            linger_ms=20,
            batch_size=min(largest or _LARGEST, _LARGEST),
            queue_buffering_max_kbytes=262_144,
            message_max_bytes=max(largest or _LARGEST, _LARGEST),  # the marker may be larger than a row
        )
        make = Producer if one_by_one or native.library() is None else NativeProducer
        self._producer: Any = make({**settings, "on_delivery": self._note})
        self._try(self._connect)
        self._try(lambda: self._producer.init_transactions(_ANSWER))

    def _connect(self) -> None:
        """Wait for a broker: a client that has none yet asks for its coordinator again only after half a second."""
        if isinstance(self._producer, NativeProducer):
            self._producer.connect(_ANSWER)
        else:
            self._producer.list_topics(timeout=_ANSWER)

    def _note(self, error: Any, _message: object) -> None:  # noqa: ANN401 - a KafkaError
        self._refusal = self._refusal or error

    def begin(self, partitions: int = 1) -> None:
        """Begin the transaction, which sends to so many partitions of a topic."""
        self._partitions = partitions
        self._try(self._producer.begin_transaction)

    def put(self, topic: str, value: bytes | None, key: bytes | None, partition: int) -> None:
        """Send one record to a partition."""
        self._try(lambda: self._producer.produce(topic, value, key, partition))

    def send(
        self, topic: str, batch: pa.RecordBatch, columns: RecordColumns, ours: list[tuple[str, bytes | None]]
    ) -> None:
        """Send a batch of records; where the client's queue is full, wait until some of it is sent."""
        if isinstance(self._producer, NativeProducer):
            self._try(lambda: self._send_columns(topic, batch, columns))
        else:
            self._try(lambda: self._send(topic, batch_of(batch, columns), ours))

    def _send_columns(self, topic: str, batch: pa.RecordBatch, columns: RecordColumns) -> None:
        most, done = min(native.EACH * self._partitions, native.MOST), 0
        while done < batch.num_rows:
            room = most - len(self._producer)
            taken = self._producer.produce_columns(topic, batch.slice(done, room), columns) if room > most // 2 else 0
            done += taken
            self._producer.poll(0 if taken else _SHORTLY)
            if self._refusal is not None:
                raise self._sorted(self._refusal)

    def _send(self, topic: str, batch: Batch, ours: list[tuple[str, bytes | None]]) -> None:
        produce, number = self._producer.produce, 0
        while number < len(batch.values):
            more: dict[str, Any] = {}
            if batch.partitions and (partition := batch.partitions[number]) is not None:
                more["partition"] = partition
            if batch.times and (moment := batch.times[number]) is not None:
                more["timestamp"] = moment
            if ours or batch.headers:
                more["headers"] = [*(batch.headers[number] if batch.headers else ()), *ours]
            try:
                produce(topic, batch.values[number], batch.keys[number] if batch.keys else None, **more)
            except BufferError:
                self._producer.poll(_POLL)
                continue
            number += 1
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until the broker has everything."""
        left = self._try(lambda: self._producer.flush(self._seconds))
        if self._refusal is not None:
            raise self._sorted(self._refusal)
        if left:
            msg = f"{left} records were not acknowledged within {self._seconds:.0f} s"
            raise NotSent(msg)

    def commit(self, seconds: float) -> None:
        """Commit; while the outcome is open ask again, as the client wants it."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + seconds
        while True:
            try:
                self._producer.commit_transaction(_ANSWER)
            except KafkaException as failed:
                error = failed.args[0]
                if error.retriable() and not error.fatal() and time.monotonic() < deadline:
                    continue
                if error.txn_requires_abort():
                    raise self._sorted(error) from failed
                msg = f"the outcome of the commit is unknown: {error.str()}"
                raise Unknown(msg) from failed
            except SystemError as failed:  # see `_try`
                msg = "the outcome of the commit is unknown: the client has failed"
                raise Unknown(msg) from failed
            return

    def abort(self) -> None:
        """End the transaction if that is possible; if not, the next producer or the broker's time-out ends it."""
        from confluent_kafka import KafkaException

        with suppress(KafkaException, SystemError):
            self._producer.purge()
            self._producer.abort_transaction(_ANSWER)

    def close(self) -> None:
        """Destroy the handle: it is never used again."""
        self._producer = None

    def _try(self, call: Any) -> Any:  # noqa: ANN401 - any call of the client
        from confluent_kafka import KafkaException

        try:
            return call()
        except SystemError as failed:  # what the client makes of a fatal error that comes with a refused record
            msg = f"kafka (connection {self._cluster.conn_id}): this producer is fenced, or its transaction has ended"
            raise NotSent(msg) from failed
        except KafkaException as failed:
            with suppress(KafkaException, SystemError):  # it says the same again
                self._producer.poll(0)
            raise self._sorted(self._refusal or failed.args[0]) from failed

    def _sorted(self, error: Any) -> Exception:  # noqa: ANN401 - a KafkaError
        """Return what an error before the commit means: the topic refuses the rows, or not now."""
        from confluent_kafka import KafkaError

        refusals = {
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.INVALID_RECORD,
            KafkaError.INVALID_TIMESTAMP,
            KafkaError.INVALID_TRANSACTION_TIMEOUT,
            KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the client's own name
        }
        said = f"kafka (connection {self._cluster.conn_id}): {' '.join(error.str().split())}"
        if error.code() in refusals:
            return Refused(said)
        found = NotSent(said)
        found.forbidden = error.code() in {
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        }
        return found


@contextmanager
def producing(
    cluster: KafkaCluster, output: Output, seconds: float, *, one_by_one: bool = False
) -> Iterator[Producing]:
    """Yield a producer of a write, which has fenced those before it; whatever happens, its handle is closed."""
    name = transactional_id(output.key.pipeline, output.handle["write"])
    producer = Producing(cluster, name, seconds, output.handle.get("largest"), one_by_one=one_by_one)
    try:
        yield producer
    except Unknown:
        raise
    except BaseException:
        producer.abort()
        raise
    finally:
        producer.close()
