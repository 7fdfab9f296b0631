"""How staged Parquet files get into a table that keeps a log of its own: one commit, which carries the marker.

The files stay where they were staged; the table's log, or its catalog, takes them in. The marker is a high-water mark,
the `commit_seq` of the last promotion: so promotions follow each other (R12), and whoever commits does it on the very
handle on which the marker was read. When another writer was faster, all of it starts over from a fresh handle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from twophase.core.checkpoint import Json, Key
from twophase.core.errors import ManifestMismatch, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.hindrances import Hindrance, Refused
from twophase.core.manifest import Column, Manifest, Schema, StagedFile
from twophase.core.ports import Outcome, Promotion
from twophase.formats import table_rules
from twophase.formats.log_errors import Conflict, Trouble
from twophase.formats.table_rules import Rule
from twophase.sinks.base import two_owners
from twophase.sinks.staged_files import manifest_check, owner
from twophase.sinks.staged_files.layout import ATTEMPT, Marker
from twophase.sinks.staged_files.receipts import Receipts, key_of
from twophase.storage import disk
from twophase.storage.base import Storage

#: How often a promoter starts over when other writers get in its way, before it leaves the work to whoever comes next.
TRIES = 20


class Change(NamedTuple):
    """What one commit does to a table."""

    app: str
    seq: int
    add: Manifest
    remove: Manifest | None
    #: What the table's history says of it.
    note: str


class LogTable(ABC):
    """A table as one handle sees it: what is read here and what is committed here belong together."""

    @property
    @abstractmethod
    def version(self) -> object:
        """Return what changes whenever the table does."""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the table's columns, with Spark's types."""

    @abstractmethod
    def marker(self, app: str) -> int | None:
        """Return the high-water mark of a pipeline; None: it has none yet."""

    def writers(self) -> frozenset[str]:
        """Return the pipelines that have markers in it, where the folder of the table does not tell already."""
        return frozenset()

    @abstractmethod
    def standing(self) -> Mapping[str, frozenset[str]]:
        """Return what of ours is in the table: the folders of attempts, and which files of each. Listed once."""

    def reduced(self, manifest: Manifest) -> list[str]:  # noqa: ARG002 - in most tables that cannot be
        """Return the files of a manifest that are in the table without all their rows."""
        return []

    @abstractmethod
    def notes(self) -> Iterator[str]:
        """Yield what the table's history says of our commits, the newest first, as far as it is kept."""

    @abstractmethod
    def objection(self, schema: Schema | None = None) -> str | None:
        """Say why this table, or this schema in it, cannot be honoured; None: it can."""

    @abstractmethod
    def rules(self) -> Sequence[Rule]:
        """Return what the table asks of every row."""

    def misfit(self, schema: Schema) -> str | None:
        """Say which column the table has otherwise."""
        there = {column.name.lower(): column for column in self.schema()}
        for column in schema:
            found = there.get(column.name.lower(), column)
            if found != column and not (found.name == column.name and self.widens(*found, column.type)):
                return (
                    f"column {column.name!r}: expected {found.name} {found.type} as in the table, found {column.name}"
                    f" {column.type}; cast it"
                )
        return None

    def promoted(self, schema: Schema) -> Schema:
        """Return a schema as it is in the table, where what was voted for before a column was widened still fits."""
        there = dict(self.schema())
        return tuple(
            Column(name, there[name]) if name in there and self.widens(name, kind, there[name]) else Column(name, kind)
            for name, kind in schema
        )

    def widens(self, name: str, before: str, after: str) -> bool:  # noqa: ARG002 - for formats that can
        """Say whether a column of the table may go on with a wider type, over files that have the narrower one."""
        return False

    def takes(self, file: StagedFile) -> bool:  # noqa: ARG002 - most take all
        """Say whether a staged file becomes part of the table."""
        return True

    @abstractmethod
    def widen(self, schema: Schema) -> bool:
        """Add the columns that the table lacks, without rows; True: it did, and this handle is old."""

    @abstractmethod
    def commit(self, change: Change) -> None:
        """Do it all in one step, unless the marker has moved since this handle was opened: Conflict.

        Afterwards this handle shows the table with it.
        """

    @abstractmethod
    def make_durable(self) -> None:
        """Make durable what this handle has seen."""


class Opener(Protocol):
    """Who opens tables."""

    @property
    def storage(self) -> Storage:
        """Return where their files are."""
        ...

    def app(self, key: Key, handle: Json) -> str:
        """Return whose high-water mark it is: one per pipeline and write."""
        ...

    def open(self, handle: Json) -> LogTable | None:
        """Open the table of a handle; None: it is not there yet. Trouble if it cannot be said."""
        ...

    def create(self, handle: Json, schema: Schema) -> None:
        """Create it, empty; Conflict if another did."""
        ...


