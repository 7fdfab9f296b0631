"""Who remembers what a write-ahead sink has sent: shipped committers, and the base of one's own."""

from twophase.sinks.write_ahead.committers import CheckpointCommitter, File
from twophase.sinks.write_ahead.postgres_committer import Postgres

__all__ = ["CheckpointCommitter", "File", "Postgres"]
