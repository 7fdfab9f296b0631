"""The sink `Kafka`: stages rows as Parquet, and sends them to a topic in one transaction once they are decided.

In Flink this is the Kafka producer with a transaction per checkpoint. Here no transaction is open while Spark runs, so
none can time out before the commit point, and none has to be resumed after a crash.

    <path>.twophase/staging/00000018.r1.a3.7c1e09ab/…   the rows, durable before the vote
    <path>.twophase/promoting                           held by the process that sends
    topic twophase-markers                              what was sent, in the transaction of the rows

`sinks/base.py` says who calls its methods, `promotion.py` how rows are sent, `markers.py` how that is found out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.changelog import CHANGE
from twophase.core.checkpoint import Json, Key, Output
from twophase.core.errors import ConfigError, SinkUnavailable
from twophase.core.hindrances import Refused
from twophase.core.manifest import Column
from twophase.core.ports import Promotion
from twophase.sinks import modes
from twophase.sinks.base import Attempt, Sink
from twophase.sinks.files.sink import Files
from twophase.sinks.kafka import acceptance, verification
from twophase.sinks.kafka.markers import TOPIC, Markers, Note, SentMarker
from twophase.sinks.kafka.promotion import Promoter, time_out
from twophase.sinks.kafka.records import VALUE, RecordColumns
from twophase.sinks.kafka.transaction import NotSent, producing
from twophase.sinks.staged_files import manifest_check
from twophase.sinks.staged_files.layout import FilesPaths
from twophase.storage.kafka_cluster import KafkaCluster

if TYPE_CHECKING:
    from twophase.row_queries.duckdb_rows import DuckDBRows

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
#: Bytes of the headers that say where a record comes from.
_LINEAGE = 200


#: What may be declared; all but the first let Spark send before the decision.
DELIVERIES = ("exactly_once", "at_least_once", "none")


class _Log(Files):
    """The staging of a files table, without the column `checkpoint`, which the name of a visible folder would give."""

    def _given_names(self) -> list[str]:
        return []

    def _rows(self, frame: Any, output: Output) -> Any:  # noqa: ANN401, ARG002 - DataFrames
        return frame


class Kafka(Sink):
    """Sends each checkpoint to a topic in one transaction: readers of committed records see all of it or nothing."""

    identity = ("markers",)
    fixed_while_pending = ("path", "topic", "conn_id", "delivery", "mode")

    #: Markers of a write follow each other by commit_seq, so that the newest one is near the end of their topic.
    ordered = True
    added_columns = frozenset({VALUE})

    def __new__(cls, *_: object, delivery: str = DELIVERIES[0], **__: object) -> Kafka:  # noqa: PYI034 - or a kind of it
        """Make the kind of sink that the delivery asks for."""
        if cls is Kafka and delivery in DELIVERIES[1:]:
            from twophase.sinks.kafka.direct import DirectKafka

            return super().__new__(DirectKafka)
        return super().__new__(cls)

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        topic: str,
        *,
        conn_id: str = "kafka_default",
        mode: str = "append",
        key: str | None = None,
        value: str | list[str] | None = None,
        headers: str | None = None,
        partition: str | None = None,
        timestamp: str | None = None,
        delivery: str = "exactly_once",
        lineage: bool = False,
        republish: bool = False,
        markers: str = TOPIC,
        path: str | None = None,
    ) -> None:
        """Declare a topic, which must exist, and the columns that make a record.

        `value` is a column of text or bytes; several columns, or None for all that are left, become JSON. `delivery`
        is "exactly_once", or "at_least_once" or "none", with which Spark sends the rows before the decision. With
        `lineage` each record has headers that name its pipeline, checkpoint and revision. With `republish` a committed
        checkpoint may be run again: its rows are sent again, with those headers. `markers` is the topic of markers,
        `path` the folder of the staged rows, default `kafka/<pipeline>/<write>`.
        With `mode="retract"` the rows are a changelog, and `_change` is part of the JSON value. With `mode="upsert"`
        there is one record per `key`: its value, or no value (a tombstone) where `_change` is -D.
        """
        self.topic = topic
        self.conn_id = conn_id
        self.mode = mode
        values = list(value) if isinstance(value, list | tuple) else value
        self.columns = RecordColumns(
            key, values, headers, partition, timestamp, mode if mode in {"retract", "upsert"} else None
        )
        self.delivery = delivery
        self.lineage = lineage
        self.republish = republish
        self.markers_topic = markers
        self.path = None if path is None else str(path)
        self._owner: tuple[str, str] | None = None
        self._note: Note | None = None
        self._largest: int | None = None
        #: What the markers say was sent, once `verify` has read them.
        self._sent: dict[int, SentMarker] | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        for name, value in (("topic", self.topic), ("markers", self.markers_topic)):
            if not _NAME.fullmatch(str(value)):
                msg = f"sinks.Kafka: {name} {value!r}: expected letters, digits, '.', '_' and '-', at most 249 of them"
                raise ConfigError(msg)
        self._check_mode()
        if self.delivery not in DELIVERIES:
            msg = f"sinks.Kafka {self.topic!r}: delivery: expected {', '.join(DELIVERIES)}, found {self.delivery!r}"
            raise ConfigError(msg)
        if self.topic == self.markers_topic:
            msg = f"sinks.Kafka {self.topic!r}: rows and markers need topics of their own"
            raise ConfigError(msg)
        for name, flag in (("lineage", self.lineage), ("republish", self.republish)):
            if not isinstance(flag, bool):
                msg = f"sinks.Kafka {self.topic!r}: {name}: expected True or False, found {flag!r}"
                raise ConfigError(msg)
        for name, column in self.columns.to_json().items():
            named = column if name == "value" and isinstance(column, list) else [column]
            if not named or not all(isinstance(one, str) and one for one in named):
                msg = f"sinks.Kafka {self.topic!r}: {name}: expected the name of a column, found {column!r}"
                raise ConfigError(msg)
        if self.path is not None:
            Files(self.path)  # refuses what is no folder of a file system

    def _check_mode(self) -> None:
        """Raise ConfigError unless the mode is one of Kafka's, and the other arguments go with it."""
        modes.check_declared(f"sinks.Kafka {self.topic!r}", "Kafka", self.mode)
        problem = None
        if self.mode == "upsert" and self.columns.key is None:
            problem = "a record is known by its key; declare key="
        elif self.mode == "retract" and isinstance(self.columns.value, str):
            problem = f"{CHANGE} is part of the value; name columns as value=[…], or leave value out"
        elif self.mode != "append" and self.delivery != DELIVERIES[0]:
            problem = f"delivery={self.delivery!r} may send a change twice; leave delivery out"
        if problem:
            msg = f"sinks.Kafka {self.topic!r}: mode={self.mode!r}: {problem}"
            raise ConfigError(msg)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {
            "topic": self.topic,
            "conn_id": self.conn_id,
            **self.columns.to_json(),
            "delivery": self.delivery,
            "lineage": self.lineage,
            "republish": self.republish,
            "markers": self.markers_topic,
            "path": self.location(),
        }

    def join(self, pipeline: str, name: str, *, slotted: bool = False) -> None:
        """Take the names of the pipeline and the write: markers and producers are known by them."""
        if self._owner not in {None, (pipeline, name)}:
            mine = "/".join(self._owner or ())
            msg = f"sinks.Kafka {self.topic}: it is {mine} already; declare one of its own for {pipeline}/{name}"
            raise ConfigError(msg)
        if self.mode == "upsert" and slotted:
            self._refuse(modes.NO_SLOTS)
        self._owner = (pipeline, name)
        super().join(pipeline, name, slotted=slotted)

    @property
    def _write(self) -> str:
        return self._owner[1] if self._owner else Path(self.location()).name

    @property
    def _log(self) -> Files:
        """Return the files sink that stages the rows; nothing is ever promoted to its table."""
        if self.path is None and self._owner is None:
            msg = f"sinks.Kafka {self.topic}: it has no folder yet; declare it in a pipeline, or give it a path"
            raise ConfigError(msg)
        staging = _Log(self.path or "/".join(("kafka", *(self._owner or ()))))
        staging.pipeline = self.pipeline
        return staging

    def location(self) -> str:
        """Return the folder of the staged rows: a topic may have several writers."""
        return self._log.location()

    def owner(self) -> str | None:
        """Return the pipeline whose rows are staged there."""
        return self._log.owner()

    def folders(self) -> tuple[str, ...]:
        """Return the folder of the staged rows, and the one beside it."""
        return self._log.folders()

    def objection(self, *, latest: bool) -> str | None:
        """Refuse to run a checkpoint again, unless `republish` allows to send it again; an upsert only the latest."""
        if self.republish and self.mode == "upsert" and not latest:
            return "its values would take the place of those that later checkpoints sent; run them again with it"
        if self.republish:
            return None
        return "what was sent cannot be taken back; declare republish=True to send it again, marked with its revision"

    def prepare(self, slot: str | None = None) -> None:  # noqa: ARG002 - no slot has a place of its own here
        """Check topic and rights, create the topic of markers, and note how the markers of this write stand."""
        who, cluster = f"sinks.Kafka {self.topic}", self._cluster()
        acceptance.check_topic(who, self.topic, cluster.topic(self.topic))
        self._largest = cluster.topic_settings(self.topic).largest
        self._log.prepare()
        with Markers(cluster, self.pipeline or "", self._write, self.markers_topic) as markers:
            kept = markers.create()
            acceptance.check_markers(who, kept)
            self._note = markers.note(kept) if self.pipeline else None

    def _cluster(self) -> KafkaCluster:
        return KafkaCluster(self.conn_id, f"sinks.Kafka {self.topic}")

    # --- stage -------------------------------------------------------------------------------------------------------

    def place(
        self,
        key: Key,
        attempt: int,
        token: str,
        *,
        slot: str | None = None,  # noqa: ARG002 - see prepare
        older: Output | None = None,  # noqa: ARG002 - what was sent is not replaced
    ) -> Json:
        """Name a staging folder, and all that promotion needs to know from the record alone."""
        return {
            **self._log.place(key, attempt, token),
            "write": self._write,
            "topic": self.topic,
            "markers": self.markers_topic,
            "columns": self.columns.to_json(),
            **({"note": list(self._note)} if self._note else {}),
            **({"largest": self._largest} if self._largest else {}),
        }

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Let Spark write the frame and the values made of it, then seal what it wrote."""
        schema = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        self.columns.check(output.which, schema)
        rows = modes.rows(output.which, self.mode, frame)
        return self._log.stage(self.columns.with_value(rows), output)

    def seal(self, output: Output, schema: tuple[Column, ...]) -> Json:
        """Make the staged files durable, and write their manifest."""
        return self._log.seal(output, schema)

    def check(self, output: Output) -> None:
        """Compare the staged folder with its manifest, and ask whether the topic would take the rows."""
        self._log.check(output)
        which, cluster = output.which, self._cluster()
        topic = acceptance.check_topic(which, self.topic, cluster.topic(self.topic))
        place = FilesPaths(output.key, output.handle)
        manifest = manifest_check.load(place, output.attempt, output.manifest["digest"])
        files = [place.staged / file.path for file in manifest.files if file.rows]
        marked = _LINEAGE + len(output.key.pipeline) if self.lineage or output.key.revision > 1 else 0
        settings = cluster.topic_settings(self.topic)
        acceptance.check_rows(which, topic, settings, RecordColumns(**output.handle["columns"]), files, marked)
        if self.mode == "upsert" and self.columns.key:
            modes.check_keys(which, [self.columns.key], self._log.staged(output))
        acceptance.check_transactions(which, cluster, output)

    def staged(self, output: Output) -> DuckDBRows:
        """Return the rows that an attempt staged, for audits."""
        return self._log.staged(output)

    # --- promote -----------------------------------------------------------------------------------------------------

    def _promoter(self, output: Output) -> Promoter:
        return Promoter(output, self._cluster(), self.lineage)

    def find(self, output: Output) -> Promotion:
        """Read the markers; change nothing, and fence nobody."""
        return self._promoter(output).find()

    def promote(self, output: Output) -> Promotion:
        """Send the rows and the marker in one transaction."""
        return self._promoter(output).promote()

    def discard(self, output: Output) -> None:
        """Remove what the attempts of an aborted revision staged; none of it was sent."""
        self._log.discard(output)

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what earlier attempts staged, then fence whoever is sending it.

        In this order: a promoter that comes by later finds no files, and one that has opened them is fenced.
        """
        self._log.discard_earlier(output, voted)
        try:
            with producing(self._cluster(), voted, time_out(voted.manifest)):
                pass
        except (NotSent, Refused) as error:
            raise SinkUnavailable(str(error)) from error

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> Iterator[Attempt]:
        """List staged rows and manifests."""
        yield from self._log.attempts()

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List staged rows, and the manifests of these revisions."""
        yield from self._log.left_by(revisions)

    def remove(self, left: Attempt) -> None:
        """Remove one leftover."""
        self._log.remove(left)

    # --- for a record that is older than the topic -------------------------------------------------------------------

    def _markers(self, pipeline: str) -> Markers:
        return Markers(self._cluster(), pipeline, self._write, self.markers_topic)

    def newest(self, pipeline: str) -> int | None:
        """Return the commit_seq of the newest marker, 0 for none."""
        with self._markers(pipeline) as markers:
            return markers.newest() if self._has_markers(markers) else 0

    def _has_markers(self, markers: Markers) -> bool:
        return markers.cluster.topic(markers.topic) is not None

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:
        """Yield the receipts that were sent with the markers."""
        with self._markers(pipeline) as markers:
            if self._has_markers(markers):
                yield from (receipt for _, receipt in markers.since(since) if receipt is not None)

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:
        """Yield checkpoint and revision of everything that was sent."""
        with self._markers(pipeline) as markers:
            if self._has_markers(markers):
                yield from ((marker.checkpoint_id, marker.revision) for marker, _ in markers.since(0))

    # --- verify ------------------------------------------------------------------------------------------------------

    def verify(self, output: Output) -> Iterator[str]:
        """Count the records of a committed revision between the offsets that its marker names."""
        if self._sent is None:
            with self._markers(output.key.pipeline) as markers:
                self._sent = {marker.commit_seq: marker for marker, _ in markers.since(0)}
        yield from verification.differences(self._cluster(), output, self._sent.get(output.commit_seq or 0))