class LogTablePaths:
    """Where one attempt's output is: it stays there when the table takes it in."""

    def __init__(self, key: Key, handle: Json, storage: Storage) -> None:
        """Derive every path from what the record keeps."""
        self.key = key
        self.storage = storage
        self.side: str = handle["home"]
        self.name: str = handle["name"]
        self.staged = f"{self.side}/{self.name}"
        #: Digests that were voted for before a restage: what they stand for may still turn up (R10).
        self.earlier: list[str] = handle.get("earlier", [])
        #: The marker of the committed revision that this one takes the place of.
        self.replaces: Marker | None = Marker.parse(handle.get("replaces") or "")

    def manifest(self, attempt: int) -> str:
        """Return where an attempt's manifest is."""
        return f"{self.side}/manifests/{self.key.checkpoint_id:08d}.r{self.key.revision}.a{attempt}.json"

    def holds(self, manifest: Manifest) -> bool:
        """Say whether the staged folder is there; one without files need not be."""
        return not manifest.files or self.storage.has(self.staged)

    def older(self) -> Manifest | None:
        """Return the manifest of what this one takes the place of."""
        if self.replaces is None:
            return None
        key = self.key._replace(revision=self.replaces.revision)
        place = LogTablePaths(key, {"home": self.side, "name": ""}, self.storage)
        return manifest_check.load(place, self.replaces.attempt, self.replaces.digest)


def foreign(table: LogTable | None, storage: Storage, home: str, pipeline: str) -> str | None:
    """Say that a table is another pipeline's, by its folder or by the markers in it; None: it is not."""
    if theirs := owner.objection(storage, home, pipeline):
        return theirs
    others = (table.writers() if table is not None else frozenset()) - {pipeline}
    return two_owners("the table", min(others)) if others else None


def schema_of(summary: Json) -> Schema:
    """Return the columns in a manifest's summary."""
    return tuple(Column(*column) for column in summary["schema"])


def note_of(key: Key, attempt: int, digest: str) -> str:
    """Return what the table's history says of a promotion."""
    return f"{key} a{attempt} {digest}"


