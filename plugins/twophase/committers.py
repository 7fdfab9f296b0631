"""Who remembers what a write-ahead sink has sent: shipped committers, and the base of one's own."""

from twophase.sinks.committers import CheckpointCommitter, File
from twophase.sinks.pg.committer import Postgres

__all__ = ["CheckpointCommitter", "File", "Postgres"]
