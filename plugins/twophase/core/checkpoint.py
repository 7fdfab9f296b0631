"""The values of the protocol, used by every other module: keys, inputs, runs, revisions, participants, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from twophase.core.states import State

Json = Mapping[str, Any]

#: The year 9999: Python has no later one.
_LAST = 253_370_764_800


class InputFile(NamedTuple):
    """One file of a fixed input: its path below the source's folder, and what it looked like when it was fixed."""

    path: str
    size: int
    mtime_ns: int
    #: The checksum of its bytes (xxh3, 64 bits), once an attempt has taken it.
    xxh3: str | None = None


def looks(size: int, mtime_ns: int) -> str:
    """Describe a file by its size and its modification time, for messages."""
    seconds, rest = divmod(mtime_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC) if 0 <= seconds < _LAST else None
    return f"{size} bytes of {f'{moment:%Y-%m-%d %H:%M:%S}.{rest:09d} UTC' if moment else f'{mtime_ns} ns'}"


class Known(NamedTuple):
    """What a source remembers of files that checkpoints own already: enough to see that none of them changed.

    Only the source knows how the sums are made. The record keeps the value, and replaces it only as a whole.
    """

    #: The latest modification time among them.
    newest: int
    sums: bytes


class Position(NamedTuple):
    """How far a source's partition has been read: the offset to read next, and what the source noted about it."""

    offset: int
    #: What the source needs to see later that the offset still means the same records; only the source knows how.
    mark: Json | None = None


class Key(NamedTuple):
    """The identity of a revision; it says nothing of the run or process that works on it."""

    pipeline: str
    checkpoint_id: int
    revision: int

    def __str__(self) -> str:
        """Read as `orders/17 r1`."""
        return f"{self.pipeline}/{self.checkpoint_id} r{self.revision}"


@dataclass(frozen=True)
class Output:
    """What one attempt puts into one sink, with all that the record knows of it; every method of a sink is given one.

    How much of it is filled depends on how far the attempt has come: `manifest` once it is staged, `commit_seq` after
    the commit point, `receipt` for its promotion.
    """

    key: Key
    attempt: int
    #: What the sink's `place` named for this attempt, and nothing else.
    handle: Json = field(default_factory=dict)
    #: The summary of the manifest: rows, bytes, files, digest, schema.
    manifest: Json = field(default_factory=dict)
    commit_seq: int | None = None
    #: When the revision began.
    began: datetime | None = None
    #: What the record knows of the decision; a sink that keeps it can tell it to a restored record.
    receipt: Json = field(default_factory=dict)
    #: The name of the write.
    sink: str = ""
    #: Digests that were voted for before a restage: the output of such an attempt may still turn up in the sink (R10).
    earlier: tuple[str, ...] = ()

    @property
    def which(self) -> str:
        """Return how errors name it."""
        return f"checkpoint {self.key}: sink {self.sink!r}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON for another process; what is not filled is left out."""
        told = {name: value for name, value in vars(self).items() if value or name == "attempt"}
        return told if self.began is None else {**told, "began": self.began.isoformat()}

    @classmethod
    def of_json(cls, told: Json) -> Output:
        """Read it from what `to_json` returned."""
        began = datetime.fromisoformat(told["began"]) if "began" in told else None
        return cls(**{**told, "key": Key(*told["key"]), "began": began, "earlier": tuple(told.get("earlier", ()))})


