"""`sql`, what a user declares of a continuous query; the record keeps its text, and Spark's stage job compiles it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twophase.core.declared import Declared
from twophase.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from twophase.spark.continuous.query import CompiledQuery

#: What is no word of a query: comments, texts and quoted names.
_NO_WORDS = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`", re.DOTALL)
#: What makes a result depend on more than one row.
_AGGREGATES = re.compile(
    r"\bgroup\s+by\b|\bdistinct\b|\bunion\b(?!\s+all\b)|\baggregate\b|\bhaving\b"
    r"|\b(?:sum|count|avg|mean|min|max|count_if|every|some|any|bool_and|bool_or)\s*\(",
    re.IGNORECASE,
)


class ContinuousQuery(Declared):
    """A query over the reads of a pipeline that goes on: each checkpoint gives the changes of its result."""

    def __init__(  # noqa: PLR0913 - what a user may declare
        self,
        text: str,
        *,
        mode: str | None = None,
        event_time: Mapping[str, Sequence[str]] | None = None,
        emit: str | None = None,
        retain: str = "7d",
        lookups: Collection[str] = (),
    ) -> None:
        """Keep the text; Spark analyses it when a schema of the reads is there."""
        from twophase.spark.continuous.changes import MODES
        from twophase.spark.continuous.event_time import span
        from twophase.spark.continuous.windowed import EMITS

        self.text = text
        self.mode = mode
        self.event_time = {name: list(told) for name, told in (event_time or {}).items()}
        self.emit = emit
        self.retain = retain
        self.lookups = sorted(lookups)
        if not str(text).strip():
            msg = f"sql: expected the text of a query, found {text!r}"
            raise ConfigError(msg)
        for name, value, known in (("mode", mode, MODES), ("emit", emit, EMITS)):
            if value is not None and value not in known:
                msg = f"sql: {name} {value!r}: expected {', '.join(known)}"
                raise ConfigError(msg)
        for read, told in self.event_time.items():
            if len(told) != 2:  # noqa: PLR2004 - as the message says
                msg = f"sql: event_time of {read!r}: expected (column, delay), ('at', '10 minutes'), found {told!r}"
                raise ConfigError(msg)
            span(told[1], f"sql: event_time of {read!r}: delay")

    @property
    def keeps_state(self) -> bool:
        """Return True if the text aggregates, by its words: Spark, which knows for certain, is not there yet."""
        return bool(_AGGREGATES.search(_NO_WORDS.sub(" ", self.text)))

    def __str__(self) -> str:
        """Return the text in one line."""
        return " ".join(self.text.split())

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {
            "text": self.text,
            "mode": self.mode,
            "event_time": self.event_time,
            "emit": self.emit,
            "retain": self.retain,
            "lookups": self.lookups,
        }

    def over(self, lookups: Collection[str]) -> ContinuousQuery:
        """Return the query with the names of the reads that are lookup tables."""
        return type(self)(**{**self.config(), "lookups": sorted(lookups)})

    def changes(self, old: dict[str, Any], *, pending: bool) -> list[str]:
        """Refuse another text over old state: its parts would mean something else."""
        if not self.keeps_state and not type(self).load(old).keeps_state:
            return []
        problems = super().changes(old, pending=pending)
        for part in ("text", "event_time"):
            if _plain(old.get(part)) != _plain(self.config()[part]):
                problems.append(
                    f"{part} was {old.get(part)!r} and is now {self.config()[part]!r}, over a state of the old"
                )
        return problems

    def compiled(self, spark: SparkSession, reads: Mapping[str, DataFrame]) -> CompiledQuery:
        """Analyse the text over frames; raise ConfigError with the expression and the reason if it cannot go on."""
        from twophase.spark.continuous.query import CompiledQuery

        return CompiledQuery(
            spark, self.text, reads,
            lookups=self.lookups, mode=self.mode, event_time=self.event_time, emit=self.emit,
        )  # fmt: skip

    def __call__(self, spark: Any, state: Any = None, **reads: Any) -> Any:  # noqa: ANN401 - as a transform is called
        """Run one batch of it, as a transform is called: for a transform of one's own around it, and for tests."""
        return self.compiled(spark, reads).run(state)


def sql(
    text: str,
    *,
    mode: str | None = None,
    event_time: Mapping[str, Sequence[str]] | None = None,
    emit: str | None = None,
    retain: str = "7d",
) -> ContinuousQuery:
    """Declare a transform by a query over the reads, which are tables of their names.

    Its result is that of the same text over all committed input; a checkpoint gives what changed in it. `mode` says
    how: `append` (rows that never change), `retract` (with `_change`: +I, -U, +U, -D), `upsert` (the newest row of
    each group, or -D). By default it is what the query gives by itself. `event_time={read: (column, delay)}` gives the
    reads watermarks; then windows close, and `emit` says whether their rows come once (`final`) or with each change
    (`updates`). States of earlier checkpoints can be read for `retain`.
    """
    return ContinuousQuery(text, mode=mode, event_time=event_time, emit=emit, retain=retain)


def _plain(value: object) -> object:
    return " ".join(value.split()) if isinstance(value, str) else value
