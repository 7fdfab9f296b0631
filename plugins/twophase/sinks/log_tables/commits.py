"""The promoter of log tables: takes staged Parquet files into the table, in one commit that carries the marker.

The files stay where they were staged; the table's log, or its catalog, names them. The marker is a high-water mark, the
`commit_seq` of the last promotion. So promotions follow each other (R12), and each commits on the very handle on which
it read the marker. When another writer was faster, it starts over from a fresh handle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from twophase.core.checkpoint import Json, Key, Output
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

#: How often a promoter starts over when other writers are faster, before it answers RETRY_LATER.
TRIES = 20


class Change(NamedTuple):
    """What one commit does to a table."""

    app: str
    seq: int
    add: Manifest
    remove: Manifest | None
    #: What the table's history is to say of this commit.
    note: str


class LogTable(ABC):
    """A log table as one handle sees it; a commit fails if the table's marker has moved since the handle was opened."""

    @property
    @abstractmethod
    def version(self) -> object:
        """Return a value that changes whenever the table does."""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the table's columns, with Spark's types."""

    @abstractmethod
    def marker(self, app: str) -> int | None:
        """Return the high-water mark of this name; None if there is none yet."""

    def writers(self) -> frozenset[str]:
        """Return the pipelines that have markers in the table, where the owner file alone may not tell."""
        return frozenset()

    @abstractmethod
    def standing(self) -> Mapping[str, frozenset[str]]:
        """Return our attempts that are in the table: their folders, with the files of each. Listed once per handle."""

    def reduced(self, manifest: Manifest) -> list[str]:  # noqa: ARG002 - for formats with delete files
        """Return the files of a manifest that have lost some of their rows in the table."""
        return []

    @abstractmethod
    def notes(self) -> Iterator[str]:
        """Yield what the table's history says of our commits, the newest first, as far as it is kept."""

    @abstractmethod
    def objection(self, schema: Schema | None = None) -> str | None:
        """Say what this table has, or lacks for this schema, that we cannot honour; None if there is nothing."""

    @abstractmethod
    def rules(self) -> Sequence[Rule]:
        """Return the rules that every row of the table has to keep."""

    def misfit(self, schema: Schema) -> str | None:
        """Say which column is spelt otherwise or has another type in the table; None if all fit."""
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
        """Return a schema with the table's wider types: what was voted for before a column was widened still fits."""
        there = dict(self.schema())
        return tuple(
            Column(name, there[name]) if name in there and self.widens(name, kind, there[name]) else Column(name, kind)
            for name, kind in schema
        )

    def widens(self, name: str, before: str, after: str) -> bool:  # noqa: ARG002 - for formats that can
        """Say whether a column of the table may get a wider type, over files that have the narrower one."""
        return False

    def takes(self, file: StagedFile) -> bool:  # noqa: ARG002 - most take all
        """Say whether a staged file becomes part of the table."""
        return True

    @abstractmethod
    def widen(self, schema: Schema) -> bool:
        """Add the columns that the table lacks, without rows; True if it did: then this handle is outdated."""

    @abstractmethod
    def commit(self, change: Change) -> None:
        """Commit the change in one atomic step; Conflict if the marker has moved since this handle was opened.

        Afterwards this handle shows the table with the change.
        """

    @abstractmethod
    def make_durable(self) -> None:
        """Make the version of the table that this handle shows durable."""


class Opener(Protocol):
    """What the promoter needs of a sink: it opens and creates the table."""

    @property
    def storage(self) -> Storage:
        """Return the storage of the table's files."""
        ...

    def app(self, pipeline: str, handle: Json) -> str:
        """Return the name of the high-water mark in the table: one per pipeline and write."""
        ...

    def open(self, handle: Json) -> LogTable | None:
        """Open the table of a handle; None if there is none yet; Trouble if nobody can tell."""
        ...

    def create(self, handle: Json, schema: Schema) -> None:
        """Create the table, empty; Conflict if somebody else just did."""
        ...

    def visible(self, schema: Schema) -> Schema:
        """Return the columns of staged rows that the table gets."""
        ...


class LogTablePaths:
    """The paths of one attempt's output, which stays there when the table takes it in."""

    def __init__(self, key: Key, handle: Json, storage: Storage) -> None:
        """Derive every path from the handle in the record."""
        self.key = key
        self.storage = storage
        self.side: str = handle["home"]
        self.name: str = handle["name"]
        self.staged = f"{self.side}/{self.name}"
        #: The marker of the committed revision that this one takes the place of.
        self.replaces: Marker | None = Marker.parse(handle.get("replaces") or "")

    def manifest(self, attempt: int) -> str:
        """Return where an attempt's manifest is."""
        return f"{self.side}/manifests/{self.key.checkpoint_id:08d}.r{self.key.revision}.a{attempt}.json"

    def holds(self, manifest: Manifest) -> bool:
        """Say whether the staged folder is there; an output without files needs none."""
        return not manifest.files or self.storage.has(self.staged)

    def older(self) -> Manifest | None:
        """Return the manifest of the revision that this one replaces; None if it replaces none."""
        if self.replaces is None:
            return None
        key = self.key._replace(revision=self.replaces.revision)
        place = LogTablePaths(key, {"home": self.side, "name": ""}, self.storage)
        return manifest_check.load(place, self.replaces.attempt, self.replaces.digest)


