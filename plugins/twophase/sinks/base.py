"""The base class of all sinks: which methods a sink has, who calls each of them, and what each must guarantee.

The calls for one revision and one sink, in order, and who makes them:

    0. `join`      when a pipeline declares the sink: says the pipeline and the name of the write. The copy of the sink
                   that the Spark job builds does not get this call.
    1. `prepare`   in the submitter, before anything is recorded: checks that the sink can be written to, and creates
                   what must exist.
    2. `place`     in the submitter, inside the transaction that opens an attempt: names a staging place private to the
                   attempt, and what its promotion replaces. It touches nothing, and is in the record before step 3.
    3. `stage`     in the Spark driver and its executors: writes to that place, which no reader looks at, makes it
                   durable, and returns the manifest's summary: rows, bytes, schema, and a digest that stands for it.
                   (A Spark job of the user's own writes to `staging_path`; `inspect` then does the rest.)
    4. `check`     in the submitter: compares storage with the manifest. Only then is the yes vote recorded.
       ---- the commit point ----
    5. `promote`   in the committer: one atomic step that makes the output visible and carries its marker.
       `find`      in recovery, and after a promotion whose outcome is unknown: reads the marker, and says whether the
                   output is promoted.
       Instead of 5, after the move to ABORTING: `discard`.
       A restage of a decided revision makes steps 1 to 5 again. Before its vote `discard_earlier` removes what earlier
       attempts staged, so that nobody can promote it, and `find` reads the marker once more.

`promote`, `find`, `check`, `discard` and `discard_earlier`

- may be **repeated**: by the same process, or by another one after a crash in the middle of them. The second call sees
  by the marker what the first one did, never by its own memory, and changes nothing.
- may be **late**: from a process that was stopped for an hour while others promoted, replaced and swept. It must not
  bring back what was replaced, nor show anything twice. So reading the marker and acting on it are one atomic step.
- may be **interrupted** anywhere. The next call finds what was left behind, or the sweeper does, by `attempts`.
- may **race** with themselves in other processes: one of them promotes, the others see ALREADY_PROMOTED.

A promotion ends in one of five outcomes (`Outcome`): PROMOTED, ALREADY_PROMOTED, RETRY_LATER (down or locked, nothing
changed), FAILED (a person has to act; the marker was read again before saying so) or UNKNOWN (the reply was lost:
`find` is called next). `promote` and `find` return these; they do not raise.

Each of them is given one value, the `Output` of an attempt: its key and number, the handle that `place` named, the
name of the write, the manifest once it is staged, and of a decided revision `commit_seq` and `began`. `promote` also
gets the `receipt`, which is what the record knows of the decision. A sink that stores it before it shows any output can
tell a restored record what that has forgotten (`twophase reconcile`).

A sink that keeps its marker as a high-water mark declares `ordered`: then its promotions follow each other by
`commit_seq`, replacements included. A sink that cannot take back what it has shown says so in `objection`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from twophase.core.declared import Declared
from twophase.core.errors import ConfigError, SinkUnavailable

if TYPE_CHECKING:
    from twophase.core.checkpoint import Json, Key, Output
    from twophase.core.claims import Claim
    from twophase.core.ports import Promotion
    from twophase.row_queries.base import RowSet


#: How often `until_gone` looks for what earlier attempts staged, before it gives up with SinkUnavailable.
LOOKS = 20
#: How many looks in a row have to find nothing: one alone may miss a folder that is renamed at that moment.
ENOUGH = 2


class Attempt(NamedTuple):
    """Something an attempt left on storage, as the sweeper sees it; the pipeline is the one that is being swept."""

    checkpoint_id: int
    revision: int
    attempt: int
    path: str
    #: True: it is a manifest, which is still needed after the promotion of its attempt; staged output is not.
    manifest: bool = False


class Superseded(NamedTuple):
    """A superseded revision that is still on storage."""

    checkpoint_id: int
    revision: int
    path: str


def two_owners(what: str, owner: str) -> str:
    """Return the message for a table that belongs to another pipeline, with the remedy."""
    way = f"hand this one over: `twophase hand-over {owner} …`"
    return f"{what} belongs to pipeline {owner!r}, and two cannot share one; write to another table, or {way}"


def until_gone(output: Output, attempts: Callable[[], Iterable[Attempt]], remove: Callable[[Attempt], None]) -> None:
    """Remove what attempts before this one staged, until two looks in a row find nothing.

    Promoters of those attempts may still be moving folders, so a single look may miss one. Manifests stay: one of them
    may describe what was promoted before.
    """
    missed = 0
    for _ in range(LOOKS):
        mine = [a for a in attempts() if a[:2] == output.key[1:]]
        found = [a for a in mine if a.attempt < output.attempt and not a.manifest]
        missed = 0 if found else missed + 1
        if missed == ENOUGH:
            return
        for left in found:
            remove(left)
    msg = f"checkpoint {output.key}: what attempts before {output.attempt} staged is still being moved about; try again"
    raise SinkUnavailable(msg)


class Sink(Declared):
    """One output of a pipeline. Subclasses say how it is staged, promoted, found and discarded."""

    public_module = "twophase.sinks"
    #: The defaults for a user's own sink that does not declare these two itself.
    identity: ClassVar[tuple[str, ...]] = ("format", "timezone", "partition_by", "slot_folder", "slot_column")
    fixed_while_pending: ClassVar[tuple[str, ...]] = ("path", "table", "catalog", "mode", "key")

    #: The pipeline that declares the sink; None: it is not part of a pipeline.
    pipeline: str | None = None

    #: What rows the write holds: see `modes.py`.
    mode: str = "append"
    #: Whether promotion copies or moves the staged output away, so that what is left in staging is dead (R11).
    copies = True
    #: Whether promotions have to follow each other by commit_seq, replacements included (R12).
    ordered = False
    #: Names of columns that `stage` adds to the rows: they are in the manifest, and the transform does not return them.
    added_columns: frozenset[str] = frozenset()
    #: Whether the place of a slot depends on local time, and the time zone that counts; None: UTC.
    zoned: bool = False
    timezone: str | None = None

    @property
    def slotted(self) -> bool:
        """Say whether each slot owns a place of its own in this sink."""
        return False

    @abstractmethod
    def location(self) -> str:
        """Return the place that only one pipeline may write to: a second one on the same location is refused."""

    def join(self, pipeline: str, name: str, *, slotted: bool = False) -> None:  # noqa: ARG002 - for those that care
        """Take note of the pipeline that declares this sink, the name of the write, and whether it goes by slots."""
        self.pipeline = pipeline

    def owner(self) -> str | None:
        """Return the pipeline that the target itself names as its owner; None if it names none."""
        return None

    def hand_over(self, to: str) -> None:  # noqa: ARG002 - for sinks that can
        """Make another pipeline the owner of the target; ConfigError if what the target holds forbids it."""
        self._refuse(
            "what it holds is known by the checkpoints of its pipeline; let the other one write to another table"
        )

    def connections(self) -> tuple[str, ...]:
        """Return the ids of the connections that `stage` needs; the Spark driver gets them in its environment."""
        return ()

    def reading_connections(self) -> tuple[str, ...]:
        """Return the ids of the connections that `read` needs in the Spark job of a pipeline that reads this sink."""
        return self.connections()

    def objection(self, *, latest: bool) -> str | None:  # noqa: ARG002 - for sinks that cannot
        """Say why a committed checkpoint cannot be run again here; None if it can.

        `latest`: True if no later checkpoint would keep output computed from the old revision. That is so for the
        latest checkpoint of a pipeline, and for those of a replay that goes on through the latest. Slots are unordered,
        so it is always true for them.
        """
        return None

    def folders(self) -> tuple[str, ...]:
        """Return the folders that belong to this sink alone: no other read or write may use them."""
        return ()

    def prepare(self, slot: str | None = None) -> None:
        """Check, before anything is recorded, that this sink can be written to; create what must exist."""

    def claim(self, slot: str) -> Claim | None:  # noqa: ARG002 - for sinks where slots have places of their own
        """Return the place that only this slot may write; None if slots cannot collide here. Reads no storage."""
        return None

    def adopt(self, key: Key, slot: str) -> Output | None:  # noqa: ARG002 - for sinks that can
        """Describe and mark unrecorded data that is in the slot's place already; None if there is none."""
        return None

    @abstractmethod
    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        """Name a staging place private to this attempt, and what its promotion replaces; touches nothing."""

    @abstractmethod
    def stage(self, frame: Any, output: Output) -> Json:  # noqa: ANN401 - a DataFrame
        """Write the frame to the staging place, durably; return the manifest's summary. Runs in the Spark driver."""

    def staging_path(self, output: Output) -> str:  # noqa: ARG002 - for sinks that can
        """Return the path that a Spark job of the user's own writes to; `inspect` looks at it afterwards."""
        self._refuse("it is written by a transform, not by a job of one's own")

    def inspect(self, output: Output) -> Json:  # noqa: ARG002 - for sinks that can
        """Make durable what the user's own job wrote; return the manifest's summary. Runs in the submitter."""
        self._refuse("it is written by a transform, not by a job of one's own")

    @abstractmethod
    def check(self, output: Output) -> None:
        """Raise ManifestMismatch unless storage holds all that the manifest says."""

    def staged(self, output: Output) -> RowSet:  # noqa: ARG002 - for sinks that can
        """Return what an attempt staged, for audits and comparisons."""
        self._refuse("it cannot be audited; leave it out with on=…")

    def changing(self, output: Output) -> tuple[RowSet, RowSet] | None:  # noqa: ARG002 - for sinks that can
        """Return the rows that a staged output would change: as they are now, and as they would be after promotion.

        For sinks that go by keys, or that remove rows of other checkpoints. None: the output is compared with the
        revision that it replaces.
        """
        return None

    @abstractmethod
    def find(self, output: Output) -> Promotion:
        """Say whether the output is promoted, staged or lost; change nothing."""

    @abstractmethod
    def promote(self, output: Output) -> Promotion:
        """Make the staged output visible, atomically and once."""

    @abstractmethod
    def discard(self, output: Output) -> None:
        """Remove what any attempt of an aborted revision staged; `output` is the newest of them."""

    def discard_earlier(self, output: Output, voted: Output) -> None:  # noqa: ARG002 - for sinks that go by it
        """Remove what attempts before this one staged, so that nobody can promote it any more (R21).

        A restage of a decided revision calls it once the new attempt is staged. `voted` is the attempt that was voted
        for last; the new one is staged where the sink is declared now.
        """
        until_gone(output, self.attempts, self.remove)

    @abstractmethod
    def attempts(self) -> Iterator[Attempt]:
        """List what attempts left on storage outside the table."""

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:  # noqa: ARG002 - for sinks that can
        """List what attempts of these revisions (checkpoint, revision → newest attempt) left; it may list more.

        A sink where `attempts` would go through the whole history looks for these revisions only.
        """
        return self.attempts()

    @abstractmethod
    def remove(self, left: Attempt) -> None:
        """Remove one leftover of `attempts`; the record said that it is dead."""

    def superseded(self) -> Iterator[Superseded]:
        """List the superseded revisions that the sink still keeps."""
        return iter(())

    def forget(self, old: Superseded) -> None:
        """Remove one superseded revision; the record said that its retention is over."""

    @abstractmethod
    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with what the sink holds; yield each difference in words."""

    def strangers(self, known: Iterable[Output]) -> Iterator[str]:  # noqa: ARG002 - for sinks that can
        """Yield what is visible in the sink but belongs to no committed checkpoint, as far as the sink can tell."""
        return iter(())

    # --- for a record that is older than the sink --------------------------------------------------------------------

    def newest(self, pipeline: str) -> int | None:  # noqa: ARG002 - for sinks that can
        """Return the highest commit_seq that the sink knows of a pipeline, 0 for none; cheap, however much it holds.

        None: the sink knows no numbers, and only `markers` can say what it holds.
        """
        return None

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:  # noqa: ARG002 - for sinks that can
        """Yield the receipts of a pipeline's decisions, from one commit_seq on, in order."""
        return iter(())

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - for sinks that can
        """Yield checkpoint and revision of a pipeline's visible output, as far as the sink can tell; may be slow."""
        return iter(())

    # --- reading: for sinks that can be read by the record -----------------------------------------------------------

    def check_readable(self, outputs: Sequence[Output] = ()) -> None:  # noqa: ARG002 - for sinks where it depends
        """Raise ConfigError unless the sink, and these revisions of it if any are given, can be read by the record."""
        if type(self).read is Sink.read:
            self._refuse("it cannot be read by the record; read it with its own tools")

    def stands(self, output: Output) -> bool:  # noqa: ARG002 - for sinks that can
        """Say whether the output of a decided revision can be read: it is visible, or kept after its replacement."""
        self._refuse("it cannot be read by the record; read it with its own tools")

    def files(self, output: Output) -> list[str]:  # noqa: ARG002 - for sinks that can
        """List the files of a decided revision."""
        self._refuse("it is no table of files; read it with its own tools")

    def read(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401, ARG002 - a SparkSession, a DataFrame
        """Return a DataFrame over decided revisions."""
        self._refuse("it cannot be read by the record; read it with its own tools")

    def check_changes(self, outputs: Sequence[Output]) -> None:
        """Raise ConfigError unless these revisions can be read as a changelog."""
        if self.mode not in {"append", "retract"}:
            self._refuse(f"what a checkpoint of mode {self.mode!r} changed is not told apart; read the table itself")
        self.check_readable(outputs)

    def read_changes(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return decided revisions as a changelog, with `_change` and the number of the checkpoint in `_checkpoint`."""
        from twophase.sinks import modes

        return modes.changes_of(self.read(spark, outputs), outputs, lambda output: self.read(spark, [output]))

    def committed(self, output: Output) -> RowSet:  # noqa: ARG002 - for sinks that can
        """Return the rows of a decided revision, for comparisons."""
        self._refuse("it cannot be compared")

    def _refuse(self, why: str) -> NoReturn:
        msg = f"{type(self).__name__} {self.location()}: {why}"
        raise ConfigError(msg)

    def widens(self, before: str, after: str) -> bool:  # noqa: ARG002 - for sinks that can
        """Say whether a column may change from one type to another, so that old data and all readers still work."""
        return False

    def by_position(self) -> bool:
        """Say whether readers know columns by position, so that new ones must come last."""
        return False
