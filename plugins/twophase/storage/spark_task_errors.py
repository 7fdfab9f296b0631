"""What our own code says in a task of Spark, found again in the error that Spark makes of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

_SAID = re.compile(r"twophase: (.*?) :twophase", re.DOTALL)


def say(what: str) -> str:
    """Mark a text so that it is found in whatever Spark puts around it."""
    return f"twophase: {what} :twophase"


def stop(before: str, value: Column, after: str = "") -> Any:  # noqa: ANN401 - a Column, of no type
    """Return a column that stops the job that needs it, and says a value."""
    from pyspark.sql import functions

    first, last = say("\0").split("\0")
    said = functions.concat(functions.lit(first + before), value, functions.lit(after + last))
    return functions.raise_error(said)


def heard(text: str) -> str | None:
    """Return what was said, in one line; None: the error is another one's."""
    found = _SAID.search(text)
    return " ".join(found[1].split()) if found else None
