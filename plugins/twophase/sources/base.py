"""What a checkpoint reads.

`discover` and `fix` run at begin, in the coordinator; `written_again` and `summed` before each attempt, `check` before
each attempt and before each vote, in the submitter; `read` and `sifted` in the Spark driver; `settle` after COMMITTED.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from twophase.core.declared import Declared
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from twophase.core.checkpoint import Input, InputFile, Known
    from twophase.core.claims import Claim
    from twophase.core.ports import Progress
    from twophase.sinks.base import Sink


class Sifted(NamedTuple):
    """A fixed input as two DataFrames; each record is in one of them."""

    good: Any
    #: None: the source has no quarantine, a bad record fails the attempt.
    bad: Any = None
    #: Raises ConfigError if the transform undid what keeps them apart.
    check: Callable[[], None] = lambda: None


class Source(Declared):
    """One input of a pipeline. Subclasses say how it is found, fixed, read and settled."""

    public_module = "twophase.sources"
    #: These two are for sources of a user's own that do not say it themselves.
    identity: ClassVar[tuple[str, ...]] = ("format", "timezone")
    fixed_while_pending: ClassVar[tuple[str, ...]] = ("path", "table", "catalog")

    #: Goes by slots: begin is told which one.
    slotted: bool = False
    #: Whether its slots go by a clock, and by that of which time zone; None: UTC's.
    zoned: bool = False
    timezone: str | None = None
    #: Each revision fixes its own input anew; otherwise the checkpoint's input is for ever.
    per_revision: bool = False
    #: A lookup table: no checkpoint fixes it, and it brings no input of its own.
    unversioned: bool = False

    def folders(self) -> tuple[str, ...]:
        """Return the folders that are this source's own: nothing may be written into them."""
        return ()

    def claim(self, slot: str) -> Claim | None:  # noqa: ARG002 - for sources that go by slots
        """Return what a slot alone may read; None: slots may read the same. Looks at nothing."""
        return None

    def prepare(self) -> None:
        """Check, before anything is recorded, that this source can be read."""

    @abstractmethod
    def discover(self, slot: str | None = None, known: Known | None = None) -> Any:  # noqa: ANN401 - only this source's own `fix` looks into it
        """Look for input, of a slot if the source goes by slots; may be slow, holds no lock.

        `known` is what `fix` asked to be remembered when it was last called, if it ever does.
        """

    @abstractmethod
    def fix(self, found: Any, progress: Progress) -> Input:  # noqa: ANN401 - see discover
        """Choose what this checkpoint reads out of what was found; fast, no outside calls."""

    @abstractmethod
    def check(self, fixed: Input) -> None:
        """Raise InputChanged, naming the part, unless the fixed input is still what it was."""

    def written_again(self, fixed: Input) -> list[InputFile]:  # noqa: ARG002 - for sources of files
        """Return those of the files that have another time and the same bytes, as they look now; may be slow."""
        return []

    def summed(self, fixed: Input) -> list[InputFile]:  # noqa: ARG002 - likewise
        """Return the files whose checksum was not known and is cheap to take, with it."""
        return []

    @abstractmethod
    def read(self, spark: Any, fixed: Input, slot: str | None = None) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return the fixed input as a DataFrame. Runs in the Spark driver."""

    def connections(self, fixed: Input) -> tuple[str, ...]:  # noqa: ARG002 - for sources that need some
        """Return the ids of the connections that `read` needs: they reach the Spark driver by its environment."""
        return ()

    def paths(self, fixed: Input) -> list[str]:  # noqa: ARG002 - for sources that can
        """Return the files of a fixed input in full, for a Spark job that reads them by itself."""
        msg = f"{type(self).__name__}: its input is no list of files; give the pipeline a transform"
        raise ConfigError(msg)

    def quarantine(self) -> Sink | None:
        """Return the table that bad records go to, written under the same checkpoint; None: there is none."""
        return None

    @contextmanager
    def sifted(self, spark: Any, fixed: Input, slot: str | None = None) -> Iterator[Sifted]:  # noqa: ANN401 - see read
        """Yield the fixed input with its bad records apart; both frames hold until the end. Runs in the driver."""
        yield Sifted(self.read(spark, fixed, slot))

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Say which record of the input made Spark fail with this error, if it was one; looks only after a failure."""

    @property
    def settles(self) -> bool:
        """Say whether there is anything to do with input files after COMMITTED."""
        return False

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        """Do what `after_commit` asks with a committed checkpoint's files; repeatable. Then their names are free."""
