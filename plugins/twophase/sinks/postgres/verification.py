"""Compares the target with the revisions that the record has as committed. The sink's `verify` and reads call it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twophase.changelog import CHANGE
from twophase.core.checkpoint import Output
from twophase.sinks.postgres import history, staging_table
from twophase.sinks.postgres.promotion import MARKERS, Mode, PostgresPromoter
from twophase.sinks.postgres.slot_rows import SlotRows, by_checkpoint
from twophase.sinks.postgres.staging_table import CHECKPOINT
from twophase.storage import database
from twophase.storage.database import TableName

if TYPE_CHECKING:
    from psycopg2.sql import Composable


class Held:
    """What the target holds, as one session sees it."""

    def __init__(self, cursor: Any, target: TableName, mode: Mode) -> None:  # noqa: ANN401 - a cursor
        """Name the table, and how rows get into it."""
        self.cursor = cursor
        self.target = target
        self.mode = mode

    def stands(self, output: Output) -> bool:
        """Say whether a revision's rows are still in the target: no later revision has replaced them."""
        from psycopg2 import sql

        last = "SELECT checkpoint_id, revision FROM {} WHERE pipeline = %s AND target = %s{} ORDER BY {} DESC LIMIT 1"
        whole = self.mode.name == "replace" and "slot" not in output.handle  # any later checkpoint replaces it, too
        mine = sql.SQL("" if whole else " AND checkpoint_id = %s")
        query = sql.SQL(last).format(MARKERS.sql, mine, sql.Identifier("promoted_at" if whole else "revision"))
        values = (output.key.pipeline, str(self.target), output.key.checkpoint_id)
        self.cursor.execute(query, values[: 2 if whole else 3])
        return bool(self.cursor.fetchone() == (output.key.checkpoint_id, output.key.revision))

    def keeps(self, output: Output) -> bool:
        """Say whether the history has what a revision changed by key, and no later revision has replaced it."""
        return self.stands(output) and PostgresPromoter("", self.mode, output).kept(self.cursor)

    def mine(self, output: Output) -> Composable | None:
        """Return the condition for the rows of a revision that stands; None if all rows of the table are."""
        if by_checkpoint(self.mode.name, output.handle):
            return staging_table.of_checkpoint(output.key.checkpoint_id)
        rows = SlotRows.of(output.handle)
        return rows.where(self.cursor, self.target) if rows else None

    def differences(self, output: Output, promoter: PostgresPromoter) -> Iterator[str]:
        """Compare a committed revision with its marker, and with its rows: by their count, or upserted ones by key."""
        from psycopg2 import sql

        marker = promoter.marker(self.cursor)
        if marker is None or marker[1]["digest"] != output.manifest["digest"]:
            found = "none" if marker is None else f"that of attempt {marker[0]}"
            yield f"table {self.target}: expected the marker of attempt {output.attempt}, found {found}"
            return
        if self.mode.name == "upsert":
            yield from self._keys(output, promoter)
        if self.mode.key or (self.mode.name == "replace" and not self.stands(output)):
            return
        mine = self.mine(output) or sql.SQL("")
        self.cursor.execute(sql.SQL("SELECT count(*) FROM {} {}").format(self.target.sql, mine))
        rows = self.cursor.fetchone()[0]
        if rows != output.manifest["rows"]:
            yield f"table {self.target}: expected {output.manifest['rows']} rows of checkpoint, found {rows}"

    def _keys(self, output: Output, promoter: PostgresPromoter) -> Iterator[str]:
        """Compare the keys of a checkpoint in the history with the number of its rows, and with the table."""
        if not promoter.kept(self.cursor):
            return
        table = history.history_of(output.key.pipeline, self.target)
        found, gone = history.entries(self.cursor, table, promoter.order, self.target, self.mode.key)
        if found != output.manifest["rows"]:
            yield f"history of {self.target}: expected {output.manifest['rows']} keys of checkpoint, found {found}"
        if gone and not self._has_deletions(output):
            yield f"table {self.target}: {gone} keys of checkpoint are not there any more"

    def _has_deletions(self, output: Output) -> bool:
        """Say whether any checkpoint of this target may have deleted keys: then a key that is gone proves nothing."""
        from psycopg2 import sql

        query = sql.SQL(
            "SELECT FROM {} WHERE pipeline = %s AND target = %s AND manifest->'schema' @> %s::jsonb LIMIT 1"
        )
        deleting = json.dumps([[CHANGE, "string"]])
        self.cursor.execute(query.format(MARKERS.sql), (output.key.pipeline, str(self.target), deleting))
        return self.cursor.fetchone() is not None

    def strangers(self, known: Sequence[Output]) -> Iterator[str]:
        """Yield the checkpoints that rows carry and that are not among these outputs."""
        from psycopg2 import sql

        if database.columns_of(self.cursor, self.target) is None:
            yield f"table {self.target} is not there"
            return
        query = sql.SQL("SELECT DISTINCT {0} FROM {1} WHERE {0} <> ALL(%s) LIMIT 100")
        numbers = [output.key.checkpoint_id for output in known]
        self.cursor.execute(query.format(sql.Identifier(CHECKPOINT), self.target.sql), (numbers,))
        for (number,) in self.cursor.fetchall():
            yield f"table {self.target} has rows of checkpoint {number}, which is not committed"
