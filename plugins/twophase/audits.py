"""Audits: checks on staged rows that vote; users declare them, `audit_votes` runs them.

    Pipeline(..., audits=[audits.row_count(minimum=1), audits.not_null("word")])

An audit sees what one attempt staged for one write, before any reader does. The commit point needs a yes from every
audit, as from every sink. If an audit of severity `fail` finds something it votes no, and the revision is aborted. One
of severity `warn` says what it found and votes yes.
"""

from __future__ import annotations

import hashlib
import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar

from twophase.core.declared import Declared, import_path
from twophase.core.errors import AttemptFailed, ConfigError
from twophase.core.row_samples import Row, cut, line, sample
from twophase.core.settings import spark_jobs
from twophase.core.slots import Slot, duration
from twophase.row_queries.base import RowSet
from twophase.row_queries.duckdb_rows import literal, quote

SEVERITIES = ("fail", "warn")
LONGEST_NAME = 80
_TEXT_BYTES = 1500


@dataclass(frozen=True)
class AuditContext:
    """What an audit is told about the revision whose output it checks."""

    pipeline: str
    checkpoint_id: int
    revision: int
    slot: str | None
    sink: str
    #: When the revision began.
    began: datetime
    #: Rows of the revision that is being replaced, or else of the commit before; None: there is none.
    previous_rows: int | None
    #: Rows that were staged, by the manifest.
    rows: int


@dataclass(frozen=True)
class Verdict:
    """What an audit found; at most 8 kB of JSON, whatever is in the data."""

    passed: bool
    #: One line: what was checked, expected and found.
    text: str
    #: Some of the rows that are wrong.
    sample: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Cut text and sample to size."""
        object.__setattr__(self, "text", line(self.text, _TEXT_BYTES))
        object.__setattr__(self, "sample", sample(self.sample))

    def summary(self) -> dict[str, Any]:
        """Return what the record keeps."""
        return {"passed": self.passed, "text": self.text, "sample": self.sample}


class Audit(Declared):
    """One check; subclasses implement `find`. The record keeps only the arguments that it was declared with."""

    public_module = "twophase.audits"
    #: The name of the function that declares it.
    kind: ClassVar[str]

    def __init__(self, subject: str, arguments: dict[str, Any], on: str | None, severity: str) -> None:
        """Keep what was declared; `on` is the write that it checks (None: every write)."""
        self.on = on
        self.severity = severity
        self.arguments = arguments
        self.name = _called(self.kind, subject)
        self._expect(on is None or _is_text(on), f"on={on!r}: expected the name of a write, or None for every write")
        self._expect(severity in SEVERITIES, f"severity {severity!r}: expected {' or '.join(SEVERITIES)}")

    @abstractmethod
    def find(self, relation: RowSet, context: AuditContext) -> Verdict:
        """Check the staged rows."""

    def check(self, relation: RowSet, context: AuditContext) -> Verdict:
        """Check the staged rows; if they cannot be checked, the audit has failed."""
        try:
            return self.find(relation, context)
        except (ConfigError, AttemptFailed) as error:
            return self.failed(str(error))

    def passed(self, text: str) -> Verdict:
        """Return a yes."""
        return Verdict(passed=True, text=f"{self.name}: {text}")

    def failed(self, text: str, rows: Iterable[object] = ()) -> Verdict:
        """Return a no, with some of the rows that caused it."""
        return Verdict(passed=False, text=f"{self.name}: {text}", sample=sample(rows))

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {**self.arguments, "on": self.on, "severity": self.severity}

    def _expect(self, good: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
        if not good:
            msg = f"audit {self.kind}: {otherwise}"
            raise ConfigError(msg)


class ColumnsAudit(Audit):
    """A check of some columns."""

    def __init__(self, columns: Sequence[str], *, on: str | None = None, severity: str = "fail") -> None:
        """Declare the columns."""
        self.columns = list(columns)
        good = bool(self.columns) and all(map(_is_text, self.columns))
        self._expect(good, f"expected names of columns, found {', '.join(map(repr, columns)) or 'none'}")
        once = len({column.lower() for column in self.columns}) == len(self.columns)
        self._expect(once, f"expected each column once, found {', '.join(self.columns)}")
        super().__init__(", ".join(self.columns), {"columns": self.columns}, on, severity)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object, kinds: Any = int | float) -> bool:  # noqa: ANN401 - types for isinstance
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_pair(value: object) -> bool:
    """Return True if the value is a list of two numbers, the lower one first."""
    return (
        isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) and value == sorted(value)  # noqa: PLR2004 - a pair
    )


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _called(kind: str, subject: str) -> str:
    """Return a name such as `not_null(word)`; a long one ends in a digest, so that names stay different."""
    subject = " ".join(subject.split())
    if len(subject) > LONGEST_NAME:
        digest = hashlib.sha256(subject.encode("utf-8", "replace")).hexdigest()[:8]
        subject = f"{cut(subject, LONGEST_NAME - len(digest) - 1)} {digest}"
    return f"{kind}({subject})" if subject else kind


def _there(relation: RowSet, columns: Iterable[str]) -> None:
    """Raise ConfigError unless the staged rows have these columns; letter case does not count, as in Spark."""
    names = {name.lower() for name in relation.names}
    if missing := [column for column in columns if column.lower() not in names]:
        msg = f"no column {', '.join(map(repr, missing))}; there is {', '.join(relation.names)}"
        raise ConfigError(msg)


def _count(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


# --- row_count -------------------------------------------------------------------------------------------------------


class RowCount(Audit):
    """As many rows as expected; the manifest has the number, so nothing is read."""

    kind = "row_count"

    def __init__(
        self,
        minimum: int | None = None,
        maximum: int | None = None,
        ratio_to_previous: Sequence[float] | None = None,
        *,
        on: str | None = None,
        severity: str = "fail",
    ) -> None:
        """Declare bounds."""
        self.minimum, self.maximum = minimum, maximum
        self.ratio = list(ratio_to_previous) if isinstance(ratio_to_previous, list | tuple) else ratio_to_previous
        bounds = {"minimum": minimum, "maximum": maximum, "ratio_to_previous": self.ratio}
        some = any(bound is not None for bound in bounds.values())
        self._expect(some, f"expected one of {', '.join(bounds)}, found none")
        for name in ("minimum", "maximum"):
            good = bounds[name] is None or _is_number(bounds[name], int)
            self._expect(good, f"{name} {bounds[name]!r}: expected a number of rows")
        good = minimum is None or maximum is None or minimum <= maximum
        self._expect(good, f"minimum {minimum} is above maximum {maximum}")
        good = self.ratio is None or _is_pair(self.ratio)
        expected = "expected a pair such as (0.5, 2.0), the lower one first"
        self._expect(good, f"ratio_to_previous {ratio_to_previous!r}: {expected}")
        super().__init__("", bounds, on, severity)

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:  # noqa: ARG002 - the manifest knows
        """Compare the manifest's count with the bounds."""
        rows, before = context.rows, context.previous_rows
        expected, good, note = [], [], ""
        if self.minimum is not None:
            expected.append(f"at least {self.minimum}")
            good.append(rows >= self.minimum)
        if self.maximum is not None:
            expected.append(f"at most {self.maximum}")
            good.append(rows <= self.maximum)
        if self.ratio is not None:
            low, high = self.ratio
            expected.append(f"{low:g} to {high:g} times as many as before")
            note = "; before there were 0" if before == 0 else "; there is nothing to compare with"
            if before:
                note = f"; that is {rows / before:.3g} times the {before} before"
                good.append(low * before <= rows <= high * before)
        text = f"expected {' and '.join(expected)}, found {_count(rows)}{note}"
        return self.passed(text) if all(good) else self.failed(text)


