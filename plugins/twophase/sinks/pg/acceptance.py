"""Would the target take what is staged? Asked before the vote: after the commit point nobody can say no any more."""

from __future__ import annotations

from typing import Any

from twophase.core.errors import ConfigError
from twophase.sinks.pg import demands, rights, staging
from twophase.sinks.pg.promoting import Promoter
from twophase.sinks.pg.staging import CHANGE


class Acceptance:
    """The staged rows of one promotion, held against its target."""

    def __init__(self, promoter: Promoter) -> None:
        """Take the promotion that is to come."""
        self.promoter = promoter
        self.which = f"checkpoint {promoter.key}: table {promoter.target}"

    def check(self, cursor: Any) -> None:  # noqa: ANN401 - a cursor
        """Raise an error that says which row, column or right, if the target would refuse the promotion."""
        found = demands.kind_of(cursor, self.promoter.target)
        if found is None:  # the promotion makes it, of the staged columns
            return
        written = [name for name in staging.columns_of(cursor, self.promoter.staged) or () if name != CHANGE]
        self._check_rights(cursor, found, written)

    def _check_rights(self, cursor: Any, found: demands.Kind, written: list[str]) -> None:  # noqa: ANN401 - a cursor
        there = staging.columns_of(cursor, self.promoter.target) or {}
        new = [name for name in written if name not in there]
        if new and not rights.is_owner(cursor, found.oid):
            msg = f"{self.which}: column {new[0]!r} is new, and the account that promotes does not own the table"
            msg = f"{msg}, so it cannot add it; add it yourself, or drop it from the output"
            raise ConfigError(msg)
        for problem in rights.lacking_for(cursor, found.oid, written, self.promoter.mode):
            msg = f"{self.which}: {problem}"
            raise ConfigError(msg)
