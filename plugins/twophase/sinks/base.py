"""What a checkpoint writes: the few methods that every sink has, and what each must guarantee.

The proper sequence of calls for one revision and one sink, and who makes them:

    0. `join`      when a pipeline declares it: under which name. What the Spark job builds of it is never told.
    1. `prepare`   in the submitter, before anything is recorded: can this sink be written to? Creates what must exist.
    2. `place`     in the submitter, inside the transaction that opens an attempt: names a staging place private to the
                   attempt, and what its promotion replaces. It touches nothing, and is in the record before step 3.
    3. `stage`     in the Spark driver and its executors: writes there, invisibly to every reader, makes it durable, and
                   returns the manifest's summary: rows, bytes, schema, and a digest that stands for all of it.
                   (A Spark job of the user's own writes to `staging_path`; `inspect` then does the rest.)
    4. `check`     in the submitter: compares storage with the manifest. Only then is the yes vote recorded.
       ---- the commit point ----
    5. `promote`   in the committer: one atomic step that makes the output visible and carries its marker.
       `find`      in recovery, and after a promotion whose outcome is unknown: where does it stand, by its marker?
       or, instead of 5, after the move to ABORTING: `discard`.
       A restage of what is decided is steps 1 to 5 again; before its vote `discard_earlier` sees to it that nobody can
       promote what earlier attempts staged, and `find` reads the marker once more.

`promote`, `find`, `check`, `discard` and `discard_earlier`

- may be **repeated**: by the same process, or by another one after a crash in the middle of them. The second call finds
  what the first one did by the marker, never by its own memory, and changes nothing.
- may be **late**: from a process that was stopped for an hour while others promoted, replaced and swept. It must not
  bring back what was replaced, nor show anything twice; so what it does and the look at the marker are one step.
- may be **interrupted** anywhere. What they leave the next call finds, or the sweeper does, by `attempts`.
- may **race** with themselves in other processes: one of them promotes, the others see ALREADY_PROMOTED.

A promotion ends in one of five outcomes (`Outcome`): PROMOTED, ALREADY_PROMOTED, RETRY_LATER (down or locked, nothing
changed), FAILED (for a reason that only a person can mend; the marker was read again before saying so) or UNKNOWN (the
reply was lost: `find` is asked next). They never raise for these.

The handle of `promote` has, beside what `place` named, `commit_seq` and `receipt`: what the record knows of the
decision. A sink that keeps the latter before it shows anything lets a record that was restored from a backup be brought
up to what its sinks hold (`twophase reconcile`).

A sink that keeps its marker as a high-water mark declares `ordered`: then no promotion of the pipeline overtakes
another in it, replacements included. A sink that cannot take back what it has shown says so in `objection`.
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


#: How often what earlier attempts staged is looked for, before it is left to whoever comes next.
LOOKS = 20
#: How many looks have to agree that nothing is there: one alone may miss what is renamed at that moment.
ENOUGH = 2


class Attempt(NamedTuple):
    """Something an attempt left on storage, as the sweeper sees it; the key's pipeline is the asker's."""

    checkpoint_id: int
    revision: int
    attempt: int
    path: str
    #: A manifest: unlike staged output it stays of use after the promotion of its attempt.
    manifest: bool = False


class Superseded(NamedTuple):
    """A revision that a later one took the place of, as it lies on storage."""

    checkpoint_id: int
    revision: int
    path: str


def two_owners(what: str, owner: str) -> str:
    """Say why a pipeline may not write to what is another's, and what can be done."""
    way = f"hand this one over: `twophase hand-over {owner} …`"
    return f"{what} belongs to pipeline {owner!r}, and two cannot share one; write to another table, or {way}"


def until_gone(
    key: Key, attempt: int, attempts: Callable[[], Iterable[Attempt]], remove: Callable[[Attempt], None]
) -> None:
    """Remove what attempts before one staged, until two looks in a row find nothing of them.

    Their promoters may be at it, and move what they took while it is looked for. Manifests stay: one of them may say
    what was promoted before.
    """
    missed = 0
    for _ in range(LOOKS):
        found = [a for a in attempts() if a[:2] == key[1:] and a.attempt < attempt and not a.manifest]
        missed = 0 if found else missed + 1
        if missed == ENOUGH:
            return
        for left in found:
            remove(left)
    msg = f"checkpoint {key}: what attempts before {attempt} staged is still being moved about; try again"
    raise SinkUnavailable(msg)


