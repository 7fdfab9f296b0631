"""The nouns of the protocol: checkpoint, revision, attempt, participant."""

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
    """Say what a file looks like, its time as people read it."""
    seconds, rest = divmod(mtime_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC) if 0 <= seconds < _LAST else None
    return f"{size} bytes of {f'{moment:%Y-%m-%d %H:%M:%S}.{rest:09d} UTC' if moment else f'{mtime_ns} ns'}"


class Known(NamedTuple):
    """What is remembered of the files of a source that all have an owner: enough to see that they are still the same.

    Its reader says what the sums are of; to the record it is one thing that is exchanged as a whole.
    """

    #: The latest modification time among them.
    newest: int
    sums: bytes


class Key(NamedTuple):
    """The identity of a revision: it comes from the declaration, never from a run or a process."""

    pipeline: str
    checkpoint_id: int
    revision: int

    def __str__(self) -> str:
        """Read as `orders/17 r1`."""
        return f"{self.pipeline}/{self.checkpoint_id} r{self.revision}"


class Output(NamedTuple):
    """What a decided revision put into one sink: all that it takes to find and read it again."""

    key: Key
    attempt: int
    handle: Json
    manifest: Json


@dataclass(frozen=True)
class Input:
    """What one revision reads from one source; fixed at begin, the same for every attempt (the barrier)."""

    #: The files: of a landing folder each owned by this checkpoint for ever, of an interval this revision's list.
    files: tuple[InputFile, ...] = ()
    #: Offset sources: partition → half-open range [start, end).
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Committed sources: what the other pipeline's revisions put into its sink; that sink's declaration and schema.
    outputs: tuple[Output, ...] = ()
    upstream: Json | None = None
    #: Whose it is: what was archived at its commit is found by this.
    checkpoint_id: int | None = None
    #: Log tables: the version that the files are of, its columns, and what the files do not say of their rows.
    table: Json | None = None
    #: Where a lookup table is that no checkpoint fixes: each attempt reads it as it then is.
    unversioned: str | None = None

    def __bool__(self) -> bool:
        """Say whether there is anything new to read; a lookup table alone is not."""
        return bool(self.files) or any(end > start for start, end in self.ranges.values())

    def summary(self) -> dict[str, Any]:
        """Return what the record keeps in one place; lists of files and of outputs have tables of their own."""
        if self.unversioned is not None:
            return {"unversioned": self.unversioned}
        if self.ranges:
            return {"ranges": {name: list(bounds) for name, bounds in self.ranges.items()}}
        found = {"files": len(self.files), "bytes": sum(file.size for file in self.files)}
        return found if self.table is None else {**found, "table": self.table}


class Run(NamedTuple):
    """Who works on a revision: an Airflow run, or a script (dag_id None), whose run ends with its lease."""

    dag_id: str | None
    run_id: str

    def __str__(self) -> str:
        """Read as `dag_id/run_id`, or the run_id alone."""
        return f"{self.dag_id}/{self.run_id}" if self.dag_id else self.run_id


@dataclass(frozen=True)
class Revision:
    """One deliberate (re)processing of a checkpoint, as the record has it."""

    key: Key
    state: State
    epoch: int
    kind: str = "regular"
    slot: str | None = None
    run: Run | None = None
    #: Seconds until the lease runs out on the record's own clock; None: nobody holds one; negative: it ran out.
    lease_left: float | None = None
    parked_reason: str | None = None
    #: Of a parked one, what stands in the way of which sink: a `Hindrance` each.
    hindrances: Mapping[str, str] = field(default_factory=dict)
    commit_seq: int | None = None
    rows: int | None = None
    bytes: int | None = None
    error: str | None = None
    created_at: datetime | None = None
    committed_at: datetime | None = None
    #: Whether retention took its output away.
    swept: bool = False
    #: Whether its own run saw it committed: clearing such a run asks for another revision.
    acknowledged: bool = False
    #: The Spark job of an attempt that outlives its submitter: whose attempt, its id, where its plan is.
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
        """Say whether it has its place in the order of its pipeline: no slot, and no replacement."""
        return self.slot is None and self.kind == "regular"

    @property
    def leased(self) -> bool:
        """Say whether somebody works on it right now."""
        return self.lease_left is not None and self.lease_left > 0


@dataclass(frozen=True)
class Participant:
    """One output (or voter) of a revision: the attempt it stands for, its vote, and what it voted for."""

    name: str
    kind: str
    attempt: int = 0
    vote: bool | None = None
    #: What a sink needs to promote, find or discard the staged output, in this process or any later one.
    handle: Json = field(default_factory=dict)
    #: Summary of the manifest: rows, bytes, files, digest, schema.
    manifest: Json = field(default_factory=dict)
    reason: str | None = None

    @property
    def stages(self) -> bool:
        """Say whether it stages output, in a place of its own; audits and approvals only vote."""
        return self.kind == "sink"

    @property
    def standing(self) -> Participant | None:
        """Return it as it was last voted for: what a restage takes the place of counts until the new vote."""
        if self.vote:
            return self
        kept = self.handle.get("standing")
        return None if kept is None else replace(self, vote=True, **kept)
