"""`Retention`: how long a pipeline keeps replaced output and old events; users declare it, sweeps apply it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from twophase.core.errors import ConfigError
from twophase.core.slots import duration


@dataclass(frozen=True)
class Retention:
    """How long a pipeline keeps the output of superseded revisions, and the events of ended ones."""

    #: How long output of superseded revisions is kept after they were replaced; `as_of` reads no further back.
    superseded: str = "7d"
    #: How long events of revisions that have ended are kept.
    events: str = "400d"
    #: How many superseded revisions of each checkpoint are kept however old they are.
    keep_last: int = 0

    def __post_init__(self) -> None:
        """Check that the arguments are lengths of time, and a number."""
        duration(self.superseded, "retention: superseded")
        duration(self.events, "retention: events")
        if type(self.keep_last) is not int or self.keep_last < 0:
            msg = f"retention: keep_last {self.keep_last!r}: expected a whole number, 0 or above"
            raise ConfigError(msg)

    @property
    def superseded_for(self) -> timedelta:
        """Return how long output of superseded revisions is kept."""
        return duration(self.superseded, "retention: superseded")

    @property
    def events_for(self) -> timedelta:
        """Return how long events are kept."""
        return duration(self.events, "retention: events")

    def config(self) -> dict[str, Any]:
        """Return the arguments that build an equal one."""
        return {"superseded": self.superseded, "events": self.events, "keep_last": self.keep_last}
