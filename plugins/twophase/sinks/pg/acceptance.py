"""Would the target take what is staged? Asked before the vote: after the commit point nobody can say no any more.

    NOT NULL and CHECK      one query over the staged rows
    all else that could     a trial: the very promotion, in a transaction that is rolled back. Foreign keys, unique and
    refuse a row            exclusion constraints, partitions, triggers, rules, and attached partitions: each depends on
                            what the promotion takes out, changes and puts in, so nothing but the promotion tells.

A target that has nothing of the second kind is not touched before the promotion.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from twophase.core.errors import BadValue, ConfigError, SinkUnavailable
from twophase.core.failpoints import hit
from twophase.sinks.pg import database, demands, rights, staging, targets
from twophase.sinks.pg.promoting import NotThere, Promoter
from twophase.sinks.pg.receipts import Refused
from twophase.sinks.pg.staging import CHANGE, CHECKPOINT

if TYPE_CHECKING:
    from psycopg2.sql import Composable

#: How often a trial waits for a lock (`LOCK_TIMEOUT`) before the attempt fails: what was staged cost more than a wait.
TRIES = 6
_REMEDY = "correct it in the transform, or alter the table"
#: Of a row, so much is shown.
_CHARACTERS = 300


class Acceptance:
    """The staged rows of one promotion, held against its target."""

    def __init__(self, promoter: Promoter) -> None:
        """Take the promotion that is to come."""
        self.promoter = promoter
        self.which = f"checkpoint {promoter.key}: table {promoter.target}"
        #: Whether what is retracted may come by what is staged and not promoted yet.
        self._is_early = False

    def check(self) -> None:
        """Raise an error that says which row, column or right, if the target would refuse the promotion."""
        with self._told(), database.committed(self.promoter.conn_id) as cursor:
            needs_trial = self._look(cursor)
        if needs_trial:
            self._try_out()

    def _look(self, cursor: Any) -> bool:  # noqa: ANN401 - a cursor
        """Check what can be asked for; say whether there is more that could refuse."""
        promoter = self.promoter
        found = demands.kind_of(cursor, promoter.target)
        self._is_early = promoter.mode.name == "retract" and promoter.comes_after_staged(cursor)
        with self._told():
            promoter.check_there(cursor)
        if found is None:  # the promotion makes it, of the staged columns
            return False
        there = staging.columns_of(cursor, promoter.target) or {}
        written = [name for name in staging.columns_of(cursor, promoter.staged) or () if name != CHANGE]
        filled = {*written, *([CHECKPOINT] if promoter.numbers else [])}
        self._check_rights(cursor, found, written, filled & there.keys())
        columns, checks = demands.columns_of(cursor, found.oid), demands.checks_of(cursor, found.oid)
        self._check_rows(cursor, written, columns, checks)
        if promoter.mode.attach:
            targets.fit(cursor, found.oid, promoter.staged)  # its scans are done before the trial locks the target
            return True
        return (
            found.partitioned
            or any(check.columns is None or not set(check.columns) <= set(written) for check in checks)
            or any(column.name not in filled and _may_refuse_nothing(column) for column in columns)
            or self._has_hazards(cursor, found.oid, written)
        )

    def _has_hazards(self, cursor: Any, oid: int, written: list[str]) -> bool:  # noqa: ANN401 - a cursor
        """Say whether rows of others, or somebody's code, decide upon the staged ones."""
        mode, in_order = self.promoter.mode, self.promoter.is_in_order(cursor)
        deletes = mode.name in {"replace", "retract"} or not in_order
        changed = [name for name in written if mode.key and name not in mode.key]
        return bool(
            (mode.name == "retract" and not in_order)
            or demands.watchers_of(cursor, oid)
            or demands.references_of(cursor, oid, changed, deletes=deletes)
            or any(not (one.plain and set(one.columns) == set(mode.key)) for one in demands.uniques_of(cursor, oid))
        )

    def _check_rights(self, cursor: Any, found: demands.Kind, written: list[str], known: Collection[str]) -> None:  # noqa: ANN401 - a cursor
        new = [name for name in written if name not in known]
        if new and not rights.is_owner(cursor, found.oid):
            msg = (
                f"{self.which}: column {new[0]!r} is new, and the account that promotes does not own the table, so it"
                " cannot add it; add it yourself, or drop it from the output"
            )
            raise ConfigError(msg)
        for problem in rights.lacking_for(cursor, found.oid, known, self.promoter.mode):
            msg = f"{self.which}: {problem}"
            raise ConfigError(msg)

    def _check_rows(
        self,
        cursor: Any,  # noqa: ANN401 - a cursor
        written: list[str],
        columns: list[demands.Column],
        checks: list[demands.Check],
    ) -> None:
        """Raise BadValue for a row that breaks a NOT NULL or a CHECK over what is staged."""
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
        if self.promoter.mode.name == "retract":
            source = sql.SQL("({})").format(staging.net(self.promoter.staged, written, ">"))
        query = sql.SQL("SELECT CASE {} END, left(s::text, {}) FROM {} AS s WHERE {} LIMIT 1").format(
            sql.SQL(" ").join(cases), sql.Literal(_CHARACTERS), source, sql.SQL(" OR ").join(broken.values())
        )
        cursor.execute(query)
        if row := cursor.fetchone():
            msg = f"{self.which}: {rules[row[0]]}, found the row {row[1]}; {_REMEDY}"
            raise BadValue(msg)

    # --- the trial ---------------------------------------------------------------------------------------------------

    def _try_out(self) -> None:
        """Promote in a transaction that is rolled back; who dies in it leaves nothing, for it is a session's own."""
        from psycopg2 import errors

        for left in reversed(range(TRIES)):
            try:
                with self._told(), database.session(self.promoter.conn_id) as session, session.cursor() as cursor:
                    self.promoter.try_out(cursor)
                    hit("vote.tried")
                    session.rollback()
            except SinkUnavailable as error:
                if not left or not isinstance(error.__cause__, errors.LockNotAvailable | errors.DeadlockDetected):
                    raise
            else:
                return

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say what the server said in one line, with what to do about it."""
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


def _may_refuse_nothing(column: demands.Column) -> bool:
    """Say whether a column could refuse a row that gives it no value."""
    return column.base is not None or (column.not_null and not column.has_default)


def _said(error: Any) -> str:  # noqa: ANN401 - an error of psycopg2's
    """Return what the server said: the constraint, the row or the value, and where a trigger said it."""
    found = [error.diag.message_primary or database.one_line(error)]
    found += [f"({part})" for part in (error.diag.message_detail, _where(error)) if part]
    return " ".join(" ".join(found).split())[: 2 * _CHARACTERS]


def _where(error: Any) -> str | None:  # noqa: ANN401 - an error of psycopg2's
    """Return the function that raised an error; of a constraint it says nothing new."""
    context = str(error.diag.context or "").partition("\n")[0]
    return context if not error.diag.constraint_name and context.startswith("PL/") else None
