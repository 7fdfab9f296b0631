"""The promoter of the write-ahead sink: gives staged rows to the user's sender, one subtask after the other.

A subtask is one staged file; its number is its place in the manifest. Neither the number nor the rows ever change. One
promoter at a time sends, under the committer's lock. For each subtask it takes three steps, which cannot be one:

    is it committed? ──▶ send_values(rows) ──▶ commit
                              ↑                ↑
                     window 1: some arrived    window 2: all arrived, nobody knows

If the promoter dies in a window, the subtask is sent again. So rows may arrive twice, unless they carry ids and the
system keeps the ids together with the rows (`idempotent`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from twophase.core.connections import hide_declared
from twophase.core.errors import ManifestMismatch, TwophaseError
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance
from twophase.core.isolation import one_line
from twophase.core.manifest import Manifest
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.staged_files import manifest_check
from twophase.sinks.staged_files.layout import FilesPaths
from twophase.storage import disk

if TYPE_CHECKING:
    import pyarrow as pa

    from twophase.core.checkpoint import Key, Output
    from twophase.core.manifest import StagedFile
    from twophase.sinks.write_ahead.committers import CheckpointCommitter

log = logging.getLogger("twophase")

Row = dict[str, Any]

#: The columns that are added to a row: its id, and its revision. No column of the data may have these names.
ID = "_twophase_id"
REVISION = "_twophase_revision"

#: Seconds to wait for another promoter that is sending.
PATIENCE = 20.0
#: How many rows are in memory at a time.
BATCH = 1024
#: How many bytes of a column are read at a time; without it pyarrow would read a whole row group.
BUFFER = 1 << 16
#: An attempt that sends again what an earlier one had begun to send has subtask numbers from attempt times this.
STRIDE = 1_000_000


#: Committed like a subtask: some attempt has begun to send. Which attempt, a second mark says: its number, negated.
BEGUN = -STRIDE


class NotNow(Exception):
    """A subtask could not be sent; the reason in words."""


class Sends(Protocol):
    """What a sender has to have."""

    def send_values(self, rows: Iterator[Row], checkpoint_id: int, timestamp: datetime) -> bool:
        """Send every row; True only if all of them have arrived."""
        ...


@dataclass(frozen=True)
class Delivery:
    """Sends the rows that one attempt staged, or says how many of them are sent."""

    output: Output
    committer: CheckpointCommitter
    idempotent: bool
    republish: bool

    @property
    def key(self) -> Key:
        """Return the revision that the rows are of."""
        return self.output.key

    @property
    def attempt(self) -> int:
        """Return the attempt that staged the rows."""
        return self.output.attempt

    # --- where it stands ---------------------------------------------------------------------------------------------

    @property
    def place(self) -> FilesPaths:
        """Return where the rows are staged."""
        return FilesPaths(self.key, self.output.handle)

    def find(self) -> Promotion:
        """Say whether the rows are sent, staged or lost; change nothing. Ask the committer again before saying lost."""
        try:
            with self.committer:
                sent = self._sent()
                lost = None if sent else self._lost()
                left = self.pending()
                sent = sent or self._sent()
        except Exception as error:  # noqa: BLE001 - a user's own committer may raise anything: ask again later
            return _later(self.key, error)
        reason = f"{len(left)} of {self.output.manifest['files']} subtasks to be sent, staged at {self.place.staged}"
        return sent or lost or Promotion(Outcome.RETRY_LATER, reason)

    def _sent(self) -> Promotion | None:
        """Say that every subtask is committed, of this attempt or one voted for before a restage (R10); else None."""
        if not self.pending():
            return Promotion(Outcome.ALREADY_PROMOTED, attempt=self.attempt)
        for attempt in self._earlier():
            path = self.place.manifest(attempt)
            content = path.read_bytes() if path.exists() else b""
            if (checksum := disk.digest(content)) in self.output.earlier:
                found = Manifest.loads(content).summary(checksum)
                if not replace(self, output=replace(self.output, attempt=attempt, manifest=found)).pending():
                    return Promotion(Outcome.ALREADY_PROMOTED, attempt=attempt, manifest=found)
        return None

    def pending(self) -> list[int]:
        """Return the subtasks that are not committed, in order."""
        first = self.attempt * STRIDE if self._begun_before() else 0
        numbers = range(first, first + self.output.manifest["files"])
        return [number for number in numbers if not self._is_committed(number)]

    def _is_committed(self, subtask: int) -> bool:
        return self.committer.is_committed(subtask, self.key.checkpoint_id, self.key.revision)

    def _begun_before(self) -> int | None:
        """Return the earlier attempt that had begun to send before its staged rows were lost; None if none had.

        A later attempt may split the rows into other files. So a subtask number stands for other rows than before, and
        neither numbers nor ids can tell what arrived.
        """
        return next((attempt for attempt in self._earlier() if self._is_committed(-attempt)), None)

    def _earlier(self) -> range:
        """Return the attempts before this one if one of them was voted for, else none."""
        return range(1, self.attempt if self.output.earlier else 1)

    def begun_elsewhere(self) -> bool:
        """Say whether sending has begun though this record never voted for the revision: another record did (R17)."""
        with self.committer:
            return not self.output.earlier and self._is_committed(BEGUN)

    def cut_off(self) -> str | None:
        """Say why restaged rows must not be sent; None if they may be."""
        with self.committer:
            return self._cut_off()

    def _cut_off(self) -> str | None:
        begun = self._begun_before()
        if begun is None or self.republish:
            return None
        return (
            f"attempt {begun} had begun to send before it was staged again, and nobody can tell which of its rows"
            " arrived; declare republish=True to send all of them again"
        )

    def _lost(self) -> Promotion | None:
        """Say why the rows cannot be sent now, or ever; None if they can."""
        if not self.place.reachable:
            return Promotion(Outcome.RETRY_LATER, f"folder {self.place.table} is not there; is it mounted?")
        try:
            self._load()
        except ManifestMismatch as error:
            return Promotion(Outcome.FAILED, str(error), Hindrance.LOST)
        if cut_off := self._cut_off():
            return Promotion(Outcome.FAILED, cut_off, Hindrance.REFUSED)
        if self._begun_before() is None and self._is_committed(BEGUN) and not self._is_committed(-self.attempt):
            return Promotion(Outcome.RETRY_LATER, "it was staged again, and another attempt has begun to send since")
        return None

    def _load(self) -> Manifest:
        """Load the manifest, and check the staged files against it."""
        manifest = manifest_check.load(self.place, self.attempt, self.output.manifest["digest"])
        if not self.place.staged.is_dir():
            msg = f"checkpoint {self.key}: staged output {self.place.staged} is gone"
            raise ManifestMismatch(msg)
        manifest_check.check(self.place.staged, manifest)
        return manifest

    # --- send --------------------------------------------------------------------------------------------------------

    def send(self, build: Callable[[], Sends]) -> Promotion:
        """Send every subtask that is not committed; stop at the first that cannot be sent now."""
        try:
            with self.committer:
                if sent := self._sent():
                    return sent
                with self.committer.lock(PATIENCE):
                    return self._send_alone(build)
        except NotNow as reason:
            return Promotion(Outcome.RETRY_LATER, str(reason))
        except Exception as error:  # noqa: BLE001 - a user's own committer may raise anything: send the rest later
            return _later(self.key, error)

    def remember(self, sent: Promotion) -> Promotion:
        """Commit every subtask again, in a committer that was restored from a backup: all of them were sent."""
        try:
            with self.committer:
                for number in self.pending():
                    self.committer.commit(number, self.key.checkpoint_id, self.key.revision)
        except Exception as error:  # noqa: BLE001 - a user's own committer may raise anything: try again later
            return _later(self.key, error)
        return sent

    def _send_alone(self, build: Callable[[], Sends]) -> Promotion:
        """Send what is left, under the lock; look again first, since another promoter may have sent it meanwhile."""
        settled = self._sent() or self._lost()
        if settled is not None:
            return settled
        manifest = self._load()
        sender = _built(build)
        for begun in (-self.attempt, BEGUN):  # in this order; if it is killed in between, nothing was sent
            self.committer.commit(begun, self.key.checkpoint_id, self.key.revision)
        try:
            for number in self.pending():
                if not self._is_committed(number):
                    hit("send.before")
                    self._send_subtask(sender, number, manifest.files[number % STRIDE], manifest)
                    hit("send.sent")
                    self.committer.commit(number, self.key.checkpoint_id, self.key.revision)
                    hit("send.committed")
        finally:
            close = getattr(sender, "close", None)
            if close is not None:
                close()
        return Promotion(Outcome.PROMOTED, attempt=self.attempt)

    def _send_subtask(self, sender: Sends, number: int, file: StagedFile, manifest: Manifest) -> None:
        """Give the rows of one file to the sender; its True counts only if it has taken all of them."""
        if not file.rows:
            return
        which = f"subtask {number}: {type(sender).__name__}.send_values"
        rows = CountedRows(self._rows(number, file, manifest))
        try:
            sent = sender.send_values(rows, self.key.checkpoint_id, self._timestamp())
        except Exception as error:
            hide_declared()
            log.warning("%s: %s failed after %s rows", self.key, which, rows.given, exc_info=True)
            msg = f"{which} raised {one_line(error)}"
            raise NotNow(msg) from error
        finally:
            rows.close()
        if not isinstance(sent, bool):
            msg = f"{which} returned {sent!r}, expected True or False"
            raise NotNow(msg)
        if not sent:
            msg = f"{which} returned False: not now"
            raise NotNow(msg)
        if rows.given != file.rows:
            msg = f"{which} returned True and has taken {rows.given} of {file.rows} rows; expected all of them"
            raise NotNow(msg)

    def _timestamp(self) -> datetime:
        """Return when the revision began, or when its rows were staged if nobody says it."""
        return self.output.began or datetime.fromtimestamp(self.place.manifest(self.attempt).stat().st_mtime, UTC)

    def _rows(self, number: int, file: StagedFile, manifest: Manifest) -> Iterator[Row]:
        """Yield the rows of a staged file in their order, with one batch in memory at a time."""
        import pyarrow.parquet as pq

        pipeline, checkpoint_id, revision = self.key
        stem = f"{pipeline}/{self.output.handle['operator']}/{checkpoint_id}/r{revision}/{number}"
        of_instants = {name for name, kind in manifest.schema if "timestamp" in kind and "timestamp_ntz" not in kind}
        ordinal = 0
        path = self.place.staged / file.path
        with pq.ParquetFile(path, buffer_size=BUFFER, coerce_int96_timestamp_unit="us") as opened:
            for batch in opened.iter_batches(BATCH):
                for row in _with_instants(batch, of_instants).to_pylist():
                    if self.republish:
                        row[REVISION] = self.key.revision
                    if self.idempotent:
                        row[ID] = f"{stem}/{ordinal}"
                    ordinal += 1
                    yield row


class CountedRows:
    """An iterator over rows that counts how many were taken."""

    def __init__(self, rows: Iterator[Row]) -> None:
        """Wrap an iterator over rows."""
        self.given = 0
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        """Return itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> Row:
        """Return the next row, and count it."""
        row = next(self._rows)
        self.given += 1
        hit("send.row")
        return row

    def close(self) -> None:
        """Close the file, which is still open if the sender stopped half-way."""
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()


def _built(build: Callable[[], Sends]) -> Sends:
    try:
        return build()
    except Exception as error:
        hide_declared()
        msg = f"the sender could not be built: {one_line(error)}"
        raise NotNow(msg) from error


def _with_instants(batch: pa.RecordBatch, names: set[str]) -> pa.RecordBatch:
    """Give Spark's timestamps the zone UTC: INT96, Spark's default in Parquet, does not say it."""
    for number, field in enumerate(batch.schema):
        if field.name in names and (known := _in_utc(field.type)) != field.type:
            batch = batch.set_column(number, field.with_type(known), batch.column(number).cast(known))
    return batch


def _in_utc(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_timestamp(kind) and kind.tz is None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(_in_utc(kind.item_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    return kind


def _later(key: Key, error: Exception) -> Promotion:
    """Return RETRY_LATER, with the error in one line."""
    if not isinstance(error, TwophaseError):  # our own errors need no stack trace
        log.warning("%s: not sent", key, exc_info=error)
    return Promotion(Outcome.RETRY_LATER, one_line(error))
