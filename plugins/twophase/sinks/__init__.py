"""What a checkpoint writes."""

from twophase.sinks.base import Attempt, Sink
from twophase.sinks.files import Files

__all__ = ["Attempt", "Files", "Sink"]
