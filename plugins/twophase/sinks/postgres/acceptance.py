"""Checks before the vote that the target will accept the staged rows: after the commit point nobody can say no.

`Postgres.check` calls it. What could refuse the promotion, and how that is found out:

    NOT NULL and CHECK      one query over the staged rows
    all else that could     a trial: the very promotion, in a transaction that is rolled back. Foreign keys, unique and
    refuse a row            exclusion constraints, partitions, triggers, rules, and attached partitions: each depends on
                            what the promotion takes out, changes and puts in, so only the promotion itself can tell.
                            The same for expressions of indexes and generated columns, and for long index entries
    CREATE and DROP         a trial of these statements alone, if the table is new or there are event triggers

A target that has nothing of the second kind is not touched before the promotion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from twophase.changelog import CHANGE
from twophase.core.errors import BadValue, ConfigError, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.core.hindrances import Refused
from twophase.sinks.postgres import catalog, rights, staging_table, target
from twophase.sinks.postgres.promotion import NotThere, PostgresPromoter
from twophase.sinks.postgres.staging_table import CHECKPOINT
from twophase.storage import database

if TYPE_CHECKING:
    from psycopg2.sql import Composable

#: How often a trial waits for a lock (`LOCK_TIMEOUT`) before the attempt fails: staging again would cost more.
TRIES = 6
_REMEDY = "correct it in the transform, or alter the table"
#: How many characters of a row an error shows.
_CHARACTERS = 300
#: An index entry of up to a page divided by this always fits: a B-tree needs room for three in each page.
_ENTRIES = 4

Trial = Callable[[Any], None]


class Acceptance:
    """Checks the staged rows of one promotion against its target."""

    def __init__(self, promoter: PostgresPromoter) -> None:
        """Name the promotion that is to be made later."""
        self.promoter = promoter
        self.which = f"checkpoint {promoter.key}: table {promoter.target}"
        #: Whether rows to be retracted may still arrive, by another output that is staged and not promoted yet.
        self._is_early = False

    def check(self) -> None:
        """Raise an error that says which row, column or right, if the target would refuse the promotion."""
        with self._told(), database.transaction(self.promoter.conn_id) as cursor:
            trial = self._look(cursor)
        if trial:
            self._try_out(trial)

    def _look(self, cursor: Any) -> Trial | None:  # noqa: ANN401 - a cursor
        """Check all that queries can find out; return the trial to make for the rest, None if none is needed."""
        promoter = self.promoter
        found = catalog.kind_of(cursor, promoter.target)
        self._is_early = promoter.mode.name == "retract" and promoter.comes_after_staged(cursor)
        with self._told():
            promoter.check_there(cursor)
        if found is None:  # the promotion creates it from the staged columns; its only index is by the key
            # With attach the name of the partition may be taken already, so the whole is tried.
            whole = promoter.mode.attach or self._is_long(cursor, [promoter.mode.key])
            return promoter.try_out if whole else promoter.try_making
        there = database.columns_of(cursor, promoter.target) or {}
        written = [name for name in database.columns_of(cursor, promoter.staged) or () if name != CHANGE]
        filled = {*written, *([CHECKPOINT] if promoter.numbers else [])}
        self._check_rights(cursor, found, written, filled & there.keys())
        columns, checks = catalog.columns_of(cursor, found.oid), catalog.checks_of(cursor, found.oid)
        self._check_rows(cursor, written, columns, checks)
        if promoter.mode.attach:
            target.fit(cursor, found.oid, promoter.staged)  # scans staged rows now, before the trial locks the target
        needed = (
            promoter.mode.attach
            or found.partitioned
            or any(check.columns is None or not set(check.columns) <= set(written) for check in checks)
            or any(column.name not in filled and _may_refuse_nothing(column) for column in columns)
            or self._has_hazards(cursor, found.oid, written)
        )
        self._check_numbers(cursor, found.oid, filled, times=2 if needed else 1)
        if needed:
            return promoter.try_out
        return promoter.try_making if catalog.has_event_triggers(cursor) else None

    def _has_hazards(self, cursor: Any, oid: int, written: list[str]) -> bool:  # noqa: ANN401 - a cursor
        """Say whether other rows, or code of the target's owner, decide whether the staged rows are accepted."""
        mode, in_order = self.promoter.mode, self.promoter.is_in_order(cursor)
        deletes = mode.name in {"replace", "retract"} or not in_order or self.promoter.deletes(cursor)
        changed = [name for name in written if mode.key and name not in mode.key]
        indexes = catalog.indexes_of(cursor, oid)
        return bool(
            (mode.name == "retract" and not in_order)
            or catalog.watchers_of(cursor, oid)
            or catalog.references_of(cursor, oid, changed, deletes=deletes)
            or not all(one.plain and (not one.excludes or set(one.columns) == set(mode.key)) for one in indexes)
            or self._is_long(cursor, [[name for name in one.long if name in written] for one in indexes])
        )

    def _is_long(self, cursor: Any, indexed: Iterable[Collection[str]]) -> bool:  # noqa: ANN401 - a cursor
        """Say whether a staged row is so long in the columns of an index that its entry may not fit a page."""
        from psycopg2 import sql

        size = sql.SQL("COALESCE(pg_column_size({}), 0)")
        sizes = [
            sql.SQL(" + ").join(size.format(sql.Identifier(name)) for name in columns) for columns in indexed if columns
        ]
        if not sizes:
            return False
        most = sql.SQL("current_setting('block_size')::int / {}").format(sql.Literal(_ENTRIES))
        longer = sql.SQL(" OR ").join(sql.SQL("{} > {}").format(one, most) for one in sizes)
        cursor.execute(sql.SQL("SELECT FROM {} WHERE {} LIMIT 1").format(self.promoter.staged.sql, longer))
        return cursor.fetchone() is not None

    def _check_numbers(self, cursor: Any, oid: int, filled: Collection[str], *, times: int) -> None:  # noqa: ANN401 - a cursor
        """Raise BadValue unless sequences have a number left for each row; a trial uses up as many as the promotion."""
        rows = self.promoter.manifest["rows"]
        for name, left in catalog.numbers_left(cursor, oid, filled).items():
            if left < times * rows:
                msg = (
                    f"{self.which}: sequence {name}, which fills a column, has {left} numbers left, expected"
                    f" {times * rows} for {rows} rows{' and a trial of them' if times > 1 else ''}; give it, and its"
                    " column, a larger range"
                )
                raise BadValue(msg)

    def _check_rights(self, cursor: Any, found: catalog.Relation, written: list[str], known: Collection[str]) -> None:  # noqa: ANN401 - a cursor
        new = [name for name in written if name not in known]
        if new and not rights.is_owner(cursor, found.oid):
            msg = (
                f"{self.which}: column {new[0]!r} is new, and the account that promotes does not own the table, so it"
                " cannot add it; add it yourself, or drop it from the output"
            )
            raise ConfigError(msg)
        if new and (whole := catalog.columns_given_by(cursor, found.oid)):
            msg = f"{self.which}: column {new[0]!r} is new, and its columns are those of {whole}; add it there"
            raise ConfigError(msg)
        removes = "keys are deleted" if self.promoter.deletes(cursor) else None
        removes = removes if self.promoter.is_in_order(cursor) else "a checkpoint is replaced"
        if removes and not rights.may_delete(cursor, found.oid):
            msg = f"{self.which}: the account that promotes has no DELETE, by which {removes}; grant it"
            raise ConfigError(msg)
        told_by = {CHECKPOINT, *([self.promoter.slot_rows.column] if self.promoter.slot_rows else [])}
        for problem in rights.lacking_for(cursor, found.oid, known, self.promoter.mode, told_by):
            msg = f"{self.which}: {problem}"
            raise ConfigError(msg)

    def _check_rows(
        self,
        cursor: Any,  # noqa: ANN401 - a cursor
        written: list[str],
        columns: list[catalog.CatalogColumn],
        checks: list[catalog.CheckConstraint],
    ) -> None:
        """Raise BadValue if a staged row breaks a NOT NULL, or a CHECK over staged columns only."""
        from psycopg2 import sql

        broken: dict[str, Composable] = {
            f"column {column.name!r} is NOT NULL": sql.SQL("{} IS NULL").format(sql.Identifier(column.name))
            for column in columns
            if column.not_null and column.name in written
        }
        for check in checks:
            if check.columns is not None and set(check.columns) <= set(written):
                broken[f"constraint {check.name!r} is {check.definition}"] = sql.SQL("NOT ({})").format(
                    sql.SQL(check.expression)
                )
        if not broken:
            return
        rules = list(broken)
        cases = (sql.SQL("WHEN {} THEN {}").format(broken[rule], sql.Literal(n)) for n, rule in enumerate(rules))
        source = self.promoter.staged.sql
        if self.promoter.deletes(cursor):
            source = sql.SQL("(SELECT * FROM {} WHERE {})").format(source, staging_table.staying())
        elif self.promoter.mode.name == "retract":
            source = sql.SQL("({})").format(staging_table.net(self.promoter.staged, written, ">"))
        query = sql.SQL("SELECT CASE {} END, left(ROW(s.*)::text, {}) FROM {} AS s WHERE {} LIMIT 1").format(
            sql.SQL(" ").join(cases), sql.Literal(_CHARACTERS), source, sql.SQL(" OR ").join(broken.values())
        )
        cursor.execute(query)
        if row := cursor.fetchone():
            msg = f"{self.which}: {rules[row[0]]}, found the row {row[1]}; {_REMEDY}"
            raise BadValue(msg)

    # --- the trial ---------------------------------------------------------------------------------------------------

    def _try_out(self, trial: Trial) -> None:
        """Promote in a transaction that is rolled back; a process that dies in it leaves nothing.

        The session ends with it: it knows `twophase.trial`, which a trigger may ask for, from now on.
        """
        from psycopg2 import errors

        conn_id = self.promoter.conn_id
        for left in reversed(range(TRIES)):
            try:
                with self._told(), database.session(conn_id, keep=False) as session, session.cursor() as cursor:
                    trial(cursor)
                    hit("vote.tried")
                    session.rollback()
            except SinkUnavailable as error:
                if not left or not isinstance(error.__cause__, errors.LockNotAvailable | errors.DeadlockDetected):
                    raise
            else:
                return

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn the server's errors into one line that says what to do."""
        import psycopg2

        try:
            yield
        except Refused as error:
            if isinstance(error, NotThere) and self._is_early:
                return
            msg = f"checkpoint {self.promoter.key}: {error}; correct it in the transform"
            raise BadValue(msg) from error
        except psycopg2.Error as error:
            if database.passes(error):
                msg = f"{self.which}: {_said(error)}; nothing was changed, try again"
                raise SinkUnavailable(msg) from error
            msg = f"{self.which} refuses what is staged: {_said(error)}; {_REMEDY}"
            raise BadValue(msg) from error


def _may_refuse_nothing(column: catalog.CatalogColumn) -> bool:
    """Say whether a column may refuse a row that has no value for it."""
    return column.base is not None or column.computed or (column.not_null and not column.has_default)


def _said(error: Any) -> str:  # noqa: ANN401 - an error of psycopg2's
    """Return the server's message, its detail, and the function that raised it."""
    found = [error.diag.message_primary or database.one_line(error)]
    found += [f"({part})" for part in (error.diag.message_detail, _where(error)) if part]
    return " ".join(" ".join(found).split())[: 2 * _CHARACTERS]


def _where(error: Any) -> str | None:  # noqa: ANN401 - an error of psycopg2's
    """Return the PL function that raised an error; None for a constraint, whose name says it already."""
    context = str(error.diag.context or "").partition("\n")[0]
    return context if not error.diag.constraint_name and context.startswith("PL/") else None
