"""Sends the rows of one decided checkpoint and its marker in one Kafka transaction, and reads the marker back.

One try, and what another process sees if it dies there:

    look          is the marker there? then nothing is sent
    check         the staged files are those that were voted for
    fence         a new producer takes the transactional id of the write: whoever had it can send no more
    look again    the fenced one may have committed just before; wait until that is decided
    send          the rows, then the receipt, then the marker: invisible to readers of committed records
    commit        all of it becomes visible at once, or never
    look          until the marker can be read: only then it is promoted

A producer is used for one try: after an error an old handle may send without being fenced.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twophase.core.checkpoint import Output
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance, Refused
from twophase.core.manifest import Manifest
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.kafka.markers import MarkerLook, Markers, Note, SentMarker, key_of, split
from twophase.sinks.kafka.records import Batch, RecordColumns, batches
from twophase.sinks.staged_files import manifest_check
from twophase.sinks.staged_files.layout import FilesPaths
from twophase.storage.kafka_cluster import KafkaCluster

#: Seconds to wait for another promoter of this write before this one gives up for now.
PATIENCE = 20.0
#: Seconds to wait until a transaction that was fenced or committed is decided for readers, too.
SETTLE = 10.0
#: A transaction gets three times what its rows should take, at these rates, and no less than this, in seconds.
SHORTEST = 60.0
SAFETY = 3
ROWS, BYTES = 100_000, 20_000_000
#: Bytes of a batch, and of a record unless the topic takes larger ones.
_LARGEST = 1_000_000
_POLL = 0.05
_ANSWER = 10.0


class NotSent(Exception):
    """Nothing was committed; the same call may succeed later. The reason in words."""

    #: Whether the broker does not allow it to this account.
    forbidden = False


class Unknown(Exception):
    """It may be committed: only the marker can tell. The reason in words."""


def time_out(manifest: Mapping[str, int]) -> float:
    """Return how many seconds the transaction of some staged rows may take before the broker ends it."""
    return max(SHORTEST, SAFETY * (manifest["rows"] / ROWS + manifest["bytes"] / BYTES))


def transactional_id(pipeline: str, write: str) -> str:
    """Return the name by which a write's producers fence each other; no two writes have the same."""
    escaped = (name.replace("%", "%25").replace(".", "%2E") for name in (pipeline, write))
    return ".".join(("twophase", *escaped))