def row_count(
    minimum: int | None = None,
    maximum: int | None = None,
    ratio_to_previous: Sequence[float] | None = None,
    *,
    on: str | None = None,
    severity: str = "fail",
) -> Audit:
    """Expect a number of rows; `ratio_to_previous=(0.5, 2.0)` compares with the commit before.

    If a committed revision is being replaced, it compares with that one. If there is nothing to compare with, it passes
    and says so.
    """
    return RowCount(minimum, maximum, ratio_to_previous, on=on, severity=severity)


# --- not_null, unique ------------------------------------------------------------------------------------------------


class NotNull(ColumnsAudit):
    """No NULL in some columns."""

    kind = "not_null"

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:  # noqa: ARG002 - the same for every checkpoint
        """Count the NULLs of every column in one scan."""
        _there(relation, self.columns)
        view = quote(relation.name)
        counts = ", ".join(f"count(*) - count({quote(column)}) AS c{n}" for n, column in enumerate(self.columns))
        found = relation.rows(f"SELECT {counts} FROM {view}")[0].values()  # noqa: S608 - names are quoted
        bad = [f"{column!r} is null in {_count(n)}" for column, n in zip(self.columns, found, strict=True) if n]
        if not bad:
            return self.passed("expected no null, found none")
        # A sample may show only some columns, so the checked ones come first.
        mine = {column.lower() for column in self.columns}
        first = sorted(relation.names, key=lambda name: name.lower() not in mine)
        where = " OR ".join(f"{quote(column)} IS NULL" for column in self.columns)
        some = f"SELECT {', '.join(map(quote, first))} FROM {view} WHERE {where}"  # noqa: S608 - names are quoted
        return self.failed(f"expected no null, found that {', '.join(bad)}", relation.sample(some))


