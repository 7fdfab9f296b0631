"""What a checkpoint reads.

`discover` and `fix` run at begin, in the coordinator; `check` before each attempt and before each vote, in the
submitter; `read` in the Spark driver; `settle` after COMMITTED.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from twophase.core.declared import Declared

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twophase.core.checkpoint import Input, InputFile
    from twophase.core.ports import Progress


class Source(Declared):
    """One input of a pipeline. Subclasses say how it is found, fixed, read and settled."""

    def folders(self) -> tuple[str, ...]:
        """Return the folders that are this source's own: nothing may be written into them."""
        return ()

    def prepare(self) -> None:
        """Check, before anything is recorded, that this source can be read."""

    @abstractmethod
    def discover(self) -> Any:  # noqa: ANN401 - only this source's own `fix` looks into it
        """Look for input; may be slow, holds no lock."""

    @abstractmethod
    def fix(self, found: Any, progress: Progress) -> Input:  # noqa: ANN401 - see discover
        """Choose what this checkpoint reads out of what was found; fast, no outside calls."""

    @abstractmethod
    def check(self, fixed: Input) -> None:
        """Raise InputChanged, naming the part, unless the fixed input is still what it was."""

    @abstractmethod
    def read(self, spark: Any, fixed: Input) -> Any:  # noqa: ANN401 - a SparkSession, a DataFrame
        """Return the fixed input as a DataFrame. Runs in the Spark driver."""

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Say which record of the input made Spark fail with this error, if it was one; looks only after a failure."""

    @property
    def settles(self) -> bool:
        """Say whether there is anything to do with input files after COMMITTED."""
        return False

    def settle(self, checkpoint_id: int, files: Iterable[InputFile]) -> None:
        """Do what `after_commit` asks with a committed checkpoint's files; repeatable. Then their names are free."""
