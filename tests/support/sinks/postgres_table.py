"""A table in PostgreSQL, and checkpoints for it, each staged without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.sinks.staged_rows import Rows, prestage
from twophase import sinks
from twophase.core.checkpoint import Key, Output
from twophase.core.errors import BadValue
from twophase.core.manifest import Column
from twophase.core.ports import Outcome, Promotion

KINDS = {"id": "bigint", "word": "string", "more": "bigint", "_change": "string"}

Row = dict[str, Any]


class Words:
    """A table that is there, and checkpoints for it."""

    def __init__(self, target: Any, *made: str, **more: Any) -> None:
        for statement in made:
            target.execute(statement)
        self.target = target
        self.sink = sinks.Postgres("words", conn_id="dwh", **more)
        self.sink.prepare()

    def stage(self, rows: Sequence[Row], checkpoint: int = 1, revision: int = 1) -> Output:
        key = Key("words", checkpoint, revision)
        output = Output(key, 1, self.sink.place(key, 1, f"t{checkpoint}"), sink="dwh")
        names = [name for name in KINDS if any(name in row for row in rows)]
        if self.sink.mode == "retract" and "_change" not in names:
            names.append("_change")
            rows = [{**row, "_change": "+I"} for row in rows]
        schema = [Column(name, KINDS[name]) for name in names]
        return replace(output, manifest=prestage(self.sink, output, Rows(list(rows), 1, schema)))

    def check(self, staged: Output) -> None:
        self.sink.check(staged)

    def promote(self, staged: Output) -> Promotion:
        return self.sink.promote(staged)

    def put(self, rows: Sequence[Row], checkpoint: int = 1, revision: int = 1) -> None:
        """Take a checkpoint through."""
        staged = self.stage(rows, checkpoint, revision)
        self.check(staged)
        found = self.promote(staged)
        assert found.outcome is Outcome.PROMOTED, found.reason

    def refuses(self, rows: Sequence[Row], told: str, checkpoint: int = 1, revision: int = 1) -> Output:
        """See that a checkpoint is refused before the vote, with these words, and would have been after it."""
        before = self.rows
        staged = self.stage(rows, checkpoint, revision)
        with pytest.raises(BadValue, match=told) as refused:
            self.check(staged)
        assert "\n" not in str(refused.value)
        assert str(refused.value).startswith("checkpoint words/")
        assert self.promote(staged).outcome is Outcome.FAILED
        assert self.rows == before
        return staged

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        self.target.execute("SELECT id, word FROM words ORDER BY id, word")
        found: list[tuple[Any, ...]] = self.target.fetchall()
        return found


def words(*ids: int, word: str | None = "a", **more: Any) -> list[Row]:
    return [{"id": number, "word": word, **more} for number in ids]


COLUMNS = "id bigint, word text, _checkpoint bigint"
KEYED = "id bigint PRIMARY KEY, word text, _checkpoint bigint"