def not_null(*columns: str, on: str | None = None, severity: str = "fail") -> Audit:
    """Expect a value in each of these columns, in every row."""
    return NotNull(columns, on=on, severity=severity)


class Unique(ColumnsAudit):
    """No two rows with the same values in some columns; NULL is a value like any other."""

    kind = "unique"

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:  # noqa: ARG002 - the same for every checkpoint
        """Count the distinct combinations; look for doubled ones only if there are fewer than rows."""
        _there(relation, self.columns)
        keys, view = ", ".join(map(quote, self.columns)), quote(relation.name)
        rows = relation.value(f"SELECT count(*) FROM {view}")  # noqa: S608 - names are quoted
        kept = relation.value(f"SELECT count(*) FROM (SELECT DISTINCT {keys} FROM {view}) AS kept")  # noqa: S608 - likewise
        if rows == kept:
            return self.passed(f"expected nothing twice, found nothing in {_count(rows)}")
        doubled = f'SELECT {keys}, count(*) AS "rows" FROM {view} GROUP BY {keys} HAVING count(*) > 1'  # noqa: S608 - likewise
        number = relation.value(f"SELECT count(*) FROM ({doubled}) AS doubled")  # noqa: S608 - our own query
        text = f"expected nothing twice, found {number} doubled: {_count(rows - kept)} too many of {rows}"
        return self.failed(text, relation.sample(f"{doubled} ORDER BY count(*) DESC"))


def unique(*columns: str, on: str | None = None, severity: str = "fail") -> Audit:
    """Expect each combination of values of these columns at most once; two NULLs are the same."""
    return Unique(columns, on=on, severity=severity)


# --- values_in, fresh ------------------------------------------------------------------------------------------------


class ValuesIn(Audit):
    """Only known values in a column; NULL passes."""

    kind = "values_in"

    def __init__(self, column: str, values: Iterable[object], *, on: str | None = None, severity: str = "fail") -> None:
        """Declare the column and its values; dates and decimals are kept as text."""
        self._expect(_is_text(column), f"expected the name of a column, found {column!r}")
        self._expect(_is_list(values), f"values of {column!r}: expected a list, found {values!r}")
        given = [value.isoformat() if isinstance(value, date) else value for value in values]
        self.column, self.values = column, [str(value) if isinstance(value, Decimal) else value for value in given]
        strange = [value for value in self.values if not isinstance(value, str | int | float)]
        self._expect(not strange, f"values of {column!r}: {strange} is no text, number or date; null always passes")
        self._expect(bool(self.values), f"values of {column!r}: expected some, found none")
        super().__init__(column, {"column": column, "values": self.values}, on, severity)

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:  # noqa: ARG002 - the same for every checkpoint
        """Count the rows with another value."""
        _there(relation, [self.column])
        column, kind = quote(self.column), relation.types()[self.column.lower()]
        known = ", ".join(f"CAST({literal(str(value))} AS {kind})" for value in self.values)
        other = f"FROM {quote(relation.name)} WHERE {column} NOT IN ({known})"
        number = relation.value(f"SELECT count(*) {other}")
        expected = f"expected one of {cut(', '.join(map(str, self.values)))}"
        if not number:
            return self.passed(f"{expected}, found no other")
        found = f'SELECT {column}, count(*) AS "rows" {other} GROUP BY {column} ORDER BY count(*) DESC'
        return self.failed(f"{expected}, found another in {_count(number)}", relation.sample(found))


def values_in(column: str, values: Iterable[object], *, on: str | None = None, severity: str = "fail") -> Audit:
    """Expect one of these values in a column; NULL passes, `not_null` is for that."""
    return ValuesIn(column, values, on=on, severity=severity)


