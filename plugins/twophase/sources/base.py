"""`Source`, the base of what a checkpoint reads, and who calls its methods.

The coordinator calls `discover` and `fix` at begin, and `settle` and `report` after COMMITTED. The runner or the stage
task calls `written_again` and `summed` before each attempt, and `check` before each attempt and each vote. The Spark
driver calls `read` and `sifted`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from twophase.core.declared import Declared
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from twophase.core.checkpoint import Input, InputFile, Known, Position
    from twophase.core.claims import Claim
    from twophase.core.ports import Progress
    from twophase.sinks.base import Sink


class Sifted(NamedTuple):
    """A fixed input as two DataFrames; each record is in exactly one of them."""

    good: Any
    #: None: the source has no quarantine, a bad record fails the attempt.
    bad: Any = None
    #: Raises ConfigError if the transform cleared the cache that keeps the two apart.
    check: Callable[[], None] = lambda: None


class Source(Declared):
    """One input of a pipeline. Subclasses implement how it is found, fixed, read and settled."""

    public_module = "twophase.sources"
    #: Defaults for users' own sources that do not set these two.
    identity: ClassVar[tuple[str, ...]] = ("format", "timezone")
    fixed_while_pending: ClassVar[tuple[str, ...]] = ("path", "table", "catalog")

    #: Whether its input belongs to slots.
    slotted: bool = False
    #: Whether its slots have times, and in which time zone; None: UTC.
    zoned: bool = False
    timezone: str | None = None
    #: Whether each revision fixes its input again; otherwise the input is the checkpoint's for ever.
    per_revision: bool = False
    #: A lookup table: no checkpoint fixes it, and it starts none.
    unversioned: bool = False

    def folders(self) -> tuple[str, ...]:
        """Return the folders of this source; no write may overlap them."""
        return ()

    def claim(self, slot: str) -> Claim | None:  # noqa: ARG002 - for sources that go by slots
        """Return the place that only this slot may read; None: slots may read the same. Touches nothing."""
        return None

    def prepare(self) -> None:
        """Check, before anything is recorded, that this source can be read."""

    @abstractmethod
    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> Any:  # noqa: ANN401 - only this source's own `fix` looks into it
        """Look for input, of a slot if the source is slotted; may be slow, holds no lock.

        `known` is what `fix` last asked the record to remember, if anything, and `position` how far each partition was
        read.
        """

    @abstractmethod
    def fix(self, found: Any, progress: Progress) -> Input:  # noqa: ANN401 - see discover
        """Choose this checkpoint's input from what was found; fast, without calls outside the record."""

    @abstractmethod
    def check(self, fixed: Input) -> None:
        """Raise InputChanged, naming what changed, unless the fixed input is still what it was."""

    def check_unread(self, fixed: Input) -> None:
        """Raise InputChanged if the fixed input cannot be read any more; asked before each attempt, not at votes."""

    def written_again(self, fixed: Input) -> list[InputFile]:  # noqa: ARG002 - for sources of files
        """Return the files that have another time but the same bytes, as they look now; may be slow."""
        return []

    def summed(self, fixed: Input) -> list[InputFile]:  # noqa: ARG002 - likewise
        """Return the files whose checksum was unknown and cheap to compute, with their checksums."""
        return []

    @abstractmethod
    def read(self, spark: Any, fixed: Input, slot: str | None = None) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return the fixed input as a DataFrame. Runs in the Spark driver."""

    def connections(self, fixed: Input) -> tuple[str, ...]:  # noqa: ARG002 - for sources that need some
        """Return the ids of the connections that `read` needs; the Spark driver gets them in its environment."""
        return ()

    def paths(self, fixed: Input) -> list[str]:  # noqa: ARG002 - for sources that can
        """Return the full paths of a fixed input's files, for a user's own Spark job."""
        msg = f"{type(self).__name__}: its input is no list of files; give the pipeline a transform"
        raise ConfigError(msg)

    def quarantine(self) -> Sink | None:
        """Return the table that bad records go to, written under the same checkpoint; None: there is none."""
        return None

    @contextmanager
    def sifted(self, spark: Any, fixed: Input, slot: str | None = None) -> Iterator[Sifted]:  # noqa: ANN401 - see read
        """Yield good and bad records of the fixed input as two frames, valid inside the block. Runs in the driver."""
        yield Sifted(self.read(spark, fixed, slot))

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Return an error that names the record or file that made Spark fail; None: the input was not the cause."""

    @property
    def settles(self) -> bool:
        """Return True if input files are archived or deleted after COMMITTED."""
        return False

    def ends(self, partitions: Iterable[str]) -> Mapping[str, int]:  # noqa: ARG002 - for sources of offsets
        """Return where these partitions end now, for people; those of which it is not known are left out."""
        return {}

    def moved(self, wanted: Mapping[str, str]) -> Mapping[str, Position]:
        """Return the positions that a person wants to move to; ConfigError if the source has no such place."""
        msg = f"{type(self).__name__}: its positions cannot be moved: {', '.join(wanted)}"
        raise ConfigError(msg)

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        """Archive or delete a committed checkpoint's files, as `after_commit` says; repeatable. Then names are free."""

    @property
    def reports(self) -> bool:
        """Return True if `report` is to be called after COMMITTED."""
        return False

    def report(self, offsets: Mapping[str, int]) -> None:
        """Tell others how far each partition is committed; for monitoring only, nothing here depends on it."""
