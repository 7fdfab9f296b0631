"""What audits and comparisons ask of staged or committed rows, wherever these are: in files, or in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from duckdb import DuckDBPyRelation

    from twophase.core.manifest import Column
    from twophase.core.row_samples import Row


class Session(Protocol):
    """What answers queries over rows that it knows by names; its dialect is its own."""

    def types(self, view: str) -> dict[str, str]:
        """Return the type of each column, by its name in lower case."""

    def keep(self, name: str, select: str) -> None:
        """Put the answer to a query aside, under a name."""

    def value(self, query: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""

    def sample(self, query: str, limit: int, size: int) -> list[Row]:
        """Return some rows of a query as the record can keep them."""


class RowSet(Protocol):
    """Some rows, by a name that queries give them; what was opened for them is closed at the end."""

    name: str
    schema: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""

    def types(self) -> dict[str, str]:
        """Return the type of each column, by its name in lower case."""

    def rows(self, sql: str) -> list[Row]:
        """Return all rows of a query."""

    def value(self, sql: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""

    def sample(self, sql: str) -> list[Row]:
        """Return some rows of a query as the record can keep them."""

    def query(self, text: str) -> str:
        """Return a user's query as a subquery; ConfigError unless it only reads."""

    def view(self) -> DuckDBPyRelation:
        """Return the rows in DuckDB, for functions of the user's own."""

    def nothing(self) -> RowSet:
        """Return no rows, with the same columns."""

    def beside(self, old: Any) -> AbstractContextManager[Session]:  # noqa: ANN401 - rows of the same kind
        """Ask for these rows as `new` and others of their kind as `old`."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *_: object) -> None:
        """Close what was opened."""
