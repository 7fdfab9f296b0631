"""The sink `WriteAhead`: stages rows durably, and sends them to any system once their checkpoint is decided.

In Flink this is GenericWriteAheadSink with its CheckpointCommitter. `delivery.py` says what it can promise, and what
not; `sinks/base.py` says who calls its methods.

    <path>.twophase/staging/00000018.r1.a3.7c1e09ab/…   the rows, one Parquet file per subtask, durable before the vote
    <path>.twophase/manifests/00000018.r1.a3.json       which file is which subtask, for ever
    <path>/                                             always empty: nothing becomes visible here
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.core.declared import import_path
from twophase.core.errors import ConfigError, ManifestMismatch, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.base import Attempt, Sink
from twophase.sinks.files.sink import Files
from twophase.sinks.staged_files.layout import side
from twophase.sinks.staged_files.receipts import Receipts
from twophase.sinks.write_ahead.committers import CheckpointCommitter, Mark, declared
from twophase.sinks.write_ahead.delivery import ID, REVISION, Delivery, Row, Sends
from twophase.storage.base import DISK

if TYPE_CHECKING:
    from datetime import datetime

    from twophase.core.checkpoint import Json, Key, Output
    from twophase.core.manifest import Column
    from twophase.row_queries.duckdb_rows import DuckDBRows

log = logging.getLogger("twophase")

_CLASS = re.compile(r"[\w.]+:[\w.]+")
_SECRET = re.compile(r"(?i).*(password|passwd|secret|token|api_?key)")
#: The attempt number under which the sweeper sees what the committer remembers of a revision: dead once that has ended.
_MARKS = 2**31


class Sender(ABC):
    """What the rows of a `WriteAhead` are given to; a class with the same methods will do.

    It is built from its declared arguments in the process that promotes, once per checkpoint.
    """

    @abstractmethod
    def send_values(self, rows: Iterator[Row], checkpoint_id: int, timestamp: datetime) -> bool:
        """Send the rows of one subtask; `timestamp` is when the revision was begun.

        Return True if every row has arrived. False, or any exception, means "not now": the same rows come again later,
        in the same order, and no later checkpoint overtakes them.
        """

    def close(self) -> None:  # noqa: B027 - for senders that hold something
        """Release what the sender holds; called after the last subtask, and after one that could not be sent."""


class _Log(Files):
    """The staging of a files table, without the column `checkpoint`, which the name of a visible folder would give."""

    def _given_names(self) -> list[str]:
        return []

    def _rows(self, frame: Any, output: Output) -> Any:  # noqa: ANN401, ARG002 - a sender may be given a changelog
        return frame


class WriteAhead(Sink):
    """Sends rows to a system that has no sink here: at least once, or exactly once if it keeps the ids of rows."""

    identity = ()
    fixed_while_pending = ("path", "committer", "idempotent")

    #: No checkpoint overtakes another: one that cannot be sent holds up all that come after it.
    ordered = True

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        sender: str,
        *,
        arguments: dict[str, Any] | None = None,
        committer: CheckpointCommitter | dict[str, Any] | str | None = None,
        idempotent: bool = False,
        republish: bool = False,
        path: str | None = None,
    ) -> None:
        """Declare a sender by `module:Class` and its JSON arguments: ids of connections, never secrets.

        `committer` remembers what was sent, default `committers.Postgres()`. With `idempotent` each row has a
        `_twophase_id` that stays the same however often it is sent. With `republish` a committed checkpoint may be run
        again: its rows are sent again, each with its `_twophase_revision`. `path` is the folder of the staged rows,
        default `write_ahead/<pipeline>/<write>`.
        """
        self.sender = sender
        self.arguments = {} if arguments is None else arguments
        # A committer from the record is built only when it is needed: the Spark job may lack its module.
        self._committer = committer if isinstance(committer, dict) else declared(committer).declaration()
        self.idempotent = idempotent
        self.republish = republish
        self.path = None if path is None else str(path)
        self._owner: tuple[str, str] | None = None
        self._check_arguments()

    def _check_arguments(self) -> None:
        if not _CLASS.fullmatch(str(self.sender)):
            msg = f"sinks.WriteAhead: sender {self.sender!r}: expected `module:Class`"
            raise ConfigError(msg)
        if not isinstance(self.arguments, dict):
            msg = f"sinks.WriteAhead {self.sender}: arguments: expected a dict, found {self.arguments!r}"
            raise ConfigError(msg)
        for name, said in (("arguments", self.arguments), ("committer", self._committer)):
            try:
                json.dumps(said)
            except (TypeError, ValueError) as error:
                msg = f"sinks.WriteAhead {self.sender}: {name}: expected what JSON can say, found otherwise: {error}"
                raise ConfigError(msg) from None
        secrets = [name for name in self.arguments if _SECRET.fullmatch(str(name))]
        if secrets:
            msg = (
                f"sinks.WriteAhead {self.sender}: argument {secrets[0]!r}: it would be in the record for all to read;"
                " put it into a connection, and pass the connection's id"
            )
            raise ConfigError(msg)
        for name, value in (("idempotent", self.idempotent), ("republish", self.republish)):
            if not isinstance(value, bool):
                msg = f"sinks.WriteAhead {self.sender}: {name}: expected True or False, found {value!r}"
                raise ConfigError(msg)
        if self.path is not None:
            Files(self.path)  # refuses what is no folder of a file system

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal sink."""
        return {
            "sender": self.sender,
            "arguments": self.arguments,
            "committer": self._committer,
            "idempotent": self.idempotent,
            "republish": self.republish,
            "path": self.location(),
        }

    @property
    def committer(self) -> CheckpointCommitter:
        """Return the declared committer, without a job and an operator yet."""
        return CheckpointCommitter.load(self._committer)

    def join(self, pipeline: str, name: str, *, slotted: bool = False) -> None:
        """Take the names of the pipeline and the write as job id and operator id."""
        if self._owner not in {None, (pipeline, name)}:
            mine = "/".join(self._owner or ())
            msg = f"sinks.WriteAhead {self.sender}: it is {mine} already; declare one of its own for {pipeline}/{name}"
            raise ConfigError(msg)
        self._owner = (pipeline, name)
        super().join(pipeline, name, slotted=slotted)

    @property
    def _operator(self) -> str:
        return self._owner[1] if self._owner else Path(self.location()).name

    @property
    def _log(self) -> Files:
        """Return the files sink that stages the rows; nothing is ever promoted to its table."""
        if self.path is None and self._owner is None:
            msg = f"sinks.WriteAhead {self.sender}: it has no folder yet; declare it in a pipeline, or give it a path"
            raise ConfigError(msg)
        staging = _Log(self.path or "/".join(("write_ahead", *(self._owner or ()))))
        staging.pipeline = self.pipeline
        return staging

    def location(self) -> str:
        """Return the folder of the staged rows."""
        return self._log.location()

    def owner(self) -> str | None:
        """Return the pipeline whose rows are staged there."""
        return self._log.owner()

    def folders(self) -> tuple[str, ...]:
        """Return the folder of the staged rows, and the one beside it."""
        return self._log.folders()

    def objection(self, *, latest: bool) -> str | None:  # noqa: ARG002 - whichever it is, it was sent
        """Refuse to run a checkpoint again, unless `republish` allows to send it again."""
        if self.republish:
            return None
        return "what was sent cannot be taken back; declare republish=True to send it again, marked with its revision"

    def prepare(self, slot: str | None = None) -> None:  # noqa: ARG002 - no slot has a place of its own here
        """Check that the sender takes its arguments; create the folders, and what the committer needs.

        If the committer is down, checkpoints are still staged and decided; only the sending waits.
        """
        self._sender_class()
        self._log.prepare()
        committer = self.committer.of(*(self._owner or ("", self._operator)))
        try:
            committer.create_resource()
        except SinkUnavailable as error:  # it delays only the sending; a later run creates what is missing
            log.warning("%s; rows are staged, and sent once it is back", error)

    def _sender_class(self) -> type[Sends]:
        found = import_path(self.sender)
        which = f"sinks.WriteAhead: sender {self.sender!r}"
        method = getattr(found, "send_values", None)
        if not isinstance(found, type) or not callable(method):
            msg = f"{which}: expected a class with send_values(rows, checkpoint_id, timestamp)"
            raise ConfigError(msg)
        try:
            inspect.signature(found).bind(**self.arguments)
            inspect.signature(method).bind(None, iter(()), 1, None)
        except TypeError as error:
            msg = f"{which}: it does not take what it is given: {error}"
            raise ConfigError(msg) from None
        return found

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
        """Name a staging folder and the operator id, so that recovery can promote from the record alone."""
        return {**self._log.place(key, attempt, token), "operator": self._operator}

    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Let Spark write the frame, then seal what it wrote."""
        self._check_columns(output, frame.columns)
        return self._log.stage(frame, output)

    def seal(self, output: Output, schema: tuple[Column, ...]) -> Json:
        """Make the staged files durable, and write their manifest."""
        self._check_columns(output, [column.name for column in schema])
        return self._log.seal(output, schema)

    def staging_path(self, output: Output) -> str:
        """Return the staging folder: the output path for a Spark job of the user's own, which writes Parquet."""
        return self._log.staging_path(output)

    def inspect(self, output: Output) -> Json:
        """Seal what the user's own job wrote."""
        staged = self._log.inspect(output)
        self._check_columns(output, [name for name, _ in staged["schema"]])
        return staged

    def _check_columns(self, output: Output, names: Iterable[str]) -> None:
        ours = {ID} if self.idempotent else set()
        ours |= {REVISION} if self.republish else set()
        if clash := sorted(ours & set(names)):
            msg = f"{output.which}: a column cannot be named {clash[0]!r}: rows are sent with ours"
            raise ConfigError(msg)

    def check(self, output: Output) -> None:
        """Compare the staged folder with its manifest before the vote, and check that none of it was sent before."""
        self._log.check(output)
        try:
            delivery = self._delivery(output)
            begun, cut_off = delivery.begun_elsewhere(), delivery.cut_off()
        except SinkUnavailable as error:
            log.warning("%s; rows are staged, and sent once it is back", error)
            return
        if cut_off:
            msg = f"checkpoint {output.key}: {cut_off}"
            raise ManifestMismatch(msg)
        if begun:
            msg = (
                f"checkpoint {output.key}: rows of it were sent already, says {self.committer.which}, and this record"
                " does not know of it; was it restored from an older one? Give the pipeline a new name"
            )
            raise ManifestMismatch(msg)

    def staged(self, output: Output) -> DuckDBRows:
        """Return the rows that an attempt staged, for audits."""
        return self._log.staged(output)

    # --- promote -----------------------------------------------------------------------------------------------------

    def _delivery(self, output: Output) -> Delivery:
        committer = self.committer.of(output.key.pipeline, output.handle["operator"])
        return Delivery(output, committer, self.idempotent, self.republish)

    def find(self, output: Output) -> Promotion:
        """Ask the receipts and the committer whether the output was sent; change nothing."""
        try:
            delivery = self._delivery(output)
        except (ConfigError, ImportError) as error:
            return Promotion(Outcome.RETRY_LATER, f"the committer cannot be asked: {error}")
        return self._closed(output) or delivery.find()

    def promote(self, output: Output) -> Promotion:
        """Send every subtask that the committer does not have as sent."""
        try:
            delivery = self._delivery(output)
        except (ConfigError, ImportError) as error:
            return Promotion(Outcome.RETRY_LATER, f"the committer cannot be asked: {error}")
        if not delivery.place.reachable:
            return delivery.find()
        if closed := self._closed(output):
            return delivery.remember(closed)
        kept = self._receipts(output)
        if refusal := kept.keep(output.receipt):
            return Promotion(Outcome.FAILED, refusal, Hindrance.FOREIGN)
        sent = delivery.send(lambda: self._sender_class()(**self.arguments))
        if sent.outcome in {Outcome.PROMOTED, Outcome.ALREADY_PROMOTED}:
            kept.close(output.receipt)
            hit("send.closed")
        return sent

    def _closed(self, output: Output) -> Promotion | None:
        """Say, by the receipts, that all was sent; the committer may have been restored from a backup. Else None."""
        if output.commit_seq is None or not self._receipts(output).is_closed(output.key, output.commit_seq):
            return None
        return Promotion(Outcome.ALREADY_PROMOTED)

    def _receipts(self, output: Output) -> Receipts:
        return Receipts(DISK, side(Path(output.handle["table"])))

    def discard(self, output: Output) -> None:
        """Remove what the attempts of an aborted revision staged; none of it was sent."""
        self._log.discard(output)

    def discard_earlier(self, output: Output, voted: Output) -> None:
        """Remove what earlier attempts staged: by `check` none of it was sent, or all of it may be sent again."""
        self._log.discard_earlier(output, voted)

    # --- sweep -------------------------------------------------------------------------------------------------------

    def attempts(self) -> Iterator[Attempt]:
        """List staged rows and manifests, then the revisions that the committer can drop once these are gone."""
        yield from self._log.attempts()
        yield from self._marks()

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:
        """List staged rows, the manifests of these revisions, and the revisions that the committer can drop."""
        yield from self._log.left_by(revisions)
        yield from self._marks()

    def _marks(self) -> Iterator[Attempt]:
        if self._owner and self.committer.forgets:
            with self.committer.of(*self._owner) as committer:
                for mark in committer.marks():
                    yield Attempt(mark.checkpoint, mark.revision, _MARKS, f"{committer.which}: {mark}")

    def remove(self, left: Attempt) -> None:
        """Remove one leftover; the committer drops a revision once its staged rows are gone: nobody can send them."""
        if left.attempt != _MARKS:
            self._log.remove(left)
            return
        mark = Mark(left.checkpoint_id, left.revision)
        staged = (a for a in self._log.left_by({}) if not a.manifest)
        if self._owner and not any((a.checkpoint_id, a.revision) == mark for a in staged):
            with self.committer.of(*self._owner) as committer:
                committer.forget(mark)

    # --- for a record that is older than what was sent ---------------------------------------------------------------

    def newest(self, pipeline: str) -> int | None:
        """Return the commit_seq of the newest receipt, 0 for none."""
        return self._log.newest(pipeline) or 0

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:
        """Yield the receipts that are kept beside the staged rows."""
        yield from self._log.receipts(pipeline, since)

    # --- verify ------------------------------------------------------------------------------------------------------

    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with what the committer remembers; what the system holds cannot be seen here."""
        delivery = self._delivery(output)
        if self.committer.forgets and not delivery.place.staged.exists():
            return  # its rows are swept, so the committer has dropped it
        with delivery.committer as committer:
            for subtask in delivery.pending():
                yield f"subtask {subtask} is not in {committer.which}"