@dataclass(frozen=True)
class Promoter:
    """Promotes what one attempt staged, or says whether it is promoted."""

    output: Output
    cluster: KafkaCluster
    #: Whether each record bears the pipeline, the checkpoint and the revision.
    lineage: bool = False

    @property
    def place(self) -> FilesPaths:
        """Return where the rows are staged."""
        return FilesPaths(self.output.key, self.output.handle)

    @property
    def columns(self) -> RecordColumns:
        """Return which columns make a record."""
        return RecordColumns(**self.output.handle["columns"])

    def _markers(self) -> Markers:
        handle = self.output.handle
        return Markers(self.cluster, self.output.key.pipeline, handle["write"], handle["markers"])

    # --- where it stands ---------------------------------------------------------------------------------------------

    def find(self) -> Promotion:
        """Say whether the rows are sent, staged or lost; change nothing, and fence nobody."""
        try:
            with self._markers() as markers:
                look = self._look(markers)
        except (SinkUnavailable, ConfigError) as error:
            return Promotion(Outcome.RETRY_LATER, str(error))
        if settled := self._settled(look):
            return settled
        if look.undecided:
            return Promotion(Outcome.RETRY_LATER, look.undecided)
        return self._lost() or Promotion(Outcome.RETRY_LATER, f"not sent, staged at {self.place.staged}")

    def _look(self, markers: Markers) -> MarkerLook:
        note = self.output.handle.get("note")
        return markers.look(self.output, Note(*note) if note else None)

    def _settled(self, look: MarkerLook) -> Promotion | None:
        """Return what a look has decided; None: the rows are not sent, or it cannot be said now."""
        if look.marker is not None:
            found = look.marker
            return Promotion(Outcome.ALREADY_PROMOTED, attempt=found.attempt, manifest=found.manifest)
        if look.broken:
            return Promotion(Outcome.FAILED, look.broken, Hindrance.FOREIGN)
        return None

    def _lost(self) -> Promotion | None:
        """Say why the staged rows cannot be sent now, or ever; None if they can."""
        if not self.place.reachable:
            return Promotion(Outcome.RETRY_LATER, f"folder {self.place.table} is not there; is it mounted?")
        try:
            self._load()
        except ManifestMismatch as error:
            return Promotion(Outcome.FAILED, str(error), Hindrance.LOST)
        return None

    def _load(self) -> Manifest:
        """Load the manifest, and check the staged files against it."""
        manifest = manifest_check.load(self.place, self.output.attempt, self.output.manifest["digest"])
        if not self.place.staged.is_dir():
            msg = f"checkpoint {self.output.key}: staged output {self.place.staged} is gone"
            raise ManifestMismatch(msg)
        manifest_check.check(self.place.staged, manifest)
        return manifest

    # --- promote -----------------------------------------------------------------------------------------------------

    def promote(self) -> Promotion:
        """Send the rows and the marker in one transaction, unless the marker is there."""
        if not self.place.reachable:
            return self.find()
        seconds = time_out(self.output.manifest)
        try:
            with _alone(self.place.side / "promoting", seconds), self._markers() as markers:
                return self._promote(markers, seconds)
        except (NotSent, SinkUnavailable, ConfigError) as reason:
            return Promotion(Outcome.RETRY_LATER, str(reason))
        except Refused as reason:
            return Promotion(Outcome.FAILED, str(reason), reason.hindrance)
        except Unknown as reason:
            return Promotion(Outcome.UNKNOWN, str(reason))

    def _promote(self, markers: Markers, seconds: float) -> Promotion:
        look = self._look(markers)
        if settled := self._settled(look):
            return settled
        if lost := self._lost():
            return Promotion(Outcome.RETRY_LATER, look.undecided) if look.undecided else lost
        with producing(self.cluster, self.output, seconds) as producer:
            hit("kafka.fenced")
            look = self._until_decided(markers)
            if settled := self._settled(look):
                return settled
            if look.undecided:
                raise NotSent(look.undecided)
            self._send(producer, markers)
            hit("kafka.marked")
            producer.commit(seconds)
        hit("kafka.committed")
        found = self._until_decided(markers)
        if found.marker is None:
            msg = f"committed, but its marker cannot be read yet: {found.undecided or found.broken}"
            raise Unknown(msg)
        return Promotion(Outcome.PROMOTED, attempt=self.output.attempt)

    def _until_decided(self, markers: Markers) -> MarkerLook:
        """MarkerLook until a transaction that has just ended is decided for readers, too."""
        deadline = time.monotonic() + SETTLE
        while (look := self._look(markers)).undecided and time.monotonic() < deadline:
            time.sleep(_POLL)
        return look

    # --- send --------------------------------------------------------------------------------------------------------

    def _send(self, producer: Producing, markers: Markers) -> None:
        """Send rows, receipt and marker.

        The files are opened only now: a restage removes them before it fences.
        """
        topic = self.output.handle["topic"]
        found = self.cluster.topic(topic)
        if found is None:
            msg = f"kafka topic {topic}: it is not there any more"
            raise NotSent(msg)
        before = self.cluster.ends(topic, found.partitions, committed=False)
        producer.begin()
        hit("kafka.begun")
        try:
            manifest = self._load()
        except ManifestMismatch as error:
            raise NotSent(str(error)) from error
        sent = 0
        for file in manifest.files:
            for batch in batches(self.place.staged / file.path, self.columns):
                producer.send(topic, batch, self._headers())
                sent += len(batch.values)
        producer.flush()
        if sent != self.output.manifest["rows"]:
            msg = f"checkpoint {self.output.key}: expected {self.output.manifest['rows']} staged rows, found {sent}"
            raise NotSent(msg)
        hit("kafka.sent")
        after = self.cluster.ends(topic, found.partitions, committed=False)
        places = {str(number): [before[number], end] for number, end in after.items() if end > before[number]}
        self._mark(producer, markers, found.id, places)

    def _mark(self, producer: Producing, markers: Markers, topic_id: str, places: dict[str, list[int]]) -> None:
        output, key = self.output, key_of(markers, self.output.key)
        pieces = split(output.receipt)
        marker = SentMarker(
            output.commit_seq or 0,
            output.key.checkpoint_id,
            output.key.revision,
            output.attempt,
            output.handle["topic"],
            topic_id,
            places,
            output.manifest,
            len(pieces),
        )
        records = [(f"{key}/{number}", piece) for number, piece in enumerate(pieces)]
        for name, value in [*records, (key, marker.dumps())]:
            producer.put(markers.topic, value, name.encode(), markers.partition)
        producer.flush()

    def _headers(self) -> list[tuple[str, bytes | None]]:
        """Return the headers of each record: who sent it; a replacement is always marked."""
        key = self.output.key
        if not self.lineage and key.revision == 1:
            return []
        told = {"pipeline": key.pipeline, "checkpoint": key.checkpoint_id, "revision": key.revision}
        return [(f"twophase.{name}", str(value).encode()) for name, value in told.items()]