@dataclass(frozen=True)
class Input:
    """What one revision reads from one source; fixed at begin, the same for every attempt (the barrier)."""

    #: Those of a landing folder belong to the checkpoint for ever, those of an interval to this revision.
    files: tuple[InputFile, ...] = ()
    #: Offset sources: partition → half-open range [start, end).
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Partition → what the source noted about the end of its range; it becomes the mark of the position.
    marks: Mapping[str, Json] = field(default_factory=dict)
    #: Committed sources: what the other pipeline's revisions put into its sink, and that sink's declaration and schema.
    outputs: tuple[Output, ...] = ()
    upstream: Json | None = None
    #: The checkpoint that owns it; files that were archived after its commit are found by this number.
    checkpoint_id: int | None = None
    #: Log tables: the version that the files belong to, its columns, and what the files do not say of their rows.
    table: Json | None = None
    #: The place of a lookup table, which no checkpoint fixes: each attempt reads it as it then is.
    unversioned: str | None = None

    def __bool__(self) -> bool:
        """Return True if there is anything new to read; a lookup table does not count."""
        return bool(self.files) or any(end > start for start, end in self.ranges.values())

    def summary(self) -> dict[str, Any]:
        """Return what the record keeps of it in one JSON column; files and outputs have tables of their own."""
        if self.unversioned is not None:
            return {"unversioned": self.unversioned}
        if self.ranges:
            ranges = {"ranges": {name: list(bounds) for name, bounds in self.ranges.items()}}
            return {**ranges, "marks": dict(self.marks)} if self.marks else ranges
        found = {"files": len(self.files), "bytes": sum(file.size for file in self.files)}
        return found if self.table is None else {**found, "table": self.table}

    @classmethod
    def of_summary(cls, told: Json) -> Input:
        """Read from what `summary` returned all but files and outputs."""
        return cls(
            ranges={part: (start, end) for part, (start, end) in told.get("ranges", {}).items()},
            marks=told.get("marks", {}),
            table=told.get("table"),
            unversioned=told.get("unversioned"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON for another process; what is not filled is left out."""
        told = {name: value for name, value in vars(self).items() if value is not None and value not in ((), {})}
        return {**told, "outputs": [output.to_json() for output in self.outputs]} if self.outputs else told

    @classmethod
    def of_json(cls, told: Json) -> Input:
        """Read it from what `to_json` returned."""
        return replace(
            cls.of_summary(told),
            files=tuple(InputFile(*file) for file in told.get("files", ())),
            outputs=tuple(map(Output.of_json, told.get("outputs", ()))),
            upstream=told.get("upstream"),
            checkpoint_id=told.get("checkpoint_id"),
        )


class Run(NamedTuple):
    """Who works on a revision: an Airflow run, or a script (dag_id None), whose run ends with its lease."""

    dag_id: str | None
    run_id: str

    def __str__(self) -> str:
        """Read as `dag_id/run_id`, or the run_id alone."""
        return f"{self.dag_id}/{self.run_id}" if self.dag_id else self.run_id


class Base(NamedTuple):
    """The state that a revision starts from: what the standing revision of the checkpoint before it left (S1)."""

    #: 0: no checkpoint before it was decided.
    checkpoint_id: int = 0
    revision: int = 0
    #: State → the attempt that was voted for there.
    attempts: Mapping[str, int] = {}

    def __str__(self) -> str:
        """Read as `17 r1`, or `nothing`."""
        return f"{self.checkpoint_id} r{self.revision}" if self.checkpoint_id else "nothing"


@dataclass(frozen=True)
class Revision:
    """One deliberate passage of a checkpoint through the protocol, as the record has it."""

    key: Key
    state: State
    epoch: int
    kind: str = "regular"
    slot: str | None = None
    run: Run | None = None
    #: The backfill that made it.
    backfill: str | None = None
    #: Seconds until the lease runs out on the record's own clock; None: nobody holds one; negative: it ran out.
    lease_left: float | None = None
    parked_reason: str | None = None
    #: If it is parked: sink → its `Hindrance`.
    hindrances: Mapping[str, str] = field(default_factory=dict)
    commit_seq: int | None = None
    rows: int | None = None
    bytes: int | None = None
    error: str | None = None
    created_at: datetime | None = None
    committed_at: datetime | None = None
    #: Whether its output was removed when its retention was over.
    swept: bool = False
    #: Whether its own run has seen it committed: clearing such a run asks for another revision.
    acknowledged: bool = False
    #: The Spark job of an attempt, if it can outlive the task that submitted it: the attempt, the job's id, its plan.
    job: Json | None = None

    @property
    def checkpoint_id(self) -> int:
        """Return the checkpoint's number within its pipeline."""
        return self.key.checkpoint_id

    @property
    def revision(self) -> int:
        """Return the revision's number within its checkpoint."""
        return self.key.revision

    @property
    def in_order(self) -> bool:
        """Return True if it is in the regular lane: it has no slot, and is no replacement."""
        return self.slot is None and self.kind == "regular"

    @property
    def leased(self) -> bool:
        """Return True while the lease of the run that works on it lasts."""
        return self.lease_left is not None and self.lease_left > 0


#: Keys that a handle in the record has besides those that a sink's `place` named; `place` must not use them.
RESERVED = frozenset({"earlier", "standing"})


@dataclass(frozen=True)
class Participant:
    """One output (or voter) of a revision: the attempt it is of, its vote, and what it voted for."""

    name: str
    kind: str
    attempt: int = 0
    vote: bool | None = None
    #: What the sink's `place` named, so that any process can find, promote or discard the staged output.
    handle: Json = field(default_factory=dict)
    #: Summary of the manifest: rows, bytes, files, digest, schema.
    manifest: Json = field(default_factory=dict)
    reason: str | None = None
    #: See `Output.earlier`.
    earlier: tuple[str, ...] = ()
    #: While it is restaged: itself as it was voted for before. That vote counts until this attempt has its own.
    voted: Participant | None = None

    @property
    def stages(self) -> bool:
        """Return True if it stages output (a sink, a state); audits and approvals only vote."""
        return self.kind in {"sink", "state"}

    @property
    def standing(self) -> Participant | None:
        """Return it as of its last yes, or None; during a restage that is the earlier attempt, until the new vote."""
        return self if self.vote else self.voted

    def output(self, revision: Revision, receipt: Json | None = None) -> Output:
        """Return what it puts into its sink, as one of a revision's participants."""
        return Output(
            revision.key,
            self.attempt,
            self.handle,
            self.manifest,
            commit_seq=revision.commit_seq,
            began=revision.created_at,
            receipt=receipt or {},
            sink=self.name,
            earlier=self.earlier,
        )
