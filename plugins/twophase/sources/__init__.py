"""What a checkpoint reads."""

from twophase.sources.files import Files

__all__ = ["Files"]