class Fresh(Audit):
    """The newest time in a column is new enough."""

    kind = "fresh"

    def __init__(self, column: str, within: str, *, on: str | None = None, severity: str = "fail") -> None:
        """Declare the column and how old its newest value may be."""
        self._expect(_is_text(column), f"expected the name of a column, found {column!r}")
        self.column, self.within = column, within
        self.age = duration(str(within), f"audit fresh: within of {column!r}")
        super().__init__(column, {"column": column, "within": within}, on, severity)

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:
        """Compare the newest value with the end of the slot, or with the time when the revision began."""
        _there(relation, [self.column])
        kind = relation.types()[self.column.lower()]
        if not kind.upper().startswith(("DATE", "TIMESTAMP")):
            msg = f"column {self.column!r} is {kind}, expected a date or a timestamp"
            raise ConfigError(msg)
        end = Slot.parse(context.slot).end if context.slot else None
        oldest = (end or context.began) - self.age
        newest = f"SELECT max({quote(self.column)}) AS newest FROM {quote(relation.name)}"  # noqa: S608 - names are quoted
        late = f"CAST(newest AS TIMESTAMPTZ) < CAST({literal(oldest.isoformat())} AS TIMESTAMPTZ)"
        answer = f"SELECT CAST(newest AS VARCHAR) AS newest, {late} AS late FROM ({newest}) AS newest_one"  # noqa: S608 - our own query
        found = relation.rows(answer)[0]
        what = "the slot's end" if end else "the checkpoint began"
        expected = f"expected {oldest.isoformat()} or later, {self.within} before {what}"
        text = f"{expected}, found {found['newest'] or 'no value'}"
        return self.passed(text) if found["late"] is False else self.failed(text)


def fresh(column: str, within: str, *, on: str | None = None, severity: str = "fail") -> Audit:
    """Expect the newest value of a column to be at most `within` (`90m`, `2h`, `1d`) older than a moment.

    The moment is the end of the slot if it is an interval, else the time when the revision began. A date counts as its
    first moment; a timestamp without a zone is in UTC.
    """
    return Fresh(column, within, on=on, severity=severity)


# --- sql, expression -------------------------------------------------------------------------------------------------


class Sql(Audit):
    """A query that must find nothing."""

    kind = "sql"

    def __init__(self, query: str, name: str | None = None, *, on: str | None = None, severity: str = "fail") -> None:
        """Declare the query, and what it is called."""
        self._expect(_is_text(query), f"expected a query over staged, found {query!r}")
        good = name is None or (_is_text(name) and len(name) <= LONGEST_NAME)
        self._expect(good, f"name {name!r}: expected a text of at most {LONGEST_NAME} characters")
        super().__init__(query, {"query": query, "name": name}, on, severity)
        self.query = query
        self.name = name or self.name

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:  # noqa: ARG002 - the same for every checkpoint
        """Count the rows that the query returns; read a sample only if there are any."""
        try:
            query = f"SELECT * FROM {relation.query(self.query)}"  # noqa: S608 - in a subquery it can only read
            number = relation.value(f"SELECT count(*) FROM ({query}) AS found")  # noqa: S608 - likewise
            found = relation.sample(query) if number else []
        except ConfigError as error:
            msg = f"{error}; the table is {relation.name}, with the columns {', '.join(relation.names)}"
            raise ConfigError(msg) from error
        if not number:
            return self.passed("expected no rows, found none")
        return self.failed(f"expected no rows, found {number}", found)


def sql(query: str, name: str | None = None, *, on: str | None = None, severity: str = "fail") -> Audit:
    """Expect that a query over the table `staged` returns no rows; it can read the staged rows and nothing else."""
    return Sql(query, name, on=on, severity=severity)


class Expression(Audit):
    """A user's own function."""

    kind = "expression"

    def __init__(self, function: str, *, on: str | None = None, severity: str = "fail") -> None:
        """Declare the function by its import path; it is imported when it is called."""
        good = _is_text(function) and re.fullmatch(r"[\w.]+:[\w.]+", function) is not None
        self._expect(good, f"function {function!r}: expected `module:function`")
        super().__init__(function, {"function": function}, on, severity)
        self.function = function

    def find(self, relation: RowSet, context: AuditContext) -> Verdict:
        """Call the function; if it raises, the audit has failed."""
        staged = relation.view()
        try:
            answer = self._import()(staged, context)
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything, and has then not passed
            return self.failed(f"raised {type(error).__name__}: {error}")
        if isinstance(answer, list) and answer:
            return self.failed(f"expected no rows, found {len(answer)}", answer)
        if answer is None or answer is True or isinstance(answer, list):
            return self.passed("found nothing wrong")
        if answer is False or isinstance(answer, str):
            return self.failed(answer or f"returned {answer!r}")
        kind = type(answer).__name__
        return self.failed(f"returned {kind}, expected True, None, False, a reason or a list of rows")

    def _import(self) -> Any:  # noqa: ANN401 - the user's function
        """Import the function from spark_jobs/, or from wherever else Python finds it."""
        folder = spark_jobs()
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        return import_path(self.function)


def expression(function: str, *, on: str | None = None, severity: str = "fail") -> Audit:
    """Call `function(staged, context)` with a DuckDB relation over the staged rows and an `AuditContext`.

    It passes if the function returns True, None or an empty list. It fails on False, a text (the reason) or a list of
    rows (the wrong ones).
    """
    return Expression(function, on=on, severity=severity)