def foreign(table: LogTable | None, storage: Storage, home: str, pipeline: str) -> str | None:
    """Say that a table belongs to another pipeline, by its owner file or by the markers in it; else None."""
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
    """Promotes the staged output of one attempt, or says whether it is promoted."""

    def __init__(self, opener: Opener, output: Output) -> None:
        """Start from what the record has of a decided output."""
        if output.commit_seq is None:
            raise AssertionError  # only a decided output is promoted
        self.opener = opener
        self.key = output.key
        self.attempt = output.attempt
        self.handle = output.handle
        self.manifest = output.manifest
        self.earlier = output.earlier
        self.place = LogTablePaths(output.key, output.handle, opener.storage)
        self.seq = output.commit_seq
        self.app = opener.app(output.key.pipeline, output.handle)
        self.receipt = output.receipt
        self.receipts = Receipts(opener.storage, self.place.side)

    # --- where it stands ---------------------------------------------------------------------------------------------

    def find(self) -> Promotion:
        """Say whether the output is promoted, staged or lost; change nothing."""
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
        """Return the manifest of the staged output; ManifestMismatch unless all of it is there."""
        found = manifest_check.load(self.place, self.attempt, self.manifest["digest"])
        if not self.place.holds(found):
            msg = f"staged output {self.place.staged} is gone"
            raise ManifestMismatch(msg)
        manifest_check.check(self.place.staged, found, self.place.storage)
        return found

    def _promoted(self, table: LogTable | None = None) -> Promotion | None:
        """Read the marker back; None if it is still below this commit_seq."""
        table = table or self.opener.open(self.handle)
        if table is None or (table.marker(self.app) or 0) < self.seq:
            return None
        table.make_durable()  # whoever counts a marker does: its promoter may have died before that (R2)
        hit("promote.durable")
        return self._evidence(table)

    def _evidence(self, table: LogTable) -> Promotion:
        """Say which attempt was promoted, or that another record moved the marker: the number alone does not tell."""
        mine = self._folders(table)
        if self.place.name in mine:
            return Promotion(Outcome.ALREADY_PROMOTED, attempt=self.attempt)
        for revision, attempt in mine.values():
            if revision == self.key.revision and (summary := self._earlier(attempt)):
                return Promotion(Outcome.ALREADY_PROMOTED, attempt=attempt, manifest=summary)
        digests = {self.manifest["digest"], *self.earlier}
        prefix = f"{self.key} a"
        for note in table.notes():  # it had no rows, was merged or replaced, or others rewrote its files
            if note.startswith(prefix) and note.rpartition(" ")[2] in digests:
                attempt = int(note.removeprefix(prefix).partition(" ")[0])
                return Promotion(Outcome.ALREADY_PROMOTED, attempt=attempt, manifest=self._earlier(attempt))
        if self._is_receipted(digests):
            return Promotion(Outcome.ALREADY_PROMOTED)  # the same, and the table has forgotten its history of that time
        reason = (
            f"the table's marker {self.app} is at {table.marker(self.app)}, expected below {self.seq}, and"
            " the table knows nothing of this revision: the record is older than the table, or another record's"
            f" pipeline of this name wrote here; `twophase reconcile {self.key.pipeline}` shows it, or write elsewhere"
        )
        return Promotion(Outcome.FAILED, reason, Hindrance.FOREIGN)

    def _is_receipted(self, digests: set[str]) -> bool:
        """Say whether the receipt of this commit_seq is of this very output: then nobody else can have the number."""
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
        """Return the summary of an attempt that was voted for before a restage; None if it was not voted for."""
        try:
            content = self.place.storage.read(self.place.manifest(attempt))
        except FileNotFoundError:
            return None
        digest = disk.digest(content)
        return Manifest.loads(content).summary(digest) if digest in self.earlier else None

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
                self.receipt = {}  # it is kept now; no need to do it again when starting over
                if table.widen(self.opener.visible(change.add.schema)):
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
        """Look for the marker that the commit just made has set."""
        if (table.marker(self.app) or 0) < self.seq:
            return Promotion(Outcome.UNKNOWN)
        table.make_durable()
        hit("promote.durable")
        return Promotion(Outcome.PROMOTED, attempt=self.attempt)

    def _table(self) -> LogTable:
        """Open the table; if there is none, create it empty and raise Conflict, so that the caller starts over.

        Created together with rows it could come to be twice.
        """
        table = self.opener.open(self.handle)
        if table is not None:
            return table
        self.opener.create(self.handle, self.opener.visible(schema_of(self.manifest)))
        hit("table.created")
        msg = "the table has just been created"
        raise Conflict(msg)

    def _change(self, table: LogTable) -> Change:
        """Return the commit to make; Refused if the table cannot take it, ManifestMismatch if staged files are lost."""
        if theirs := foreign(table, self.place.storage, self.place.side, self.key.pipeline):
            raise Refused(theirs)
        if objection := table.objection(table.promoted(self.opener.visible(schema_of(self.manifest)))):
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
        """Read the marker again before reporting an error: the output may be promoted all the same."""
        try:
            return self._promoted() or otherwise
        except (Trouble, SinkUnavailable):
            return Promotion(Outcome.RETRY_LATER, str(error))


def disturbed(table: LogTable, manifest: Manifest) -> list[tuple[str, str]]:
    """Return the files of a manifest that other writers removed, rewrote or took rows out of, each with how."""
    there = table.standing().get(manifest.folder or "", frozenset())
    gone = [file.path for file in manifest.files if table.takes(file) and file.path not in there]
    return [
        *((path, "is not in the table any more: it was rewritten or removed by another writer") for path in gone),
        *((path, "has rows that delete files of another writer take out") for path in table.reduced(manifest)),
    ]
