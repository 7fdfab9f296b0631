"""What a checkpoint writes.

The proper sequence of calls, for one revision and one sink:

    1. `place`    in the coordinator: names a staging place private to the attempt; it is in the record before step 2
    2. `stage`    in the Spark driver: writes there, makes it durable, returns the manifest's summary
    3. `check`    in the submitter: compares storage with the manifest; only then is the yes vote recorded
    4. `promote`  in the committer, after the commit point: one atomic step that carries its marker
       or `discard`, after the move to ABORTING

`find` says where an output stands, `verify` proves it, `attempts` and `remove` let the sweeper clean by the record.
Steps 3 and 4 may come again, late, from several processes at once, or after a crash in the middle of themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from twophase.core.declared import Declared
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from twophase.core.checkpoint import Json, Key, Output
    from twophase.core.ports import Promotion
    from twophase.sinks.relations import Relation


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


class Sink(Declared):
    """One output of a pipeline. Subclasses say how it is staged, promoted, found and discarded."""

    #: Whether promotion copies or moves the staged output away, so that what is left in staging is dead (R11).
    copies = True

    @property
    def slotted(self) -> bool:
        """Say whether a slot owns a place of its own in it."""
        return False

    @abstractmethod
    def location(self) -> str:
        """Return what nobody else may write to: two pipelines on one location are refused."""

    def folders(self) -> tuple[str, ...]:
        """Return the folders that are this sink's own: nothing else may be read from or written into them."""
        return ()

    def prepare(self, slot: str | None = None) -> None:
        """Check, before anything is recorded, that this sink can be written to; create what must exist."""

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
        msg = f"{type(self).__name__} {self.location()}: it is written by a transform, not by a job of one's own"
        raise ConfigError(msg)

    def inspect(self, key: Key, attempt: int, sink: str, handle: Json) -> Json:  # noqa: ARG002 - for sinks that can
        """Make durable what such a job wrote; return the manifest's summary. Runs in the submitter."""
        msg = f"{type(self).__name__} {self.location()}: it is written by a transform, not by a job of one's own"
        raise ConfigError(msg)

    @abstractmethod
    def check(self, key: Key, handle: Json, manifest: Json) -> None:
        """Raise ManifestMismatch unless storage holds all that the manifest says."""

    def staged(self, key: Key, handle: Json, manifest: Json) -> Relation:  # noqa: ARG002 - for sinks that can
        """Return what an attempt staged, for audits and comparisons."""
        msg = f"{type(self).__name__} {self.location()}: it cannot be audited; leave it out with on=…"
        raise ConfigError(msg)

    @abstractmethod
    def find(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Say where the output stands without changing it."""

    @abstractmethod
    def promote(self, key: Key, handle: Json, manifest: Json) -> Promotion:
        """Make the staged output visible, atomically and once."""

    @abstractmethod
    def discard(self, key: Key, handle: Json) -> None:
        """Remove what the attempts of a dead revision staged."""

    @abstractmethod
    def attempts(self) -> Iterator[Attempt]:
        """List what attempts left on storage outside the table."""

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

    @abstractmethod
    def strangers(self, known: Iterable[Output]) -> Iterator[str]:
        """Yield what is visible in the sink but is no committed checkpoint's."""

    def by_position(self) -> bool:
        """Say whether readers know columns by position, so that new ones must come last."""
        return False
