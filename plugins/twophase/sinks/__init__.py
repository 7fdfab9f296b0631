"""What a checkpoint writes."""

from twophase.sinks.base import Attempt, Sink
from twophase.sinks.delta import Delta
from twophase.sinks.files import Files
from twophase.sinks.iceberg import Iceberg
from twophase.sinks.postgres import Postgres
from twophase.sinks.write_ahead import Sender, WriteAhead

__all__ = ["Attempt", "Delta", "Files", "Iceberg", "Postgres", "Sender", "Sink", "WriteAhead"]
