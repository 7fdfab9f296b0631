"""The checkpoint committers that users declare for a write-ahead sink, and the base class for their own."""

from twophase.sinks.write_ahead.committers import CheckpointCommitter, File
from twophase.sinks.write_ahead.postgres_committer import Postgres

__all__ = ["CheckpointCommitter", "File", "Postgres"]
