"""`Committed`, the source that reads what another pipeline committed to a sink, by ranges of its commit_seq.

So records pass through several pipelines exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from twophase.changelog import CHANGE, CHECKPOINT
from twophase.core.checkpoint import Input, Known, Position
from twophase.core.errors import ConfigError, InputChanged
from twophase.sinks.base import Sink
from twophase.sources import bad_records
from twophase.sources.base import Source
from twophase.storage.spark_paths import ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from twophase.core.ports import Progress

#: The only partition of such a source; its offsets are the other pipeline's commit_seq.
SEQ = "commit_seq"


class Committed(Source):
    """The checkpoints that another pipeline committed since the last one that was read here.

    A checkpoint is read once, after its first commit. If it is replaced upstream later, what was made from it here is
    stale, until a new revision reads the replacement.
    """

    identity = ("pipeline", "sink", "changes")
    fixed_while_pending = ()

    per_revision = True

    def __init__(self, pipeline: str, sink: str, *, max_checkpoints: int | None = None, changes: bool = False) -> None:
        """Name the other pipeline and its write, and how many of its checkpoints one checkpoint here reads at most.

        With `changes` what it changed is read, as a changelog: `_change` says +I, -U, +U or -D, and `_checkpoint` is
        the number of the other pipeline's checkpoint.
        """
        self.pipeline = pipeline
        self.sink = sink
        self.changes_only = changes
        if not isinstance(changes, bool):
            msg = f"{self._who}: changes: expected True or False, found {changes!r}"
            raise ConfigError(msg)
        self.max_checkpoints = max_checkpoints
        if max_checkpoints is not None and not (type(max_checkpoints) is int and max_checkpoints > 0):
            msg = f"{self._who}: max_checkpoints {max_checkpoints!r}: expected a whole number above 0"
            raise ConfigError(msg)

    @property
    def _who(self) -> str:
        return f"committed source {self.pipeline}.{self.sink}"

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "pipeline": self.pipeline,
            "sink": self.sink,
            "max_checkpoints": self.max_checkpoints,
            **({"changes": True} if self.changes_only else {}),
        }

    def discover(
        self,
        slot: str | None = None,
        known: Known | None = None,
        position: Mapping[str, Position] | None = None,
    ) -> None:
        """Do nothing: what is committed is in the record, which `fix` asks."""

    def fix(self, found: None, progress: Progress) -> Input:  # noqa: ARG002 - see discover
        """Take what was committed since, or for a later revision what is committed now in the checkpoint's range."""
        if mine := progress.fixed().get(SEQ):
            start, end = mine
            standing = progress.committed(self.pipeline, self.sink, start, end, None)
        else:
            start = progress.position().get(SEQ, 1)
            standing = progress.committed(self.pipeline, self.sink, start, None, self.max_checkpoints)
            end = standing.end if standing.outputs else start
        if standing.upstream:
            sink = Sink.load(dict(standing.upstream["sink"]))
            (sink.check_changes if self.changes_only else sink.check_readable)(standing.outputs)
        return Input(ranges={SEQ: (start, end)}, outputs=standing.outputs, upstream=standing.upstream)

    def check(self, fixed: Input) -> None:
        """Raise InputChanged unless the output of every revision that is read is still there."""
        if fixed.upstream is None:
            return
        sink = self._sink(fixed)
        for output in fixed.outputs:
            if not sink.stands(output):
                msg = (
                    f"{self._who}: checkpoint {output.key}: expected it in {sink.location()} or kept after its"
                    " replacement, found neither; run again to read what stands now"
                )
                raise InputChanged(msg)

    def _sink(self, fixed: Input) -> Sink:
        return Sink.load(dict((fixed.upstream or {})["sink"]))

    def connections(self, fixed: Input) -> tuple[str, ...]:
        """Return the connections that are needed to read the other pipeline's sink."""
        return self._sink(fixed).reading_connections() if fixed.outputs else ()

    def paths(self, fixed: Input) -> list[str]:
        """Return the files of these revisions, also if they were moved after a replacement."""
        return [path for output in fixed.outputs for path in self._sink(fixed).files(output)]

    def read(self, spark: SparkSession, fixed: Input, slot: str | None = None) -> DataFrame:  # noqa: ARG002 - see discover
        """Return a frame over exactly these revisions, also if they were moved after a replacement."""
        if not fixed.outputs:
            schema = (fixed.upstream or {}).get("schema")
            if not schema:
                msg = f"{self._who}: nothing was committed there yet, so its columns are not known; run it first"
                raise ConfigError(msg)
            return spark.createDataFrame([], ddl(self._columns(schema)))
        if self.changes_only:
            return cast("DataFrame", self._sink(fixed).read_changes(spark, fixed.outputs))
        return cast("DataFrame", self._sink(fixed).read(spark, fixed.outputs).drop("checkpoint"))

    def _columns(self, schema: Iterable[Sequence[str]]) -> list[Sequence[str]]:
        """Return the columns of what is read, from those that were written."""
        if not self.changes_only:
            return list(schema)
        return [*(column for column in schema if column[0] != CHANGE), (CHANGE, "string"), (CHECKPOINT, "bigint")]

    def explain(self, fixed: Input, error: Exception) -> Exception | None:
        """Explain a read error: most likely a revision was replaced or removed while Spark read its files."""
        text = bad_records.text_of(error)
        remedy = "restore the file, or run that checkpoint again"
        if found := bad_records.unread(self._who, text, lambda: self.check(fixed), remedy):
            return found
        if not fixed.outputs or not bad_records.is_about_input(text):
            return None
        msg = f"{self._who}: a revision was replaced or removed while it was read; run again"
        return InputChanged(msg)
