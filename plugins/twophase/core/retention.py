"""How long what is no longer needed is kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from twophase.core.errors import ConfigError
from twophase.core.slots import duration


@dataclass(frozen=True)
class Retention:
    """How long a pipeline keeps what was replaced, and the story of what has ended."""

    #: Output of superseded revisions, from the moment they were replaced: as far back as `as_of` reaches for them.
    superseded: str = "7d"
    #: Events of revisions that have ended.
    events: str = "400d"
    #: So many superseded revisions of each checkpoint are kept however old they are.
    keep_last: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no length of time."""
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
        """Return what builds an equal one."""
        return {"superseded": self.superseded, "events": self.events, "keep_last": self.keep_last}
