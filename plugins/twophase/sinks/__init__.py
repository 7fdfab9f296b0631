"""What a checkpoint writes."""

from twophase.sinks.base import Attempt, Sink
from twophase.sinks.files import Files
from twophase.sinks.postgres import Postgres
from twophase.sinks.write_ahead import Sender, WriteAhead

__all__ = ["Attempt", "Files", "Postgres", "Sender", "Sink", "WriteAhead"]