class Sink(Declared):
    """One output of a pipeline. Subclasses say how it is staged, promoted, found and discarded."""

    public_module = "twophase.sinks"
    #: These two are for sinks of a user's own that do not say it themselves.
    identity: ClassVar[tuple[str, ...]] = ("format", "timezone", "partition_by", "slot_folder", "slot_column")
    fixed_while_pending: ClassVar[tuple[str, ...]] = ("path", "table", "catalog", "mode", "key")

    #: The pipeline that declares it; None: it was built by itself.
    pipeline: str | None = None

    #: Whether promotion copies or moves the staged output away, so that what is left in staging is dead (R11).
    copies = True
    #: Whether its promotions have to follow each other by commit_seq, replacements included (R12).
    ordered = False
    #: Whether the places of its slots go by a clock, and by that of which time zone; None: UTC's.
    zoned: bool = False
    timezone: str | None = None

    @property
    def slotted(self) -> bool:
        """Say whether a slot owns a place of its own in it."""
        return False

    @abstractmethod
    def location(self) -> str:
        """Return what nobody else may write to: two pipelines on one location are refused."""

    def join(self, pipeline: str, name: str, *, slotted: bool = False) -> None:  # noqa: ARG002 - for those that care
        """Hear which pipeline declares it, under which name, and whether it goes by slots: all outlive restarts."""
        self.pipeline = pipeline

    def owner(self) -> str | None:
        """Return the pipeline that the target itself names as its owner; None: it names none."""
        return None

    def hand_over(self, to: str) -> None:  # noqa: ARG002 - for sinks that can
        """Let the target belong to another pipeline from now on; ConfigError if what it holds stands in the way."""
        self._refuse(
            "what it holds is known by the checkpoints of its pipeline; let the other one write to another table"
        )

    def connections(self) -> tuple[str, ...]:
        """Return the ids of the connections that `stage` needs: they reach the Spark driver by its environment."""
        return ()

    def reading_connections(self) -> tuple[str, ...]:
        """Return the ids of the connections that `read` needs in the Spark job of a pipeline that reads this sink."""
        return self.connections()

    def objection(self, *, latest: bool) -> str | None:  # noqa: ARG002 - for sinks that cannot
        """Say why a committed checkpoint cannot be run again here; None: it can.

        `latest`: nothing that stays as it is came after it. It is the latest of its pipeline, or one of a replay that
        goes on through the latest; slots do not come after each other.
        """
        return None

    def folders(self) -> tuple[str, ...]:
        """Return the folders that are this sink's own: nothing else may be read from or written into them."""
        return ()

    def prepare(self, slot: str | None = None) -> None:
        """Check, before anything is recorded, that this sink can be written to; create what must exist."""

    def claim(self, slot: str) -> Claim | None:  # noqa: ARG002 - for sinks where slots have places of their own
        """Return what a slot alone may write; None: slots do not meet in it. Looks at nothing."""
        return None

    def adopt(self, key: Key, slot: str) -> Output | None:  # noqa: ARG002 - for sinks that can
        """Describe what is in the slot's place though nobody recorded it, and mark it; None: there is nothing."""
        return None

    @abstractmethod
    def place(
        self, key: Key, attempt: int, token: str, *, slot: str | None = None, older: Output | None = None
    ) -> Json:
        """Name a staging place private to this attempt, and what its promotion replaces; touches nothing."""

    @abstractmethod
    def stage(self, frame: Any, key: Key, attempt: int, sink: str, handle: Json) -> Json:  # noqa: ANN401 - a DataFrame
        """Write the frame to the staging place, durably; return the manifest's summary. Runs in the Spark driver."""

    def staging_path(self, key: Key, handle: Json) -> str:  # noqa: ARG002 - for sinks that can
        """Return where a Spark job of the user's own writes what `inspect` then looks at."""
        self._refuse("it is written by a transform, not by a job of one's own")

    def inspect(self, key: Key, attempt: int, sink: str, handle: Json) -> Json:  # noqa: ARG002 - for sinks that can
        """Make durable what such a job wrote; return the manifest's summary. Runs in the submitter."""
        self._refuse("it is written by a transform, not by a job of one's own")

    @abstractmethod
    def check(self, key: Key, handle: Json, manifest: Json) -> None:
        """Raise ManifestMismatch unless storage holds all that the manifest says."""

    def staged(self, key: Key, handle: Json, manifest: Json) -> RowSet:  # noqa: ARG002 - for sinks that can
        """Return what an attempt staged, for audits and comparisons."""
        self._refuse("it cannot be audited; leave it out with on=…")

    def changing(self, key: Key, handle: Json, manifest: Json) -> tuple[RowSet, RowSet] | None:  # noqa: ARG002 - for sinks that can
        """Return the rows that a staged output would change, as they are and as they would be.

        For sinks that go by keys, or take out rows of others. None: it is compared with the one that it replaces.
        """
        return None

    @abstractmethod
    def find(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Say where the output stands without changing it."""

    @abstractmethod
    def promote(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Make the staged output visible, atomically and once."""

    @abstractmethod
    def discard(self, key: Key, handle: Json) -> None:
        """Remove what the attempts of a dead revision staged."""

    def discard_earlier(self, key: Key, attempt: int, handle: Json) -> None:  # noqa: ARG002 - for sinks that go by it
        """Remove what earlier attempts of a decided revision staged, so that nobody can promote it any more (R21).

        Called by a restage, once the new attempt is staged. `handle` is that of what was voted for last.
        """
        until_gone(key, attempt, self.attempts, self.remove)

    @abstractmethod
    def attempts(self) -> Iterator[Attempt]:
        """List what attempts left on storage outside the table."""

    def left_by(self, revisions: Mapping[tuple[int, int], int]) -> Iterator[Attempt]:  # noqa: ARG002 - for sinks that can
        """List what attempts of these revisions (checkpoint, revision → newest attempt) left, and what else is at hand.

        A sink that would have to go through its whole history for all of it goes by the revisions.
        """
        return self.attempts()

    @abstractmethod
    def remove(self, left: Attempt) -> None:
        """Remove one of those; the record said that it is dead."""

    def superseded(self) -> Iterator[Superseded]:
        """List the revisions that later ones took the place of, as far as the sink keeps them."""
        return iter(())

    def forget(self, old: Superseded) -> None:
        """Remove one of those; the record said that its retention is over."""

    @abstractmethod
    def verify(self, output: Output) -> Iterator[str]:
        """Compare a committed revision with what the sink holds; yield each difference in words."""

    def strangers(self, known: Iterable[Output]) -> Iterator[str]:  # noqa: ARG002 - for sinks that can
        """Yield what is visible in the sink but is no committed checkpoint's, as far as that can be told."""
        return iter(())

    # --- for a record that is older than the sink --------------------------------------------------------------------

    def newest(self, pipeline: str) -> int | None:  # noqa: ARG002 - for sinks that can
        """Return the highest commit_seq that it was given of a pipeline, 0 for none; one cheap look, whatever it holds.

        None: it was never told a number, and only `markers` can say what it holds.
        """
        return None

    def receipts(self, pipeline: str, since: int) -> Iterator[Json]:  # noqa: ARG002 - for sinks that can
        """Yield the receipts that it keeps of a pipeline's decisions, from one commit_seq on, in order."""
        return iter(())

    def markers(self, pipeline: str) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - for sinks that can
        """Yield checkpoint and revision of all that it shows of a pipeline, as far as it can tell, however much."""
        return iter(())

    # --- reading: for sinks that can be read by the record -----------------------------------------------------------

    def check_readable(self, outputs: Sequence[Output] = ()) -> None:  # noqa: ARG002 - for sinks where it depends
        """Raise ConfigError unless decided revisions, these if any, can be read by the record."""
        if type(self).read is Sink.read:
            self._refuse("it cannot be read by the record; read it with its own tools")

    def stands(self, output: Output) -> bool:  # noqa: ARG002 - for sinks that can
        """Say whether the output of a decided revision can be read: it is visible, or kept after its replacement."""
        self._refuse("it cannot be read by the record; read it with its own tools")

    def files(self, output: Output) -> list[str]:  # noqa: ARG002 - for sinks that can
        """List the files of a decided revision."""
        self._refuse("it is no table of files; read it with its own tools")

    def read(self, spark: Any, outputs: Sequence[Output]) -> Any:  # noqa: ANN401, ARG002 - a SparkSession, a DataFrame
        """Return a frame over decided revisions."""
        self._refuse("it cannot be read by the record; read it with its own tools")

    def committed(self, output: Output) -> RowSet:  # noqa: ARG002 - for sinks that can
        """Return what a decided revision holds, for comparisons."""
        self._refuse("it cannot be compared")

    def _refuse(self, why: str) -> NoReturn:
        msg = f"{type(self).__name__} {self.location()}: {why}"
        raise ConfigError(msg)

    def widens(self, before: str, after: str) -> bool:  # noqa: ARG002 - for sinks that can
        """Say whether a column of one type may go on as one of another: with what is there, and all who read it."""
        return False

    def by_position(self) -> bool:
        """Say whether readers know columns by position, so that new ones must come last."""
        return False
