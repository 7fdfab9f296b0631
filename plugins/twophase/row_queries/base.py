"""The interface by which audits and comparisons query staged or committed rows, in files or in a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from duckdb import DuckDBPyRelation

    from twophase.core.manifest import Column
    from twophase.core.row_samples import Row


class Session(Protocol):
    """Answers queries over several sets of rows, each under a name; the SQL dialect is its own."""

    def types(self, view: str) -> dict[str, str]:
        """Return the type of each column, by its name in lower case."""

    def keep(self, name: str, select: str) -> None:
        """Keep the result of a query under a name."""

    def value(self, query: str) -> Any:  # noqa: ANN401 - whatever the query asks for
        """Return the first column of a query's first row."""

    def sample(self, query: str, limit: int, size: int) -> list[Row]:
        """Return some rows of a query as the record can keep them."""


class RowSet(Protocol):
    """A set of rows, under a name for queries; leaving its `with` closes what was opened."""

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
        """Return an empty set of rows with the same columns."""

    def beside(self, old: Any) -> AbstractContextManager[Session]:  # noqa: ANN401 - rows of the same kind
        """Open a session that knows these rows as `new`, and others of the same kind as `old`."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *_: object) -> None:
        """Close what was opened."""