class LogTablePromoter:
    """Promotes what one attempt staged, or says where it stands."""

    def __init__(self, opener: Opener, key: Key, handle: Json, manifest: Json) -> None:
        """Start from what the record keeps of the participant."""
        self.opener = opener
        self.key = key
        self.handle = handle
        self.manifest = manifest
        self.place = LogTablePaths(key, handle, opener.storage)
        match = ATTEMPT.fullmatch(self.place.name)
        self.attempt = int(match[3]) if match else 0
        self.seq: int = handle["commit_seq"]
        self.app = opener.app(key, handle)
        self.receipt: Json | None = handle.get("receipt")
        self.receipts = Receipts(opener.storage, self.place.side)

    # --- where it stands ---------------------------------------------------------------------------------------------

    def find(self) -> Promotion:
        """Say where the output stands without changing it."""
        try:
            if promoted := self._promoted():
                return promoted
            try:
                self._staged()
            except ManifestMismatch as error:  # the marker is read again: it may have been promoted, and swept, since
                return self._promoted() or Promotion(Outcome.FAILED, str(error), Hindrance.LOST)
        except (Trouble, SinkUnavailable) as error:
            return Promotion(Outcome.RETRY_LATER, str(error))
        return Promotion(Outcome.RETRY_LATER, f"staged at {self.place.staged}")

    def _staged(self) -> Manifest:
        """Return the manifest of what is staged, if all of it is there."""
        found = manifest_check.load(self.place, self.attempt, self.manifest["digest"])
        if not self.place.holds(found):
            msg = f"staged output {self.place.staged} is gone"
            raise ManifestMismatch(msg)
        manifest_check.check(self.place.staged, found, self.place.storage)
        return found

    def _promoted(self, table: LogTable | None = None) -> Promotion | None:
        """Read the marker back; None: it has not come this far."""
        table = table or self.opener.open(self.handle)
        if table is None or (table.marker(self.app) or 0) < self.seq:
            return None
        table.make_durable()  # whoever counts a marker: its promoter may have died before it came to that (R2)
        hit("promote.durable")
        return self._evidence(table)

    def _evidence(self, table: LogTable) -> Promotion:
        """Say which attempt it was, or that the mark is another record's: a mark alone does not say whose rows came."""
        mine = self._folders(table)
        if self.place.name in mine:
            return Promotion(Outcome.ALREADY_PROMOTED, attempt=self.attempt)
        for revision, attempt in mine.values():
            if revision == self.key.revision and (summary := self._earlier(attempt)):
                return Promotion(Outcome.ALREADY_PROMOTED, attempt=attempt, manifest=summary)
        digests = {self.manifest["digest"], *self.place.earlier}
        prefix = f"{self.key} a"
        if any(note.startswith(prefix) and note.rpartition(" ")[2] in digests for note in table.notes()):
            return Promotion(Outcome.ALREADY_PROMOTED)  # it had no rows, was replaced, or others rewrote its files
        if self._is_receipted(digests):
            return Promotion(Outcome.ALREADY_PROMOTED)  # likewise, and the table's history of that time is gone
        reason = (
            f"the table's marker {self.app} is at {table.marker(self.app)}, expected below {self.seq}, and"
            " the table knows nothing of this revision: the record is older than the table, or another record's"
            f" pipeline of this name wrote here; `twophase reconcile {self.key.pipeline}` shows it, or write elsewhere"
        )
        return Promotion(Outcome.FAILED, reason, Hindrance.FOREIGN)

    def _is_receipted(self, digests: set[str]) -> bool:
        """Say whether the number that the marker has passed was given to this very output: nobody else can have it."""
        found = self.receipts.of(self.key.pipeline, self.seq)
        return (
            found is not None
            and key_of(found) == self.key
            and any(one["manifest"].get("digest") in digests for one in found["participants"])
        )

    def _folders(self, table: LogTable) -> dict[str, tuple[int, int]]:
        """Return the folders of this checkpoint that are in the table, with their revision and attempt."""
        matches = [match for name in table.standing() if (match := ATTEMPT.fullmatch(name))]
        return {m[0]: (int(m[2]), int(m[3])) for m in matches if int(m[1]) == self.key.checkpoint_id}

    def _earlier(self, attempt: int) -> Json | None:
        """Return the summary of an attempt that was voted for before a restage; None: it was not."""
        try:
            content = self.place.storage.read(self.place.manifest(attempt))
        except FileNotFoundError:
            return None
        digest = disk.digest(content)
        return Manifest.loads(content).summary(digest) if digest in self.place.earlier else None

    # --- promote -----------------------------------------------------------------------------------------------------

    def promote(self) -> Promotion:
        """Read the marker, check what is staged, commit; start over whenever another writer was faster."""
        faster = ""
        for _ in range(TRIES):
            try:
                table = self._table()
                if promoted := self._promoted(table):
                    return promoted
                change = self._change(table)
                if refusal := self.receipts.keep(self.receipt):
                    return Promotion(Outcome.FAILED, refusal, Hindrance.FOREIGN)
                self.receipt = None  # kept, however often it starts over
                if table.widen(change.add.schema):
                    hit("table.widened")
                    continue
                hit("promote.checked")
                table.commit(change)
                hit("promote.visible")
                return self._read_back(table)
            except Conflict as conflict:
                faster = f": {conflict}"
            except (ManifestMismatch, Refused) as error:
                hindrance = error.hindrance if isinstance(error, Refused) else Hindrance.LOST
                return self._despite(error, Promotion(Outcome.FAILED, str(error), hindrance))
            except (Trouble, SinkUnavailable) as error:
                return self._despite(error, Promotion(Outcome.RETRY_LATER, str(error)))
        return Promotion(Outcome.RETRY_LATER, f"other writers were faster {TRIES} times{faster}")

    def _read_back(self, table: LogTable) -> Promotion:
        """Look for the marker that this very commit has set."""
        if (table.marker(self.app) or 0) < self.seq:
            return Promotion(Outcome.UNKNOWN)
        table.make_durable()
        hit("promote.durable")
        return Promotion(Outcome.PROMOTED, attempt=self.attempt)

    def _table(self) -> LogTable:
        """Open the table; create it empty where there is none, for one with rows could come to be twice."""
        table = self.opener.open(self.handle)
        if table is not None:
            return table
        self.opener.create(self.handle, schema_of(self.manifest))
        hit("table.created")
        msg = "the table has just been created"
        raise Conflict(msg)

    def _change(self, table: LogTable) -> Change:
        """Return what is to be done to a table, if it can be."""
        if theirs := foreign(table, self.place.storage, self.place.side, self.key.pipeline):
            raise Refused(theirs)
        if objection := table.objection(table.promoted(schema_of(self.manifest))):
            raise Refused(objection)
        if rule := table_rules.unmet(self.handle, table.rules()):
            msg = f"the table has got {rule} since the rows were staged, and they were not held to it; drop it"
            raise Refused(msg)
        older = self.place.older()
        if older is not None and (found := disturbed(table, older)):
            path, how = found[0]
            msg = (
                f"checkpoint {older.key} cannot be replaced: its file {path} {how}, and {len(found) - 1} more likewise;"
                " put it back, for instance by a restore"
            )
            raise Refused(msg, Hindrance.REWRITTEN)
        note = note_of(self.key, self.attempt, self.manifest["digest"])
        return Change(self.app, self.seq, self._staged(), older, note)

    def _despite(self, error: Exception, otherwise: Promotion) -> Promotion:
        """Read the marker again before saying that something went wrong: it may be there all the same."""
        try:
            return self._promoted() or otherwise
        except (Trouble, SinkUnavailable):
            return Promotion(Outcome.RETRY_LATER, str(error))


def disturbed(table: LogTable, manifest: Manifest) -> list[tuple[str, str]]:
    """Return the files of a manifest that other writers have changed the rows of, and how."""
    there = table.standing().get(manifest.folder or "", frozenset())
    gone = [file.path for file in manifest.files if table.takes(file) and file.path not in there]
    return [
        *((path, "is not in the table any more: it was rewritten or removed by another writer") for path in gone),
        *((path, "has rows that delete files of another writer take out") for path in table.reduced(manifest)),
    ]
