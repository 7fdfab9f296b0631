"""Who remembers what a write-ahead sink has sent: shipped committers, and the base of one's own."""

from twophase.sinks.committers import CheckpointCommitter, File, Postgres

__all__ = ["CheckpointCommitter", "File", "Postgres"]
