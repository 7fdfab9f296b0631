"""What a checkpoint reads."""

from twophase.sources.committed import Committed
from twophase.sources.files import Files
from twophase.sources.interval import Interval
from twophase.sources.lookup import Lookup

__all__ = ["Committed", "Files", "Interval", "Lookup"]
