"""The promotion: one transaction in the target database that applies the staged rows and carries the marker.

marker row ── already there? ─→ nothing to do          the primary key decides between two promoters
│
take out what the older revision put in (a replacement)
put the staged rows in, or attach the staging table
drop the staging table
│
COMMIT ── reply lost? ─→ unknown: the marker tells
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twophase.core.checkpoint import Json, Key
from twophase.core.failpoints import hit
from twophase.core.ports import Outcome, Promotion
from twophase.sinks.pg import database, staging
from twophase.sinks.pg.database import Table
from twophase.sinks.pg.staging import CHANGE, CHECKPOINT

#: Where the markers are: a schema that whoever only stages has no rights in.
MARKERS = Table("twophase_sinks", "promoted")
_CREATE_MARKERS = (
    "CREATE TABLE IF NOT EXISTS {} (pipeline text, target text, checkpoint_id bigint, revision integer,"
    " attempt integer NOT NULL, manifest jsonb NOT NULL, promoted_at timestamptz NOT NULL DEFAULT now(),"
    " PRIMARY KEY (pipeline, target, checkpoint_id, revision))"
)


class Refused(Exception):
    """The target is not what the staged rows are for; nothing was changed."""


@dataclass(frozen=True)
class Mode:
    """How staged rows get into the target."""

    name: str
    key: tuple[str, ...] = ()
    create: bool = False
    attach: bool = False


def create_markers(cursor: Any) -> None:  # noqa: ANN401 - a cursor
    """Make the table of markers, unless it is there."""
    from psycopg2 import sql

    cursor.execute("SELECT to_regclass(%s)", (str(MARKERS),))
    if cursor.fetchone()[0] is None:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtext('twophase_sinks'))")
        cursor.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(MARKERS.schema)))
        cursor.execute(sql.SQL(_CREATE_MARKERS).format(MARKERS.sql))


class Promoter:
    """Takes one staged output into the target."""

    def __init__(self, conn_id: str, mode: Mode, key: Key, handle: Json, manifest: Json) -> None:
        """Name the output."""
        self.conn_id = conn_id
        self.mode = mode
        self.key = key
        self.handle = handle
        self.manifest = manifest
        self.target = Table(*handle["target"])
        self.staged = Table(*handle["staging"])

    # --- looking -----------------------------------------------------------------------------------------------------

    def find(self) -> Promotion:
        """Say where the output stands."""
        import psycopg2

        try:
            with database.session(self.conn_id) as session, session.cursor() as cursor:
                return self._find(cursor)
        except psycopg2.Error as error:
            return Promotion(Outcome.RETRY_LATER, database.one_line(error))

    def _find(self, cursor: Any) -> Promotion:  # noqa: ANN401 - a cursor
        marker = self.marker(cursor)
        if marker is not None:
            return self._already(*marker)
        found = staging.look(cursor, self.staged)
        if found is None:
            return Promotion(Outcome.FAILED, f"staging table {self.staged} is gone and no marker is there")
        if found.digest(self.staged) != self.manifest["digest"]:
            return Promotion(Outcome.FAILED, f"staging table {self.staged} is not what was voted for")
        return Promotion(Outcome.RETRY_LATER, "staged")

    def marker(self, cursor: Any) -> tuple[int, Json] | None:  # noqa: ANN401 - a cursor
        """Return attempt and manifest that the marker names; None: there is none."""
        from psycopg2 import sql

        query = (
            "SELECT attempt, manifest FROM {}"
            " WHERE pipeline = %s AND target = %s AND checkpoint_id = %s AND revision = %s"
        )
        cursor.execute(sql.SQL(query).format(MARKERS.sql), (self.key[0], str(self.target), *self.key[1:]))
        row = cursor.fetchone()
        return (row[0], row[1]) if row else None

    def _already(self, attempt: int, manifest: Json) -> Promotion:
        """Say that the marker is there, if this record has ever voted for what it names (R10)."""
        if manifest["digest"] not in {self.manifest["digest"], *self.handle.get("earlier", ())}:
            why = f"the target has the marker of another {self.key}, which this record did not vote for"
            return Promotion(Outcome.FAILED, why)
        return Promotion(Outcome.ALREADY_PROMOTED, attempt=attempt, manifest=manifest)

    # --- promoting ---------------------------------------------------------------------------------------------------

    def promote(self) -> Promotion:  # noqa: PLR0911 - one return per outcome
        """Apply the staged rows in one transaction with the marker."""
        import psycopg2

        committing = False
        try:
            with database.session(self.conn_id) as session, session.cursor() as cursor:
                found = self._find(cursor)
                if found.outcome is not Outcome.RETRY_LATER:
                    return found
                if not self._mark(cursor):
                    session.rollback()
                    return self._find(cursor)
                hit("promote.marked")
                self._apply(cursor)
                hit("promote.applied")
                committing = True
                session.commit()
                hit("promote.durable")
                return Promotion(Outcome.PROMOTED, attempt=self.attempt, manifest=self.manifest)
        except Refused as error:
            return Promotion(Outcome.FAILED, str(error))
        except psycopg2.Error as error:
            if committing and not error.pgcode:
                return Promotion(Outcome.UNKNOWN, database.one_line(error))
            if database.passes(error):
                return Promotion(Outcome.RETRY_LATER, database.one_line(error))
            return self._failed(error)

    @property
    def attempt(self) -> int:
        """Return the attempt whose rows these are."""
        found: int = self.handle["attempt"]
        return found

    def _failed(self, error: Exception) -> Promotion:
        """Read the marker once more before saying that a person is needed: another promoter may have been faster."""
        found = self.find()
        settled = found.outcome in {Outcome.ALREADY_PROMOTED, Outcome.FAILED}
        return found if settled else Promotion(Outcome.FAILED, database.one_line(error))

    def _mark(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Put the marker in; False: another promoter has."""
        from psycopg2 import sql
        from psycopg2.extras import Json as Jsonb

        query = (
            "INSERT INTO {} (pipeline, target, checkpoint_id, revision, attempt, manifest)"
            " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"
        )
        values = (self.key[0], str(self.target), *self.key[1:], self.attempt, Jsonb(dict(self.manifest)))
        cursor.execute(sql.SQL(query).format(MARKERS.sql), values)
        return int(cursor.rowcount) == 1

    def _apply(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        from psycopg2 import sql

        columns = staging.columns_of(cursor, self.staged) or {}
        columns.pop(CHECKPOINT, None)
        columns.pop(CHANGE, None)
        if self.mode.create:
            self._create(cursor, columns)
        if self.mode.name == "replace":
            cursor.execute(sql.SQL("DELETE FROM {}").format(self.target.sql))
        elif self.mode.attach:
            self._attach(cursor)
            return
        elif self.mode.name == "append" and self.handle.get("replaces") is not None:
            taken_out = sql.SQL("DELETE FROM {} WHERE {} = %s").format(self.target.sql, sql.Identifier(CHECKPOINT))
            cursor.execute(taken_out, (self.key.checkpoint_id,))
        if self.mode.name == "retract":
            self._take_back(cursor, list(columns))
        self._insert(cursor, list(columns))
        staging.drop(cursor, self.staged)

    def _insert(self, cursor: Any, columns: list[str]) -> None:  # noqa: ANN401 - a cursor
        from psycopg2 import sql

        names = [sql.Identifier(name) for name in columns]
        values: list[Any] = list(names)
        if self.mode.name == "append":
            names.append(sql.Identifier(CHECKPOINT))
            values.append(sql.Literal(self.key.checkpoint_id))
        rows = self.staged.sql
        if self.mode.name == "retract":
            rows = sql.SQL("({}) AS added").format(staging.net(self.staged, columns, ">"))
        insert = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(
            self.target.sql, sql.SQL(", ").join(names), sql.SQL(", ").join(values), rows
        )
        if self.mode.key:
            kept = sql.SQL(", ").join(map(sql.Identifier, self.mode.key))
            others = [sql.Identifier(name) for name in columns if name not in self.mode.key]
            changes = [sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in others]
            then = sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(changes)) if changes else sql.SQL("NOTHING")
            insert += sql.SQL(" ON CONFLICT ({}) DO {}").format(kept, then)
        cursor.execute(insert)

    def _take_back(self, cursor: Any, columns: list[str]) -> None:  # noqa: ANN401 - a cursor
        """Delete what a changelog takes back and does not put in anew; what it takes back has to be there."""
        from psycopg2 import sql

        def same(one: str, other: str) -> Any:  # noqa: ANN401 - a condition
            equal = (
                sql.SQL("{0}.{2} = {1}.{2}").format(*map(sql.SQL, (one, other)), sql.Identifier(name))
                for name in self.mode.key
            )
            return sql.SQL(" AND ").join(equal)

        gone, added = (staging.net(self.staged, columns, sign) for sign in "<>")
        missing = sql.SQL("SELECT count(*) FROM ({}) AS gone WHERE NOT EXISTS (SELECT 1 FROM {} AS t WHERE {})")
        cursor.execute(missing.format(gone, self.target.sql, same("t", "gone")))
        if count := cursor.fetchone()[0]:
            msg = f"{count} rows are retracted from {self.target} that are not there"
            raise Refused(msg)
        delete = sql.SQL(
            "DELETE FROM {} AS t USING ({}) AS gone WHERE {} AND NOT EXISTS (SELECT 1 FROM ({}) AS added WHERE {})"
        )
        cursor.execute(delete.format(self.target.sql, gone, same("t", "gone"), added, same("added", "gone")))

    def _attach(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Make the staging table a partition; in a replacement the old one goes in the same transaction."""
        from psycopg2 import sql

        if old := partition_of(cursor, self.target, self.key.checkpoint_id):
            cursor.execute(sql.SQL("ALTER TABLE {} DETACH PARTITION {}").format(self.target.sql, old.sql))
            cursor.execute(sql.SQL("DROP TABLE {}").format(old.sql))
        attach = sql.SQL("ALTER TABLE {} ATTACH PARTITION {} FOR VALUES IN ({})")
        cursor.execute(attach.format(self.target.sql, self.staged.sql, sql.Literal(self.key.checkpoint_id)))
        cursor.execute(sql.SQL("DROP TABLE {}").format(staging.parts_of(self.staged).sql))
        partition = sql.Identifier(f"{self.target.name[:40]}_{self.key.checkpoint_id:08d}_r{self.key.revision}")
        cursor.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(self.staged.sql, partition))

    # --- the target --------------------------------------------------------------------------------------------------

    def _create(self, cursor: Any, columns: dict[str, str]) -> None:  # noqa: ANN401 - a cursor
        """Make the target, or add the columns that are new."""
        from psycopg2 import sql

        there = staging.columns_of(cursor, self.target)
        if there is None:
            lines = [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in columns.items()]
            if self.mode.name == "append":
                lines.append(sql.SQL("{} bigint NOT NULL").format(sql.Identifier(CHECKPOINT)))
            if self.mode.key:
                names = sql.SQL(", ").join(map(sql.Identifier, self.mode.key))
                lines.append(sql.SQL("PRIMARY KEY ({})").format(names))
            by = (
                sql.SQL(" PARTITION BY LIST ({})").format(sql.Identifier(CHECKPOINT))
                if self.mode.attach
                else sql.SQL("")
            )
            cursor.execute(sql.SQL("CREATE TABLE {} ({}){}").format(self.target.sql, sql.SQL(", ").join(lines), by))
            if self.mode.name == "append" and not self.mode.attach:
                index = sql.SQL("CREATE INDEX ON {} ({})").format(self.target.sql, sql.Identifier(CHECKPOINT))
                cursor.execute(index)
            return
        for name, kind in columns.items():
            if name not in there:
                add = sql.SQL("ALTER TABLE {} ADD COLUMN {} {}")
                cursor.execute(add.format(self.target.sql, sql.Identifier(name), sql.SQL(kind)))


def partition_of(cursor: Any, target: Table, checkpoint_id: int) -> Table | None:  # noqa: ANN401 - a cursor
    """Return the partition that holds a checkpoint's rows."""
    cursor.execute(
        "SELECT n.nspname, c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_class p ON p.oid = i.inhparent"
        " JOIN pg_namespace s ON s.oid = p.relnamespace WHERE s.nspname = %s AND p.relname = %s"
        " AND pg_get_expr(c.relpartbound, c.oid) = %s",
        (*target, f"FOR VALUES IN ('{checkpoint_id}')"),
    )
    row = cursor.fetchone()
    return Table(*row) if row else None
