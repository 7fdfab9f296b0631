"""Compare two sets of rows; `revision_diff` calls it with an old and a new revision.

Rows are compared as multisets, so a row that is there twice counts twice; NULL equals NULL. The comparison is done by
SQL where the rows are: by DuckDB for files, which spills to disk what memory cannot hold. Only samples reach Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twophase.core.errors import ConfigError
from twophase.core.manifest import Column
from twophase.core.row_samples import Row, sample
from twophase.row_queries.duckdb_rows import quote

if TYPE_CHECKING:
    from twophase.row_queries.base import RowSet, Session

#: How many bytes of JSON one row of a sample takes at most; large, because a person asked to see it.
SAMPLE_BYTES = 8000
#: Groups of types whose values can be compared with each other; any two other types are compared as text.
_UNITED = tuple(
    map(re.compile, (r"(TINY|SMALL|BIG)INT|INTEGER|FLOAT|DOUBLE|DECIMAL\([\d,]+\)", "DATE|TIMESTAMP( WITH TIME ZONE)?"))
)


@dataclass(frozen=True)
class Comparison:
    """How the new rows differ from the old ones."""

    old_rows: int
    new_rows: int
    #: Rows on one side only; with a key, rows whose key is on one side only.
    added: int
    removed: int
    #: Keys with other values; None: no key was given, so a changed row is one removed and one added.
    changed: int | None = None
    key: tuple[str, ...] = ()
    #: How the columns changed, in words.
    schema: tuple[str, ...] = ()
    #: Columns that only one side has; rows were not compared by them.
    ignored: tuple[str, ...] = ()
    #: `added`, `removed`, `changed` → some rows; of a changed row its key, and the old and new values.
    samples: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Return True if neither rows nor columns differ."""
        return not (self.added or self.removed or self.changed or self.schema)

    def lines(self) -> list[str]:
        """Return the comparison in words, as lines."""
        changed = "" if self.changed is None else f", {self.changed} changed"
        rows = f"rows: {self.old_rows} before, {self.new_rows} now: {self.added} added, {self.removed} removed{changed}"
        found = [rows, *(f"schema: {change}" for change in self.schema)]
        if self.ignored:
            found.append(f"not compared, since only one side has it: {', '.join(self.ignored)}")
        return found

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "old_rows": self.old_rows,
            "new_rows": self.new_rows,
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "key": list(self.key),
            "schema": list(self.schema),
            "ignored": list(self.ignored),
            "samples": self.samples,
        }


def compare(old: RowSet, new: RowSet, key: Sequence[str] = (), samples: int = 0) -> Comparison:
    """Compare rows by all columns that both sides have; with a key, tell changed rows from added and removed ones.

    Raise ConfigError if a key is not unique on one side. `samples` is how many rows of each kind to show.
    """
    sides = {"old": old, "new": new}
    before, after = ({column.name.lower(): column for column in side.schema} for side in sides.values())
    shared = [column.name for name, column in after.items() if name in before]
    if not shared:
        msg = f"nothing to compare: old has {', '.join(old.names)}, new has {', '.join(new.names)}, none is in both"
        raise ConfigError(msg)
    keys = _keys(key, shared)
    alone = [column.name for name, column in {**before, **after}.items() if name not in before or name not in after]
    with new.beside(old) as session:
        work = _Difference(session, shared, keys)
        for side in sides if keys else ():
            work.check_key(side)
        work.create()
        counts = work.counts()
        return Comparison(
            old_rows=work.number("SELECT count(*) FROM old"),
            new_rows=work.number("SELECT count(*) FROM new"),
            added=counts["added"],
            removed=counts["removed"],
            changed=counts.get("changed"),
            key=tuple(keys),
            schema=tuple(_words(before, after)),
            ignored=tuple(alone),
            samples={kind: work.sample(kind, samples) for kind, n in counts.items() if n} if samples else {},
        )


def _keys(key: Sequence[str], shared: Sequence[str]) -> list[str]:
    """Return the key in the spelling of the columns."""
    there = {name.lower(): name for name in shared}
    if missing := [name for name in key if name.lower() not in there]:
        msg = f"key {', '.join(missing)}: no such column on both sides, expected some of {', '.join(shared)}"
        raise ConfigError(msg)
    return list(dict.fromkeys(there[name.lower()] for name in key))


def _words(before: Mapping[str, Column], after: Mapping[str, Column]) -> Iterator[str]:
    """Say how the columns changed."""
    for name, column in before.items():
        if name not in after:
            yield f"column {column.name!r} ({column.type}) was removed"
        elif after[name].type != column.type:
            yield f"column {column.name!r} was {column.type} and is now {after[name].type}"
    for name, column in after.items():
        if name not in before:
            yield f"column {column.name!r} ({column.type}) was added"


