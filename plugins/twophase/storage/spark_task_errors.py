"""Marks our own error texts in Spark tasks, and finds them again in the error that Spark raises in the driver.

Called by the rules of log tables, and when rows are loaded into PostgreSQL.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

_SAID = re.compile(r"twophase: (.*?) :twophase", re.DOTALL)


def say(what: str) -> str:
    """Mark a text so that `heard` finds it in whatever Spark puts around it."""
    return f"twophase: {what} :twophase"


def stop(before: str, value: Column, after: str = "") -> Any:  # noqa: ANN401 - a Column, of no type
    """Return a column that stops the job when it is evaluated, with an error that shows a value."""
    from pyspark.sql import functions

    first, last = say("\0").split("\0")
    said = functions.concat(functions.lit(first + before), value, functions.lit(after + last))
    return functions.raise_error(said)


def heard(text: str) -> str | None:
    """Return the marked text in one line; None if the error is not ours."""
    found = _SAID.search(text)
    return " ".join(found[1].split()) if found else None
