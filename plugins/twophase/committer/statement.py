"""`Statement`: SQL of the record that each session plans once, and then executes by its name.

The modules that every checkpoint goes through keep theirs as constants. Building a statement anew from its parts, and
planning it anew, cost several times as much as what it does.
"""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

if TYPE_CHECKING:
    from sqlalchemy import Connection, CursorResult

#: What the server says of a name that the session has not prepared, or no longer.
LOST = "26000"
_NUMBERS = count(1)
#: A value in a statement: `:name`, but not the second half of a `::`.
_VALUE = re.compile(r"(?<!:):([a-z]\w*)")


class Statement:
    """One statement with values written as `:name`."""

    def __init__(self, text: str) -> None:
        """Give it a name that is its own in this process."""
        names = list(dict.fromkeys(_VALUE.findall(text)))
        self._name = f"twophase_{next(_NUMBERS)}"
        self._prepare = f"PREPARE {self._name} AS {_VALUE.sub(lambda m: f'${names.index(m[1]) + 1}', text)}"
        self._execute = f"EXECUTE {self._name} ({', '.join(f'%({name})s' for name in names)})"

    def __call__(self, connection: Connection, **values: Any) -> CursorResult[Any]:  # noqa: ANN401 - what psycopg2 adapts
        """Execute it; a session prepares it first if it has not yet, which a rollback does not undo."""
        prepared: set[str] = connection.info.setdefault("twophase prepared", set())
        if self._name not in prepared:
            connection.exec_driver_sql(self._prepare)
            prepared.add(self._name)
        try:
            return connection.exec_driver_sql(self._execute, values)
        except DBAPIError as error:
            if getattr(error.orig, "pgcode", None) == LOST:
                prepared.clear()
            raise
