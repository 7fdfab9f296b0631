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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twophase.core.checkpoint import Output
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance, Refused
from twophase.core.manifest import Manifest
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.kafka.markers import MarkerLook, Markers, Note, SentMarker, key_of, split
from twophase.sinks.kafka.native import takes
from twophase.sinks.kafka.records import RecordColumns, arrow_batches
from twophase.sinks.kafka.transaction import NotSent, Producing, Unknown, producing
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
_POLL = 0.05


def time_out(manifest: Mapping[str, int]) -> float:
    """Return how many seconds the transaction of some staged rows may take before the broker ends it."""
    return max(SHORTEST, SAFETY * (manifest["rows"] / ROWS + manifest["bytes"] / BYTES))


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
        one_by_one = not takes(self.columns, self._headers())
        with producing(self.cluster, self.output, seconds, one_by_one=one_by_one) as producer:
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
        producer.begin(len(found.partitions))
        hit("kafka.begun")
        try:
            manifest = self._load()
        except ManifestMismatch as error:
            raise NotSent(str(error)) from error
        sent = 0
        for file in manifest.files:
            for batch in arrow_batches(self.place.staged / file.path, self.columns):
                producer.send(topic, batch, self.columns, self._headers())
                sent += batch.num_rows
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