class Producing:
    """One producer for one transaction; every error of the client becomes what the promoter has to do."""

    def __init__(self, cluster: KafkaCluster, name: str, seconds: float, largest: int | None = None) -> None:
        """Make the producer, and fence those before it."""
        from confluent_kafka import Producer

        self._cluster = cluster
        self._seconds = seconds
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
        self._producer: Any = Producer({**settings, "on_delivery": self._note})
        self._try(lambda: self._producer.init_transactions(max(_ANSWER, SETTLE)))

    def _note(self, error: Any, _message: object) -> None:  # noqa: ANN401 - a KafkaError
        self._refusal = self._refusal or error

    def begin(self) -> None:
        """Begin the transaction."""
        self._try(self._producer.begin_transaction)

    def put(self, topic: str, value: bytes | None, key: bytes | None, partition: int) -> None:
        """Send one record to a partition."""
        self._try(lambda: self._producer.produce(topic, value, key, partition))

    def send(self, topic: str, batch: Batch, ours: list[tuple[str, bytes | None]]) -> None:
        """Send a batch of records; where the client's queue is full, wait until some of it is sent."""
        self._try(lambda: self._send(topic, batch, ours))

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
def producing(cluster: KafkaCluster, output: Output, seconds: float) -> Iterator[Producing]:
    """Yield a producer of a write, which has fenced those before it; whatever happens, its handle is closed."""
    name = transactional_id(output.key.pipeline, output.handle["write"])
    producer = Producing(cluster, name, seconds, output.handle.get("largest"))
    try:
        yield producer
    except Unknown:
        raise
    except BaseException:
        producer.abort()
        raise
    finally:
        producer.close()


@contextmanager
def _alone(path: Path, seconds: float) -> Iterator[None]:
    """Hold a lock file, so that promoters of one write do not fence each other for nothing; safety does not need it.

    The file says until when its holder may need it. One that was stopped holds it for ever; after that time the broker
    has ended its transaction, and it is passed by.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _locked(descriptor):
            until = float(os.pread(descriptor, 64, 0) or 0)
            if time.time() > until > 0:
                break
            if time.monotonic() > deadline:
                msg = f"another process has been promoting this write for {PATIENCE:.0f} s"
                raise NotSent(msg)
            time.sleep(_POLL)
        os.pwrite(descriptor, f"{time.time() + seconds:020.0f}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