class _Difference:
    """The rows that one side has more often, in a table with columns c0, c1 … and `n`: how often more, old below 0."""

    def __init__(self, session: Session, columns: list[str], keys: list[str]) -> None:
        self.session = session
        self.types = {view: session.types(view) for view in ("old", "new")}
        #: Column of that table → name of the column; the key comes first.
        self.columns = {f"c{n}": name for n, name in enumerate(sorted(columns, key=lambda name: name not in keys))}
        self.keys = [cell for cell, name in self.columns.items() if name in keys]
        self.kinds = ("added", "removed", "changed") if keys else ("added", "removed")

    def number(self, query: str) -> int:
        return int(self.session.value(query) or 0)

    def check_key(self, side: str) -> None:
        """Raise ConfigError if a key is there twice: then a changed row cannot be matched."""
        names = [self.columns[cell] for cell in self.keys]
        listed = ", ".join(map(quote, names))
        twice = f"SELECT {listed} FROM {side} GROUP BY {listed} HAVING count(*) > 1"  # noqa: S608 - names are quoted
        if number := self.number(f"SELECT count(*) FROM ({twice}) AS doubled"):  # noqa: S608 - our own query
            example = self.session.sample(f"{twice} ORDER BY {listed}", 1, SAMPLE_BYTES)[0]
            shown = ", ".join(f"{name}={value}" for name, value in example.items())
            which = f"key {', '.join(names)}: in the {side} rows {number} of its values are there more than once"
            msg = f"{which}, such as {shown}; expected each once, give a key that is unique"
            raise ConfigError(msg)

    def create(self) -> None:
        """Fill the table in one pass over both sides; equal rows cancel out."""
        cells = ", ".join(self.columns)
        sides = [
            f"SELECT {', '.join(self._value(cell, side) for cell in self.columns)}, {n} AS n FROM {side}"  # noqa: S608 - names are quoted
            for side, n in (("old", -1), ("new", 1))
        ]
        self.session.keep(
            "difference",
            f"SELECT {cells}, CAST(sum(n) AS BIGINT) AS n FROM ({' UNION ALL '.join(sides)}) AS sides"  # noqa: S608 - our own names
            f" GROUP BY {cells} HAVING sum(n) <> 0",
        )

    def _value(self, cell: str, side: str) -> str:
        """Return SQL for a column so that equal values compare as equal on both sides."""
        name = quote(self.columns[cell])
        kinds = {view: types[self.columns[cell].lower()] for view, types in self.types.items()}
        if kinds["old"] != kinds["new"] and not any(all(map(of.fullmatch, kinds.values())) for of in _UNITED):
            name = f"CAST({name} AS VARCHAR)"
        elif kinds[side].startswith("MAP("):  # the order of a map's entries means nothing
            name = f"map_from_entries(list_sort(map_entries({name})))"
        return f"{name} AS {cell}"

    def counts(self) -> dict[str, int]:
        """Count what was added, removed and, with a key, changed."""
        what = {"added": "sum(n)", "removed": "-sum(n)", "changed": "count(*)"}
        return {kind: self.number(f"SELECT {what[kind]} {self._of(kind)}") for kind in self.kinds}

    def _of(self, kind: str) -> str:
        """Return the FROM clause of one kind of rows; with a key, added and removed rows have keys of one side only."""
        match = " AND ".join(f"a.{cell} IS NOT DISTINCT FROM b.{cell}" for cell in self.keys)
        if kind == "changed":
            return f"FROM difference AS a JOIN difference AS b ON {match} AND a.n < 0 AND b.n > 0"
        mine, other = (">", "<") if kind == "added" else ("<", ">")
        there = f"SELECT 1 FROM difference AS b WHERE {match} AND b.n {other} 0"  # noqa: S608 - our own names
        lacks = f" AND NOT EXISTS ({there})" if self.keys else ""
        return f"FROM difference AS a WHERE a.n {mine} 0{lacks}"

    def sample(self, kind: str, limit: int) -> list[Row]:
        """Return some rows of one kind; of changed ones the key, and the old and new values of what differs."""
        if kind != "changed":
            cells = ", ".join(f"a.{cell} AS {quote(name)}" for cell, name in self.columns.items())
            order = ", ".join(f"a.{cell}" for cell in self.columns)
            return self.session.sample(f"SELECT {cells} {self._of(kind)} ORDER BY {order}", limit, SAMPLE_BYTES)
        others = [cell for cell in self.columns if cell not in self.keys]
        cells = ", ".join(
            [
                *(f"a.{cell} AS {cell}" for cell in self.keys),
                *(f"a.{cell} AS old_{cell}, b.{cell} AS new_{cell}" for cell in others),
                *(f"a.{cell} IS DISTINCT FROM b.{cell} AS differs_{cell}" for cell in others),
            ]
        )
        query = f"SELECT {cells} {self._of(kind)} ORDER BY {', '.join(f'a.{cell}' for cell in self.keys)}"
        return [self._changed(row) for row in self.session.sample(query, limit, sys.maxsize)]

    def _changed(self, row: Row) -> Row:
        """Split a changed row into its key, and the old and new values of the columns that differ."""
        differ = [cell for cell in self.columns if row.get(f"differs_{cell}")]
        parts = {
            "key": {self.columns[cell]: row[cell] for cell in self.keys},
            "old": {self.columns[cell]: row[f"old_{cell}"] for cell in differ},
            "new": {self.columns[cell]: row[f"new_{cell}"] for cell in differ},
        }
        return {part: sample([values], size=SAMPLE_BYTES)[0] for part, values in parts.items()}
