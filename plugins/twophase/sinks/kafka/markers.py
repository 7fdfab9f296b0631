"""Markers: the proof, in Kafka itself, that the rows of a decision were sent. Promotion writes and reads them.

    topic `twophase-markers`, compacted, 16 partitions or more
    key   <pipeline>/<write>/<checkpoint>/<revision>              never repeats, so compaction takes nothing away
    value commit_seq, attempt, digest, rows, where the rows are   JSON, in the transaction of the rows

The receipt of the decision goes before its marker, in records of its own. Markers of one write are in one partition,
in the order of commit_seq, because its promotions follow each other.

A look changes nothing. It says "absent" only if that is sure: nothing before the end of the partition is undecided, the
topic is the one that was noted before the vote, and nothing was cut off it since.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import quote

from twophase.core.checkpoint import Json, Key
from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.storage.kafka_cluster import PATIENCE, KafkaCluster, Topic
from twophase.storage.kafka_reader import KafkaReader

if TYPE_CHECKING:
    from twophase.core.checkpoint import Output

TOPIC = "twophase-markers"
#: How many partitions markers are spread over; more are left alone, so that adding some moves no marker.
PARTITIONS = 16
#: How many offsets are read first, backwards from the end, and how much further each time.
_WINDOW, _FURTHER = 100, 8
#: How many bytes of a receipt go into one record.
_PIECE = 500_000
_POLL = 0.1


@dataclass(frozen=True)
class SentMarker:
    """What the marker of a promotion says."""

    commit_seq: int
    checkpoint_id: int
    revision: int
    attempt: int
    topic: str
    topic_id: str
    #: Partition of the topic → where the rows are: [start, end), between which others may have sent, too.
    places: dict[str, list[int]]
    #: The summary of the manifest.
    manifest: Json
    #: How many records before it hold the receipt.
    pieces: int = 0

    def dumps(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def loads(cls, content: bytes) -> SentMarker:
        """Read what `dumps` wrote."""
        return cls(**json.loads(content))


class Note(NamedTuple):
    """How the markers of a write stood before it was staged: enough to see later that nothing was cut off."""

    topic_id: str
    start: int
    end: int
    #: The commit_seq of the newest marker, 0 for none.
    newest: int


class MarkerLook(NamedTuple):
    """What a look found; nothing at all: there is no marker, and that is sure."""

    marker: SentMarker | None = None
    #: Why it cannot be said now.
    undecided: str | None = None
    #: Why only a person can say it.
    broken: str | None = None


class _Read(NamedTuple):
    offset: int
    key: str
    value: bytes


@dataclass
class Markers:
    """The markers of one write."""

    cluster: KafkaCluster
    pipeline: str
    write: str
    topic: str = TOPIC

    def __post_init__(self) -> None:
        """Name its keys and its partition."""
        self.prefix = f"{quote(self.pipeline, safe='')}/{quote(self.write, safe='')}/"
        self.partition = zlib.crc32(self.prefix.encode()) % PARTITIONS
        self._reader = KafkaReader(self.cluster)

    def __enter__(self) -> Self:
        """Open nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the consumer."""
        self._reader.__exit__()

    # --- the topic ---------------------------------------------------------------------------------------------------

    def create(self) -> Topic:
        """Create the topic unless it is there; ConfigError if it is not fit for markers."""
        found = self.cluster.topic(self.topic)
        if found is None:
            self._make()
            deadline = time.monotonic() + PATIENCE
            while (found := self._ready()) is None:
                if time.monotonic() > deadline:
                    why = f"topic {self.topic} was created and is not there"
                    raise self.cluster.unavailable(why)
                time.sleep(_POLL)
        if self.cluster.topic_settings(self.topic).expires:
            why = "expected cleanup.policy compact, found delete: markers would expire"
            msg = f"kafka topic {self.topic}: {why}; kafka-configs --alter --add-config cleanup.policy=compact"
            raise ConfigError(msg)
        if len(found.partitions) < PARTITIONS:
            counted = f"expected {PARTITIONS} partitions or more, found {len(found.partitions)}"
            msg = f"kafka topic {self.topic}: {counted}; add some"
            raise ConfigError(msg)
        return found

    def _ready(self) -> Topic | None:
        """Return the topic that was just created; None: not every broker knows it yet."""
        try:
            self.cluster.starts(self.topic, range(PARTITIONS))
        except SinkUnavailable:
            return None
        return self.cluster.topic(self.topic)

    def _make(self) -> None:
        try:
            self.cluster.create(self.topic, PARTITIONS, cleanup_policy="compact")
        except ConfigError as error:
            how = f"--topic {self.topic} --partitions {PARTITIONS} --config cleanup.policy=compact"
            why = f"it is not there and cannot be created ({error})"
            msg = f"kafka topic {self.topic}: {why}; create it: kafka-topics --create {how}"
            raise ConfigError(msg) from error

    # --- look --------------------------------------------------------------------------------------------------------

    def note(self, topic: Topic) -> Note:
        """Return how the markers stand now."""
        start, end, _ = self._bounds()
        return Note(topic.id, start, end, self.newest())

    def newest(self) -> int:
        """Return the commit_seq of the newest marker, 0 for none."""
        start, _, stable = self._bounds()
        return next((marker.commit_seq for marker in self._backwards(start, stable)), 0)

    def look(self, output: Output, note: Note | None) -> MarkerLook:
        """MarkerLook for the marker of a decided output."""
        try:
            start, end, stable = self._bounds()
        except SinkUnavailable:
            if self.cluster.topic(self.topic) is not None:
                raise
            gone = f"kafka topic {self.topic} was deleted"
            return MarkerLook(broken=f"{gone}, so nobody can tell whether commit_seq {output.commit_seq} was sent")
        seq, above, below = output.commit_seq or 0, 0, 0
        for marker in self._backwards(start, stable):
            if marker.commit_seq == seq:
                return self._compare(marker, output)
            if marker.commit_seq < seq:
                below = marker.commit_seq
                break
            above = marker.commit_seq
        if above:
            return MarkerLook(broken=self._older(f"commit_seq {above} was sent, {seq} was not"))
        if stable < end:
            return MarkerLook(undecided=f"a transaction is open in {self._where} from offset {stable}")
        if cut := self._cut_off(note, start, end, below):
            return MarkerLook(broken=f"{self._where}: {cut}, so nobody can tell whether commit_seq {seq} was sent")
        return MarkerLook()

    def _compare(self, marker: SentMarker, output: Output) -> MarkerLook:
        """Say whether a marker with this commit_seq is of this decision, by an attempt that was voted for (R10)."""
        mine = (output.key.checkpoint_id, output.key.revision) == (marker.checkpoint_id, marker.revision)
        if mine and marker.manifest["digest"] in {output.manifest["digest"], *output.earlier}:
            return MarkerLook(marker)
        which = f"{marker.checkpoint_id} r{marker.revision} attempt {marker.attempt}"
        return MarkerLook(
            broken=self._older(f"commit_seq {marker.commit_seq} is that of {self.pipeline}/{which} there")
        )

    def _older(self, found: str) -> str:
        return (
            f"{self._where}: {found}, and this record does not know it: it is older than the topic, or another record"
            f" has a pipeline of this name; see `twophase reconcile {self.pipeline}`"
        )

    def _cut_off(self, note: Note | None, start: int, end: int, below: int) -> str | None:
        """Say why markers may be missing; None: what was there when the note was taken is still there."""
        if note is None:
            return None if below or start == 0 else f"records before offset {start} were deleted"
        topic = self.cluster.topic(self.topic)
        if topic is None or topic.id != note.topic_id:
            return "the topic was deleted" + (" and created again" if topic else "")
        if end < note.end:
            return f"it ended at offset {note.end} before and ends at {end} now"
        if start != note.start and (below == 0 or below < note.newest):
            return f"records before offset {start} were deleted"
        if below < note.newest:
            return f"the marker of commit_seq {note.newest} is gone"
        return None

    @property
    def _where(self) -> str:
        return f"kafka topic {self.topic} partition {self.partition}"

    # --- read --------------------------------------------------------------------------------------------------------

    def _bounds(self) -> tuple[int, int, int]:
        """Return where the partition starts, where it ends, and up to where everything is decided.

        The end is asked before the last stable offset: if they are equal, all that was there is decided.
        """
        which = [self.partition]
        start = self.cluster.starts(self.topic, which)[self.partition]
        end = self.cluster.ends(self.topic, which, committed=False)[self.partition]
        stable = self.cluster.ends(self.topic, which, committed=True)[self.partition]
        return start, end, stable

    def _backwards(self, start: int, end: int) -> Iterator[SentMarker]:
        """Yield the markers of this write, the newest first; reads no more than is asked for."""
        window = _WINDOW
        while end > start:
            begin = max(start, end - window)
            found = [read for read in self._between(begin, end) if self._is_marker(read.key)]
            for read in reversed(found):
                yield SentMarker.loads(read.value)
            end, window = begin, window * _FURTHER

    def _is_marker(self, key: str) -> bool:
        return key.startswith(self.prefix) and key.count("/") == 3  # noqa: PLR2004 - a piece of a receipt has more

    def _between(self, start: int, end: int) -> Iterator[_Read]:
        """Yield the committed records between two offsets that are decided."""
        for message in self._reader.between(self.topic, {self.partition: (start, end)}):
            key = (message.key() or b"").decode(errors="replace")
            yield _Read(int(message.offset() or 0), key, message.value() or b"")

    # --- for a record that is older ----------------------------------------------------------------------------------

    def since(self, seq: int) -> Iterator[tuple[SentMarker, Json | None]]:
        """Yield the markers from one commit_seq on, each with its receipt, in order."""
        start, _, stable = self._bounds()
        pieces: dict[str, list[bytes]] = {}
        for read in self._between(start, stable) if stable > start else ():
            if self._is_marker(read.key):
                marker = SentMarker.loads(read.value)
                kept = pieces.pop(read.key, [])
                if marker.commit_seq >= seq:
                    yield marker, _joined(kept[-marker.pieces :]) if marker.pieces else None
            elif read.key.startswith(self.prefix):
                pieces.setdefault(read.key.rpartition("/")[0], []).append(read.value)


def key_of(markers: Markers, key: Key) -> str:
    """Return the key of a marker."""
    return f"{markers.prefix}{key.checkpoint_id}/{key.revision}"


def split(receipt: Json) -> list[bytes]:
    """Return a receipt in pieces that fit into records; none if there is none."""
    if not receipt:
        return []
    content = zlib.compress(json.dumps(receipt, separators=(",", ":")).encode())
    return [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]


def _joined(pieces: list[bytes]) -> Json:
    found: Json = json.loads(zlib.decompress(b"".join(pieces)))
    return found
