"""Keyed state of a pipeline: rows kept between checkpoints in sorted, immutable Arrow files."""
